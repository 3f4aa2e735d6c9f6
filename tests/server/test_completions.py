"""The completions endpoint: kinds of prompt, echo, log-probabilities, and the token endpoints beside it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.service import Running, say

PATH = "/v1/completions"


def ids_of(service: Running, text: str) -> list[int]:
    ids: list[int] = service.post("/tokenize", {"prompt": text})[1]["tokens"]
    return ids


def test_shape(service: Running) -> None:
    status, reply = service.post(PATH, {"prompt": "p", "extra": say("abc"), "model": service.model})
    assert status == 200 and reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert reply["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]


def test_text_and_ids_are_the_same_prompt(tiny: Running) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    replies = [
        tiny.post(PATH, {**asked, "prompt": prompt})[1]
        for prompt in ("The cat sat", ids_of(tiny, "The cat sat"), [ids_of(tiny, "The cat sat")], ["The cat sat"])
    ]
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1
    assert len({reply["usage"]["prompt_tokens"] for reply in replies}) == 1


def test_lists_of_prompts_are_answered_in_order(service: Running, tiny: Running) -> None:
    prompts = [f"prompt {i}" for i in range(5)]
    one = [tiny.post(PATH, {"prompt": p, "max_tokens": 6, "temperature": 0})[1]["choices"][0]["text"] for p in prompts]
    asked = {"prompt": prompts, "max_tokens": 6, "temperature": 0, "n": 2}
    _, reply = tiny.post(PATH, asked)
    assert [choice["index"] for choice in reply["choices"]] == list(range(10))
    assert [choice["text"] for choice in reply["choices"]] == [text for text in one for _ in range(2)]
    chunks = tiny.stream(PATH, asked)[:-1]
    texts = ["".join(c["text"] for x in chunks for c in x["choices"] if c["index"] == i) for i in range(10)]
    assert texts == [text for text in one for _ in range(2)]


def test_a_list_longer_than_the_queue_is_worked_off(service: Running) -> None:
    """16 may run and 64 may wait; a client with 200 prompts is served all the same, and leaves nothing behind."""
    status, reply = service.post(PATH, {"prompt": [f"p{i}" for i in range(200)], "extra": say("x"), "max_tokens": 1})
    assert status == 200
    assert [choice["text"] for choice in reply["choices"]] == ["x"] * 200
    assert service.engine.wait_idle(5)


@pytest.mark.parametrize(
    "prompt", ["The cat sat", "\u4fee\u590d \U0001f30d", "<|im_start|>user\nhi", "<s>already", "  two"]
)
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_with_logprobs(tiny: Running, prompt: str, max_tokens: int) -> None:
    asked = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "echo": True,
        "logprobs": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    _, reply = tiny.post(PATH, asked)
    choice, usage = reply["choices"][0], reply["usage"]
    ids = ids_of(tiny, prompt)
    scores = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert usage["prompt_tokens"] == len(ids) and usage["completion_tokens"] == max_tokens
    assert {len(column) for column in scores.values()} == {len(ids) + max_tokens}
    assert "".join(scores["tokens"]) == choice["text"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert all(value < 0 for value in scores["token_logprobs"][1:])
    for token, value, top, offset in list(zip(*scores.values(), strict=True))[1:]:
        assert top[token] == value
        assert 2 <= len(top) <= 3
        assert choice["text"][offset:].startswith(token)
    without = tiny.post(PATH, {**asked, "echo": False})[1]["choices"][0]
    assert prompt + without["text"] == choice["text"]
    assert without["logprobs"]["token_logprobs"] == pytest.approx(scores["token_logprobs"][len(ids) :])
    chunks = tiny.stream(PATH, asked)[:-1]
    assert "".join(c["text"] for x in chunks for c in x["choices"]) == choice["text"]
    parts = [c["logprobs"] for x in chunks for c in x["choices"] if c["logprobs"]]
    assert [t for part in parts for t in part["tokens"]] == scores["tokens"]
    assert [t for part in parts for t in part["text_offset"]] == scores["text_offset"]


def test_echo_of_token_ids(tiny: Running) -> None:
    ids = ids_of(tiny, "The cat sat")
    reply = tiny.post(PATH, {"prompt": [ids, ids[:2]], "max_tokens": 0, "echo": True, "logprobs": 0})[1]
    assert [c["text"] for c in reply["choices"]] == ["The cat sat", "The"]
    assert all(len(top) == 1 for top in reply["choices"][0]["logprobs"]["top_logprobs"][1:])


def test_echo_of_every_choice(tiny: Running) -> None:
    reply = tiny.post(PATH, {"prompt": "ab", "n": 3, "echo": True, "logprobs": 1, "max_tokens": 3, "seed": 1})[1]
    first = [c["logprobs"]["token_logprobs"][1] for c in reply["choices"]]
    assert len(set(first)) == 1 and first[0] is not None
    assert all(c["text"].startswith("ab") for c in reply["choices"])


def test_logprobs_of_a_text_that_a_stop_string_cut(service: Running) -> None:
    reply = service.post(PATH, {"prompt": "p", "extra": say("one two"), "stop": "e t", "logprobs": 0})[1]
    choice = reply["choices"][0]
    assert choice["text"] == "on"
    assert choice["logprobs"]["tokens"] == ["o", "n", "", "", ""]
    assert reply["usage"]["completion_tokens"] == 5


def test_a_character_over_several_tokens_has_its_text_at_the_last(service: Running) -> None:
    reply = service.post(PATH, {"prompt": "p", "extra": say("a\u4fee"), "logprobs": 1})[1]
    scores = reply["choices"][0]["logprobs"]
    assert scores["tokens"] == ["a", "", "", "\u4fee", ""]
    assert scores["text_offset"] == [0, 1, 1, 1, 2]
    cut = service.post(PATH, {"prompt": "p", "extra": say("a\u4fee"), "logprobs": 1, "max_tokens": 3})[1]
    assert cut["choices"][0]["text"] == "a\ufffd"
    assert "".join(cut["choices"][0]["logprobs"]["tokens"]) == "a\ufffd"


def test_tokens_there_and_back(service: Running) -> None:
    for text in ("The cat sat", "\U0001f30d", "<|im_start|>x"):
        _, reply = service.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True})
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
        assert service.post("/detokenize", {"tokens": reply["tokens"]})[1] == {"prompt": text}
    assert service.post("/tokenize", {"prompt": ""})[1]["count"] == 1  # BOS


def test_tokenize_says_what_generation_uses(service: Running) -> None:
    ids = ids_of(service, "some text")
    usage = service.post(PATH, {"prompt": "some text", "extra": say("x")})[1]["usage"]
    assert usage["prompt_tokens"] == len(ids)
    bare = service.post("/tokenize", {"prompt": "some text", "add_special_tokens": False})[1]["tokens"]
    assert ids == [0, *bare]
    usage = service.post(PATH, {"prompt": "some text", "add_special_tokens": False, "extra": say("x")})[1]["usage"]
    assert usage["prompt_tokens"] == len(bare)


def test_both_endpoints_name_the_same_best_tokens(tiny: Running) -> None:
    """Completions have texts as keys, chat has bytes: a part of a character is written out byte by byte."""
    messages = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    ids = tiny.post("/tokenize", {"messages": messages})[1]["tokens"]
    chat = tiny.post("/v1/chat/completions", {**asked, "messages": messages, "logprobs": True, "top_logprobs": 20})[1]
    text = tiny.post(PATH, {**asked, "prompt": ids, "logprobs": 20})[1]["choices"][0]["logprobs"]
    seen = 0
    for entry, top in zip(chat["choices"][0]["logprobs"]["content"], text["top_logprobs"], strict=True):
        others = [t for t in entry["top_logprobs"] if t["bytes"] != entry["bytes"]]
        wanted = {key(bytes(t["bytes"])) for t in others}
        assert wanted <= set(top) and len(top) <= 21
        assert sorted(top.values(), reverse=True)[1] == pytest.approx(entry["top_logprobs"][1]["logprob"])
        seen += sum(name.startswith("bytes:") for name in top)
    assert seen, "no part of a character was among them: the case is not tested"


def key(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
