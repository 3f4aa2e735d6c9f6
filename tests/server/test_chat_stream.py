"""Chat over HTTP: the stream and the whole reply say the same, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.tokenizer import Tokenizer
from tests.support.engines import scripted_engine
from tests.support.service import Running, say
from tests.support.tokenizers import TINY

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, **fields}


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def reasons(chunks: list[Any]) -> list[tuple[int, str]]:
    return [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]


def test_shape_of_a_stream(service: Running) -> None:
    chunks = service.stream(CHAT, body(extra=say("Hi!"), model=service.model))
    assert chunks[-1] == "[DONE]"
    first = chunks[0]
    assert first["object"] == "chat.completion.chunk" and first["id"].startswith("chatcmpl-")
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks[:-1]}) == 1
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert [c["choices"][0]["delta"].get("role") for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    last = chunks[-2]["choices"][0]
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert joined(chunks) == "Hi!"


def test_shape_of_a_whole_reply(service: Running) -> None:
    status, reply = service.post(CHAT, body(extra=say("Hi!")))
    assert status == 200
    assert reply["object"] == "chat.completion" and reply["model"] == service.model
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = reply["usage"]
    assert usage["completion_tokens"] == 4  # three and the end
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    tokens = service.post("/tokenize", {"messages": HI})[1]
    assert tokens["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    "text", ["", "a", "\U0001f30d und \u4fee\u590d", "x" * 50, 'quote " and \\ and \n', "\u2028\x85"]
)
@pytest.mark.parametrize("stop", [None, "un", ["d \u4fee", "xx"]])
def test_stream_and_whole_reply_say_the_same(service: Running, text: str, stop: Any) -> None:
    asked = body(extra=say(text), stop=stop, logprobs=True, top_logprobs=1)
    _, whole = service.post(CHAT, asked)
    chunks = service.stream(CHAT, {**asked, "stream_options": {"include_usage": True}})
    choice = whole["choices"][0]
    expected = text
    for one in [stop] if isinstance(stop, str) else stop or []:
        expected = min(expected, text.split(one)[0], key=len)
    assert joined(chunks) == choice["message"]["content"] == expected
    assert reasons(chunks) == [(0, choice["finish_reason"])] == [(0, "stop")]
    entries = [e for c in chunks[:-2] for x in c["choices"] if x["logprobs"] for e in x["logprobs"]["content"]]
    assert entries == choice["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert chunks[-2]["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {"prompt_tokens_details": 0}


def test_logprobs_of_chat(service: Running) -> None:
    _, reply = service.post(CHAT, body(extra=say("\u4fee"), logprobs=True, top_logprobs=2, max_tokens=3))
    content = reply["choices"][0]["logprobs"]["content"]
    assert bytes(b for e in content for b in e["bytes"]).decode() == "\u4fee"
    for entry in content:
        assert entry["logprob"] == pytest.approx(0.0, abs=1e-6)
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    assert (
        service.post(CHAT, body(extra=say("a"), logprobs=True))[1]["choices"][0]["logprobs"]["content"][0][
            "top_logprobs"
        ]
        == []
    )


def test_choices_are_separate(tiny: Running) -> None:
    asked = body(n=4, seed=5, max_tokens=12, temperature=1.0)
    _, whole = tiny.post(CHAT, asked)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    chunks = tiny.stream(CHAT, asked)
    assert [joined(chunks, i) for i in range(4)] == texts
    assert sorted(i for i, _ in reasons(chunks)) == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == tiny.post("/tokenize", {"messages": HI})[1]["count"]


def test_a_choice_that_stops_leaves_the_others_alone(tiny: Running) -> None:
    """A stop string ends one choice; the text of the rest is what it is without."""
    asked = body(n=3, seed=11, max_tokens=30)
    free = [c["message"]["content"] for c in tiny.post(CHAT, asked)[1]["choices"]]
    stop = next(ch for ch in free[0][2:] if ch.isascii())
    stopped = tiny.post(CHAT, {**asked, "stop": stop})[1]["choices"]
    assert [c["message"]["content"] for c in stopped] == [text.split(stop)[0] for text in free]


def test_finish_reasons(service: Running) -> None:
    def reason(**fields: Any) -> str:
        return str(service.post(CHAT, body(**fields))[1]["choices"][0]["finish_reason"])

    assert reason(extra=say("abc")) == "stop"
    assert reason(extra=say("abc"), max_tokens=3) == "length"
    assert reason(extra=say("abc"), max_tokens=3, stop="c") == "stop"
    assert reason(extra=say("abc"), stop_token_ids=say("b")["script"]) == "stop"


def test_stop_token_is_not_part_of_the_text(service: Running) -> None:
    _, reply = service.post(CHAT, body(extra=say("abc"), stop_token_ids=say("b")["script"]))
    assert reply["choices"][0]["message"]["content"] == "a"
    assert reply["usage"]["completion_tokens"] == 2


def test_min_tokens_keeps_stops_away(service: Running) -> None:
    _, reply = service.post(CHAT, body(extra=say("a.b.c."), stop=".", min_tokens=3))
    assert reply["choices"][0]["message"]["content"] == "a.b"


def test_final_message_is_continued(service: Running) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    status, tokens = service.post("/tokenize", {"messages": messages, "continue_final_message": True})
    assert status == 200
    text = service.post("/detokenize", {"tokens": tokens["tokens"]})[1]["prompt"]
    assert text.endswith("assistant\nWell, ")


def test_cached_tokens_are_reported(service: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "a rather long text to be cached " * 3}], "extra": say("ok")}
    service.post(CHAT, asked)
    usage = service.post(CHAT, asked)[1]["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_headers_of_a_stream(service: Running) -> None:
    with service.open(CHAT, body(stream=True, extra=say("a"))) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        raw = response.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    assert all(part.startswith(b"data: ") for part in raw.split(b"\n\n")[:-1])


@pytest.mark.parametrize("template", ["{% for %}", "{{ x | no_such_filter }}", None])
def test_without_a_usable_template_chat_is_refused_and_completions_go_on(template: str | None) -> None:
    tokenizer = Tokenizer.from_folder(TINY)
    tokenizer.chat_template = template
    with Running(scripted_engine(tokenizer=tokenizer)) as broken:
        for path in (CHAT, "/tokenize"):
            status, reply = broken.post(path, {"messages": HI})
            assert status == 400 and reply["error"]["code"] == "no_chat_template", reply
            assert "chat template" in reply["error"]["message"] and "/v1/completions" in reply["error"]["message"]
        status, reply = broken.post("/v1/completions", {"prompt": "p", "extra": say("ok")})
        assert (status, reply["choices"][0]["text"]) == (200, "ok")
        assert broken.get("/health")[0] == 200
