"""What an outside implementation said, and the comparison of our output with it. NumPy only.

A reference is a pair of files: ``<stem>.json`` (what made it, prompts, greedy tokens) and ``<stem>.npz`` (logits).
Every case is one prompt and the ``n`` tokens of its greedy continuation. Row i of a case holds the logits that
chose token i: those behind the prefix ``prompt + tokens[:i]``. Of every row there are the two best ids with their
logits, max |logit|, and the logits of a few ids drawn once at random; of a few rows there are all logits.

How equality is judged: the greedy token is the same at every row; where it is not, the reference's own two best
logits must lie within ``NEAR_TIE`` and ours must be the second, and the comparison goes on behind the
*reference's* token. No stored logit may be off by more than ``LOGIT_TOLERANCE`` times max |logit| of its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parents[1] / "data"
MODELS = DATA / "models"
SMOLLM2 = DATA / "smollm2_greedy.json"
NEAR_TIE = 1e-4
LOGIT_TOLERANCE = 1e-3
TINY_TOLERANCE = 1e-4
"""For the tiny models: float32 noise is below 1e-5 there, and the exact GELU in place of tanh's only 7e-4."""
SAMPLED_IDS = 32
_FULL_STEPS = 32767

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ReferenceCase:
    """One prompt, its greedy continuation by the reference and what is kept of the logits (n rows).

    top_ids, top_logits: [n, 2], best first. max_abs: [n]. sample_ids, sample_logits: [n, S].
    full: row -> all logits [vocab], float32, rounded to max |logit| / 32767.
    """

    name: str
    vocab: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_ids: Ints
    top_logits: Floats
    max_abs: Floats
    sample_ids: Ints
    sample_logits: Floats
    full: Mapping[int, Floats] = field(default_factory=dict)
    text: str | None = None

    def __post_init__(self) -> None:
        if self.tokens != tuple(self.top_ids[:, 0].tolist()):
            raise ValueError(f"reference case {self.name!r}: tokens and best ids are not the same; make it anew")

    def prefix(self, row: int) -> list[int]:
        """The token ids behind which the reference chose token ``row``."""
        return [*self.prompt, *self.tokens[:row]]

    def gap(self, row: int) -> float:
        """Best logit less second best."""
        return float(self.top_logits[row, 0]) - float(self.top_logits[row, 1])


@dataclass(frozen=True)
class GreedyReport:
    """Rows whose token was equal, rows excused as near ties, and the largest |dlogit| / max |logit| met."""

    equal: int = 0
    excused: int = 0
    max_relative_delta: float = 0.0

    def __add__(self, other: GreedyReport) -> GreedyReport:
        delta = max(self.max_relative_delta, other.max_relative_delta)
        return GreedyReport(self.equal + other.equal, self.excused + other.excused, delta)

    def __str__(self) -> str:
        delta = f"max |dlogit| {self.max_relative_delta:.1e} of the row's max"
        return f"{self.equal} equal, {self.excused} excused, {delta}"


# ---------------------------------------------------------------------------------------------- comparison


def excused(case: ReferenceCase, row: int, token: int, near_tie: float = NEAR_TIE) -> bool:
    """False where ``token`` is the reference's, True where it is the other of two near-tied; else AssertionError."""
    if token == case.tokens[row]:
        return False
    gap = case.gap(row)
    if gap <= near_tie and token == int(case.top_ids[row, 1]):
        return True
    raise AssertionError(
        f"case {case.name!r}, output token {row} (position {len(case.prompt) + row}): got id {token}, the reference "
        f"has {case.tokens[row]}; its second best is {int(case.top_ids[row, 1])}, {gap:.3g} below "
        f"(excused only up to {near_tie:g})"
    )


