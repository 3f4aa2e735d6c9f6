"""Counter-based random numbers: the same draw on every device, whatever the batch, and after a preemption.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key: the request's seed (64
bit). Counter: (position, choice index, purpose, 0). Made on the host, many positions at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE = 0
"""Purpose of the uniform that draws the token at a position."""
ACCEPT = 1
"""Purpose of the uniform that accepts or rejects a draft with probabilities."""

AHEAD = 64
"""Positions made in one go."""

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MASK = 0xFFFFFFFF


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """counter [4, n] of 32-bit words in uint64 -> [4, n] random 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = (p1 >> _32) ^ c1 ^ np.uint64(k0), (p0 >> _32) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    out: NDArray[np.uint64] = np.stack([c0, c1, c2, c3])
    return out


def uniforms(seed: int, choice: int, position: int, count: int = AHEAD, purpose: int = SAMPLE) -> NDArray[np.float32]:
    """[count] float32 in [0, 1), multiples of 2^-24, for positions ``position`` .. ``position + count - 1``.

    seed: any int, its low 64 bits count. choice: which of a request's ``n``. position: index of the token drawn.
    """
    counter: NDArray[Any] = np.zeros((4, count), np.uint64)
    counter[0] = np.arange(position, position + count, dtype=np.uint64)
    counter[1] = choice
    counter[2] = purpose
    words = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))[0]
    out: NDArray[np.float32] = (words >> np.uint64(8)).astype(np.float32)
    out *= np.float32(2.0**-24)
    return out
