"""The suite is red for a device that is wrong: one planted fault at a time, each of a kind that kernels have had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from device import cpu, reference, reference_kv
from device import reference_sampling as sampling
from device.cases import Profile, generate
from device.conformance import run_invariance, run_op
from device.contract import HostBuffer
from device.host_tensor import wrapped
from device.ops import SampleParams
from device.weights import NO_ACTIVATION, CanonicalWeight
from tests.conformance.rounding import RoundingDevice

Fn = Callable[..., Any]


def faulty(op: str, fn: Fn) -> cpu.CpuDevice:
    """The CPU device with another function for one op."""
    device = cpu.CpuDevice("float32")
    planted = wrapped(fn)
    setattr(device._inner, op, planted)
    setattr(device.ops, op, device._in_order(planted))
    return device


def _contiguous(x: Any) -> Any:
    """Rows as if they lay one after the other, whatever the stride says."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    if base.ndim < 2 or base.size < x.size:
        return x
    flat = base.reshape(-1)
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    return flat[start : start + x.size].reshape(x.shape) if start + x.size <= flat.size else x


def _parts(change: Callable[[CanonicalWeight], CanonicalWeight]) -> Fn:
    return lambda weights, uses: reference.pack_weight([change(w) for w in weights], uses)


def _with(w: CanonicalWeight, **other: Any) -> CanonicalWeight:
    fields = {n: getattr(w, n) for n in ("dtype", "q", "scale", "offset", "group", "perm", "activation")}
    return CanonicalWeight(**{**fields, **other})


def _swapped_nibbles(w: CanonicalWeight) -> CanonicalWeight:
    return _with(w, q=(w.q >> 4) | (w.q << 4)) if w.dtype in ("int4", "uint4") else w


def _first_offset(w: CanonicalWeight) -> CanonicalWeight:
    return w if w.offset is None else _with(w, offset=np.repeat(w.offset[:, :1], w.offset.shape[1], axis=1))


def _interleaved_rope(q: Any, k: Any, positions: Any, cos_sin: Any) -> Any:
    rot = cos_sin.shape[1]
    order = np.concatenate((np.arange(0, rot, 2), np.arange(1, rot, 2)))

    def turn(x: Any) -> Any:
        y = x.copy()
        y[..., :rot] = x[..., order]
        return y

    return tuple(turn(x) for x in reference.rope(turn(q), turn(k), positions, cos_sin))


def _in_place_add(x: Any, y: Any) -> Any:
    x += y
    return x


def _negative_slots(k: Any, v: Any, layer: Any, slots: Any) -> None:
    reference.store_kv(k, v, layer, np.where(slots < 0, layer.k.shape[0] * layer.block_size - 1, slots))


def _reads_the_end(layer: Any, slots: Any) -> Any:
    return reference.read_kv(layer, np.where(slots < 0, layer.k.shape[0] * layer.block_size - 1, slots))


def _one_scale_a_token(k: Any, v: Any, layer: Any, slots: Any) -> None:
    reference.store_kv(k, v, layer, slots)
    live = slots >= 0
    if layer.k_scale is not None and live.any():
        at = slots[live]
        scale = (np.abs(k[live]).max(axis=(1, 2), keepdims=True) / 127).astype(np.float32)
        safe = np.where(scale == 0, 1, scale)
        layer.k.reshape(-1, layer.heads, layer.head_dim)[at] = np.rint(k[live] / safe)
        layer.k_scale.reshape(-1, layer.heads)[at] = scale[..., 0]


def _moved_one_by_one(kv: Any, src: Any, dst: Any) -> None:
    for a, b in zip(src, dst, strict=True):
        reference.move_kv(kv, np.array([a]), np.array([b]))


def _moved_without_scales(kv: Any, src: Any, dst: Any) -> None:
    live = (src >= 0) & (dst >= 0)
    for layer in kv.layers:
        for array in layer.arrays()[:2]:
            flat = array.reshape(-1, *array.shape[2:])
            flat[dst[live]] = flat[src[live]]


def _meta(meta: Any, **other: Any) -> reference.RefMeta:
    fields = {n: getattr(meta, n) for n in ("q_start", "seq_lens", "block_table", "tree", "is_tree")}
    return reference.RefMeta(**{**fields, **other})


def _attention(change: Callable[..., Any]) -> Fn:
    """Attention with changed (q, layer, meta, scale, window)."""
    return lambda q, layer, meta, scale, window=None: reference.paged_attention(*change(q, layer, meta, scale, window))


