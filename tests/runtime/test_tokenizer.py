"""Tokenizers from a folder and from GGUF metadata, against llama.cpp, sentencepiece and the tokenizers library."""

from __future__ import annotations

import json
import random
import shutil
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.errors import LoadError, RequestRejected, UnsupportedModel
from runtime.tokenizer import BYTE_OF_CHAR, CHAR_OF_BYTE, Tokenizer
from runtime.tokenizer_gguf import PRE_TOKENIZERS
from tests.support.tokenizers import TINY, byte_ids, read, sentencepiece, smollm2, tiny

GGML = "tokenizer.ggml."
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


# --- folders ------------------------------------------------------------------------------------------------------


def folder(tmp_path: Path, edit: Callable[[dict[str, Any]], None] = lambda _: None, **files: Any) -> Path:
    """A copy of the tiny tokenizer with tokenizer.json edited and other JSON files replaced (None: removed)."""
    target = tmp_path / "model"
    shutil.copytree(TINY, target)
    main = target / "tokenizer.json"
    content = json.loads(main.read_text())
    edit(content)
    main.write_text(json.dumps(content))
    for name, value in files.items():
        path = target / f"{name}.json"
        if value is None:
            path.unlink()
        else:
            path.write_text(json.dumps(value))
    return target


def config(**changes: Any) -> dict[str, Any]:
    found = {**json.loads((TINY / "tokenizer_config.json").read_text()), **changes}
    return {k: v for k, v in found.items() if v is not ...}


def test_tiny_tokenizer() -> None:
    assert (tiny().vocab_size, tiny().bos_id, tiny().eos_ids) == (512, 0, frozenset({1, 3}))
    assert tiny().special_ids == frozenset({0, 1, 2, 3}) and tiny().adds_bos
    assert tiny().special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tiny().encode("The cat")[0] == 0
    assert tiny().decode(tiny().encode("The cat")) == "The cat"
    assert tiny().decode(tiny().encode("The cat"), skip_special_tokens=False) == "<s>The cat"


def test_the_stored_tiny_tokenizer_is_what_its_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.data import make_tiny_tokenizer

    monkeypatch.setattr(make_tiny_tokenizer, "FOLDER", tmp_path / "made")
    make_tiny_tokenizer.main()
    made = json.loads((tmp_path / "made" / "tokenizer.json").read_text())
    kept = json.loads((TINY / "tokenizer.json").read_text())
    assert made["model"]["vocab"] == kept["model"]["vocab"] and made["model"]["merges"] == kept["model"]["merges"]
    assert config() == json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())


def test_end_of_text_ids_come_from_every_file(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        generation_config={"eos_token_id": [10, 11]},
        config={"eos_token_id": [12, -1, None], "text_config": {"eos_token_id": [13]}},
        special_tokens_map={"eos_token": {"content": "</s>"}},
        tokenizer_config=config(eos_token=...),
    )
    assert Tokenizer.from_folder(path).eos_ids == {1, 3, 10, 11, 12, 13}


def test_a_turn_end_counts_only_as_a_special_token(tmp_path: Path) -> None:
    def shown(content: dict[str, Any]) -> None:
        content["added_tokens"][3]["special"] = False

    found = Tokenizer.from_folder(folder(tmp_path, shown))
    assert found.eos_ids == {1} and 3 not in found.special_ids
    assert found.decode([3]) == "<|im_end|>"


def test_add_bos_token_of_the_configuration_wins(tmp_path: Path) -> None:
    off = Tokenizer.from_folder(folder(tmp_path / "off", tokenizer_config=config(add_bos_token=False)))
    assert not off.adds_bos and off.encode("a") == off.encode("a", add_special_tokens=False)

    def bare(content: dict[str, Any]) -> None:
        content["post_processor"] = None

    on = Tokenizer.from_folder(folder(tmp_path / "on", bare, tokenizer_config=config(add_eos_token=True)))
    assert on.adds_bos and on.encode("a") == [0, *off.encode("a"), 1]
    silent = Tokenizer.from_folder(folder(tmp_path / "silent", tokenizer_config=config(add_bos_token=...)))
    assert silent.adds_bos and silent.prefix_ids == (0,)


