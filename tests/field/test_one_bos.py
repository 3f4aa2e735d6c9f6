"""Exactly one BOS, whichever way a text becomes tokens.

A chat template that writes the BOS and a tokenizer that adds one gave two. Text from a template is encoded without
adding special tokens. vllm-project/vllm#9519, vllm-project/vllm#55197, abetlen/llama-cpp-python#1439,
huggingface/text-generation-inference#1843.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runtime.api import GenerationRequest
from runtime.chat import encode_chat, encode_prompt, render_chat
from runtime.engine import RequestHandle
from runtime.tokenizer import Tokenizer
from tests.support.engines import scripted_engine
from tests.support.service import Running
from tests.support.tokenizers import TINY, sentencepiece

BOS = 0
MESSAGES = [{"role": "user", "content": "Hi there"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """``add_bos_token`` and a template that begins with the BOS as well."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert config["add_bos_token"] is True
    config["chat_template"] = "{{ bos_token }}" + config["chat_template"]
    path.write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def test_chat_has_one_bos_when_the_template_writes_it(tokenizer: Tokenizer) -> None:
    ids = encode_chat(tokenizer, MESSAGES)
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert ids == encode_prompt(tokenizer, render_chat(tokenizer, MESSAGES))


def test_chat_has_no_bos_when_the_template_writes_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is not None
    tokenizer.chat_template = tokenizer.chat_template.removeprefix("{{ bos_token }}")
    assert BOS not in encode_chat(tokenizer, MESSAGES)


def test_a_plain_prompt_gets_one_bos(tokenizer: Tokenizer) -> None:
    ids = encode_prompt(tokenizer, "Hi there")
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert encode_prompt(tokenizer, "Hi there", add_special_tokens=False) == ids[1:]
    assert encode_prompt(tokenizer, "") == [BOS]


def test_a_prompt_that_begins_with_the_bos_gets_no_second(tokenizer: Tokenizer) -> None:
    assert encode_prompt(tokenizer, "<s>Hi there") == encode_prompt(tokenizer, "Hi there")
    assert encode_prompt(tokenizer, "<s>Hi there", add_special_tokens=False).count(BOS) == 1
    assert encode_prompt(tokenizer, "Hi <s>there").count(BOS) == 2  # written inside the text: the author's wish


def test_the_same_for_sentencepiece() -> None:
    prefix = sentencepiece("prefix")
    ids = encode_prompt(prefix, "Hi there")
    assert ids[0] == prefix.bos_id and ids.count(ids[0]) == 1
    assert encode_prompt(prefix, "<s>Hi there") == ids


def test_over_http(tokenizer: Tokenizer) -> None:
    """The ids that /tokenize shows are those that are generated from, and usage counts them."""
    engine = scripted_engine(tokenizer=tokenizer)
    submitted: list[tuple[int, ...]] = []
    submit = engine.submit

    def remembering(request: GenerationRequest, **how: Any) -> RequestHandle:
        submitted.append(request.prompt)
        return submit(request, **how)

    engine.submit = remembering  # type: ignore[method-assign]
    with Running(engine) as service:
        asked = {"extra": {"script": [5]}, "max_tokens": 1}
        for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "Hi"})):
            shown = service.post("/tokenize", body)[1]["tokens"]
            status, answer = service.post(path, {**body, **asked})
            assert status == 200
            assert shown.count(BOS) == 1 and shown[0] == BOS
            assert list(submitted[-1]) == shown
            assert answer["usage"]["prompt_tokens"] == len(shown)
