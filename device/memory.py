"""How much memory and how many cores this process may use on the host, control groups (containers) included.

Inside a container ``/proc/meminfo`` and ``os.cpu_count()`` describe the whole machine; what the kernel enforces is in
the control group. Version 1 and 2 are read, at every level from the process's own group up to the mount: a limit of a
parent binds as well. Files: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from device.contract import MemoryInfo
from device.errors import DeviceError

_UNLIMITED = 1 << 60
"""Version 1 writes about 2^63 for "no limit"; no machine has an exbibyte."""


def host_memory(root: Path | str = "/", *, sysconf: Mapping[str, int] | None = None) -> MemoryInfo:
    """Memory of this host in bytes: ``free`` is the least of what the kernel calls available and what each control
    group still allows.

    A group's page cache counts as use but goes when memory is wanted, so its inactive part (``inactive_file``) is
    taken off, as Kubernetes does for its "working set".

    root: where ``proc`` and ``sys`` are (tests put their own there). sysconf: page counts by name, for systems without
    ``/proc/meminfo``. DeviceError where neither says how much memory there is.
    """
    root = Path(root)
    info = _meminfo(root / "proc/meminfo")
    if "MemTotal" in info:
        total, source = info["MemTotal"], "/proc/meminfo"
        # MemAvailable is absent before Linux 3.14; free and cached pages are the usual estimate.
        free = info.get("MemAvailable", info.get("MemFree", 0) + info.get("Buffers", 0) + info.get("Cached", 0))
    else:
        total, free, source = _from_sysconf(sysconf)
    for group in cgroup_levels("memory", root):
        limit, left = _group_memory(group)
        if limit is None:
            continue
        total = min(total, limit)
        if left < free:
            free, source = left, f"control group {_shown(group, root)}"
    return MemoryInfo(total=total, free=max(0, min(free, total)), source=source)


def usable_cores(root: Path | str = "/", *, affinity: int | None = None) -> tuple[int, str]:
    """(cores, where the number comes from): the cores that this process may run on, at most its group's CPU quota.

    A quota of 2.5 cores gives 2: a third thread would be stopped half of the time while the others wait for it.
    affinity: cores allowed by the affinity mask (default: ask the system).
    """
    root = Path(root)
    if affinity is not None:
        cores = affinity
    elif hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    source = "affinity"
    for group in cgroup_levels("cpu", root):
        quota = _group_quota(group)
        if quota is not None and max(1, int(quota)) < cores:
            cores, source = max(1, int(quota)), f"CPU quota of control group {_shown(group, root)}"
    return cores, source


def cgroup_levels(controller: str, root: Path | str = "/") -> list[Path]:
    """Directories of this process's control group for ``controller`` ("memory", "cpu"), innermost first, up to the
    mount point. Empty where there is none. Version 1 wins where both are mounted and it has the controller."""
    root = Path(root)
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)  # hierarchy:controllers:path; version 2 has no controllers
        if len(parts) == 3:
            for name in parts[1].split(","):
                paths[name] = parts[2]
    mounts = _cgroup_mounts(root)
    for name in (controller, ""):
        if name in paths and name in mounts:
            mounted, point = mounts[name]
            return _chain(root, point, _relative(paths[name], mounted))
    return []


def _cgroup_mounts(root: Path) -> dict[str, tuple[str, str]]:
    """controller ("" for version 2) -> (which part of the hierarchy is mounted, where)."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        # id parent major:minor root mountpoint options [optional...] - fstype source superoptions
        left, _, right = line.partition(" - ")
        head, tail = left.split(), right.split()
        if len(head) < 5 or not tail:
            continue
        if tail[0] == "cgroup2":
            mounts.setdefault("", (head[3], head[4]))
        elif tail[0] == "cgroup":
            for name in tail[-1].split(","):
                mounts.setdefault(name, (head[3], head[4]))
    return mounts


def _relative(path: str, mounted: str) -> str:
    """``path`` seen from a mount of ``mounted``. In a container without a namespace of its own the path names the
    group as the host sees it while only that group is mounted; then the mount itself is the group."""
    if mounted in ("", "/"):
        return path
    if path == mounted or path.startswith(mounted + "/"):
        return path[len(mounted) :]
    return ""


def _chain(root: Path, point: str, relative: str) -> list[Path]:
    top = root / point.lstrip("/")
    parts = [p for p in relative.split("/") if p]
    if ".." in parts:  # a namespace that starts below the group: nothing of it can be read
        parts = []
    levels = [top.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _group_memory(group: Path) -> tuple[int | None, int]:
    """(limit or None, bytes that may still be taken) of one group."""
    limit = _number(group / "memory.max")
    used, reclaimable = "memory.current", "inactive_file"
    if limit is None:
        limit = _number(group / "memory.limit_in_bytes")
        used, reclaimable = "memory.usage_in_bytes", "total_inactive_file"
    if limit is None or limit >= _UNLIMITED:
        return None, 0
    in_use = _number(group / used) or 0
    cache = 0
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == reclaimable and value.strip().isdigit():
            cache = int(value)
    return limit, max(0, limit - max(0, in_use - cache))


def _group_quota(group: Path) -> float | None:
    """CPU quota of one group in cores, None without one."""
    words = " ".join(_lines(group / "cpu.max")).split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and period else None


def _meminfo(path: Path) -> dict[str, int]:
    info = {}
    for line in _lines(path):
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            info[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return info


def _from_sysconf(sysconf: Mapping[str, int] | None) -> tuple[int, int, str]:
    def ask(name: str) -> int:
        if sysconf is not None:
            return sysconf.get(name, 0)
        return os.sysconf(name) if name in os.sysconf_names else 0

    page, pages, spare = ask("SC_PAGE_SIZE"), ask("SC_PHYS_PAGES"), ask("SC_AVPHYS_PAGES")
    if page <= 0 or pages <= 0:
        raise DeviceError(
            "how much memory this host has cannot be found: neither /proc/meminfo nor sysconf says it; "
            "set kv_blocks to a number of blocks"
        )
    if spare > 0:
        return page * pages, page * spare, "sysconf"
    return page * pages, page * pages // 2, "sysconf (what is free is not said: half of the memory assumed)"


def _number(path: Path) -> int | None:
    text = " ".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _shown(group: Path, root: Path) -> str:
    return "/" + str(group.relative_to(root))
