"""Ascend NPUs, by ``npu-smi`` and the files of driver and CANN.

Sources: the output forms of npu-smi 24.1 to 26.0 as users paste them (for example
https://github.com/vllm-project/vllm-ascend/issues/1130 910B3, .../2534 A3, https://github.com/Syllo/nvtop/issues/421
310P); ASCEND_RT_VISIBLE_DEVICES:
https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0028.html
CANN's version: https://www.hiascend.com/document/detail/en/canncommercial/850/softwareinst/instg/instg_0064.html
Never run on an NPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from device.cards import Card, Probe
from device.machine import Command, Machine

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_COLUMNS = re.compile(r"NPU ID|Slot ID|Device ID|Chip Logic ID|Chip Phy-ID|Chip ID|Chip Name")
_BUS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_MiB = 1 << 20

FAMILIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # (pattern of the chip's name, family, dtypes it computes in). Without a digit after it "Ascend910" is what npu-smi
    # calls the chips of Atlas A3.
    (r"910B\d", "A2", ("bfloat16", "float16", "float32")),
    (r"910C|910_?93", "A3", ("bfloat16", "float16", "float32")),
    (r"310P", "310P", ("float16", "float32")),
    (r"950", "950", ("bfloat16", "float16", "float32")),
    (r"910(A|Pro|Premium)", "910A", ("float16", "float32")),
    (r"Ascend ?910$", "A3", ("bfloat16", "float16", "float32")),
)


@dataclass(frozen=True, slots=True)
class _Chip:
    """One line of ``npu-smi info -m``, and what ``npu-smi info`` says about it."""

    npu: int
    chip: int
    logical: int
    physical: int | None
    model: str
    health: str = "?"
    bus: str = ""
    used: int | None = None
    total: int | None = None


def probe_ascend(machine: Machine) -> Probe:
    """Cards, visibility, versions. Never raises: what went wrong is ``trouble``."""
    nodes = machine.devices("davinci")
    versions = {
        "driver": driver_version(machine),
        "CANN": cann_version(machine),
        "torch": machine.version("torch"),
        "torch-npu": machine.version("torch-npu"),
        "mindspore": machine.version("mindspore"),
    }
    probe = Probe("ascend", present=bool(nodes), versions=versions)
    mapping = machine.run("npu-smi", "info", "-m")
    if mapping.status == "missing":
        if not nodes:
            return replace(probe, trouble="not present: no npu-smi and no /dev/davinci*")
        return replace(
            probe,
            trouble=f"{nodes[0]} is there but npu-smi is not",
            advice="in a container mount /usr/local/bin/npu-smi, /usr/local/dcmi and /usr/local/Ascend/driver",
        )
    probe = replace(probe, present=True)
    trouble, advice = _failure(mapping)
    if trouble:
        return replace(probe, trouble=trouble, advice=advice)
    chips = parse_mapping(mapping.text)
    if chips is None:
        return replace(
            probe,
            trouble=f"npu-smi info -m answered in an unknown form: {mapping.first_line!r}",
            advice="report it with the output of npu-smi info -m and npu-smi info",
        )
    table = machine.run("npu-smi", "info")
    notes = () if table.status == "ok" else (f"npu-smi info ended with {table.status}: memory and health are unknown",)
    chips = join_table(chips, table.text if table.status == "ok" else "")
    cards, trouble, advice = _visible(chips, machine.environ.get(VISIBLE))
    if not chips:
        trouble, advice = "npu-smi lists no chip", "see npu-smi info"
    hidden = f"{VISIBLE}={machine.environ[VISIBLE]}" if VISIBLE in machine.environ else ""
    return replace(probe, cards=cards, trouble=trouble, advice=advice, notes=notes, hidden_by=hidden)


def parse_mapping(text: str) -> list[_Chip] | None:
    """Chips of ``npu-smi info -m``, by logical id; None when the text is no such table.

    Columns differ between versions (with or without Chip Phy-ID, Chip Logic ID or Slot ID), so they are found by name.
    Management controllers (Mcu) have a line but no logical id.
    """
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if "NPU ID" in line and "Chip ID" in line), None)
    if header is None:
        return None
    columns = _COLUMNS.findall(lines[header])
    number = "Chip Logic ID" if "Chip Logic ID" in columns else "Chip Phy-ID"
    if number not in columns or columns[-1] != "Chip Name":
        return None
    chips = []
    for line in lines[header + 1 :]:
        cells = line.split(None, len(columns) - 1)
        if not cells:
            continue
        if len(cells) != len(columns):
            return None
        row = dict(zip(columns, cells, strict=True))
        if row[number] == "-" or row["Chip Name"].lower() == "mcu":
            continue
        try:
            chips.append(
                _Chip(
                    npu=int(row["NPU ID"]),
                    chip=int(row["Chip ID"]),
                    logical=int(row[number]),
                    physical=int(row["Chip Phy-ID"]) if row.get("Chip Phy-ID", "-") != "-" else None,
                    model=row["Chip Name"].strip(),
                )
            )
        except ValueError:
            return None
    return sorted(chips, key=lambda c: c.logical)


def join_table(chips: Sequence[_Chip], text: str) -> list[_Chip]:
    """Add model, health, bus and memory from the table of ``npu-smi info``.

    A chip has two rows: ``| NPU Name | Health | ... |`` and ``| Chip [Phy-ID] | Bus-Id | AICore Memory HBM |``. The
    last ``used / total`` of the second is the memory of the chip, HBM where there is any. Numbers are MiB.
    """
    has_physical = "Phy-ID" in text  # 310P has a column Device in its place
    found: dict[tuple[int, int], _Chip] = {}
    by_key = {(c.npu, c.chip): c for c in chips}
    first: tuple[int, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        words = cells[0].split()
        if len(cells) != 3 or not words or not words[0].isdigit():
            continue
        if not _BUS.fullmatch(cells[1]):
            first = (int(words[0]), " ".join(words[1:]), cells[1])
            continue
        chip = by_key.get((first[0], int(words[0]))) if first else None
        if chip is None or first is None:
            continue
        usage = _USAGE.findall(cells[2])
        physical = int(words[1]) if len(words) > 1 and words[1].isdigit() and has_physical else None
        found[chip.npu, chip.chip] = replace(
            chip,
            model=first[1] or chip.model,
            health=first[2],
            bus=cells[1],
            physical=chip.physical if chip.physical is not None else physical,
            used=int(usage[-1][0]) * _MiB if usage else None,
            total=int(usage[-1][1]) * _MiB if usage else None,
        )
    return [found.get((c.npu, c.chip), c) for c in chips]


def parse_visible(text: str, ids: Sequence[int]) -> tuple[list[int], str]:
    """(ids that CANN will see, what is wrong with the list).

    CANN reads decimal ids separated by commas, ascending, stops at the first other character or unknown id, and says
    nothing about the rest. A list of which it would drop a part is taken for a mistake.
    """
    if not text:
        return [], f"{VISIBLE} is set and empty, which hides every NPU"
    seen: list[int] = []
    read = re.match(r"\d+(?:,\d+)*", text)
    for number in read[0].split(",") if read else ():
        if int(number) not in ids:
            there = f"{min(ids)} to {max(ids)}" if ids else "none"
            return seen, f"{VISIBLE}={text!r} names NPU {int(number)}, which is not there (ids: {there})"
        if seen and int(number) <= seen[-1]:
            return seen, f"{VISIBLE}={text!r} does not ascend, which CANN does not support"
        seen.append(int(number))
    if read is None or read[0] != text:
        return seen, f"{VISIBLE}={text!r} is not a list of ids: CANN would see {seen or 'none'} and ignore the rest"
    return seen, ""


def driver_version(machine: Machine) -> str | None:
    """Version of the NPU driver, None without one."""
    return _info(machine.read("/usr/local/Ascend/driver/version.info"), "Version")


def cann_version(machine: Machine) -> str | None:
    """Version of the CANN toolkit, by the environment its ``set_env.sh`` leaves, else in the usual places."""
    bases = [machine.environ.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    for top in ("/usr/local/Ascend", machine.environ.get("HOME", "") + "/Ascend"):
        bases += [f"{top}/cann", f"{top}/ascend-toolkit/latest", f"{top}/nnrt/latest"]
    arch = "aarch64" if machine.arch in ("aarch64", "arm64") else "x86_64"
    for base in bases:
        for folder in (f"{base}/{arch}-linux", base) if base else ():
            for package in ("toolkit", "nnrt", "nnae"):
                version = _info(machine.read(f"{folder}/ascend_{package}_install.info"), "version")
                if version:
                    return version
    return None


def family(model: str) -> tuple[str, tuple[str, ...]]:
    """(family that kernels are made for, dtypes) of a chip's name; ("?", ()) for an unknown one."""
    return next(((name, dtypes) for pattern, name, dtypes in FAMILIES if re.search(pattern, model)), ("?", ()))