def _seeing(change: Callable[[Any], Any]) -> Fn:
    """Attention with other metadata."""
    return _attention(lambda q, layer, meta, scale, window: (q, layer, change(meta), scale, window))


def _one_shorter(meta: Any) -> Any:
    """Sequences with context are taken to be one token shorter."""
    return _meta(meta, seq_lens=meta.seq_lens - (meta.seq_lens > np.diff(meta.q_start)))


def _heads_interleaved(q: Any, layer: Any, meta: Any, scale: float, window: Any = None) -> Any:
    """Query head h reads kv head h mod Hkv instead of h div group."""
    heads = q.shape[1]
    order = np.arange(heads).reshape(-1, layer.heads).T.reshape(-1)
    y = reference.paged_attention(q[:, order], layer, meta, scale, window).reshape(q.shape)
    out = np.empty_like(y)
    out[:, order] = y
    return out.reshape(q.shape[0], -1)


def _not_causal(q: Any, layer: Any, meta: Any, scale: float, window: Any = None) -> Any:
    """All rows of a sequence see all of its positions."""
    out = reference.paged_attention(q, layer, meta, scale, window)
    for b, length in enumerate(meta.seq_lens.tolist()):
        for row in range(int(meta.q_start[b]), int(meta.q_start[b + 1])):
            one = reference.RefMeta(np.array([0, 1]), np.array([length]), meta.block_table[b : b + 1])
            out[row] = reference.paged_attention(q[row : row + 1], layer, one, scale, window)
    return out


def _edit_last_row(logits: Any, row: Any, id: Any, factor: Any, bias: Any) -> None:
    reference.edit_logits(logits, np.where(row < 0, logits.shape[0] - 1, row), id, factor, bias)


def _edit_bias_first(logits: Any, row: Any, id: Any, factor: Any, bias: Any) -> None:
    live = row >= 0
    z = logits[row[live], id[live]] + bias[live]
    logits[row[live], id[live]] = np.where(z > 0, z / factor[live], z * factor[live])


def _masked_big_endian(logits: Any, bitmask: Any) -> None:
    bits = np.unpackbits(np.ascontiguousarray(bitmask).view(np.uint8), axis=1)[:, : logits.shape[1]]
    np.copyto(logits, -np.inf, where=bits == 0)


def _params(change: Callable[..., Any]) -> Fn:
    """sample with other parameters."""

    def fn(logits: Any, params: Any, uniforms: Any) -> Any:
        if params is not None:
            params = SampleParams(*change(*(np.array(x) for x in params)))
        return reference.sample(logits, params, uniforms)

    return fn


def _highest_of_ties(logits: Any, params: Any, uniforms: Any) -> Any:
    if params is not None:
        return reference.sample(logits, params, uniforms)
    ids = (logits.shape[1] - 1 - np.argmax(logits[:, ::-1], axis=1)).astype(np.int32)
    return np.where(reference.sample(logits, None, uniforms) < 0, -1, ids).astype(np.int32)


def _no_answer_is_zero(logits: Any, params: Any, uniforms: Any) -> Any:
    return np.maximum(reference.sample(logits, params, uniforms), 0)


def _top_p_before_top_k(logits: Any, params: Any, uniforms: Any) -> Any:
    out = reference.sample(logits, params, uniforms)
    if params is None:
        return out
    for r in range(logits.shape[0]):
        t, k, p, m = (float(np.asarray(x)[r]) for x in params)
        if t <= 0 or out[r] < 0:
            continue
        first = sampling.kept_weights(logits[r], t, 0, p, 0.0)
        ids = np.arange(logits.shape[1]) if first[0] is None else first[0]
        second = sampling.kept_weights(logits[r][ids], t, int(k), 1.0, m)
        inner = np.arange(ids.size) if second[0] is None else second[0]
        out[r] = ids[inner][sampling._draw(second[1], float(uniforms[r]))]
    return out


def _filter_forgets_temperature(logits: Any, params: Any, uniforms: Any) -> Any:
    out = reference.sample(logits, params, uniforms)
    for r in range(logits.shape[0]) if params is not None else ():
        t, k, p, m = (float(np.asarray(x)[r]) for x in params)
        if t <= 0 or out[r] < 0 or p >= 1:
            continue
        ids, _ = sampling.kept_weights(logits[r], 1.0, int(k), p, 0.0)
        found = sampling.kept_weights(logits[r][ids], t, 0, 1.0, m)
        inner = np.arange(ids.size) if found[0] is None else found[0]
        out[r] = ids[inner][sampling._draw(found[1], float(uniforms[r]))]
    return out


