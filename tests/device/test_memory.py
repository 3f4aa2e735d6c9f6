"""What the host's memory and cores are taken to be, with control groups of both versions faked in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from device.errors import DeviceError
from device.memory import cgroup_levels, host_memory, usable_cores

GiB = 1 << 30
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total: int = 64 * GiB, available: int | None = 40 * GiB) -> str:
    lines = [f"MemTotal: {total // 1024} kB", "MemFree: 1048576 kB", "Buffers: 1024 kB", "Cached: 2048 kB"]
    if available is not None:
        lines.insert(2, f"MemAvailable: {available // 1024} kB")
    return "\n".join(lines) + "\n"


def test_no_control_group(tmp_path: Path) -> None:
    info = host_memory(write(tmp_path, {"proc/meminfo": meminfo()}))
    assert (info.total, info.free, info.source) == (64 * GiB, 40 * GiB, "/proc/meminfo")


def test_kernel_without_memavailable(tmp_path: Path) -> None:
    info = host_memory(write(tmp_path, {"proc/meminfo": meminfo(available=None)}))
    assert info.free == (1048576 + 1024 + 2048) * 1024


def test_v2_limit_is_what_counts_in_a_container(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{8 * GiB}\n",
            "sys/fs/cgroup/memory.current": f"{5 * GiB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 1\nfile {4 * GiB}\ninactive_file {3 * GiB}\nactive_file 7\n",
        },
    )
    info = host_memory(tmp_path)
    assert (info.total, info.free) == (8 * GiB, 6 * GiB)
    assert info.source == "control group /sys/fs/cgroup"


def test_v2_a_parents_limit_binds_as_well(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/user.slice/app.scope\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/app.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/app.scope/memory.current": "5\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{2 * GiB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{GiB}\n",
        },
    )
    info = host_memory(tmp_path)
    assert (info.total, info.free, info.source) == (2 * GiB, GiB, "control group /sys/fs/cgroup/user.slice")


def test_v1_unlimited_and_limited(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "4:memory:/job/42\n3:cpu,cpuacct:/\n0::/elsewhere\n",
            "proc/self/mountinfo": V1_MOUNTS + V2_MOUNT,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/42/memory.limit_in_bytes": f"{4 * GiB}\n",
            "sys/fs/cgroup/memory/job/42/memory.usage_in_bytes": f"{3 * GiB}\n",
            "sys/fs/cgroup/memory/job/42/memory.stat": f"inactive_file 1\ntotal_inactive_file {GiB}\n",
        },
    )
    info = host_memory(tmp_path)
    assert (info.total, info.free, info.source) == (4 * GiB, 2 * GiB, "control group /sys/fs/cgroup/memory/job/42")


def test_v1_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    """Docker without a control group namespace: the path is the host's, the mount is the group."""
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": "9 8 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GiB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
        },
    )
    assert cgroup_levels("memory", tmp_path) == [tmp_path / "sys/fs/cgroup/memory"]
    assert host_memory(tmp_path).total == GiB


def test_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(),
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "250\n",
        },
    )
    assert host_memory(tmp_path).free == 0


def test_without_proc(tmp_path: Path) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000, "SC_AVPHYS_PAGES": 300}
    info = host_memory(tmp_path, sysconf=pages)
    assert (info.total, info.free, info.source) == (4096 * 1000, 4096 * 300, "sysconf")
    del pages["SC_AVPHYS_PAGES"]
    info = host_memory(tmp_path, sysconf=pages)
    assert info.free == info.total // 2 and "assumed" in info.source
    with pytest.raises(DeviceError, match="kv_blocks"):
        host_memory(tmp_path, sysconf={})


def test_this_machine() -> None:
    info = host_memory()
    assert 0 < info.free <= info.total
    cores, _ = usable_cores()
    assert 1 <= cores <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_cores_v2(tmp_path: Path, quota: str, cores: int) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/cpu.max": quota + "\n",
        },
    )
    assert usable_cores(tmp_path, affinity=8)[0] == cores


def test_cores_v1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert usable_cores(tmp_path, affinity=8) == (8, "affinity")
    write(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n"})
    cores, source = usable_cores(tmp_path, affinity=8)
    assert cores == 3 and "/sys/fs/cgroup/cpu,cpuacct" in source
