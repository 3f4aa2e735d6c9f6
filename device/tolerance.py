"""How close a device must come to the float64 reference, op by op, and why.

Two measures, both of which must hold. Element by element ``|error| ≤ rtol·|expected| + atol·rms(expected) + absolute``:
rtol for roundings of the result itself, atol (in units of the expected result's root mean square) for roundings of what
was summed, where a sum may cancel, absolute where the size of what cancels is known. Over the whole result the
normalised mean square error ``Σ error² / Σ expected²`` stays below ``nmse``: it sees a systematic error that the wider
bound for one element lets pass. Non-finite numbers must stand at the same places, and integers (ids, ranks, counts) are
always exact.

``e`` below is half the spacing of the compute dtype at 1 (2⁻⁵³ … 2⁻⁸), ``a`` that of the accumulator: float32 for all
but float64. Half-precision devices may round weights, probabilities and intermediate results to the compute dtype, but
must accumulate in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EPS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds as in the module's text. All zero: bit for bit the value that was expected."""

    rtol: float = 0.0
    atol: float = 0.0
    nmse: float = 0.0
    why: str = ""
    absolute: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether nothing but equality passes."""
        return self.rtol == 0 and self.atol == 0 and self.absolute == 0

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        parts = ((self.rtol, "·|y|"), (self.atol, "·rms"), (self.absolute, ""))
        return " + ".join(f"{n:.0e}{unit}" for n, unit in parts if n) + f", nmse {self.nmse:.0e}"


_COPIES = (
    "split_qkv", "gather_rows", "store_kv", "read_kv", "move_kv", "swap_kv", "mask_logits", "sample", "verify",
    "all_reduce", "all_gather",
)  # fmt: skip
EXACT = Tolerance(why="values are copied, chosen or compared, never computed")


def tolerance(
    op: str,
    dtype: str,
    output: str = "",
    *,
    depth: int = 1,
    step: float = 0.0,
    elements: int = 1,
    kv: str = "",
    size: float = 0.0,
) -> Tolerance:
    """The bound for a float result of ``op`` on a device that computes in ``dtype``; ``output``: its name in the probe.

    depth: how many products an element of the result sums (K of linear, tokens of attention).
    step: for composites, the size of one int8 step relative to the rms of what is quantised inside, where another
        rounding may tip a value over to the neighbouring step; 0 where nothing is. elements: how many such values.
    kv: the dtype of the cache that is written or read. size: the largest logit, for log-probabilities.
    """
    e, a = EPS[dtype], EPS["float64" if dtype == "float64" else "float32"]
    root = math.sqrt(max(depth, 1))
    if op in ("store_kv", "read_kv", "move_kv", "swap_kv") and kv == "int8":
        r = 2 * e + 4 * EPS["float32"]
        return Tolerance(r, 0.0, r * r, "the int8 value is exact, its float32 scale rounded")
    if op in _COPIES:
        return EXACT
    if op == "edit_logits":
        return _sum(4 * a, 4 * a, 4 * a, "a division (or a reciprocal and a product) and a sum in float32")
    if op == "logprobs":
        why = "log of a sum over the vocabulary, then a difference of numbers of the size of the logits, in float32"
        return Tolerance(8 * a, 0.0, (8 * a) ** 2, why, absolute=(8 * size + root) * a)
    if op == "embed":
        return _sum(3 * e, 16 * e, 3 * e, "q·scale + offset may cancel up to the offset's size; one more for scale")
    if op == "add":
        return _sum(2 * e, 2 * a, 1.5 * e, "one sum, rounded once")
    if op in ("rms_norm", "add_rms_norm"):
        why = "sum and products may each be rounded; a sum of squares"
        return _sum(4 * e + 16 * a, 4 * e + root * a, 2 * e + root * a, why)
    if op == "rope":
        return _sum(2 * e, 8 * e, 2 * e, "two products that may be rounded before they cancel")
    if op == "gated_act":
        why = "activation and product may be rounded; 1 + tanh cancels below 0"
        return _sum(4 * e + 16 * a, 8 * e, 2 * e + 16 * a, why)
    if op == "pack_weight":
        why = "read back by embed and by linear: the wider of their bounds"
        return _sum(3 * e, 16 * e + 8 * root * a, 3 * e + 8 * root * a, why)
    if op == "linear":
        why = "weights may be rounded to the compute dtype; a float32 sum over K"
        return _sum(2 * e, 8 * e + 8 * root * a, 1.4 * e + 8 * root * a, why)
    if op == "paged_attention":
        # exp turns an error a·|score| of a score into a relative error of the result
        why = "probabilities may be rounded; float32 scores and sums"
        return _sum(2 * e + 64 * a, 8 * e + 16 * root * a, 2 * e + 16 * root * a, why)
    if op in ("norm_linear", "act_linear"):
        if output == "out1":  # the residual
            return _sum(2 * e, 2 * a, 1.5 * e, "one sum, rounded once")
        why = "two ops, the value between them may be rounded"
        return _sum(4 * e, 16 * e + 8 * root * a + 3 * step, 2.5 * e + 8 * root * a, why, _flips(step, e, elements))
    if op == "qkv_rope_store":
        if output == "q":
            step, kv = 0.0, ""
        e = max(e, EPS.get(kv, 0.0))
        why = "norm and rotation, then the cache's dtype"
        return _sum(6 * e + 16 * a, 16 * e + root * a + 1.01 * step, 3 * e + root * a, why, _flips(step, e, elements))
    raise KeyError(f"no tolerance is declared for op {op!r}")


def _sum(rtol: float, atol: float, mean: float, why: str, flips: float = 0.0) -> Tolerance:
    """mean: the root mean square error, relative to the rms, that a sound implementation stays below."""
    return Tolerance(rtol, atol, mean * mean + flips, why)


def _flips(step: float, e: float, elements: int) -> float:
    """Mean square error from values tipped to a neighbouring int8 step of size ``step``, relative to the mean square.

    A value of relative error e lies that close to the edge of a step with a probability of about 2·e/step, and each
    tip costs step²; 8 times that is allowed, and two tips at least. At most it is as if nothing had been quantised at
    all, which costs step²/12 on either side.
    """
    return step * step * min(1 / 4, 16 * e / step + 2 / elements) if step else 0.0


def compare(got: NDArray[Any], want: NDArray[Any], bound: Tolerance) -> tuple[float, float, float, str]:
    """(worst error over its bound, nmse, largest absolute error, what is wrong or ""). Arrays on the host, decoded."""
    if got.shape != want.shape:
        return math.inf, math.inf, math.inf, f"shape {got.shape}, expected {want.shape}"
    if not want.size:
        return 0.0, 0.0, 0.0, ""
    if want.dtype.kind in "iu" or got.dtype.kind in "iu":
        if want.dtype.kind not in "iu" or got.dtype.kind not in "iu":
            return math.inf, math.inf, math.inf, f"dtype {got.dtype}, expected {want.dtype}"
        return _exact(got, want, got != want)
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    odd = (np.isnan(got) != np.isnan(want)) | (~finite & ~np.isnan(want) & (got != want)) | (finite & ~np.isfinite(got))
    if odd.any():
        return math.inf, math.inf, math.inf, _where(got, want, odd, "non-finite where it should not be, or not alike")
    if bound.exact:
        return _exact(got, want, finite & (got != want))
    got, want = np.where(finite, got, 0), np.where(finite, want, 0)
    error = np.abs(got - want)
    power = float((want * want).sum())
    rms = math.sqrt(power / max(1, int(finite.sum())))
    limit = bound.rtol * np.abs(want) + bound.atol * rms + bound.absolute
    ratio = float(np.divide(error, limit, out=np.where(error > 0, np.inf, 0.0), where=limit > 0).max())
    square = float((error * error).sum())
    nmse = square / power if power else (math.inf if square else 0.0)
    most = bound.nmse + ((bound.absolute / rms) ** 2 / 4 if power else 0.0)
    text = ""
    if ratio > 1:
        text = _where(got, want, error > limit, f"{ratio:.3g} times the bound {bound}")
    elif nmse > most:
        text = f"nmse {nmse:.3g}, at most {most:.3g}"
        ratio = max(ratio, nmse / most)
    return ratio, nmse, float(error.max()), text


def _exact(got: NDArray[Any], want: NDArray[Any], wrong: NDArray[Any]) -> tuple[float, float, float, str]:
    if not wrong.any():
        return 0.0, 0.0, 0.0, ""
    return math.inf, math.inf, float(np.abs(got[wrong] - want[wrong]).max()), _where(got, want, wrong, "not equal")


def _where(got: NDArray[Any], want: NDArray[Any], wrong: NDArray[Any], what: str) -> str:
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    count = int(wrong.sum())
    return f"{what}: at {list(at)} got {got[at]!s}, expected {want[at]!s} ({count} of {wrong.size} wrong)"