def compare_row(
    case: ReferenceCase,
    row: int,
    logits: NDArray[Any],
    tolerance: float = LOGIT_TOLERANCE,
    near_tie: float = NEAR_TIE,
) -> GreedyReport:
    """Compare our logits [vocab] of one row; AssertionError says what differs."""
    where = f"case {case.name!r}, output token {row}"
    if logits.shape != (case.vocab,):
        raise AssertionError(f"{where}: logits of shape {logits.shape}, expected {(case.vocab,)}")
    if not np.isfinite(logits).all():
        raise AssertionError(f"{where}: {int((~np.isfinite(logits)).sum())} logits are not finite")
    ids = np.concatenate([case.sample_ids[row], case.top_ids[row]])
    want = np.concatenate([case.sample_logits[row], case.top_logits[row]])
    if row in case.full:
        ids = np.concatenate([ids, np.arange(case.vocab, dtype=ids.dtype)])
        want = np.concatenate([want, case.full[row]])
    delta = np.abs(logits[ids].astype(np.float64) - want)
    worst = int(delta.argmax())
    relative = float(delta[worst]) / float(case.max_abs[row])
    if not relative <= tolerance:
        raise AssertionError(
            f"{where}: logit of id {int(ids[worst])} is {float(logits[ids[worst]]):.6g}, the reference has "
            f"{float(want[worst]):.6g}: off by {relative:.2e} of the row's max |logit|, allowed {tolerance:g}"
        )
    near = excused(case, row, int(np.argmax(logits)), near_tie)
    return GreedyReport(0 if near else 1, 1 if near else 0, relative)


def compare_greedy(
    case: ReferenceCase,
    step_fn: Callable[[list[int]], NDArray[Any]],
    tolerance: float = LOGIT_TOLERANCE,
    near_tie: float = NEAR_TIE,
) -> GreedyReport:
    """Walk the case: ``step_fn(prefix)`` gives our logits [vocab] of the token after ``prefix``.

    The prefix is always the reference's, so one early near tie does not spoil the rest. Example:

        report = sum((compare_greedy(case, step) for case in smollm2_cases()), GreedyReport())
    """
    report = GreedyReport()
    for row in range(len(case.tokens)):
        report += compare_row(case, row, step_fn(case.prefix(row)), tolerance, near_tie)
    return report


def compare_teacher_forced(
    case: ReferenceCase,
    forward: Callable[[list[int]], NDArray[Any]],
    tolerance: float = LOGIT_TOLERANCE,
    near_tie: float = NEAR_TIE,
) -> GreedyReport:
    """The same with one call: ``forward(ids)`` gives logits [len(ids), vocab], or only the last n rows of them."""
    count = len(case.tokens)
    ids = case.prefix(count - 1)
    rows = forward(ids)
    if rows.ndim != 2 or rows.shape[0] not in (len(ids), count):
        raise AssertionError(f"case {case.name!r}: logits of shape {rows.shape}, expected {len(ids)} or {count} rows")
    rows = rows[-count:]
    report = GreedyReport()
    for row in range(count):
        report += compare_row(case, row, rows[row], tolerance, near_tie)
    return report


def compare_generation(
    case: ReferenceCase,
    generate: Callable[[list[int], int], Sequence[int]],
    near_tie: float = NEAR_TIE,
) -> GreedyReport:
    """Tokens only, running free: ``generate(prefix, count)`` gives ``count`` greedy ids, end-of-text ignored.

    At an excused difference it is called again behind the reference's token, for the tokens still due.
    """
    count = len(case.tokens)
    done = 0
    report = GreedyReport()
    while done < count:
        got = list(generate(case.prefix(done), count - done))
        if len(got) != count - done:
            raise AssertionError(f"case {case.name!r}: {len(got)} tokens generated, {count - done} were asked for")
        differs = next((i for i, token in enumerate(got) if token != case.tokens[done + i]), None)
        if differs is None:
            return report + GreedyReport(equal=len(got))
        excused(case, done + differs, got[differs], near_tie)
        report += GreedyReport(equal=differs, excused=1)
        done += differs + 1
    return report


# ---------------------------------------------------------------------------------------------- files


def load_cases(path: Path) -> list[ReferenceCase]:
    """All cases of ``<stem>.json`` and the ``<stem>.npz`` beside it."""
    meta = json.loads(path.read_text(encoding="utf-8"))
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    vocab = int(meta["vocab"])
    cases = []
    for index, entry in enumerate(meta["cases"]):
        full = {
            int(row): arrays["full_values"][k].astype(np.float32) * arrays["full_steps"][k]
            for k, (case, row) in enumerate(arrays["full_index"])
            if case == index
        }
        cases.append(
            ReferenceCase(
                name=entry["name"],
                vocab=vocab,
                prompt=tuple(entry["prompt"]),
                tokens=tuple(entry["tokens"]),
                top_ids=arrays["top_ids"][index].astype(np.int32),
                top_logits=arrays["top_logits"][index],
                max_abs=arrays["max_abs"][index],
                sample_ids=arrays["sample_ids"][index].astype(np.int32),
                sample_logits=arrays["sample_logits"][index],
                full=full,
                text=entry.get("text"),
            )
        )
    return cases


