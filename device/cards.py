"""What a probe reports: cards of one kind, which of them this process sees, and why none can be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator, or the CPU.

    index: its number for this process (the N of ``cuda:N``), None when a ``*_VISIBLE_DEVICES`` variable hides it.
    visible: the id that such a variable would name. physical: the id of ``/dev/davinciN`` or of the PCI slot order,
    None where the driver does not say. arch: the family that kernels are made for. Memory in bytes, None when unknown.
    """

    kind: str
    index: int | None
    visible: int
    physical: int | None
    model: str
    arch: str
    dtypes: tuple[str, ...]
    memory_total: int | None = None
    memory_free: int | None = None
    health: str = "OK"
    bus: str = ""

    @property
    def name(self) -> str:
        """``ascend:0``; the CPU has no number."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Probe:
    """Everything found about one kind.

    present: hardware or its driver was seen. cards: all that the driver lists, hidden ones too. trouble: why no card of
    this kind can be used, empty when some can; advice: what to do about it. versions: name -> version, None when not
    installed. notes: what a reader of the table should know. hidden_by: "NAME=value" that hides cards.
    """

    kind: str
    present: bool
    cards: tuple[Card, ...] = ()
    trouble: str = ""
    advice: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hidden_by: str = ""

    @property
    def visible(self) -> tuple[Card, ...]:
        """The cards of this process, by index."""
        return tuple(sorted((c for c in self.cards if c.index is not None), key=lambda c: c.index or 0))


def readable_bytes(count: int | None) -> str:
    """``7.5 GiB``; ``?`` when unknown."""
    if count is None:
        return "?"
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
