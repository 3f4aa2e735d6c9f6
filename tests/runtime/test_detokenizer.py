"""Text from tokens as they arrive: whole characters, whole stop strings, the same for every split into pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.errors import RequestRejected
from runtime.detokenizer import Detokenizer, StopStrings, TextDelta, TextStream
from runtime.tokenizer import Tokenizer
from tests.support.tokenizers import byte_ids, read, sentencepiece, smollm2, tiny

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "tiny": tiny,
    "smollm2": smollm2,
    "prefix": lambda: sentencepiece("prefix"),
    "plain": lambda: sentencepiece("plain"),
}
# Ids of the tiny tokenizer with the bytes of characters in front, so that many sequences are valid text.
TINY_IDS = st.lists(st.one_of(st.integers(0, 519), st.sampled_from(byte_ids("é修🌍"))), max_size=30)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def split(data: st.DataObject, items: Sequence[int]) -> list[list[int]]:
    """The items cut into runs, empty ones among them."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [list(items[a:b]) for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


# --- Detokenizer --------------------------------------------------------------------------------------------------


@given(ids=TINY_IDS, skip=st.booleans(), data=st.data())
def test_joined_pieces_are_the_decoded_text(ids: list[int], skip: bool, data: st.DataObject) -> None:
    detokenizer = Detokenizer(tiny(), skip)
    text = "".join(detokenizer.push(part) for part in split(data, ids)) + detokenizer.flush()
    assert text == tiny().decode([i for i in ids if i < 512], skip)  # ids of the padding have no text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=ANY_TEXT, data=st.data())
