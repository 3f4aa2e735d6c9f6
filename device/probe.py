"""Which device to use. ``auto`` tries Ascend, CUDA and the CPU in this order and says for each why it was taken or not;
a device that is named is used or is an error.

This is one of the two places that may branch on hardware (the other is the binding of the op table).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from device.cards import Card, Probe, readable_bytes
from device.config import KINDS, DeviceConfig, parse_device
from device.errors import DeviceError
from device.machine import Machine
from device.probe_ascend import probe_ascend
from device.probe_cpu import probe_cpu
from device.probe_cuda import probe_cuda

IMPLEMENTED: frozenset[str] = frozenset({"cpu"})
"""Kinds that this build has a device for. A new device adds its kind here."""

_TITLES = {"ascend": "Ascend", "cuda": "CUDA", "cpu": "CPU"}
BROKEN_HEALTH = ("alarm", "critical", "offline")
"""Health that npu-smi reports for chips that do not compute; a warning (temperature, say) is not among them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that could be selected, or a kind that could not. ``reason``: why it is usable or not."""

    name: str
    kind: str
    usable: bool
    reason: str
    advice: str = ""
    card: Card | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The device to use, and every candidate that was looked at."""

    kind: str
    index: int
    card: Card
    reason: str
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        """``ascend:0``, ``cuda:1``, ``cpu``."""
        return self.card.name

    def report(self) -> str:
        """One line per candidate; neighbours with the same reason share one."""
        rows: list[list[str]] = []
        for candidate in self.candidates:
            taken = candidate.card is self.card
            verdict = "taken" if taken else "usable" if candidate.usable else "not used"
            text = f"{verdict}: {candidate.reason}"
            if rows and rows[-1][1] == text and not taken:
                rows[-1][0] = rows[-1][0].split(" .. ")[0] + f" .. {candidate.name}"
            else:
                rows.append([candidate.name, text])
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


class Survey:
    """Looks at a machine once, each kind only when it is asked for (a vendor's tool may take seconds)."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine or Machine()

    @cached_property
    def ascend(self) -> Probe:
        """Ascend NPUs."""
        return probe_ascend(self.machine)

    @cached_property
    def cuda(self) -> Probe:
        """NVIDIA GPUs."""
        return probe_cuda(self.machine)

    @cached_property
    def cpu(self) -> Probe:
        """The CPU."""
        return probe_cpu(self.machine)

    def of(self, kind: str) -> Probe:
        """The probe of one kind."""
        probe: Probe = getattr(self, kind)
        return probe


def candidates(
    survey: Survey,
    config: DeviceConfig | None = None,
    *,
    kinds: Collection[str] = KINDS,
    implemented: Collection[str] = IMPLEMENTED,
) -> list[Candidate]:
    """Every visible card of ``kinds``, in the order of ``auto``; a kind without any has one candidate that says why."""
    config = config or DeviceConfig()
    found = []
    for kind in (k for k in KINDS if k in kinds):
        probe = survey.of(kind)
        if probe.trouble:
            found.append(Candidate(kind, kind, False, probe.trouble, probe.advice))
            continue
        for card in probe.visible:
            trouble, advice = _unusable(survey, probe, card, config, implemented)
            reason = trouble or _facts(probe, card)
            found.append(Candidate(card.name, kind, not trouble, reason, advice, card))
    return found


def select(
    config: DeviceConfig | None = None, survey: Survey | None = None, *, implemented: Collection[str] = IMPLEMENTED
) -> Selection:
    """The device of ``config.device``. DeviceError when a named one cannot be used: why, and what to do."""
    config = config or DeviceConfig()
    survey = survey or Survey()
    kind, index = parse_device(config.device)
    if kind == "auto":
        tried = tuple(candidates(survey, config, implemented=implemented))
        for candidate in tried:
            if candidate.usable and candidate.card is not None:
                card = candidate.card
                return Selection(candidate.kind, card.index or 0, card, "first usable of " + ", ".join(KINDS), tried)
        raise DeviceError("no device can be used: " + "; ".join(f"{c.name}: {c.reason}" for c in tried))
    tried = tuple(candidates(survey, config, kinds=(kind,), implemented=implemented))
    for candidate in tried:
        if candidate.card is not None and candidate.card.index == index and candidate.usable:
            return Selection(kind, index, candidate.card, f"device = {config.device}", tried)
    raise DeviceError(_refusal(config.device, kind, index, tried, survey.of(kind)))


def _refusal(asked: str, kind: str, index: int, tried: tuple[Candidate, ...], probe: Probe) -> str:
    chosen = next((c for c in tried if c.card is None or c.card.index == index), None)
    if chosen is None:
        last = max((c.card.index or 0) for c in tried if c.card is not None)
        why = f"there is no {kind}:{index}, the visible cards are {kind}:0 to {kind}:{last}"
        if probe.hidden_by:
            why += f" ({probe.hidden_by})"
        return f"device {asked} was asked for and cannot be used: {why}. Run jumar devices to see them"
    advice = chosen.advice or "run jumar doctor to see what is missing"
    return (
        f"device {asked} was asked for and cannot be used: {chosen.reason}. What to do: {advice}; or take device = auto"
    )


def _unusable(
    survey: Survey, probe: Probe, card: Card, config: DeviceConfig, implemented: Collection[str]
) -> tuple[str, str]:
    """(why this card cannot be used, what to do); empty when it can."""
    if probe.kind not in implemented:
        model = f"{card.model} is present" if probe.kind != "cpu" else "present"
        return f"{model}, but this build has no {_TITLES[probe.kind]} device yet", "use device = cpu"
    if card.health.lower() in BROKEN_HEALTH:
        return f"its health is {card.health}", "see npu-smi info -t health"
    return _SOFTWARE[probe.kind](survey.machine, probe, config)


def _ascend_software(machine: Machine, probe: Probe, config: DeviceConfig) -> tuple[str, str]:
    if probe.versions["CANN"] is None:
        return "CANN is not installed", "install the CANN toolkit and ops, then source its set_env.sh"
    needs = ("mindspore",) if config.framework == "mindspore" else ("torch", "torch-npu")
    missing = [name for name in needs if machine.version(name) is None]
    if missing:
        extra = "mindspore" if config.framework == "mindspore" else "ascend"
        return (
            f"{' and '.join(missing)} not installed",
            f"pip install -e '.[{extra}]' (in Jumar's folder and environment)",
        )
    return "", ""


def _install(extra: str) -> str:
    # not by the distribution's name: what an index has under it need not be this project
    return f"pip install -e '.[{extra}]' (in Jumar's folder and environment)"


def _cuda_software(machine: Machine, probe: Probe, config: DeviceConfig) -> tuple[str, str]:
    missing = [name for name in ("torch", "triton") if machine.version(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed", _install("cuda")
    if (machine.version("torch") or "").endswith("+cpu"):
        return "the installed torch is the build without CUDA", "pip install -e '.[cuda]' in an environment of its own"
    return "", ""


def _cpu_software(machine: Machine, probe: Probe, config: DeviceConfig) -> tuple[str, str]:
    return "", ""


_SOFTWARE: dict[str, Callable[[Machine, Probe, DeviceConfig], tuple[str, str]]] = {
    "ascend": _ascend_software,
    "cuda": _cuda_software,
    "cpu": _cpu_software,
}


def _facts(probe: Probe, card: Card) -> str:
    memory = f"{readable_bytes(card.memory_free)} of {readable_bytes(card.memory_total)} free"
    return f"{card.model}, {card.arch}, {memory}"
