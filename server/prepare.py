"""From a request body to engine requests and the reply they fill: what the service and offline batches share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from device.errors import RequestRejected
from runtime.api import GenerationRequest
from runtime.chat import encode_chat, encode_prompt
from runtime.detokenizer import TextStream
from runtime.tokenizer import Tokenizer
from server import protocol
from server.answers import Answers, Choice, Echo, Task
from server.protocol import Common, Conversation
from server.responses import ChatReply, CompletionReply, Reply

if TYPE_CHECKING:
    from runtime.engine import Engine


class Prepared:
    """A checked request, ready for the engine. ``choices``: of the whole reply."""

    def __init__(self, common: Common, tasks: Sequence[Task], reply: Reply, prompt_field: str) -> None:
        self.common = common
        self.tasks = tasks
        self.reply = reply
        self.choices = sum(len(task.choices) for task in tasks)
        self._prompt_field = prompt_field

    def name_of(self, param: str | None) -> str | None:
        """The request's own name for a field that the engine refused."""
        return self._prompt_field if param == "prompt" else param

    def body(self, answers: Answers) -> dict[str, Any]:
        """The whole reply; waits for its end. ClientGone, RequestRejected as ``Answers.pieces``."""
        pieces = (piece for some in answers.pieces() for piece in some)
        return self.reply.body(self.choices, pieces, answers)


class Preparer:
    """Parses, templates and tokenises. RequestRejected for what cannot be served.

    model: its name in the API. allow_extra: see ``protocol``.
    """

    def __init__(self, engine: Engine, model: str, fingerprint: str, *, allow_extra: bool = False) -> None:
        if engine.tokenizer is None:
            raise ValueError("a model with a tokenizer is needed")
        self._tokenizer: Tokenizer = engine.tokenizer
        self._vocab_size = engine.vocab_size
        self._model = model
        self._fingerprint = fingerprint
        self._allow_extra = allow_extra

    def chat(self, values: dict[str, Any], label: str) -> Prepared:
        """A body of ``/v1/chat/completions``."""
        body = protocol.parse_chat(values, allow_extra=self._allow_extra)
        protocol.reject_model(body.common.model, self._model)
        prompt = tuple(encode_conversation(self._tokenizer, body.conversation))
        tasks = [self._task(prompt, body.common, label, 0)]
        return Prepared(body.common, tasks, self._reply(ChatReply, body.common), "messages")

    def completions(self, values: dict[str, Any], label: str) -> Prepared:
        """A body of ``/v1/completions``."""
        body = protocol.parse_completion(values, allow_extra=self._allow_extra)
        protocol.reject_model(body.common.model, self._model)
        params = body.common.params
        tasks = []
        for i, given in enumerate(body.prompts):
            text = given if isinstance(given, str) else None
            if isinstance(given, str):
                ids = tuple(encode_prompt(self._tokenizer, given, body.add_special_tokens))
            else:
                ids = given
                self._check_ids(ids)
            echo = Echo(self._tokenizer, ids, text, closed=params.max_tokens == 0) if body.echo else None
            tasks.append(self._task(ids, body.common, label, i * params.n, echo))
        return Prepared(body.common, tasks, self._reply(CompletionReply, body.common), "prompt")

    def _reply(self, kind: type[Reply], common: Common) -> Reply:
        wants = common.params.logprobs is not None
        return kind(self._tokenizer, self._model, self._fingerprint, logprobs=wants)

    def _check_ids(self, ids: tuple[int, ...]) -> None:
        """An echo decodes them before the engine sees them."""
        top = self._vocab_size
        bad = next((i for i in ids if not 0 <= i < top), None)
        if bad is not None:
            raise RequestRejected(
                f"prompt has token id {bad}; this model's ids run from 0 to {top - 1}", param="prompt"
            )

    def _task(self, prompt: tuple[int, ...], common: Common, label: str, first: int, echo: Echo | None = None) -> Task:
        params = common.params
        choices = [
            Choice(
                first + i,
                TextStream(self._tokenizer, params.stop, min_tokens=params.min_tokens, prompt=prompt),
                params.logprobs is not None,
                echo,
            )
            for i in range(params.n)
        ]
        return Task(GenerationRequest(prompt, params, label, common.cache_salt, common.extra), choices, echo)


def encode_conversation(tokenizer: Tokenizer, talk: Conversation) -> list[int]:
    """Token ids of messages, as generation and /tokenize both use them."""
    return encode_chat(
        tokenizer,
        talk.messages,
        add_generation_prompt=talk.add_generation_prompt,
        variables=talk.template_kwargs,
        continue_final_message=talk.continue_final_message,
    )
