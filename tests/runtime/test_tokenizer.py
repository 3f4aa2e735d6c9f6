"""What tokenizers do with text, against llama.cpp, sentencepiece and the tokenizers library."""

from __future__ import annotations

import random
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.errors import RequestRejected
from runtime.tokenizer import BYTE_OF_CHAR, CHAR_OF_BYTE, Tokenizer
from runtime.tokenizer_gguf import PRE_TOKENIZERS
from tests.support.tokenizers import GGML, byte_ids, byte_level_metadata, read, sentencepiece, smollm2, tiny

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "tiny": tiny,
    "smollm2": smollm2,
    "prefix": lambda: sentencepiece("prefix"),
    "plain": lambda: sentencepiece("plain"),
}


# --- against other tokenizers -------------------------------------------------------------------------------------


def test_embedded_model_gives_the_ids_of_llama_cpp() -> None:
    cases = read("smollm2_token_ids.json")["cases"]
    assert len(cases) > 150
    for case in cases:
        assert smollm2().encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]


@pytest.mark.parametrize("name", ["prefix", "plain"])
def test_sentencepiece_kind_gives_the_ids_of_sentencepiece(name: str) -> None:
    cases = read(f"sentencepiece_{name}.json")["cases"]
    assert len(cases) > 150
    for case in cases:
        assert sentencepiece(name).encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]


def _differs_on_purpose(pre: str, text: str) -> bool:
    """Where llama.cpp only approximates the models' tokenizer.json: no normal form C, no combining marks in words."""
    if PRE_TOKENIZERS[pre].nfc:
        return unicodedata.normalize("NFC", text) != text
    return pre in ("tekken", "gpt-4o") and any(unicodedata.category(c).startswith("M") for c in text)


@pytest.mark.parametrize("pre", sorted(read("pre_tokenizer_ids.json")["ids"]))
def test_pre_tokenizers_cut_words_where_llama_cpp_does(pre: str) -> None:
    data = read("pre_tokenizer_ids.json")
    tokenizer = Tokenizer.from_gguf(
        {
            GGML + "model": "gpt2",
            GGML + "pre": pre,
            GGML + "tokens": data["tokens"],
            GGML + "merges": data["merges"],
            GGML + "add_bos_token": False,
        }
    )
    compared = 0
    for text, ids in zip(data["texts"], data["ids"][pre], strict=True):
        if not _differs_on_purpose(pre, text):
            assert tokenizer.encode(text) == ids, text
            compared += 1
    assert compared >= 55


def test_qwen2_brings_text_into_normal_form_c() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9") != []


def test_digits_are_single_tokens_in_the_embedded_model() -> None:
    ids = smollm2().encode("in 2026 or 1234567890", add_special_tokens=False)
    texts = [smollm2().token_text(i) for i in ids]
    assert [t for t in texts if any(c.isdigit() for c in t)] == list("20261234567890")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_decode_agrees_with_the_library_on_encoded_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    for case in read("smollm2_token_ids.json")["cases"]:
        ids = tokenizer.encode(case["text"])
        for skip in (True, False):
            # No word for "clean up spaces" here: the library's decode never does that.
            expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
            if "\ufffd" not in expected:
                assert tokenizer.decode(ids, skip) == expected


# --- SentencePiece merges -----------------------------------------------------------------------------------------


def greedy_by_score(text: str, scores: dict[str, float]) -> list[str] | None:
    """SentencePiece's rule, spelt out: join the best-scored neighbours, the leftmost first.

    None where two overlapping pairs would make the same piece: there the rule by score alone and a list of merges
    may differ (and transformers' conversion with it).
    """
    parts = list(text)
    while True:
        best = max((scores[a + b] for a, b in zip(parts, parts[1:], strict=False) if a + b in scores), default=None)
        if best is None:
            return parts
        places = [i for i in range(len(parts) - 1) if scores.get(parts[i] + parts[i + 1]) == best]
        if any(j == i + 1 and parts[i] != parts[j] for i, j in zip(places, places[1:], strict=False)):
            return None
        at = places[0]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_merges_from_scores_do_what_scores_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draw = random.Random(5)
    compared = 0
    for _ in range(60):
        pieces = ["a", "b", "c"]
        while len(pieces) < 25:
            new = draw.choice(pieces) + draw.choice(pieces)
            if new not in pieces and len(new) <= 7:
                pieces.append(new)
        scores = [0.0, 0.0, 0.0, *draw.sample(range(-1000, 0), len(pieces) - 3)]
        tokenizer = Tokenizer.from_gguf(
            {
                GGML + "model": "llama",
                GGML + "tokens": ["<unk>", "<s>", "</s>", *pieces],
                GGML + "token_type": [2, 3, 3] + [1] * len(pieces),
                GGML + "scores": [0.0, 0.0, 0.0, *scores],
                GGML + "add_space_prefix": False,
                GGML + "add_bos_token": False,
            }
        )
        table = dict(zip(pieces, scores, strict=True))
        for _ in range(20):
            text = "".join(draw.choices("abc", k=draw.randint(1, 30)))
            expected = greedy_by_score(text, table)
            if expected is not None:
                assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == expected
                compared += 1
    assert compared > 800


