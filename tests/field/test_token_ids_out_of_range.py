"""Token ids that the model has not are refused by name, and never become an index on the device.

Out-of-range ids in ``logit_bias``, ``stop_token_ids`` or a prompt of ids crashed the engine or wrote into the logits of
a neighbour's row. vllm-project/vllm#16529, vllm-project/vllm#6866, vllm-project/vllm#54195,
sgl-project/sglang#7670.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from device.errors import RequestRejected
from runtime.api import GenerationRequest, SamplingParams
from tests.support.engines import run_alone, scripted_engine, tiny_engine
from tests.support.pace import Pace
from tests.support.service import Running, events

# The tokenizer has 512 ids, the model's tables 520 rows.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"600": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "logit_bias"),
    ({"logit_bias": {"515": 100}}, "logit_bias"),
    ({"logit_bias": {"512": 0}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": [515]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
]
BAD_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [0, 99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [0, 515]}, "prompt"),
    ({"prompt": [[1, 2], [3, 512]]}, "prompt"),
    ({"prompt": [0, 99999], "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt"),
]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "x"}]


def check_refused(service: Running, path: str, body: dict[str, Any], param: str) -> None:
    status, headers, raw = service.call("POST", path, body)
    assert status == 400 and headers["content-type"] == "application/json", body
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert param in error["message"]


def refuse_all(service: Running) -> int:
    """Send every bad request in every form; how many."""
    sent = 0
    for stream in (False, True):
        for fields, param in BAD:
            check_refused(service, TEXT, {"prompt": "x", "stream": stream, **fields}, param)
            check_refused(service, CHAT, {"messages": HI, "stream": stream, **fields}, param)
            sent += 2
        for fields, param in BAD_PROMPTS:
            check_refused(service, TEXT, {"stream": stream, **fields}, param)
            sent += 1
    return sent


def joined(chunks: list[Any]) -> tuple[str, list[float]]:
    """Text and log-probabilities of a streamed choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    scores = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), scores


def test_bad_ids_are_refused_and_a_neighbour_is_not_touched() -> None:
    wanted = {"prompt": [0, 7, 9, 300], "temperature": 0, "max_tokens": 120, "ignore_eos": True, "logprobs": 0}
    pace = Pace()
    with Running(tiny_engine()) as service:
        pace.attach(service.engine)
        alone = service.post(TEXT, wanted)[1]["choices"][0]
        assert len(alone["logprobs"]["token_logprobs"]) == 120
        pace.delay = 0.005
        with service.open(TEXT, {**wanted, "stream": True}) as response:
            chunks = events(response)
            first = next(chunks)
            assert refuse_all(service) == 2 * (2 * len(BAD) + len(BAD_PROMPTS))
            assert service.metric("num_requests_running") == 1, "the neighbour was to run all the while"
            pace.delay = 0.0
            text, scores = joined([first, *(chunk for chunk in chunks if chunk != "[DONE]")])
        assert text == alone["text"] and scores == alone["logprobs"]["token_logprobs"]
        assert service.post(TEXT, wanted)[1]["choices"][0]["text"] == text


@pytest.mark.parametrize("params", [
    SamplingParams(logit_bias={600: 5.0}), SamplingParams(logit_bias={-1: 5.0}), SamplingParams(logit_bias={515: 9.0}),
    SamplingParams(stop_token_ids=(99999,)), SamplingParams(stop_token_ids=(512,)),
])  # fmt: skip
def test_the_engine_itself_refuses_them(tiny: Running, params: SamplingParams) -> None:
    """The Python interface has no HTTP layer in front."""
    with pytest.raises(RequestRejected) as caught:
        tiny.engine.submit(GenerationRequest((1, 2), params))
    assert caught.value.param == ("logit_bias" if params.logit_bias else "stop_token_ids")
    for prompt in ((0, 99999), (-1,), (515,)):
        with pytest.raises(RequestRejected) as caught:
            tiny.engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=1)))
        assert caught.value.param == "prompt"


def test_the_last_id_is_within(tiny: Running) -> None:
    """511 is an id like others: it can be forced, stopped at, and be part of a prompt."""
    engine = tiny.engine
    assert run_alone(engine, [0, 511], temperature=0, max_tokens=3, logit_bias={511: 100.0}) == [511] * 3
    forced = {"prompt": [511], "temperature": 0, "max_tokens": 3, "logit_bias": {"511": 100}}
    assert tiny.post(TEXT, forced)[1]["choices"][0]["finish_reason"] == "length"
    status, reply = tiny.post(TEXT, {**forced, "stop_token_ids": [511]})
    assert status == 200 and reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 2.0}])
@pytest.mark.parametrize("edits", [{}, {"presence_penalty": 1.0}, {"logprobs": 2}])
def test_an_id_of_the_padding_is_never_drawn(params: dict[str, Any], edits: dict[str, Any]) -> None:
    """The model wants 515 with all its might; it has no text and is no index of the tokenizer."""
    engine = scripted_engine(lambda seq: [515] * 20)
    try:
        tokens = run_alone(engine, [1, 2, 3], max_tokens=20, ignore_eos=True, **params, **edits)
    finally:
        engine.shutdown()
    assert len(tokens) == 20
    assert all(0 <= token < 512 for token in tokens)