def test_no_replacement_character_in_valid_text(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids, False)
    if "\ufffd" in whole:  # in the text itself, or bytes that this vocabulary lacks
        return
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push((i,)) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == whole and detokenizer.flush() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_agree_with_the_librarys_own_stream(name: str) -> None:
    from tokenizers import decoders

    if not hasattr(decoders, "DecodeStream"):
        pytest.skip("tokenizers before 0.21 have no DecodeStream")
    tokenizer = TOKENIZERS[name]()
    compared = 0
    for case in read("smollm2_token_ids.json")["cases"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        theirs = decoders.DecodeStream(skip_special_tokens=True)
        text = "".join(theirs.step(tokenizer._backend, i) or "" for i in ids)
        ours = Detokenizer(tokenizer)
        pieces = "".join(ours.push((i,)) for i in ids)
        if "\ufffd" not in text:
            assert pieces == text
            compared += 1
    assert compared > 150


def test_characters_appear_when_their_last_byte_does() -> None:
    detokenizer = Detokenizer(tiny())
    assert [detokenizer.push((i,)) for i in byte_ids("a🌍b")] == ["a", "", "", "", "🌍", "b"]


def test_bytes_that_nothing_can_complete_come_out_at_once() -> None:
    detokenizer = Detokenizer(tiny())
    assert [detokenizer.push((i,)) for i in byte_ids(b"\xf0\x9fA\xff\x80")] == ["", "", "\ufffdA", "\ufffd", "\ufffd"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_one_replacement_at_the_end() -> None:
    for raw in (b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x8c", b"\xe4\xbf"):
        detokenizer = Detokenizer(tiny())
        assert detokenizer.push(byte_ids(raw)) == ""
        assert detokenizer.flush() == "\ufffd"


def test_a_special_token_within_a_character_does_not_break_it() -> None:
    ids = byte_ids("🌍")
    assert Detokenizer(tiny()).push([*ids[:2], 3, *ids[2:]]) == "🌍"
    shown = Detokenizer(tiny(), skip_special_tokens=False)
    assert shown.push([*ids[:2], 3]) == "\ufffd<|im_end|>"


def test_the_leading_space_belongs_to_the_output_only_after_a_text() -> None:
    prefix = sentencepiece("prefix")
    ids = prefix.encode("the rope", add_special_tokens=False)
    bos = prefix.bos_id
    assert bos is not None
    assert Detokenizer(prefix).push(ids) == "the rope"
    assert Detokenizer(prefix, prompt_tail=[bos]).push(ids) == "the rope"
    assert Detokenizer(prefix, prompt_tail=prefix.encode("ascends")).push(ids) == " the rope"
    assert Detokenizer(prefix, skip_special_tokens=False, prompt_tail=[bos]).push(ids) == " the rope"
    assert Detokenizer(sentencepiece("plain")).push(sentencepiece("plain").encode(" x", False)) == " x"


@given(text=ANY_TEXT, continuation=ANY_TEXT, data=st.data())
def test_prompt_and_output_join_to_the_whole_text(text: str, continuation: str, data: st.DataObject) -> None:
    prefix = sentencepiece("prefix")
    ids = prefix.encode(text + continuation, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    before, after = Detokenizer(prefix), Detokenizer(prefix, prompt_tail=ids[:cut])
    joined = before.push(ids[:cut]) + after.push(ids[cut:])
    assert joined == prefix.decode(ids)


def test_the_output_may_finish_a_character_that_the_prompt_began() -> None:
    ids = byte_ids("修🌍")
    for cut in range(1, len(ids)):
        after = Detokenizer(tiny(), prompt_tail=ids[:cut])
        assert after.push(ids[cut:]) == ("修🌍" if cut < len("修".encode()) else "🌍")
    broken = Detokenizer(tiny(), prompt_tail=byte_ids(b"a\xff"))
    assert broken.push(byte_ids("b")) == "b"


def test_each_token_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny().encode("The climber ascends. " * 50)
    looked: list[int] = []
    real = tiny().token_bytes
    monkeypatch.setattr(tiny(), "token_bytes", lambda i: looked.append(i) or real(i))
    detokenizer = Detokenizer(tiny(), skip_special_tokens=False, prompt_tail=ids)
    started = len(looked)
    for i in ids:
        detokenizer.push((i,))
    assert started <= 3 and len(looked) - started == len(ids)


# --- StopStrings --------------------------------------------------------------------------------------------------

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: Sequence[str], from_end: int = 0) -> tuple[int, str] | None:
    """(where it ends, which) of the stop string complete first at or after ``from_end``; the longest of several."""
    for end in range(from_end + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=6), max_size=8), include=st.booleans())
def test_stop_strings_against_a_plain_search(stops: list[str], pieces: list[str], include: bool) -> None:
    finder = StopStrings(stops, include)
    whole, shown = "", ""
    for piece in pieces:
        safe, matched = finder.push(piece)
        whole, shown = whole + piece, shown + safe
        expected = first_stop(whole, stops)
        if expected is not None:
            end, stop = expected
            assert matched == stop
            assert shown == whole[: end if include else end - len(stop)]
            return
        assert matched is None
        # Kept back: the longest end of the text that begins a stop string, and nothing more.
        begun = max(n for n in range(len(whole) + 1) if n == 0 or any(s.startswith(whole[-n:]) for s in stops))
        assert shown == whole[: len(whole) - begun]
    assert shown + finder.flush() == whole
    assert finder.flush() == ""


@given(stops=STOPS, unarmed=st.text("abc", max_size=12), armed=st.text("abc", max_size=12))
def test_unarmed_text_may_only_begin_a_stop_string(stops: list[str], unarmed: str, armed: str) -> None:
    finder = StopStrings(stops)
    first, none = finder.push(unarmed, armed=False)
    second, matched = finder.push(armed)
    assert none is None
    expected = first_stop(unarmed + armed, stops, from_end=len(unarmed))
    if expected is None:
        assert matched is None and first + second + finder.flush() == unarmed + armed
    else:
        end, stop = expected
        assert matched == stop and first + second == (unarmed + armed)[: end - len(stop)]


def test_no_stop_strings_hold_nothing_back() -> None:
    assert StopStrings(()).push("anything") == ("anything", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestRejected, match="empty string") as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


def test_a_hostile_stop_string_costs_no_more_than_its_length() -> None:
    stop = "a" * 20_000 + "b"
    finder = StopStrings([stop])
    text = "".join(finder.push("a" * 100)[0] for _ in range(1000))
    assert len(text) == 100_000 - 20_000
    assert finder.push("b") == ("", stop)


# --- TextStream ---------------------------------------------------------------------------------------------------


def run(stream: TextStream, parts: Sequence[Sequence[int]], stop_token: bool = False) -> tuple[str, str | None, int]:
    """(text, stop string, tokens used) of a whole output given in parts."""
    deltas: list[TextDelta] = []
    for i, part in enumerate(parts):
        deltas.append(stream.push(part, stop_token=stop_token and i == len(parts) - 1))
    deltas.append(stream.finish())
    stopped = next((d.finished_by_stop for d in deltas if d.finished_by_stop), None)
    used = sum(d.tokens_used for d in deltas)
    assert used == stream.tokens
    return "".join(d.text for d in deltas), stopped, used


LETTER_IDS = st.lists(st.sampled_from([*byte_ids("abc🌍"), 2, 515]), max_size=25)
STREAM_STOPS = st.lists(st.text("abc🌍", min_size=1, max_size=4), max_size=3)


@given(
    ids=LETTER_IDS,
    stops=STREAM_STOPS,
    include=st.booleans(),
    minimum=st.integers(0, 8),
    skip=st.booleans(),
    stop_token=st.booleans(),
    data=st.data(),
)
def test_the_output_does_not_depend_on_the_split(
    ids: list[int],
    stops: list[str],
    include: bool,
    minimum: int,
    skip: bool,
    stop_token: bool,
    data: st.DataObject,
) -> None:
    def stream() -> TextStream:
        return TextStream(tiny(), stops, include_stop=include, min_tokens=minimum, skip_special_tokens=skip)

    stop_token = stop_token and bool(ids)
    whole = run(stream(), [ids], stop_token)
    parts = split(data, ids)
    while stop_token and not parts[-1]:
        parts.pop()
    assert run(stream(), parts, stop_token) == whole
    singles = [[i] for i in ids]
    assert run(stream(), singles or [[]], stop_token) == whole


@given(ids=LETTER_IDS, stops=STREAM_STOPS, minimum=st.integers(0, 8))
def test_the_output_against_a_plain_search(ids: list[int], stops: list[str], minimum: int) -> None:
    text, stopped, used = run(TextStream(tiny(), stops, min_tokens=minimum), [ids])
    detokenizer = Detokenizer(tiny())
    so_far = ""
    for count, token in enumerate(ids, 1):
        before = len(so_far)
        so_far += detokenizer.push((token,))
        found = first_stop(so_far, stops, from_end=before)
        if found is not None and count > minimum:
            end, stop = found
            assert (text, stopped, used) == (so_far[: end - len(stop)], stop, count)
            return
    assert (text, stopped, used) == (so_far + detokenizer.flush(), None, len(ids))


def test_tokens_after_the_stop_string_do_not_count() -> None:
    stream = TextStream(tiny(), ["bc"])
    delta = stream.push(byte_ids("abcde"))
    assert delta == TextDelta("a", "bc", 3, (0, 1, 2))
    assert stream.push(byte_ids("xyz")) == TextDelta("", "bc", 0, ())
    assert stream.finish() == TextDelta("", "bc", 0, ())
    assert stream.tokens == 3


def test_a_stop_token_is_counted_and_not_shown() -> None:
    newline = byte_ids("\n")[0]
    stream = TextStream(tiny(), ["\n"])
    assert stream.push([*byte_ids("ab"), newline], stop_token=True) == TextDelta("ab", None, 3, (0, 1, 2))
    assert stream.finish().text == ""


def test_min_tokens_let_a_stop_string_pass() -> None:
    ids = byte_ids("aXbXc")
    assert run(TextStream(tiny(), ["X"]), [ids]) == ("a", "X", 2)
    assert run(TextStream(tiny(), ["X"], min_tokens=2), [ids]) == ("aXb", "X", 4)
    assert run(TextStream(tiny(), ["X"], min_tokens=4), [ids]) == ("aXbXc", None, 5)
    assert run(TextStream(tiny(), ["aXb"], min_tokens=2), [ids]) == ("", "aXb", 3)


def test_offsets_say_where_each_tokens_text_begins() -> None:
    ids = tiny().encode("The cat 🌍 sat", add_special_tokens=False)
    delta = TextStream(tiny()).push(ids)
    ends = [*delta.offsets[1:], len(delta.text)]
    pieces = [delta.text[a:b] for a, b in zip(delta.offsets, ends, strict=True)]
    assert "".join(pieces) == delta.text == "The cat 🌍 sat"
    assert pieces[:2] == ["The", " cat"] and pieces.count("🌍") == 1


def test_echo_puts_the_prompt_before_the_output() -> None:
    prompt = tiny().encode("stop here, ")
    stream = TextStream(tiny(), ["stop"], prompt=prompt)
    echoed = stream.echo()
    assert echoed.text == "stop here, " and len(echoed.offsets) == len(prompt) == echoed.tokens_used
    assert stream.tokens == 0 and stream.length == len("stop here, ")
    delta = stream.push(byte_ids("now stop"))
    assert (delta.text, delta.finished_by_stop, delta.offsets[0]) == ("now ", "stop", len("stop here, "))
    with pytest.raises(ValueError, match="before the first push"):
        stream.echo()


def test_echo_finishes_a_character_with_the_output() -> None:
    ids = byte_ids("🌍")
    stream = TextStream(tiny(), prompt=ids[:3])
    assert stream.echo().text == ""
    assert stream.push(ids[3:]).text == "🌍"