def _rank_counts_equals(logits: Any, ids: Any, n: int) -> Any:
    chosen, rank, top_ids, top = reference.logprobs(logits, ids, n)
    for r, id_ in enumerate(ids.tolist()):
        if id_ >= 0:
            rank[r] = np.count_nonzero(logits[r] >= logits[r, id_])
    return chosen, rank, top_ids, top


def _probabilities(logits: Any, ids: Any, n: int) -> Any:
    chosen, *others = reference.logprobs(logits, ids, n)
    return np.where(ids < 0, 0, np.exp(chosen)), *others


def _verify(draws: str) -> Fn:
    """At a refusal, or after the last draft, the next token comes from the wrong place."""

    def fn(logits: Any, drafts: Any, probs: Any, start: Any, params: Any, uniforms: Any) -> Any:
        if draws == "target, not residual":
            accepted, next_id = reference.verify(logits, drafts, probs, start, params, uniforms)
            rows = start[:-1] + accepted
            for b in range(accepted.size):
                if start[b + 1] > start[b] and next_id[b] >= 0:
                    r = slice(int(rows[b]), int(rows[b]) + 1)
                    own = None if params is None else SampleParams(*(np.asarray(x)[r] for x in params))
                    next_id[b] = reference.sample(logits[r], own, uniforms[r, 1])[0]
            return accepted, next_id
        if draws == "one uniform for both":
            return reference.verify(logits, drafts, probs, start, params, uniforms[:, [0, 0]])
        return reference.verify(logits, drafts, probs, start, None, uniforms)

    return fn


