"""Reading a tokenizer from a folder and from GGUF metadata: what each file decides, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device.errors import LoadError, UnsupportedModel
from runtime.tokenizer import Tokenizer
from tests.support.tokenizers import GGML, TINY, byte_level_metadata, sentencepiece, smollm2, tiny

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
