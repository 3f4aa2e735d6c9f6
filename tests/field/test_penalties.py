"""Presence and frequency penalties count generated tokens only; the repetition penalty is applied once per id.

Engines counted the prompt as output, multiplied the repetition penalty once per occurrence, or accepted the fields and
ignored them. NVIDIA/TensorRT-LLM#5623, osaurus-ai/vmlx-swift#295, ohdearquant/lattice#312, youssofal/MTPLX#120.

Formulas: OpenAI, ``mu[j] - c[j] * alpha_frequency - [c[j] > 0] * alpha_presence`` with counts over sampled tokens
(https://platform.openai.com/docs/advanced-usage); Keskar et al. 2019 (https://arxiv.org/abs/1909.05858), section 4.1,
in the form of transformers' RepetitionPenaltyLogitsProcessor: positive logits are divided, negative ones multiplied.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device.cpu import CpuDevice
from runtime.api import SamplingParams
from runtime.edits import EditState
from tests.support.engines import load_tiny, run_alone, tiny_engine
from tests.support.forward import Forward
from tests.support.service import Running

LOGITS = [2.0, 1.0, 0.0, -1.0, 3.0, -2.0, 0.5, -0.5]


def edited(prompt: list[int], output: list[int], **params: Any) -> list[float]:
    """The logits after the edits of a request with this prompt and output, by the device's op."""
    state = EditState(SamplingParams(**params), prompt, ())
    for token in output:
        state.append(token)
    ids, factor, bias = state.rows(len(output), [])[0]
    device = CpuDevice("float32")
    logits = device.tensor(np.array([LOGITS], np.float32), "float32")
    row = device.tensor(np.zeros(len(ids), np.int32), "int32")
    device.ops.edit_logits(
        logits, row, device.tensor(ids, "int32"), device.tensor(factor, "float32"), device.tensor(bias, "float32")
    )
    found: list[float] = device.numpy(logits)[0].tolist()
    return found


@pytest.mark.parametrize(("params", "change"), [
    ({"presence_penalty": 0.5}, -0.5),
    ({"frequency_penalty": 0.5}, -1.0),
    ({"frequency_penalty": -0.5}, 1.0),
    ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, -1.5),
])  # fmt: skip
def test_only_generated_tokens_are_counted(params: dict[str, float], change: float) -> None:
    expected = list(LOGITS)
    expected[1] += change
    assert edited([0, 0, 0], [1, 1], **params) == expected  # 0, three times in the prompt, is as it was


def test_repetition_once_per_id_in_prompt_or_output() -> None:
    expected = list(LOGITS)
    expected[0], expected[1], expected[3] = 1.0, 0.5, -2.0
    assert edited([0, 0, 0, 3], [1, 1, 1], repetition_penalty=2.0) == expected
    assert edited([0, 0, 0, 3, 1], [1, 1, 1, 0, 3], repetition_penalty=2.0) == expected


def test_all_of_them_together() -> None:
    """The factor first, then what is subtracted, then the bias."""
    params: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    found = edited([0, 3], [3, 1, 1], logit_bias={3: 10.0, 5: 1.0}, **params)
    expected = list(LOGITS)
    expected[0] = 1.0
    expected[1] = 0.5 - 0.25 - 2 * 0.5
    expected[3] = -2.0 - 0.25 - 0.5 + 10.0
    expected[5] = -1.0
    assert found == expected


def penalised(logits: NDArray[Any], prompt: list[int], output: list[int], params: dict[str, float]) -> NDArray[Any]:
    """The same in a few lines of NumPy, over the whole vocabulary."""
    z = logits.astype(np.float64)
    for token in {*prompt, *output}:
        z[token] = z[token] / params["repetition_penalty"] if z[token] > 0 else z[token] * params["repetition_penalty"]
    for token, count in Counter(output).items():
        z[token] -= params["presence_penalty"] + count * params["frequency_penalty"]
    return z


CASES: list[dict[str, float]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    {"presence_penalty": 0.0, "frequency_penalty": 0.75, "repetition_penalty": 1.0},
    {"presence_penalty": 0.0, "frequency_penalty": -0.75, "repetition_penalty": 1.0},
    {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_a_whole_output(params: dict[str, float], speculate: str) -> None:
    """Greedy output under penalties is that of a plain loop: nothing is ignored, lost or counted twice, also not
    for tokens that were only drafted."""
    prompt = [0, 45, 300, 45, 300, 45, 300]
    device = CpuDevice("float64")
    forward = Forward(load_tiny(device), device)
    expected: list[int] = []
    plain: list[int] = []
    for _ in range(40):
        expected.append(int(penalised(forward.rows(prompt + expected, 1)[0, :512], prompt, expected, params).argmax()))
        plain.append(int(forward.rows(prompt + plain, 1)[0, :512].argmax()))
    assert expected != plain, "the penalties must make a difference"
    engine = tiny_engine(speculate=speculate)
    try:
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, **params}
        assert run_alone(engine, prompt, **asked) == expected
        if speculate == "ngram" and params["frequency_penalty"] < 0:  # an output that repeats itself
            assert engine.stats().accepted_tokens > 0
    finally:
        engine.shutdown()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_they_have_an_effect_over_http(tiny: Running, path: str) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    if path == "/v1/completions":
        body |= {"prompt": "The cat sat"}
    else:
        body |= {"messages": [{"role": "user", "content": "The cat sat"}], "logprobs": True, "top_logprobs": 1}
    plain = tiny.post(path, body)[1]["choices"][0]
    for field, value in (("presence_penalty", 2), ("frequency_penalty", -2), ("repetition_penalty", 2)):
        status, reply = tiny.post(path, {**body, field: value})
        assert status == 200 and reply["choices"][0] != plain, field
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    assert tiny.post(path, {**body, **neutral})[1]["choices"][0] == plain


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [2.01, -2.01, 1000, "1", True, [0]])
def test_values_out_of_range_are_refused(tiny: Running, path: str, field: str, value: Any) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: value}
    status, reply = tiny.post(path, body)
    assert status == 400 and reply["error"]["param"] == field
    for edge in (-2, 2):
        assert tiny.post(path, {**body, field: edge})[0] == 200


@pytest.mark.parametrize("value", [0, -1, "2", None])
def test_repetition_penalty_is_above_zero(tiny: Running, value: Any) -> None:
    status, reply = tiny.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "repetition_penalty": value})
    assert status == 200 if value is None else (status, reply["error"]["param"]) == (400, "repetition_penalty")
