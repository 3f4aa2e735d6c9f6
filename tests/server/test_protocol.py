"""Request bodies: what is read, what is refused and with which ``param``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.errors import RequestRejected
from server.errors import body_of, error_body
from server.fields import MAX_IDS, parse_object
from server.protocol import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from server.responses import dumps

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": HI, **fields})


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "hi", **fields})


def test_defaults_are_openais() -> None:
    params = chat().common.params
    assert (params.temperature, params.top_p, params.n, params.max_tokens, params.logprobs) == (1.0, 1.0, 1, None, None)
    assert completion().common.params.max_tokens == 16
    assert not chat().common.stream and chat().common.model is None


def test_every_sampling_field_arrives() -> None:
    params = chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=-1, frequency_penalty=2,
        repetition_penalty=1.5, logit_bias={"5": -100, "0": 3}, seed=-7, n=3, logprobs=True, top_logprobs=4,
        stop=["a", "b"], stop_token_ids=[1, 2], min_tokens=3, ignore_eos=True, max_completion_tokens=9,
    ).common.params  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.0, 2.0, 1.5)
    assert params.logit_bias == {5: -100.0, 0: 3.0} and params.seed == -7 and params.n == 3
    assert params.logprobs == 4 and params.stop == ("a", "b") and params.stop_token_ids == (1, 2)
    assert params.min_tokens == 3 and params.ignore_eos and params.max_tokens == 9


def test_null_is_absent() -> None:
    fields = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logit_bias",
        "max_tokens",
        "stream",
        "stream_options",
        "user",
    )
    assert chat(**dict.fromkeys(fields)).common == chat().common


def test_unknown_fields_are_ignored() -> None:
    assert chat(user="me", store=True, metadata={"a": "b"}, service_tier="auto", something_new=[1]) == chat()


@pytest.mark.parametrize(("field", "neutral", "asked"), [
    ("tools", [], [{"type": "function"}]), ("tool_choice", "none", "required"), ("audio", None, {"voice": "x"}),
    ("modalities", ["text"], ["text", "audio"]), ("suffix", "", "end"), ("guided_json", None, {}),
    ("use_beam_search", False, True), ("logits_processors", [], ["x"]), ("prompt_logprobs", None, 1),
    ("echo", False, True), ("best_of", 1, 2), ("add_special_tokens", None, True),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(field: str, neutral: Any, asked: Any) -> None:
    chat(**{field: neutral})
    with pytest.raises(RequestRejected) as caught:
        chat(**{field: asked})
    assert caught.value.param == field and caught.value.status == 400


def test_top_p_zero_leaves_the_likeliest_token() -> None:
    params = chat(top_p=0).common.params
    assert params.top_k == 1 and params.top_p == 1.0


@pytest.mark.parametrize(("field", "neutral", "asked"), [
    ("max_completion_tokens", None, 5), ("top_logprobs", 0, 2),
    ("chat_template_kwargs", {}, {"a": 1}), ("add_generation_prompt", True, False),
])  # fmt: skip
def test_a_field_of_chat_is_refused_by_completions(field: str, neutral: Any, asked: Any) -> None:
    """It would do nothing, and the answer would be another than the one asked for."""
    completion(**{field: neutral})
    with pytest.raises(RequestRejected, match="chat") as caught:
        completion(**{field: asked})
    assert caught.value.param == field and caught.value.status == 400


@pytest.mark.parametrize(("fields", "param"), [
    ({"temperature": True}, "temperature"), ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 10**400}, "temperature"), ({"min_p": 1.1}, "min_p"), ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"), ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"), ({"seed": 1.5}, "seed"), ({"n": True}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"), ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
    ({"logit_bias": {"1": 101}}, "logit_bias"), ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"), ({"stop": 5}, "stop"), ({"stop": ["a", None]}, "stop"),
    ({"stop": "\ud800"}, "stop"), ({"stop": "x" * 2000}, "stop"), ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids"), ({"stop_token_ids": [1] * 5000}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"), ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logprobs": 1}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"ignore_eos": 0}, "ignore_eos"), ({"min_tokens": -1}, "min_tokens"), ({"model": 5}, "model"),
    ({"cache_salt": 5}, "cache_salt"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": "text"}, "response_format"), ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": ["x"]}, "messages[0]"), ({"messages": {}}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
])  # fmt: skip
def test_bad_chat_fields(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split("[")[0].split(".")[0] in caught.value.message


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": {}}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"), ({"prompt": [[1], []]}, "prompt"), ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"), ({"prompt": [1] * (MAX_IDS + 1)}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"), ({"prompt": ["a"] * 3000}, "prompt"),
    ({"echo": "x"}, "echo"), ({"logprobs": True}, "logprobs"), ({"logprobs": 21}, "logprobs"),
    ({"best_of": 2}, "best_of"), ({"n": 2, "best_of": 1}, "best_of"), ({"max_tokens": -1}, "max_tokens"),
])  # fmt: skip
def test_bad_completion_fields(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_prompts_of_every_kind() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [(1, 2)]
    assert completion(prompt=[[1], [2, 3]]).prompts == [(1,), (2, 3)]
    assert completion(n=2, best_of=2).common.params.n == 2


def test_echo_asks_for_the_prompts_scores() -> None:
    assert completion(echo=True, logprobs=0).common.params.prompt_logprobs == 0
    assert completion(echo=False, logprobs=3).common.params.prompt_logprobs is None


def test_text_parts_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat({"messages": [{"role": "user", "content": content}]}).conversation.messages == [
        {"role": "user", "content": "a\nb"}
    ]


def test_tokenize_takes_one_of_prompt_and_messages() -> None:
    assert parse_tokenize({"prompt": ""}).prompt == ""
    assert parse_tokenize({"messages": HI}).conversation is not None
    for fields in ({}, {"prompt": "a", "messages": HI}, {"prompt": 5}, {"messages": []}):
        with pytest.raises(RequestRejected):
            parse_tokenize(fields)
    for fields in ({}, {"tokens": "a"}, {"tokens": [1.0]}):
        with pytest.raises(RequestRejected):
            parse_detokenize(fields)


@pytest.mark.parametrize("char", ["x", "\U0001f30d", "\x00", "\ud800", '"'])
def test_error_bodies_stay_small(char: str) -> None:
    for body in (error_body(400, char * 100_000), body_of(RequestRejected(char * 100_000, param="prompt"))):
        assert len(json.dumps(body)) < 4096
        assert body["error"]["message"].startswith(char * 200)
    assert error_body(400, "")["error"]["message"]


@pytest.mark.parametrize("body", [
    b"", b"\xff{}", b"[" * 100_000, b"1" * 10_000, b'"x"', b"null", b"{'a': 1}",
    b'{"unread": NaN}', b'{"a": [Infinity]}', b'{"a": -Infinity}', b'{"a": [' + b" " * 300_000 + b"NaN]}",
])  # fmt: skip
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_object(body)
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = (
    "messages", "prompt", "temperature", "top_p", "n", "stop", "logit_bias", "stream", "stream_options", "logprobs",
    "top_logprobs", "response_format", "seed", "max_tokens", "best_of", "echo", "tools", "stop_token_ids", "model",
    "tokens", "chat_template_kwargs", "min_tokens", "modalities",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), st.booleans())
def test_any_json_is_read_or_refused(fields: dict[str, Any], valid: bool) -> None:
    """Never another exception, and an error's body stays small whatever was sent."""
    if valid:
        fields = {"messages": HI, "prompt": "a", **fields}
    for parse in (parse_chat, parse_completion, parse_tokenize, parse_detokenize):
        try:
            parse(fields)
        except RequestRejected as error:
            assert error.status == 400 and error.message
            assert len(dumps(body_of(error)).encode()) < 4096
