"""Chat templates: what they may do, what they are given, and what becomes of messages they do not like."""

from __future__ import annotations

import contextlib
import copy
import time
from datetime import datetime
from typing import Any

import pytest

from device.errors import LoadError, RequestRejected
from runtime.chat import (
    ChatTemplate,
    chat_problem,
    check_messages,
    encode_chat,
    encode_prompt,
    render_chat,
    template_of,
)
from runtime.tokenizer import Tokenizer
from tests.support.tokenizers import TINY, smollm2, tiny

USER = [{"role": "user", "content": "Hi"}]


def fresh(template: str | None) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(TINY)
    tokenizer.chat_template = template
    return tokenizer


def refused(template: str, messages: Any = USER) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        ChatTemplate(template).render(messages)
    assert caught.value.status == 400 and 0 < len(caught.value.message) <= 300
    return caught.value


def test_chatml_of_the_embedded_model() -> None:
    assert render_chat(smollm2(), [{"role": "system", "content": "Be brief."}, *USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    default = render_chat(smollm2(), USER, add_generation_prompt=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert default.endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_chat_is_encoded_with_its_control_tokens() -> None:
    ids = encode_chat(tiny(), USER)
    start, end = 2, 3
    assert ids[0] == start and ids.count(start) == 2 and ids.count(end) == 1
    assert tiny().decode(ids, skip_special_tokens=False) == render_chat(tiny(), USER)


def test_blocks_are_trimmed_as_templates_expect() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render(USER) == "Hi\n"


def test_special_tokens_and_extra_variables_reach_the_template() -> None:
    source = "{{ bos_token }}|{{ missing_token }}|{{ enable_thinking }}|{{ tools is none }}|{{ add_generation_prompt }}"
    assert render_chat(fresh(source), USER, variables={"enable_thinking": False}) == "<s>||False|True|True"
    assert render_chat(fresh("{{ tools | length }}"), USER, tools=[{}, {}]) == "2"


def test_tojson_writes_plain_json() -> None:
    value = [{"role": "user", "content": "x", "data": {"b": "<é>", "a": [1, None]}}]
    assert ChatTemplate("{{ messages[0].data | tojson }}").render(value) == '{"b": "<é>", "a": [1, null]}'
    indented = ChatTemplate("{{ messages[0].data | tojson(indent=2, sort_keys=true) }}").render(value)
    assert indented == '{\n  "a": [\n    1,\n    null\n  ],\n  "b": "<é>"\n}'


def test_strftime_now_follows_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 11, 30))
    assert template.render(USER) == "30 Nov 2026"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) == str(datetime.now().year)


def test_loop_controls_and_generation_marks() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}"
    )
    assert ChatTemplate(source + "{% endfor %}").render(USER) == "013"
    assert ChatTemplate("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c").render(USER) == "abuserc"


def test_a_template_is_compiled_once() -> None:
    tokenizer = fresh("one")
    assert template_of(tokenizer) is template_of(tokenizer)
    assert template_of(tokenizer) is not template_of(fresh("two"))
    tokenizer.chat_template = "three"
    assert render_chat(tokenizer, USER) == "three"


def test_a_broken_template_is_an_error_of_the_model() -> None:
    with pytest.raises(LoadError, match="no valid Jinja.*line 2"):
        ChatTemplate("fine\n{% for %}")


BROKEN: tuple[Any, ...] = (
    "fine\n{% for %}",
    "{{ 'open",
    "{{ messages | no_such_filter }}",
    "{% if %}" * 3,
    "{% for m in messages %}" * 30 + "{% endfor %}" * 30,  # more blocks than Python's compiler nests
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    7,
    ["a list"],
)


@pytest.mark.parametrize("source", BROKEN, ids=lambda source: str(source)[:20])
def test_a_template_that_cannot_be_compiled_is_known_at_start_up_and_refuses_chat(source: Any) -> None:
    problem = chat_problem(fresh(source))
    assert problem is not None and "the chat template" in problem and len(problem) < 600
    with pytest.raises(RequestRejected) as caught:
        encode_chat(fresh(source), USER)
    assert (caught.value.status, caught.value.code) == (400, "no_chat_template") and caught.value.message == problem
    assert chat_problem(tiny()) is None and "no chat template" in (chat_problem(fresh(None)) or "")


