"""Penalties, logit_bias and min_tokens computed anew over the whole vocabulary: what the edit lists must amount to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.api import SamplingParams


def edited(
    logits: NDArray[np.float64],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Collection[int],
) -> NDArray[np.float64]:
    """[V] -> [V]. Repetition: once per id of prompt and output (Keskar et al. 2019). Presence and frequency: OpenAI's
    formula over output tokens. A stop id is impossible until there are min_tokens."""
    z = logits.copy()
    seen = np.zeros(len(z), bool)
    seen[[*prompt, *output]] = True
    z = np.where(seen, np.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty), z)
    counts = np.bincount(np.array(output, np.int64), minlength=len(z))
    z -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    for token, bias in params.logit_bias.items():
        z[token] += bias
    if len(output) < params.min_tokens:
        z[list(stop_ids)] = -np.inf
    return z


def applied(logits: NDArray[np.float64], entries: tuple[Any, Any, Any]) -> NDArray[np.float64]:
    """The edit list (ids, factor, bias) applied to one row, as ``edit_logits`` does."""
    z = logits.copy()
    ids, factor, bias = entries
    assert len(set(ids.tolist())) == len(ids), "an id stands twice in a list"
    old = z[ids]
    z[ids] = np.where(old > 0, old / factor, old * factor) + bias.astype(np.float64)
    return z
