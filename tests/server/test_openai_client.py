"""OpenAI's own client against the service, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.engines import scripted_engine
from tests.support.service import Running, say, script_or


@pytest.fixture(scope="module")
def client(service: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tiny_client(tiny: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as made:
        yield made


HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_models(client: openai.OpenAI, service: Running) -> None:
    assert [model.id for model in client.models.list()] == [service.model]
    assert client.models.retrieve(service.model).owned_by == "jumar"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_chat(client: openai.OpenAI, service: Running) -> None:
    answer = client.chat.completions.create(model=service.model, messages=HI, extra_body={"extra": say("Hello!")})
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.completion_tokens == 7
    assert answer.system_fingerprint


def test_stream(client: openai.OpenAI, service: Running) -> None:
    stream = client.chat.completions.create(
        model=service.model, messages=HI, stream=True, stream_options={"include_usage": True},
        extra_body={"extra": say("\u4f60\u597d, \U0001f30d")},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "\u4f60\u597d, \U0001f30d"
    assert chunks[-1].usage and chunks[-1].usage.total_tokens > 0


def test_completions(client: openai.OpenAI, service: Running) -> None:
    answer = client.completions.create(
        model=service.model, prompt=["a", "b"], max_tokens=4, extra_body={"extra": say("xyz")}
    )
    assert [choice.text for choice in answer.choices] == ["xyz", "xyz"]
    stream = client.completions.create(
        model=service.model, prompt="a", max_tokens=2, stream=True, extra_body={"extra": say("xyz")}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "xy"


def test_logprobs(tiny_client: openai.OpenAI, tiny: Running) -> None:
    answer = tiny_client.chat.completions.create(
        model=tiny.model, messages=HI, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
    )
    scores = answer.choices[0].logprobs
    assert scores and scores.content and len(scores.content) == 4
    for entry in scores.content:
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == entry.top_logprobs[0].logprob
    echoed = tiny_client.completions.create(model=tiny.model, prompt="The cat", max_tokens=0, echo=True, logprobs=1)
    legacy = echoed.choices[0].logprobs
    assert legacy and legacy.tokens and "".join(legacy.tokens) == "The cat"


def test_three_choices_and_seeds(tiny_client: openai.OpenAI, tiny: Running) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = tiny_client.chat.completions.create(
            model=tiny.model, messages=HI, n=3, seed=seed, max_tokens=10, temperature=1.2
        )
        return [choice.message.content for choice in answer.choices]

    first = texts(1)
    assert len(first) == 3 and len(set(first)) > 1
    assert texts(1) == first
    assert texts(2) != first


def test_stop(client: openai.OpenAI, service: Running) -> None:
    answer = client.chat.completions.create(
        model=service.model, messages=HI, stop=["own fox", "zzz"], extra_body={"extra": say("The quick brown fox")}
    )
    assert answer.choices[0].message.content == "The quick br"


def test_errors(client: openai.OpenAI, service: Running) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=service.model, messages=HI, temperature=3)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=service.model, prompt="word " * 1000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as tools:
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model=service.model, messages=HI, tools=[tool])
    assert tools.value.param == "tools"


def test_api_key() -> None:
    with Running(scripted_engine(script_or("ok")), api_key="s3cret") as service:
        right = openai.OpenAI(base_url=f"{service.url}/v1", api_key="s3cret", max_retries=0)
        assert right.models.list().data
        for key in ("wrong", "s3cre", "s3cret2", "schl\u00fcssel"):
            status, reply = service.get("/v1/models", {"Authorization": f"Bearer {key}".encode().decode("latin-1")})
            assert status == 401 and reply["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{service.url}/v1", api_key="wrong", max_retries=0).models.list()
        guarded = ("/v1/models", "/metrics", "/version", "/nowhere")
        assert [service.call("GET", path)[0] for path in guarded] == [401] * len(guarded)
        assert service.post("/v1/completions", {"prompt": "a"})[0] == 401
        assert [service.call("GET", path)[0] for path in ("/health", "/health/live", "/health/ready")] == [200] * 3