def test_a_model_without_a_template_refuses_chat() -> None:
    with pytest.raises(RequestRejected, match="no chat template.*completions") as caught:
        encode_chat(fresh(None), USER)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "no_chat_template")


def test_what_the_template_refuses_is_the_clients_error() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Conversations start with user.') }}{% endif %}ok"
    assert ChatTemplate(source).render(USER) == "ok"
    error = refused(source, [{"role": "assistant", "content": "x"}])
    assert error.param == "messages" and error.message.endswith("Conversations start with user.")
    assert refused("{{ raise_exception('long ' * 1000) }}").param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ messages[5].content }}",
        "{{ messages[0].nothing.deeper }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content | round }}",
    ],
)
def test_a_template_that_fails_is_the_clients_error_too(source: str) -> None:
    assert refused(source).param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__self__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(1000000000) %}{{ i }}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    given = copy.deepcopy(USER)
    start = time.perf_counter()
    with contextlib.suppress(RequestRejected):
        assert ChatTemplate(source).render(given) == ""  # an unsafe attribute reads as undefined
    assert given == USER and time.perf_counter() - start < 5


def test_what_a_client_sends_is_never_template_source() -> None:
    text = "{{ 7 * 7 }}{% for i in range(9) %}x{% endfor %}{# gone? #}"
    assert render_chat(fresh("{{ messages[0].content }}"), [{"role": "user", "content": text}]) == text


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "first\nsecond"
    assert check_messages([{"role": "user", "content": []}])[0]["content"] == ""


def test_the_request_is_not_changed() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    ]
    before = copy.deepcopy(given)
    found = check_messages(given)
    assert given == before
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found[1]["content"] is None


def test_arguments_that_are_no_json_object_stay_text() -> None:
    for text in ("not json", "[1]", ""):
        call = {"function": {"name": "f", "arguments": text}}
        found = check_messages([{"role": "assistant", "tool_calls": [call]}])
        assert found[0]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one"),
        ("hi", "list"),
        (None, "list"),
        ({"role": "user"}, "list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([*USER, {"role": "user", "content": None}], r"messages\[1\]\.content is missing"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": 5}], "string or a list of text parts"),
        ([{"role": "user", "content": {"type": "text"}}], "string or a list of text parts"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\] is of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "has no type"),
        ([{"role": "user", "content": ["x"]}], "has no type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\]\.text must be a string"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": []}], "content is missing"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, match: str) -> None:
    with pytest.raises(RequestRejected, match=match) as caught:
        encode_chat(tiny(), messages)
    assert caught.value.param == "messages" and caught.value.status == 400


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(RequestRejected, match=name) as caught:
        encode_chat(tiny(), USER, variables={"enable_thinking": True, name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_half_a_surrogate_pair_names_the_field() -> None:
    with pytest.raises(RequestRejected) as caught:
        encode_chat(tiny(), [{"role": "user", "content": "\ud83c"}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestRejected) as caught:
        encode_prompt(tiny(), "\udf0d")
    assert caught.value.param == "prompt"


def test_the_final_message_can_be_continued() -> None:
    begun = [*USER, {"role": "assistant", "content": "Once upon "}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOnce upon"
    assert render_chat(tiny(), begun, continue_final_message=True) == expected + " "
    trimming = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}{{ add_generation_prompt }}"
    assert ChatTemplate(trimming).render(begun, continue_final_message=True) == "[user]Hi[end][assistant]Once upon"
    assert encode_chat(tiny(), begun, continue_final_message=True)[-1] not in tiny().special_ids
    for hopeless in ([*USER, {"role": "assistant", "content": ""}], [{"role": "assistant", "content": "lost"}]):
        with pytest.raises(RequestRejected, match="cannot be continued"):
            ChatTemplate("nothing of it").render(hopeless, continue_final_message=True)