def test_merges_are_cached_and_a_damaged_cache_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime import tokenizer_gguf

    metadata = read("sentencepiece_prefix.json")["metadata"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    derive = tokenizer_gguf.derive_merges
    monkeypatch.setattr(tokenizer_gguf, "derive_merges", lambda *a: calls.append(1) or derive(*a))
    expected = Tokenizer.from_gguf(metadata).encode("the capital of France")
    (file,) = (tmp_path / "jumar").iterdir()
    good = file.read_bytes()
    assert Tokenizer.from_gguf(metadata).encode("the capital of France") == expected
    assert len(calls) == 1
    for damaged in (b"", good[:-4], good[:-8], good[:40] + bytes([good[40] ^ 1]) + good[41:], b"x" * len(good)):
        file.write_bytes(damaged)
        calls.clear()
        assert Tokenizer.from_gguf(metadata).encode("the capital of France") == expected
        assert calls == [1] and file.read_bytes() == good
    other = {**metadata, GGML + "scores": list(reversed(metadata[GGML + "scores"]))}
    Tokenizer.from_gguf(other)
    assert len(list((tmp_path / "jumar").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jumar").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Tokenizer.from_gguf(read("sentencepiece_plain.json")["metadata"]).encode("a")


# --- round trips and bytes ----------------------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(ANY_TEXT)
def test_every_text_comes_back_from_a_byte_level_tokenizer(text: str) -> None:
    assert tiny().decode(tiny().encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@given(ANY_TEXT)
def test_a_text_comes_back_from_the_embedded_model_but_for_bytes_without_a_token(text: str) -> None:
    missing = {b for c, b in BYTE_OF_CHAR.items() if smollm2().token_id(c) is None}
    kept = bytes(b for b in text.encode() if b not in missing).decode("utf-8", "replace")
    assert smollm2().decode(smollm2().encode(text, add_special_tokens=False), skip_special_tokens=False) == kept


@pytest.mark.parametrize("name", ["prefix", "plain"])
@given(text=ANY_TEXT)
def test_every_text_comes_back_from_a_sentencepiece_tokenizer(name: str, text: str) -> None:
    tokenizer = sentencepiece(name)
    text = text.replace("<", "(")  # after a control token the prefix kind puts a space
    # The mark that stands for a space cannot be told from one.
    assert tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False) == text.replace("\u2581", " ")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_bytes_join_to_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "A b 修复 🌍 <|im_end|>\n"
    raw = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False))
    assert raw == ((b" " if name == "prefix" else b"") + text.encode())


def test_token_bytes_of_single_tokens() -> None:
    assert tiny().token_bytes(byte_ids(b"\xf0")[0]) == b"\xf0"
    assert tiny().token_text(byte_ids(b"\xf0")[0]) == "\ufffd"
    assert [tiny().token_bytes(i) for i in (0, 3)] == [b"<s>", b"<|im_end|>"]
    assert tiny().token_bytes(515) == tiny().token_bytes(-1) == b""
    plain = sentencepiece("plain")
    for written, raw in (("<0x0A>", b"\n"), ("<0xF0>", b"\xf0"), ("\u2581the", b" the")):
        token = plain.token_id(written)
        assert token is not None and plain.token_bytes(token) == raw


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    from tokenizers import pre_tokenizers

    assert set(pre_tokenizers.ByteLevel.alphabet()) == set(CHAR_OF_BYTE.values())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\x00\x1f !~\x7f", "\u00ad\u0100é中🌍"):
        ((stand_ins, _),) = byte_level.pre_tokenize_str(text)
        assert bytes(BYTE_OF_CHAR[c] for c in stand_ins) == text.encode()


def test_invalid_utf8_becomes_one_replacement_for_each_broken_character() -> None:
    assert tiny().decode(byte_ids(b"a\xf0\x9f\x8cb")) == "a\ufffdb"
    assert tiny().decode(byte_ids(b"\xff\xfe")) == "\ufffd\ufffd"
    plain = sentencepiece("plain")
    pieces = [plain.token_id(f"<0x{b:02X}>") for b in b"\xe4\xbd"]
    assert plain.decode([i for i in pieces if i is not None]) == "\ufffd"


def test_decode_refuses_ids_that_are_not_there() -> None:
    for bad in (-1, 512, 99999):
        with pytest.raises(RequestRejected, match=str(bad)) as caught:
            tiny().decode([5, bad])
        assert caught.value.param == "tokens" and caught.value.status == 400


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestRejected, match="surrogate"):
        tiny().encode("a\ud83c b")
    assert tiny().encode("a")  # and the next valid text is served


def test_several_threads_may_encode_at_once() -> None:
    texts = [case["text"] for case in read("smollm2_token_ids.json")["cases"]]
    expected = [smollm2().encode(t) for t in texts]
    results: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        results[i] = [smollm2().encode(t) for t in texts]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(found == expected for found in results.values())
