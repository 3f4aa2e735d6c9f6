"""``jumar bench --trace``: where the time of a step goes, op by op, against the least that each could take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from device.errors import ConfigError

if TYPE_CHECKING:
    from device.contract import Ceilings, Device, OpTime


@dataclass(frozen=True, slots=True)
class Line:
    """The calls of one op in a step. seconds: of all, the median of the steps; floor: the least for what they move and
    compute, with the bandwidth of memory and the rate of products."""

    op: str
    calls: int
    seconds: float
    moved: int
    operations: int
    floor: float


class Trace:
    """Collects the op times of steps. ConfigError for a device that cannot time them."""

    def __init__(self, device: Device) -> None:
        if not device.caps.traces:
            raise ConfigError(
                f"--trace: {device.caps.name} with these kernels does not time the ops of a step; on a CPU the native "
                "kernels do (kernels = native)"
            )
        self._device = device
        self._steps: list[tuple[Mapping[str, int], Sequence[OpTime]]] = []

    def __enter__(self) -> Trace:
        self._steps = []
        self._device.tracer = lambda counts, times: self._steps.append((counts, times))
        return self

    def __exit__(self, *error: object) -> None:
        self._device.tracer = None

    def lines(self, rows: int, ceilings: Ceilings) -> list[Line]:
        """Of the steps that computed so many rows, slowest op first; [] where there was none."""
        steps = [times for counts, times in self._steps if counts["T"] == rows]
        if not steps:
            return []
        each: list[dict[tuple[str, str], list[OpTime]]] = []
        for times in steps:
            grouped: dict[tuple[str, str], list[OpTime]] = {}
            for time in times:
                grouped.setdefault((time.op, time.detail), []).append(time)
            each.append(grouped)
        middle = each[len(each) // 2]  # contexts grow from step to step: the one half-way stands for all
        lines = []
        for key, calls in middle.items():
            seconds = statistics.median(sum(t.seconds for t in g[key]) for g in each if key in g)
            moved, operations = sum(t.moved for t in calls), sum(t.operations for t in calls)
            floor = sum(max(t.moved / ceilings.bandwidth, t.operations / ceilings.rate) for t in calls)
            lines.append(Line(" ".join(key).strip(), len(calls), seconds, moved, operations, floor))
        return sorted(lines, key=lambda line: -line.seconds)

    def most_rows(self) -> int:
        """Of the step with the most; 0 where there was no step."""
        return max((counts["T"] for counts, _ in self._steps), default=0)


def table(title: str, lines: Sequence[Line]) -> list[str]:
    """For a terminal."""
    total = sum(line.seconds for line in lines)
    floor = sum(line.floor for line in lines)
    out = [f"{title}: {total * 1e3:.3f} ms in ops, at least {floor * 1e3:.3f} ms"]
    width = max((len(line.op) for line in lines), default=0)
    out.append(f"  {'op':<{width}} calls   time ms  share     GB/s    GOP/s  floor ms  floor/time")
    for line in lines:
        out.append(
            f"  {line.op:<{width}} {line.calls:>5} {line.seconds * 1e3:>9.3f} {line.seconds / total:>6.1%}"
            f" {line.moved / line.seconds / 1e9:>8.1f} {line.operations / line.seconds / 1e9:>8.1f}"
            f" {line.floor * 1e3:>9.3f} {line.floor / line.seconds:>11.0%}"
        )
    return out


def as_row(metric: str, line: Line) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "metric": f"{metric}:{line.op}",
        "ours": line.seconds * 1e3,
        "unit": "ms",
        "calls": line.calls,
        "bytes": line.moved,
        "operations": line.operations,
        "roofline_share": line.floor / line.seconds,
        "spread": None,
    }
