"""NVIDIA GPUs, by ``nvidia-smi``.

CUDA_VISIBLE_DEVICES: https://docs.nvidia.com/cuda/cuda-programming-guide/ ("CUDA Environment Variables"). MIG slices
are not told apart: a list that names one is reported as such.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from device.cards import Card, Probe
from device.machine import Machine

VISIBLE = "CUDA_VISIBLE_DEVICES"
_FIELDS = ("index", "uuid", "name", "pci.bus_id", "memory.total", "memory.free", "driver_version")
_MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Gpu:
    index: int
    uuid: str
    name: str
    bus: str
    total: int | None
    free: int | None
    driver: str
    capability: str = ""


def probe_cuda(machine: Machine) -> Probe:
    """Cards, visibility, versions. Never raises: what went wrong is ``trouble``."""
    nodes = machine.devices("nvidia")
    versions = {"driver": None, "CUDA": None, "torch": machine.version("torch"), "triton": machine.version("triton")}
    probe = Probe("cuda", present=bool(nodes), versions=versions)
    # Drivers before 2022 do not know compute_cap and refuse the whole query.
    ended = machine.run("nvidia-smi", _query((*_FIELDS, "compute_cap")), "--format=csv,noheader,nounits")
    if ended.status == "failed" and "not a valid field" in ended.text:
        ended = machine.run("nvidia-smi", _query(_FIELDS), "--format=csv,noheader,nounits")
    if ended.status == "missing":
        if not nodes:
            return replace(probe, trouble="not present: no nvidia-smi and no /dev/nvidia*")
        advice = "in a container start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return replace(probe, trouble=f"/dev/{nodes[0]} is there but nvidia-smi is not", advice=advice)
    if ended.status == "timeout":
        advice = "the driver may hang: see dmesg, and reset or restart the machine"
        return replace(probe, present=True, trouble="nvidia-smi does not answer", advice=advice)
    if ended.status == "failed" or "No devices were found" in ended.text:
        # An installed nvidia-smi says nothing about hardware: images carry it without a card.
        trouble = f"nvidia-smi failed (exit code {ended.code}): {ended.first_line}"
        return replace(probe, trouble=trouble, advice="see nvidia-smi")
    gpus = parse_query(ended.text)
    if not gpus:
        trouble = f"nvidia-smi answered in an unknown form: {ended.first_line!r}"
        return replace(probe, present=True, trouble=trouble, advice="see nvidia-smi")
    versions |= {"driver": gpus[0].driver, "CUDA": _cuda_version(machine)}
    cards, trouble = _visible(gpus, machine.environ.get(VISIBLE))
    notes = []
    if len({g.name for g in gpus}) > 1 and machine.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "the cards differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA puts the fastest first, so its numbers may"
            " not be those shown here"
        )
    return replace(
        probe,
        present=True,
        cards=cards,
        trouble=trouble,
        advice=f"unset {VISIBLE}, or write ids as in {VISIBLE}=0,1" if trouble else "",
        versions=versions,
        notes=tuple(notes),
        hidden_by=f"{VISIBLE}={machine.environ[VISIBLE]}" if VISIBLE in machine.environ else "",
    )


def parse_query(text: str) -> list[_Gpu]:
    """GPUs of the CSV query, by index; lines of another form (warnings) are passed over."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) not in (len(_FIELDS), len(_FIELDS) + 1) or not cells[0].isdigit():
            continue
        capability = cells[7] if len(cells) == 8 and re.fullmatch(r"\d+\.\d+", cells[7]) else ""
        gpus.append(
            _Gpu(int(cells[0]), cells[1], cells[2], cells[3], _mib(cells[4]), _mib(cells[5]), cells[6], capability)
        )
    return sorted(gpus, key=lambda g: g.index)


def parse_visible(text: str, gpus: Sequence[_Gpu]) -> tuple[list[int], str]:
    """(indices that CUDA will see, in its order; what is wrong with the list).

    Entries are indices or beginnings of UUIDs. CUDA stops at the first that is not valid; -1 is the usual way to write
    that on purpose, any other is taken for a mistake.
    """
    seen: list[int] = []
    entries = [entry.strip() for entry in text.split(",")]
    if entries[0] in ("", "-1", "NoDevFiles"):
        return [], f"{VISIBLE}={text!r} hides every GPU"
    for entry in entries:
        if entry == "-1":
            break
        if entry.startswith("MIG-"):
            return seen, f"{VISIBLE}={text!r} names a MIG slice, which this version cannot tell from the whole card"
        if entry.isdigit():
            matches = [g.index for g in gpus if g.index == int(entry)]
        else:
            matches = [g.index for g in gpus if entry.startswith("GPU-") and g.uuid.startswith(entry)]
        if len(matches) != 1:
            why = "more than one GPU" if matches else "no GPU"
            return seen, f"{VISIBLE}={text!r}: {entry!r} names {why}; CUDA would see {seen or 'none'}"
        if matches[0] in seen:
            return seen, f"{VISIBLE}={text!r} names GPU {matches[0]} twice"
        seen += matches
    return seen, ""


def dtypes_of(capability: str) -> tuple[str, ...]:
    """Types that kernels compute in: bfloat16 from compute capability 8.0 on."""
    if not capability:
        return ()
    major = int(capability.split(".")[0])
    return ("bfloat16", "float16", "float32") if major >= 8 else ("float16", "float32")


def _visible(gpus: Sequence[_Gpu], listed: str | None) -> tuple[tuple[Card, ...], str]:
    seen, trouble = [g.index for g in gpus], ""
    if listed is not None:
        seen, trouble = parse_visible(listed, gpus)
    if trouble:
        seen = []
    return tuple(
        Card(
            kind="cuda",
            index=seen.index(gpu.index) if gpu.index in seen else None,
            visible=gpu.index,
            physical=gpu.index,
            model=gpu.name,
            arch="sm_" + gpu.capability.replace(".", "") if gpu.capability else "?",
            dtypes=dtypes_of(gpu.capability),
            memory_total=gpu.total,
            memory_free=gpu.free,
            bus=gpu.bus,
        )
        for gpu in gpus
    ), trouble


def _query(fields: Sequence[str]) -> str:
    return "--query-gpu=" + ",".join(fields)


def _cuda_version(machine: Machine) -> str | None:
    """The newest CUDA that the driver supports; only the banner of nvidia-smi has it."""
    found = re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d+\.\d+)", machine.run("nvidia-smi").text)
    return found[1] if found else None


def _mib(cell: str) -> int | None:
    """``[N/A]`` where the card shares the host's memory."""
    return int(cell) * _MiB if cell.isdigit() else None
