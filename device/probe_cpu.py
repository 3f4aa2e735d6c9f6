"""The CPU: cores that may be used, instruction sets, memory."""

from __future__ import annotations

from collections.abc import Sequence

from device.cards import Card, Probe
from device.errors import DeviceError
from device.machine import Machine
from device.memory import host_memory, usable_cores

_X86 = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
)  # fmt: skip
"""Flags of /proc/cpuinfo that matter to kernels, old to new."""
_ARM = {
    "asimd": "neon", "asimdhp": "fp16", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve",
    "sve2": "sve2",
}  # fmt: skip


def probe_cpu(machine: Machine) -> Probe:
    """The CPU is always present. Its card's ``arch`` sums up the instruction sets; a note lists them."""
    cores, source = usable_cores(machine.root, affinity=machine.affinity)
    flags, model = _cpuinfo(machine)
    sets = instruction_sets(flags, machine.arch)
    notes = [f"{cores} cores usable ({source})", f"instruction sets: {' '.join(sets) or 'none that kernels use'}"]
    total = free = None
    try:
        memory = host_memory(machine.root)
        total, free = memory.total, memory.free
        notes.append(f"free memory by {memory.source}")
    except DeviceError as error:
        notes.append(str(error))
    card = Card(
        kind="cpu",
        index=0,
        visible=0,
        physical=0,
        model=f"{model}, {cores} cores",
        arch=summary(sets) or machine.arch,
        dtypes=("float32", "float64"),
        memory_total=total,
        memory_free=free,
    )
    python = ".".join(map(str, machine.python))
    return Probe(
        "cpu",
        present=True,
        cards=(card,),
        versions={"Python": python, "numpy": machine.version("numpy")},
        notes=tuple(notes),
    )


def cpu_name() -> str:
    """This machine's CPU and its cores, for reports."""
    return probe_cpu(Machine()).cards[0].model


def instruction_sets(flags: set[str], arch: str) -> list[str]:
    """Names of instruction sets that kernels use, from the flags of ``/proc/cpuinfo``."""
    if arch in ("aarch64", "arm64"):
        return [name for flag, name in _ARM.items() if flag in flags] or ["neon"]  # part of the 64-bit architecture
    return [flag for flag in _X86 if flag in flags]


def summary(sets: Sequence[str]) -> str:
    """The sets in a few words: ``avx2``, ``avx512 vnni bf16 amx``, ``neon dotprod``."""
    if "neon" in sets:
        return " ".join(sets)
    widest = "avx512" if "avx512f" in sets else next((s for s in ("avx2", "avx", "sse4_2") if s in sets), "")
    extras = {"vnni": ("avx512_vnni", "avx_vnni"), "bf16": ("avx512_bf16",), "amx": ("amx_int8", "amx_bf16")}
    words = [widest, *(name for name, flags in extras.items() if any(f in sets for f in flags))]
    return " ".join(word for word in words if word)


def _cpuinfo(machine: Machine) -> tuple[set[str], str]:
    flags: set[str] = set()
    model = ""
    for line in machine.read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features") and not flags:
            flags = set(value.split())
        elif name.strip().lower() == "model name" and not model:
            model = " ".join(value.split())
    return flags, model or f"{machine.arch} CPU"