def _visible(chips: Sequence[_Chip], listed: str | None) -> tuple[tuple[Card, ...], str, str]:
    """(cards, trouble, advice) under the value of the environment variable."""
    seen, trouble = [c.logical for c in chips], ""
    if listed is not None and chips:
        seen, trouble = parse_visible(listed, seen)
    if trouble:
        seen = []
    index = {logical: i for i, logical in enumerate(seen)}
    cards = []
    for chip in chips:
        arch, dtypes = family(chip.model)
        cards.append(
            Card(
                kind="ascend",
                index=index.get(chip.logical),
                visible=chip.logical,
                physical=chip.physical,
                model="Ascend" + chip.model.removeprefix("Ascend").strip(),
                arch=arch,
                dtypes=dtypes,
                memory_total=chip.total,
                memory_free=None if chip.total is None or chip.used is None else max(0, chip.total - chip.used),
                health=chip.health,
                bus=chip.bus,
            )
        )
    return tuple(cards), trouble, f"unset {VISIBLE}, or write ids as in {VISIBLE}=0,1" if trouble else ""


def _failure(ended: Command) -> tuple[str, str]:
    """(trouble, advice) of a run of npu-smi; empty when it went well. Its errors come with exit code 0, too."""
    if ended.status == "timeout":
        return "npu-smi does not answer", "the driver may hang: see dmesg, and reset or restart the server"
    code = re.search(r"ret is (-80\d\d)", ended.text)
    if code:
        why = {
            "-8005": "the container has not got the NPU devices, or the driver is not loaded",
            "-8020": "another container holds the NPUs",
        }.get(code[1], "the driver refused")
        return f"npu-smi failed with {code[1]}: {why}", "see npu-smi info on the host"
    if ended.status == "failed":
        return f"npu-smi failed (exit code {ended.code}): {ended.first_line}", "see npu-smi info"
    return "", ""


def _info(text: str, key: str) -> str | None:
    """Value of ``key=value`` in an ``.info`` file."""
    found = re.search(rf"^\s*{key}\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else None
