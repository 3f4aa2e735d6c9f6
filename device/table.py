"""The table of ``jumar devices``: every card, which number this process knows it by, and the versions around it."""

from __future__ import annotations

from dataclasses import dataclass

from device.cards import readable_bytes
from device.config import KINDS
from device.probe import Survey, candidates

_HEADINGS = ("device", "visible", "physical", "model", "arch", "memory free / total", "dtypes", "health", "usable")


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One card. ``logical``: ``ascend:0``, or "-" when hidden; ``visible``: the id that ``*_VISIBLE_DEVICES`` counts;
    ``physical``: the driver's own id, "-" when it says none. Memory in bytes or None."""

    kind: str
    logical: str
    visible: str
    physical: str
    model: str
    arch: str
    memory_free: int | None
    memory_total: int | None
    dtypes: tuple[str, ...]
    health: str
    usable: str
    """"yes", or why not."""

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of the headings."""
        memory = f"{readable_bytes(self.memory_free)} / {readable_bytes(self.memory_total)}"
        return (
            self.logical,
            self.visible,
            self.physical,
            self.model,
            self.arch,
            memory,
            " ".join(self.dtypes) or "?",
            self.health,
            self.usable,
        )


def device_table(survey: Survey | None = None) -> list[DeviceRow]:
    """All cards of all kinds, those of this process first within a kind, by its own numbers."""
    survey = survey or Survey()
    verdicts = {c.name: c for c in candidates(survey)}
    rows = []
    for kind in KINDS:
        probe = survey.of(kind)
        for card in sorted(probe.cards, key=lambda c: (c.index is None, c.index or 0, c.visible)):
            hidden = card.index is None
            verdict = verdicts.get(card.name)
            usable = "yes" if verdict and verdict.usable else verdict.reason if verdict else "no"
            rows.append(
                DeviceRow(
                    kind=kind,
                    logical="-" if hidden else card.name,
                    visible="-" if kind == "cpu" else str(card.visible),
                    physical="-" if kind == "cpu" or card.physical is None else str(card.physical),
                    model=card.model,
                    arch=card.arch,
                    memory_free=card.memory_free,
                    memory_total=card.memory_total,
                    dtypes=card.dtypes,
                    health=card.health if kind == "ascend" else "-",
                    usable=("hidden" if not probe.trouble else "no") if hidden else usable,
                )
            )
    return rows


def format_devices(survey: Survey | None = None) -> str:
    """Text for ``jumar devices``: the table, then for each kind its versions, notes, or why there is none."""
    survey = survey or Survey()
    table = [_HEADINGS, *(row.cells() for row in device_table(survey))]
    # What is in the way of a card goes below: reasons are long and the same for all cards of a kind.
    reasons: list[str] = []
    for n, row in enumerate(table[1:], 1):
        if row[-1] not in ("yes", "no", "hidden"):
            if row[-1] not in reasons:
                reasons.append(row[-1])
            table[n] = (*row[:-1], f"no ({reasons.index(row[-1]) + 1})")
    widths = [max(len(row[i]) for row in table) for i in range(len(_HEADINGS))]
    lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    lines += [f"  ({n}) {reason}" for n, reason in enumerate(reasons, 1)]
    for kind in KINDS:
        probe = survey.of(kind)
        lines.append("")
        if not probe.present:
            lines.append(f"{kind}: {probe.trouble}")
            continue
        lines.append(f"{kind}: " + ", ".join(f"{name} {version or '-'}" for name, version in probe.versions.items()))
        if probe.trouble:
            lines.append(f"  no card can be used: {probe.trouble}")
            lines.append(f"  what to do: {probe.advice}")
        hidden = len(probe.cards) - len(probe.visible)
        if hidden and not probe.trouble:
            lines.append(f"  {hidden} more hidden by {probe.hidden_by}")
        lines += [f"  {note}" for note in probe.notes]
    return "\n".join(lines) + "\n"