def test_a_folder_with_tokenizer_json_alone_still_knows_its_bos(tmp_path: Path) -> None:
    found = Tokenizer.from_folder(folder(tmp_path, tokenizer_config=None))
    assert found.bos_id == 0 and found.adds_bos and found.chat_template is None


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    def training_settings(content: dict[str, Any]) -> None:
        content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        content["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "</s>",
        }

    found = Tokenizer.from_folder(folder(tmp_path, training_settings))
    for text in ("a", "a long text of many tokens that must not be cut"):
        assert found.encode(text) == tiny().encode(text)


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    listed = {"512": {"content": "<think>", "special": False}, "513": {"content": "<|call|>", "special": True}}
    found = Tokenizer.from_folder(folder(tmp_path / "a", tokenizer_config=config(added_tokens_decoder=listed)))
    assert found.encode("<think><|call|>", add_special_tokens=False) == [512, 513]
    assert found.vocab_size == 514 and found.decode([512, 513]) == "<think>"
    wrong = {"600": {"content": "<think>"}}
    with pytest.raises(LoadError, match=r"<think>.*600.*512"):
        Tokenizer.from_folder(folder(tmp_path / "b", tokenizer_config=config(added_tokens_decoder=wrong)))


@pytest.mark.parametrize(
    ("files", "jinja", "expected"),
    [
        ({}, "from the file", "from the file"),
        ({"chat_template": {"chat_template": "from the JSON"}}, None, "from the JSON"),
        ({"tokenizer_config": config(chat_template="from the config")}, None, "from the config"),
        (
            {
                "tokenizer_config": config(
                    chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
                )
            },
            None,
            "d",
        ),
        ({"tokenizer_config": config(chat_template=...)}, None, None),
    ],
)
def test_where_the_chat_template_is_taken_from(
    tmp_path: Path, files: dict[str, Any], jinja: str | None, expected: str | None
) -> None:
    path = folder(tmp_path, **files)
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    assert Tokenizer.from_folder(path).chat_template == expected


def test_folder_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be read.*download"):
        Tokenizer.from_folder(tmp_path)
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            (True, False, False),
        ),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            (False, True, True),
        ),
        (
            {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True},
            (False, False, False),
        ),
        (
            {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
            (False, False, True),
        ),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        (
            {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
            "ByteFallback",
        ),
        (None, "none"),
    ],
)
def test_decoders_are_understood_or_refused_by_name(
    tmp_path: Path, decoder: dict[str, Any] | None, expected: tuple[bool, bool, bool] | str
) -> None:
    path = folder(tmp_path, lambda content: content.update(decoder=decoder))
    if isinstance(expected, str):
        with pytest.raises(UnsupportedModel, match=expected):
            Tokenizer.from_folder(path)
    else:
        found = Tokenizer.from_folder(path)._decoding
        assert (found.byte_level, found.byte_fallback, found.strips_leading_space) == expected


# --- GGUF metadata ------------------------------------------------------------------------------------------------


def byte_level_metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """256 byte tokens and one merge; ``changes`` by the last part of the key (None: absent)."""
    tokens = [*CHAR_OF_BYTE.values(), "ab", "<|endoftext|>", "<|im_end|>", "<tool>"]
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * 257 + [3, 3, 4],
        "merges": ["a b"],
        "eos_token_id": 257,
        **changes,
    }
    return {GGML + k: v for k, v in found.items() if v is not None}


