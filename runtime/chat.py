"""Chat messages to text by the model's own Jinja template, and the one way from a request to token ids.

``encode_chat`` and ``encode_prompt`` are what generation and ``/tokenize`` both call, so they cannot disagree:

- chat: the template writes every special token itself, so the text is encoded without adding any. There is a BOS
  if and only if the template emits one.
- prompt: the tokenizer's special tokens are added unless ``add_special_tokens`` is false; a text that already begins
  with the BOS string gets no second one.

A template comes with the model and is as trusted as the model: it runs in Jinja's sandbox (no attribute of Python's
internals, no change of what it is given, ``range`` at most 100,000 long), but nothing bounds the time of nested loops
in it. What a client sends is data to it, never template source, so the work of a rendering is bounded by the template
and linear in the messages for every template in use.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from device.errors import LoadError, RequestRejected
from runtime.tokenizer import Tokenizer

_MESSAGE_LIMIT = 300
_RESERVED = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """A compiled chat template.

    source: Jinja source. variables: names such as ``bos_token`` that every rendering sees.
    now: the clock behind ``strftime_now`` (some templates write today's date into the prompt).
    Raises LoadError if the source is no valid template.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str] | None = None, now: Callable[[], datetime] = datetime.now
    ) -> None:
        import jinja2

        self._variables = dict(variables or {})
        environment = _environment()
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise LoadError(
                f"the chat template is no valid Jinja ({error.message}, line {error.lineno}); "
                "correct the model's chat template or give another one"
            ) from error
        except Exception as error:  # Jinja writes Python, whose compiler has limits and errors of its own
            raise LoadError(
                f"the chat template cannot be compiled ({type(error).__name__}: {error}); "
                "correct the model's chat template or give another one"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation.

        messages: OpenAI chat messages; ``content`` a string, null, or a list of text parts (joined by newlines).
        continue_final_message: the text ends with the content of the last message, for the model to go on with it
            (nothing that the template writes after it; no generation prompt).
        tools, variables: handed to the template; variables are names such as ``enable_thinking`` with their values.
        Raises RequestRejected: param "messages" for messages that are malformed or that the template refuses, param
        "chat_template_kwargs" for variables that would take the place of the conversation.
        """
        import jinja2

        given = dict(variables or {})
        for name in _RESERVED:
            if name in given:
                raise RequestRejected(f"{name} cannot be set as a template variable", param="chat_template_kwargs")
        generation = add_generation_prompt and not continue_final_message
        given = {**self._variables, **given, "tools": tools, "add_generation_prompt": generation}
        checked = given["messages"] = check_messages(messages)
        try:
            text: str = self._template.render(given)
        except jinja2.TemplateError as error:
            raise _refused(
                f"the chat template refused the messages: {error.message or type(error).__name__}"
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way on unforeseen messages
            raise _refused(f"the chat template cannot render these messages: {error}") from error
        return _open_end(text, checked[-1]["content"]) if continue_final_message else text


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """OpenAI chat messages as a template wants them: copies, with the content of each a string or None.

    Content may be null only beside ``tool_calls``; the arguments of a tool call become an object where they are JSON.
    Raises RequestRejected(param="messages").
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise _refused("messages must be a list of at least one message")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of a conversation: `render_chat`, encoded without adding special tokens."""
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        variables=variables,
        continue_final_message=continue_final_message,
    )
    return _encode(tokenizer, text, False, "messages")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str:
    """The prompt text of a conversation by the tokenizer's template. RequestRejected if it has none."""
    template = template_of(tokenizer)
    return template.render(messages, add_generation_prompt, tools, variables, continue_final_message)


def encode_prompt(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a plain prompt; at most one BOS, see the head of this module."""
    return _encode(tokenizer, text, add_special_tokens, "prompt")


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's chat template, compiled once. RequestRejected if there is none or it is broken."""
    source = tokenizer.chat_template
    if source is None:
        raise _no_template("this model has no chat template")
    try:
        if not isinstance(source, str):  # metadata of a file may be anything
            raise LoadError("the chat template is no text; correct the model's chat template or give another one")
        return _compiled(source, tuple(sorted(tokenizer.special_tokens.items())))
    except LoadError as error:
        raise _no_template(str(error)) from error


def chat_problem(tokenizer: Tokenizer) -> str | None:
    """Why no conversation can be had with this tokenizer, None where one can. Compiles the template, for start-up."""
    try:
        template_of(tokenizer)
    except RequestRejected as error:
        return error.message
    return None


def _no_template(why: str) -> RequestRejected:
    message = (
        f"{why[:_MESSAGE_LIMIT]}: chat messages cannot be turned into a prompt. Use /v1/completions with the prompt "
        "written out, or start the server with a chat template"
    )
    return RequestRejected(message, code="no_chat_template", param="messages")


@functools.lru_cache(maxsize=16)
def _compiled(source: str, variables: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(variables))


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens)
    except RequestRejected as error:
        error.param = param
        raise


def _open_end(text: str, content: str | None) -> str:
    """The text up to the end of the last message's content, which a template may have trimmed."""
    wanted = content or ""
    for written in dict.fromkeys((wanted, wanted.rstrip(), wanted.lstrip(), wanted.strip())):
        at = text.rfind(written) if written else -1
        if at >= 0:
            return text[: at + len(written)]
    raise _refused("the last message cannot be continued: it is empty, or the chat template does not write it out")


def _refused(message: str) -> RequestRejected:
    return RequestRejected(message[:_MESSAGE_LIMIT], param="messages")


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(f"{where} must be an object with role and content")
    found = dict(message)
    role = found.get("role")
    if not isinstance(role, str) or not role:
        raise _refused(f"{where}.role must be a string such as system, user or assistant")
    calls = found.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = _check_calls(calls, f"{where}.tool_calls")
    content = found.get("content")
    if content is None:
        if not calls:
            raise _refused(f"{where}.content is missing; it must be a string or a list of text parts")
        found["content"] = None
    elif not isinstance(content, str):
        found["content"] = _joined_parts(content, f"{where}.content")
    return found


def _joined_parts(parts: Any, where: str) -> str:
    if not isinstance(parts, list):
        raise _refused(f"{where} must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            what = "has no type" if kind is None else f"is of type {str(kind)[:40]!r}"
            raise _refused(f"{where}[{i}] {what}; this model takes text parts only")
        if not isinstance(part.get("text"), str):
            raise _refused(f"{where}[{i}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI sends a call's arguments as JSON in a string; templates expect the object."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise _refused(f"{where} must be a list of objects")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                arguments = function["arguments"]
            if isinstance(arguments, dict):
                call = {**call, "function": {**function, "arguments": arguments}}
        found.append(dict(call))
    return found


@functools.lru_cache(maxsize=1)
def _generation_tag() -> Any:
    """An extension that reads ``{% generation %} ... {% endgeneration %}`` as plain text.

    Templates use the tag to mark what a model wrote, for training; in a prompt it means nothing.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return GenerationTag


def _environment() -> Any:
    """The environment that templates on the Hugging Face hub are written for.

    https://huggingface.co/docs/transformers/chat_templating_writing: blocks trimmed, loop controls, ``tojson``
    without HTML escapes, ``raise_exception``, ``strftime_now``.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> str:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        allowed = {k: options[k] for k in ("separators", "sort_keys") if k in options}
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