FAULTS: dict[str, tuple[str, Fn]] = {
    "embed: an id outside wraps": (
        "embed", lambda ids, table, scale=1.0: reference.embed(ids % table.shape[0], table, scale)),
    "embed: scale forgotten": ("embed", lambda ids, table, scale=1.0: reference.embed(ids, table)),
    "rms_norm: eps outside the root": (
        "rms_norm", lambda x, w, eps: x / (np.sqrt((x * x).mean(-1, keepdims=True)) + eps) * w),
    "rms_norm: rows taken as contiguous": (
        "rms_norm", lambda x, w, eps: reference.rms_norm(_contiguous(x), w, eps)),
    "rms_norm: weight plus one": ("rms_norm", lambda x, w, eps: reference.rms_norm(x, w + 1, eps)),
    "add_rms_norm: residual not summed": (
        "add_rms_norm", lambda x, r, w, eps: (reference.rms_norm(x + r, w, eps), r + 0)),
    "add: written into an operand": ("add", _in_place_add),
    "linear: bias forgotten": ("linear", lambda x, w, bias=None, out=None: reference.linear(x, w)),
    "linear: rows taken as contiguous": (
        "linear", lambda x, w, bias=None, out=None: reference.linear(_contiguous(x), w, bias)),
    "pack_weight: nibbles swapped": ("pack_weight", _parts(_swapped_nibbles)),
    "pack_weight: perm ignored": ("pack_weight", _parts(lambda w: _with(w, perm=None))),
    "pack_weight: offset with the wrong sign": (
        "pack_weight", _parts(lambda w: _with(w, offset=None if w.offset is None else -w.offset))),
    "pack_weight: offset of the first group for all": (
        "pack_weight", _parts(_first_offset)),
    "pack_weight: activation not quantised": ("pack_weight", _parts(lambda w: _with(w, activation=NO_ACTIVATION))),
    "pack_weight: segments in another order": (
        "pack_weight", lambda weights, uses: reference.pack_weight(list(weights)[::-1], uses)),
    "split_qkv: k and v swapped": (
        "split_qkv", lambda x, a, b, d: (lambda q, k, v: (q, v, k))(*reference.split_qkv(x, a, b, d))),
    "rope: neighbours paired": ("rope", _interleaved_rope),
    "rope: k not turned": ("rope", lambda q, k, p, c: (reference.rope(q, k, p, c)[0], k + 0)),
    "rope: position of the row before": ("rope", lambda q, k, p, c: reference.rope(q, k, np.maximum(p - 1, 0), c)),
    "gated_act: gate and up swapped": (
        "gated_act", lambda x, kind: reference.gated_act(np.roll(x, x.shape[1] // 2, axis=1), kind)),
    "gated_act: tanh for exact gelu": (
        "gated_act", lambda x, kind: reference.gated_act(x, "gelu_tanh" if kind == "gelu" else kind)),
    "store_kv: slot -1 written to the end": ("store_kv", _negative_slots),
    "store_kv: one int8 scale for all heads": ("store_kv", _one_scale_a_token),
    "read_kv: slot -1 reads the end": ("read_kv", _reads_the_end),
    "paged_attention: window one too wide": (
        "paged_attention", _attention(lambda q, la, m, s, w: (q, la, m, s, None if w is None else w + 1))),
    "paged_attention: window one too narrow": (
        "paged_attention", _attention(lambda q, la, m, s, w: (q, la, m, s, None if w is None else max(1, w - 1)))),
    "paged_attention: window ignored": ("paged_attention", _attention(lambda q, la, m, s, w: (q, la, m, s, None))),
    "paged_attention: scale ignored": ("paged_attention", _attention(lambda q, la, m, s, w: (q, la, m, 1.0, w))),
    "paged_attention: tree ignored": ("paged_attention", _seeing(lambda m: _meta(m, tree=None))),
    "paged_attention: upper half of the tree mask lost": (
        "paged_attention", _seeing(lambda m: m if m.tree is None else _meta(m, tree=m.tree * np.int32([1, 0])))),
    "paged_attention: blocks taken in order": (
        "paged_attention", _seeing(lambda m: _meta(m, block_table=np.sort(m.block_table)))),
    "paged_attention: last token not seen": ("paged_attention", _seeing(_one_shorter)),
    "paged_attention: later rows seen": ("paged_attention", _not_causal),
    "paged_attention: heads grouped the other way": ("paged_attention", _heads_interleaved),
    "move_kv: one after the other": ("move_kv", _moved_one_by_one),
    "move_kv: int8 scales left behind": ("move_kv", _moved_without_scales),
    "swap_kv: pairs turned round on the way in": (
        "swap_kv", lambda kv, host, p, d: reference.swap_kv(
            kv, host, p if d == "out" else np.stack((p[:, 0], p[::-1, 1]), 1), d)),
    "gather_rows: row -1 is the last": ("gather_rows", lambda x, rows: x[rows] if x.shape[0] else x[:0]),
    "edit_logits: row -1 edits the last": ("edit_logits", _edit_last_row),
    "edit_logits: bias before factor": ("edit_logits", _edit_bias_first),
    "edit_logits: negative logits divided": (
        "edit_logits",
        lambda z, r, i, f, b: reference.edit_logits(z, r, i, np.where(z[np.maximum(r, 0), i] > 0, f, 1 / f), b)),
    "mask_logits: bits from the other end": ("mask_logits", _masked_big_endian),
    "sample: highest id of ties": ("sample", _highest_of_ties),
    "sample: no answer becomes 0": ("sample", _no_answer_is_zero),
    "sample: top_p before top_k": ("sample", _top_p_before_top_k),
    "sample: filters on the untempered logits": ("sample", _filter_forgets_temperature),
    "sample: min_p ignored": ("sample", _params(lambda t, k, p, m: (t, k, p, m * 0))),
    "sample: top_k one too many": ("sample", _params(lambda t, k, p, m: (t, np.where(k > 0, k + 1, 0), p, m))),
    "sample: temperature 0 samples": ("sample", _params(lambda t, k, p, m: (np.where(t == 0, 1, t), k, p, m))),
    "logprobs: equals counted before": ("logprobs", _rank_counts_equals),
    "logprobs: probabilities": ("logprobs", _probabilities),
    "verify: the target in place of the residual": ("verify", _verify("target, not residual")),
    "verify: one uniform for both": ("verify", _verify("one uniform for both")),
    "verify: parameters ignored": ("verify", _verify("greedy")),
    "all_reduce: doubled": ("all_reduce", lambda x: 2 * x),
}  # fmt: skip

# A fault in packing shows where the weight is used.
SHOWS_IN = {"pack_weight": "linear"}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    op, fn = FAULTS[fault]
    device = faulty(op, fn)
    try:
        results = run_op(device, SHOWS_IN.get(op, op))
        failed = [r for r in results if r.status == "failed"]
        assert failed
        assert not any("Error" in r.detail for r in failed), failed[0].detail  # wrong results, not crashes of the plant
    finally:
        device.close()


SHOWS_IN_COMPOSITE = {
    "rope: neighbours paired": "qkv_rope_store",
    "store_kv: slot -1 written to the end": "qkv_rope_store",
    "gated_act: gate and up swapped": "act_linear",
    "add_rms_norm: residual not summed": "norm_linear",
    "linear: bias forgotten": "norm_linear",
}


@pytest.mark.parametrize("fault", SHOWS_IN_COMPOSITE)
def test_fault_shows_in_the_composites_too(fault: str) -> None:
    device = faulty(*FAULTS[fault])
    try:
        assert any(r.status == "failed" for r in run_op(device, SHOWS_IN_COMPOSITE[fault]))
    finally:
        device.close()


def test_an_exception_is_a_failure_and_the_other_cases_go_on() -> None:
    def fails_at_one_row(x: Any, y: Any) -> Any:
        if x.shape[0] == 1:
            raise FloatingPointError("planted")
        return x + y

    device = faulty("add", fails_at_one_row)
    try:
        results = run_op(device, "add")
    finally:
        device.close()
    assert any("FloatingPointError: planted" in r.detail for r in results)
    assert any(r.status == "ok" for r in results)


def test_a_row_that_depends_on_its_neighbours_is_found_where_it_is_claimed_not_to() -> None:
    """Far below every tolerance: only the bits tell."""
    device = faulty("rms_norm", lambda x, w, eps: reference.rms_norm(x, w, eps) * np.float32(1 + 2**-23 * (len(x) > 1)))
    try:
        results = run_op(device, "rms_norm")
        assert {r.mode for r in results if r.status == "failed"} == {"invariance"}
    finally:
        device.close()


def test_a_matrix_product_of_this_cpu_is_seen_to_vary_with_its_rows() -> None:
    """Why ``linear`` is not claimed batch-invariant: the check would find it."""
    device = cpu.CpuDevice("float32")
    try:
        cases = [c for c in generate("linear", Profile.of(device)) if c.counts()["T"] > 1]
        results = [run_invariance(device, c) for c in cases]
        assert any(r is not None and r.status == "failed" for r in results)
    finally:
        device.close()


@pytest.mark.parametrize("op", ["store_kv", "edit_logits", "qkv_rope_store"])
def test_a_recording_that_does_not_pad_its_inputs_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBuffer, "pad", lambda self, bucket: None)
    results = run_op(RoundingDevice("float16"), op)
    assert {r.mode for r in results if r.status == "failed"} == {"program"}


def test_stale_values_behind_a_sequence_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over whole blocks: what lies behind the last token belongs to nobody."""

    def whole_blocks(q: Any, layer: Any, meta: Any, scale: float, window: Any = None) -> Any:
        size = layer.block_size
        longer = np.where(meta.seq_lens > 0, -(-meta.seq_lens // size) * size, 0)
        return reference.paged_attention(q, layer, _meta(meta, seq_lens=longer), scale, window)

    device = faulty("paged_attention", whole_blocks)
    try:
        assert any(r.status == "failed" for r in run_op(device, "paged_attention"))
    finally:
        device.close()


def test_int8_rounding_down_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncating(x: Any) -> Any:
        scale = (np.abs(x).max(axis=-1) / 127).astype(np.float32)
        return np.trunc(x / np.where(scale == 0, 1, scale)[..., None]).astype(np.int8), scale

    def store(k: Any, v: Any, layer: Any, slots: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(reference_kv, "_quantize", truncating)
            reference.store_kv(k, v, layer, slots)

    device = faulty("store_kv", store)
    try:
        assert any(r.status == "failed" for r in run_op(device, "store_kv"))
    finally:
        device.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_activation_that_is_not_quantised_is_found_in_half_precision(dtype: str) -> None:
    """The smallest error that matters there: about that of the format itself, but systematic."""
    device = RoundingDevice(dtype)
    plain = device.ops.pack_weight
    device.ops.pack_weight = lambda weights, uses: plain([_with(w, activation=NO_ACTIVATION) for w in weights], uses)
    failed = {r.case for r in run_op(device, "linear") if r.status == "failed"}
    assert any("static" in case for case in failed)
    assert any("dynamic" in case for case in failed)