def test_embedded_model_special_tokens() -> None:
    assert (smollm2().bos_id, smollm2().eos_ids, smollm2().adds_bos) == (1, frozenset({0, 2}), False)
    assert smollm2().vocab_size == 49152 and smollm2().special_ids == frozenset(range(17))
    assert smollm2().special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2().chat_template is not None and "SmolLM" in smollm2().chat_template


def test_control_and_user_defined_tokens_are_matched_in_text() -> None:
    found = Tokenizer.from_gguf(byte_level_metadata(eot_token_id=258))
    a = found.token_id("a")
    assert found.encode("a<|im_end|><tool>ab") == [a, 258, 259, 256]
    assert found.special_ids == {257, 258} and found.eos_ids == {257, 258}
    assert found.decode([258, 259]) == "<tool>"


def test_bos_and_eos_are_added_as_the_metadata_say() -> None:
    a = Tokenizer.from_gguf(byte_level_metadata()).encode("a")
    assert Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe", bos_token_id=258)).encode("a") == [258, *a]
    assert Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe", add_bos_token=False)).encode("a") == a
    assert Tokenizer.from_gguf(byte_level_metadata(add_eos_token=True)).encode("a") == [*a, 257]
    assert sentencepiece("prefix").adds_bos  # the kind's default


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"model": "bert"}, UnsupportedModel, "'bert'.*gpt2.*llama"),
        ({"model": None}, UnsupportedModel, "None"),
        ({"pre": "martian"}, UnsupportedModel, "'martian'.*smollm"),
        ({"pre": None}, UnsupportedModel, "is missing"),
        ({"tokens": None}, LoadError, "no tokenizer.ggml.tokens"),
        ({"tokens": ["a"], "token_type": [1, 1]}, LoadError, "2 entries for 1 tokens"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, LoadError, r"'a' twice \(ids 0 and 2\)"),
        ({"merges": None}, LoadError, "no tokenizer.ggml.merges"),
        ({"merges": ["a zz"]}, LoadError, "merges do not fit"),
        ({"eos_token_id": 260}, LoadError, "eos_token_id is 260.*0 to 259"),
        ({"add_bos_token": True}, LoadError, "add_bos_token is true"),
        ({"model": "llama"}, LoadError, "scores is absent"),
        ({"model": "llama", "scores": [0.0]}, LoadError, "scores is 1 long"),
        ({"model": "llama", "precompiled_charsmap": [1]}, UnsupportedModel, "precompiled_charsmap"),
    ],
)
def test_metadata_errors_say_what_is_wrong(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


def sentencepiece_metadata(pieces: dict[str, int]) -> dict[str, Any]:
    """Pieces with their types, ids from 3, the first the best."""
    types = [2, 3, 3, *pieces.values()]
    return {
        GGML + "model": "llama",
        GGML + "tokens": ["<unk>", "<s>", "</s>", *pieces],
        GGML + "token_type": types,
        GGML + "scores": [-float(i) for i in range(len(types))],
        GGML + "add_space_prefix": False,
        GGML + "add_bos_token": False,
    }


def test_characters_without_a_piece_are_one_unknown_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Tokenizer.from_gguf(sentencepiece_metadata({"a": 1}))
    assert found.encode("axyza") == [3, 0, 3]


def test_a_byte_token_written_out_is_not_that_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spelt = dict.fromkeys(["<", "0", "x", "A", ">", "<0", "<0x", "<0x0", "<0x0A"], 1)
    found = Tokenizer.from_gguf(sentencepiece_metadata({**spelt, **{f"<0x{b:02X}>": 6 for b in range(256)}}))
    assert found.decode(found.encode("<0x0A>")) == "<0x0A>"
    assert found.encode("\n") == [found.token_id("<0x0A>")]


def test_user_defined_spaces_match_where_sentencepiece_marks_them() -> None:
    plain = sentencepiece("plain")
    three = plain.token_id("   ")
    assert three is not None
    assert plain.encode("a   b", False)[1] == three
    assert plain.decode([three]) == "   "