def smollm2_cases() -> list[ReferenceCase]:
    """The 20 prompts of SmolLM2-135M-Instruct.Q4_1, dequantised, in float32."""
    return load_cases(SMOLLM2)


def tiny_model_names() -> list[str]:
    """Every folder of ``tests/data/models`` that has a reference."""
    return sorted(path.parent.name for path in MODELS.glob("*/reference.json"))


def tiny_model_cases(name: str) -> list[ReferenceCase]:
    """The cases of one random tiny model; its weights lie in ``MODELS / name``."""
    return load_cases(MODELS / name / "reference.json")


def make_case(
    name: str,
    index: int,
    prompt: Iterable[int],
    logits: NDArray[Any],
    full_rows: Iterable[int] = (),
    text: str | None = None,
) -> ReferenceCase:
    """A case from the reference's logits [n, vocab]; ``index`` seeds the choice of the sampled ids."""
    logits = logits.astype(np.float32)
    count, vocab = logits.shape
    best = logits.argmax(axis=1)
    rest = logits.copy()
    rest[np.arange(count), best] = -np.inf
    top_ids = np.stack([best, rest.argmax(axis=1)], axis=1)
    # RandomState's streams are frozen by NumPy, Generator's are not.
    sample_ids = np.random.RandomState(index).randint(0, vocab, size=(count, SAMPLED_IDS))
    return ReferenceCase(
        name=name,
        vocab=vocab,
        prompt=tuple(prompt),
        tokens=tuple(best.tolist()),
        top_ids=top_ids.astype(np.int32),
        top_logits=np.take_along_axis(logits, top_ids, axis=1),
        max_abs=np.abs(logits).max(axis=1),
        sample_ids=sample_ids.astype(np.int32),
        sample_logits=np.take_along_axis(logits, sample_ids, axis=1),
        full={row: logits[row] for row in full_rows},
        text=text,
    )


def save_cases(path: Path, meta: Mapping[str, Any], cases: Sequence[ReferenceCase]) -> None:
    """Write ``path`` (JSON, one case a line) and the ``.npz`` beside it. Same cases, same bytes."""
    if cases[0].vocab > 2**16:
        raise ValueError(f"ids are stored as uint16: a vocabulary of {cases[0].vocab} does not fit")
    entries = []
    for case in cases:
        entry: dict[str, Any] = {"name": case.name, "prompt": list(case.prompt), "tokens": list(case.tokens)}
        if case.text is not None:
            entry["text"] = case.text
        entries.append(json.dumps(entry, ensure_ascii=False))
    head = json.dumps({**meta, "vocab": cases[0].vocab}, ensure_ascii=False, indent=1)
    body = ",\n  ".join(entries)
    path.write_text(f'{head[:-2]},\n "cases": [\n  {body}\n ]\n}}\n', encoding="utf-8")
    full = [(index, row, case.full[row]) for index, case in enumerate(cases) for row in sorted(case.full)]
    steps = np.array([np.abs(values).max() / _FULL_STEPS for _, _, values in full], np.float32)
    np.savez_compressed(
        path.with_suffix(".npz"),
        top_ids=np.stack([case.top_ids for case in cases]).astype(np.uint16),
        top_logits=np.stack([case.top_logits for case in cases]),
        max_abs=np.stack([case.max_abs for case in cases]),
        sample_ids=np.stack([case.sample_ids for case in cases]).astype(np.uint16),
        sample_logits=np.stack([case.sample_logits for case in cases]),
        full_index=np.array([(index, row) for index, row, _ in full], np.int32).reshape(-1, 2),
        full_values=np.array([np.rint(v / s) for (_, _, v), s in zip(full, steps, strict=True)], np.int16),
        full_steps=steps,
    )
