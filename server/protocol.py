"""The request bodies of the API, checked field by field.

Names and ranges are OpenAI's (https://github.com/openai/openai-openapi); a few sampling fields are vLLM's. What is not
known at the top level is ignored, as OpenAI's clients expect, but a field that asks for something Jumar does not do
(``tools``, ``response_format``, ``suffix``, ...) is a 400 that names it: the caller would otherwise get an answer of
another kind than the one asked for.

Where the specification leaves a choice:

* ``model`` may be absent: there is one model.
* ``top_p: 0`` leaves only the most likely token (it is greedy).
* ``stop: []`` is no stop; an empty string in it is refused.
* ``logprobs`` of ``/v1/completions`` goes to 20, as ``top_logprobs`` of chat does.
* ``max_tokens`` and ``max_completion_tokens`` may both be sent when they agree.
* an unset ``temperature`` is 1, an unset ``max_tokens`` of a completion 16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from device.errors import RequestRejected
from runtime.api import MAX_LOGPROBS, MIN_PENALTY, SamplingParams
from server.errors import shorten
from server.fields import Fields, bad, check_ids, check_number, check_string, type_name

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 2048
"""Prompts of a request, times n."""
MAX_STOP_IDS = 4096
ROLES = ("system", "developer", "user", "assistant")

_LOGIT_KEY = re.compile(r"-?(0|[1-9][0-9]{0,9})")

# What each field may be when it asks for nothing; any other value is refused by name.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"], []),
    "web_search_options": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": (),
    "json_schema": (),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "typical_p": (1, 1.0),
    "mirostat": (0, False),
    "mirostat_mode": (0,),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "documents": ([],),
}
_HINTS = {
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "truncate_prompt_tokens": "shorten the prompt before sending it",
}

# Fields of the other endpoint: whoever sends one expects it to work here. Values as above.
_ONLY_CHAT: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_ONLY_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "add_special_tokens": (),
}


@dataclass(frozen=True, slots=True)
class Common:
    """What both kinds of request have.

    model: the name asked for, None for whichever is served. logprobs: whether the reply has them at all.
    extra: inputs for particular models (``GenerationRequest.extra``).
    """

    model: str | None
    params: SamplingParams
    stream: bool
    include_usage: bool
    cache_salt: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and how the chat template is applied to them."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatBody:
    """``POST /v1/chat/completions``."""

    common: Common
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """``POST /v1/completions``. prompts: text or token ids, one answer (or ``n``) for each."""

    common: Common
    prompts: list[str | tuple[int, ...]]
    echo: bool
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """``POST /tokenize``: exactly one of prompt and conversation is set."""

    model: str | None
    prompt: str | None
    conversation: Conversation | None
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    """``POST /detokenize``."""

    model: str | None
    tokens: tuple[int, ...]


def parse_chat(values: dict[str, Any], *, allow_extra: bool = False) -> ChatBody:
    """The body of ``/v1/chat/completions``. RequestRejected (400) with ``param`` for whatever is wrong."""
    fields = Fields(values)
    _refuse_unsupported(fields)
    _refuse(fields, _ONLY_COMPLETIONS, "is a field of /v1/completions, not of chat; leave it out")
    _check_response_format(fields)
    conversation = _conversation(fields)
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise fields.refuse("top_logprobs", "needs logprobs: true")
    params = _sampling(fields, max_tokens=_chat_max_tokens(fields), logprobs=(top or 0) if wanted else None)
    return ChatBody(_common(fields, params, allow_extra), conversation)


def parse_completion(values: dict[str, Any], *, allow_extra: bool = False) -> CompletionBody:
    """The body of ``/v1/completions``. RequestRejected (400) with ``param`` for whatever is wrong."""
    fields = Fields(values)
    _refuse_unsupported(fields)
    _refuse(fields, _ONLY_CHAT, "is a field of /v1/chat/completions, not of this endpoint; leave it out")
    _check_response_format(fields)
    prompts = _prompts(fields.raw("prompt"))
    echo = fields.boolean("echo")
    if isinstance(fields.raw("logprobs"), bool):
        raise fields.refuse("logprobs", f"is a number from 0 to {MAX_LOGPROBS} on this endpoint (chat takes a boolean)")
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", 0, None, 16)
    params = _sampling(fields, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=logprobs if echo else None)
    if len(prompts) * params.n > MAX_PROMPTS:
        raise fields.refuse("n", f"times the number of prompts may be at most {MAX_PROMPTS}: every one is a sequence")
    best_of = fields.integer("best_of", 1, MAX_CHOICES, params.n)
    if best_of != params.n:
        raise fields.refuse("best_of", f"other than n is not supported (n is {params.n}); leave it out")
    return CompletionBody(
        _common(fields, params, allow_extra), prompts, echo, fields.boolean("add_special_tokens", True)
    )


def parse_tokenize(values: dict[str, Any]) -> TokenizeBody:
    """The body of ``/tokenize``: ``prompt`` or ``messages``. RequestRejected (400) with ``param`` otherwise."""
    fields = Fields(values)
    prompt = fields.string("prompt")
    if prompt is None and fields.raw("messages") is None:
        raise bad("prompt", "either prompt (a string) or messages (an array) must be given")
    if prompt is not None and fields.raw("messages") is not None:
        raise bad("messages", "prompt and messages exclude each other; send one of them")
    return TokenizeBody(
        model=fields.string("model"),
        prompt=prompt,
        conversation=_conversation(fields) if prompt is None else None,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        return_token_strs=fields.boolean("return_token_strs"),
    )


def parse_detokenize(values: dict[str, Any]) -> DetokenizeBody:
    """The body of ``/detokenize``: ``tokens``. RequestRejected (400) with ``param`` otherwise."""
    fields = Fields(values)
    if fields.raw("tokens") is None:
        raise bad("tokens", "tokens (an array of token ids) must be given")
    return DetokenizeBody(fields.string("model"), fields.token_ids("tokens"))


# ---------------------------------------------------------------- parts


def _common(fields: Fields, params: SamplingParams, allow_extra: bool) -> Common:
    stream = fields.boolean("stream")
    options = fields.mapping("stream_options")
    if options is not None and not stream:
        raise fields.refuse("stream_options", "is only for stream: true")
    extra = fields.mapping("extra") if allow_extra else None
    return Common(
        model=fields.string("model"),
        params=params,
        stream=stream,
        include_usage=Fields(options or {}, "stream_options.").boolean("include_usage"),
        cache_salt=fields.string("cache_salt") or "",
        extra=extra or {},
    )


def _sampling(
    fields: Fields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    top_p = fields.number("top_p", 0, 1, 1.0)
    top_k = fields.integer("top_k", -1, None, 0) or 0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_k=1 if top_p == 0 else max(0, top_k),  # -1 is vLLM's "off"
        top_p=top_p or 1.0,
        min_p=fields.number("min_p", 0, 1, 0.0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        repetition_penalty=fields.number("repetition_penalty", MIN_PENALTY, 10, 1.0),
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        n=fields.integer("n", 1, MAX_CHOICES, 1) or 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=_stops(fields),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOP_IDS),
        min_tokens=fields.integer("min_tokens", 0, None, 0) or 0,
        ignore_eos=fields.boolean("ignore_eos"),
    )


def _chat_max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, None)
    new = fields.integer("max_completion_tokens", 1, None)
    if old is not None and new is not None and old != new:
        raise fields.refuse("max_completion_tokens", "and max_tokens differ; send one of them")
    return old if new is None else new


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    items = value if isinstance(value, list) else [value]
    if len(items) > MAX_STOPS:
        raise fields.refuse("stop", f"may hold at most {MAX_STOPS} strings, not {len(items)}")
    for item in items:
        if not check_string(item, "stop"):
            raise fields.refuse("stop", "must not hold an empty string")
        if len(item) > MAX_STOP_CHARS:
            raise fields.refuse("stop", f"may hold strings of at most {MAX_STOP_CHARS} characters")
    return tuple(items)


def _logit_bias(fields: Fields) -> dict[int, float]:
    given = fields.mapping("logit_bias")
    bias: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not _LOGIT_KEY.fullmatch(key):
            raise fields.refuse("logit_bias", f"must have token ids as keys, not {shorten(key)}")
        bias[int(key)] = check_number(value, "logit_bias", -100, 100)
    return bias


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        return [check_string(value, "prompt")]
    if not isinstance(value, list):
        what = "is missing" if value is None else f"must not be {type_name(value)}"
        raise bad("prompt", f"prompt {what}; send a string, an array of strings, token ids or arrays of token ids")
    if not value:
        raise bad("prompt", "prompt must not be empty")
    if type(value[0]) is int:
        return [check_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise bad("prompt", f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, str) and isinstance(value[0], str):
            prompts.append(check_string(item, "prompt"))
        elif isinstance(item, list) and isinstance(value[0], list):
            prompts.append(check_ids(item, "prompt"))
        else:
            raise bad("prompt", f"prompt must hold only strings or only arrays of token ids, not {shorten(item)}")
        if not item:
            raise bad("prompt", "prompt must not hold an empty prompt")
    return prompts


def _conversation(fields: Fields) -> Conversation:
    go_on = fields.boolean("continue_final_message")
    if go_on and fields.raw("add_generation_prompt") is True:
        raise fields.refuse("continue_final_message", "and add_generation_prompt exclude each other")
    generation = fields.boolean("add_generation_prompt", not go_on)
    messages = _messages(fields.raw("messages"))
    if go_on and messages[-1]["role"] != "assistant":
        raise fields.refuse("continue_final_message", "needs an assistant message at the end")
    return Conversation(messages, generation, go_on, fields.mapping("chat_template_kwargs") or {})


def _messages(value: Any) -> list[dict[str, Any]]:
    if value is None:
        raise bad("messages", "messages is missing; send an array of messages with role and content")
    if not isinstance(value, list):
        raise bad("messages", f"messages must be an array, not {type_name(value)}")
    if not value:
        raise bad("messages", "messages must hold at least one message")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(where, f"{where} must be an object with role and content, not {type_name(value)}")
    role = value.get("role")
    if role not in ROLES:
        tools = " (tools are not supported)" if role in ("tool", "function") else ""
        raise bad(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, not {shorten(role)}{tools}")
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise bad(f"{where}.{name}", f"{where}.{name} is not supported")
    message = {"role": role, "content": _content(value.get("content"), f"{where}.content")}
    if value.get("name") is not None:
        message["name"] = check_string(value["name"], f"{where}.name")
    return message


def _content(value: Any, where: str) -> str:
    """The text of a message; the parts of an array are joined by newlines, as the chat templates do."""
    if value is None:
        raise bad(where, f"{where} is missing; send a string or an array of text parts")
    if not isinstance(value, list):
        return check_string(value, where)
    texts = []
    for i, part in enumerate(value):
        at = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise bad(at, f'{at} must be an object such as {{"type": "text", "text": "..."}}, not {type_name(part)}')
        if part.get("type") != "text":
            raise bad(f"{at}.type", f"{at}.type must be text, not {shorten(part.get('type'))}")
        texts.append(check_string(part.get("text"), f"{at}.text"))
    if not texts:
        raise bad(where, f"{where} must hold at least one part")
    return "\n".join(texts)


def _refuse_unsupported(fields: Fields) -> None:
    _refuse(fields, _UNSUPPORTED, "is not supported; {hint}")


def _refuse(fields: Fields, names: dict[str, tuple[Any, ...]], message: str) -> None:
    """400 for the first of ``names`` that has another value than the neutral ones."""
    for name, neutral in names.items():
        value = fields.raw(name)
        if value is None or any(value == n and type(value) is type(n) for n in neutral):
            continue
        raise fields.refuse(name, message.format(hint=_HINTS.get(name, "leave it out")))


def _check_response_format(fields: Fields) -> None:
    value = fields.mapping("response_format")
    if value is not None and value.get("type") != "text":
        shown = shorten(value.get("type"))
        raise fields.refuse("response_format", f"of type {shown} is not supported; only text is, or leave it out")


def reject_model(asked: str | None, served: str) -> None:
    """404 ``model_not_found`` when a request names another model than the one served."""
    if asked is not None and asked != served:
        raise RequestRejected(
            f"the model {shorten(asked)} does not exist; this service has {shorten(served, 200)}",
            param="model",
            code="model_not_found",
            status=404,
        )
