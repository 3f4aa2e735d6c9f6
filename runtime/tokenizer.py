"""Text to token ids and back: one class for `tokenizer.json` folders and for the tokenizer inside a GGUF file.

Encoding is the work of the ``tokenizers`` library. Decoding is ours: every id stands for a fixed run of bytes, so a
text is the UTF-8 reading of the bytes of its tokens, and streaming (`runtime.detokenizer`), ``decode`` and the
``bytes`` fields of logprobs cannot disagree. Invalid UTF-8 becomes U+FFFD, one for each maximal part that could have
begun a character (Unicode 15, section 3.9, "U+FFFD substitution of maximal subparts").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device.errors import LoadError, RequestRejected, UnsupportedModel

SPACE_MARK = "\u2581"
"""What SentencePiece writes for a space inside a piece."""

TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[EOS]",
        "[EOT]",
        "</s>",
        "<eos>",
    }
)
"""Control tokens that end a turn or a text in the chat formats in use. Counted only where they are special tokens."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: bytes that print stand for themselves, the others follow from U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(shown)]
    table = {chr(b): b for b in shown}
    table.update({chr(0x100 + i): b for i, b in enumerate(hidden)})
    return table


BYTE_OF_CHAR = _byte_of_char()
CHAR_OF_BYTE = {b: c for c, b in BYTE_OF_CHAR.items()}


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the text of a token stands for bytes.

    byte_level: each character stands for a byte (GPT-2); otherwise U+2581 stands for a space (SentencePiece).
    byte_fallback: pieces named ``<0xNN>`` stand for one byte.
    strips_leading_space: encoding put a space before the text, so decoding takes one off at the very beginning.
    """

    byte_level: bool
    byte_fallback: bool = False
    strips_leading_space: bool = False


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads at once.

    Attributes:
        vocab_size: ids run from 0 to ``vocab_size - 1``; a model's table may be larger by padding.
        bos_id: id of the beginning-of-text token, or None.
        eos_ids: every id that ends a text or a chat turn, as far as the tokenizer's files say.
        special_ids: control tokens; ``decode(skip_special_tokens=True)`` leaves them out.
        special_tokens: names such as ``bos_token`` to their text, as chat templates see them.
        prefix_ids, suffix_ids: what ``encode(add_special_tokens=True)`` puts around the text.
        strips_leading_space: see `Decoding`.
        chat_template: Jinja source, or None. May be replaced by the operator's own.
        source: where it came from, for messages.
    """

    def __init__(
        self,
        backend: Any,
        decoding: Decoding,
        *,
        vocab_size: int,
        bos_id: int | None,
        eos_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        chat_template: str | None = None,
        source: str = "",
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._decoding = decoding
        self._added = {int(i): str(token.content) for i, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = vocab_size
        self.special_ids = frozenset(int(i) for i, token in added.items() if token.special)
        turn_ends = (i for i in self.special_ids if self._added[i] in TURN_ENDS)
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids) | frozenset(turn_ends)
        self.special_tokens = dict(special_tokens)
        self.prefix_ids = tuple(prefix_ids)
        self.suffix_ids = tuple(suffix_ids)
        self.strips_leading_space = decoding.strips_leading_space
        self.chat_template = chat_template
        self.source = source

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model folder in Hugging Face layout. LoadError, UnsupportedModel."""
        return _load_folder(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file (keys ``tokenizer.ggml.*``). LoadError, UnsupportedModel."""
        from runtime.tokenizer_gguf import load_gguf

        return load_gguf(metadata)

    @property
    def adds_bos(self) -> bool:
        """Whether ``encode(add_special_tokens=True)`` puts the BOS token first."""
        return self.bos_id is not None and self.bos_id in self.prefix_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids.

        add_special_tokens: put ``prefix_ids`` before and ``suffix_ids`` after, each only if it is not there already:
            a text that begins with the BOS string gets no second BOS.
        Raises RequestRejected if the text cannot be written in UTF-8 (lone surrogates).
        """
        if not _is_utf8(text):  # the library refuses it in some versions and drops it in others
            raise RequestRejected(
                "the text holds half of a surrogate pair (U+D800 to U+DFFF), which is no character; send valid Unicode"
            )
        # The batch call releases the GIL, the single one does not and would hold up the engine's thread.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self.with_special_tokens(ids) if add_special_tokens else ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """ids between ``prefix_ids`` and ``suffix_ids``, none of them doubled."""
        before, after = list(self.prefix_ids), list(self.suffix_ids)
        if ids[: len(before)] == before:
            before = []
        if after and ids[-len(after) :] == after:
            after = []
        return [*before, *ids, *after]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; equals a `runtime.detokenizer.Detokenizer` fed with them and flushed.

        Raises RequestRejected for an id that the tokenizer does not have.
        """
        parts = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise RequestRejected(
                    f"token id {token} is not in the vocabulary; expected 0 to {self.vocab_size - 1}", param="tokens"
                )
            if not (skip_special_tokens and token in self.special_ids):
                parts.append(self.token_bytes(token))
        raw = b"".join(parts)
        if self.strips_leading_space and raw[:1] == b" ":
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so (as in the vocabulary, not as decoded), or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def token_text(self, token: int) -> str:
        """What a token shows on its own; U+FFFD where it holds only a part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, special tokens included; none for an id without a token (padding)."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._bytes_of(token)
        return found

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8")
        if not 0 <= token < self.vocab_size:
            return b""
        piece: str | None = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._decoding.byte_level:
            if all(c in BYTE_OF_CHAR for c in piece):
                return bytes(BYTE_OF_CHAR[c] for c in piece)
            return piece.encode("utf-8")
        if self._decoding.byte_fallback and (match := _BYTE_PIECE.match(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(SPACE_MARK, " ").encode("utf-8")


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False


# --- a folder in Hugging Face layout ------------------------------------------------------------------------------


def _load_folder(folder: Path) -> Tokenizer:
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    names = {**_named_tokens(_read_json(folder / "special_tokens_map.json")), **_named_tokens(config)}
    _add_listed_tokens(backend, config, folder)
    prefix, suffix = _specials_around(backend)
    bos_id = _id_of(backend, names.get("bos_token"))
    if bos_id is None and "bos_token" not in config and len(prefix) == 1:
        bos_id = prefix[0]
    eos_id = _id_of(backend, names.get("eos_token"))
    return Tokenizer(
        backend,
        _decoding_of(backend, folder),
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        bos_id=bos_id,
        eos_ids=_eos_ids(folder, eos_id),
        special_tokens=names,
        prefix_ids=_asked_for(config.get("add_bos_token"), bos_id, prefix),
        suffix_ids=_asked_for(config.get("add_eos_token"), eos_id, suffix),
        chat_template=_chat_template(folder, config),
        source=str(folder),
    )


def _read_backend(folder: Path) -> Any:
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LoadError(
            f"{path} is missing; Jumar reads the fast tokenizer file. Download it with the model, or make it with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"{path} cannot be read as a tokenizer ({_short(error)}); download it again") from error
    # Some files were saved with training settings: they would cut prompts, or pad them, without a word.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object; {} if the file is absent."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path} is not valid JSON ({_short(error)}); download it again") from error
    if not isinstance(found, dict):
        raise LoadError(f"{path} holds a JSON {type(found).__name__}; expected an object")
    return found


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, each a string or an object with ``content``."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            found[name] = value
    return found


def _add_listed_tokens(backend: Any, config: Mapping[str, Any], folder: Path) -> None:
    """Tokens that only ``tokenizer_config.json`` lists (fine-tunes that grew the vocabulary) join the tokenizer."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = str(entry["content"])
        if backend.token_to_id(content) is not None:
            continue
        flags = {k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
        backend.add_tokens([AddedToken(content, **flags)])
        got = backend.token_to_id(content)
        if got != int(key):
            raise LoadError(
                f"{folder / 'tokenizer_config.json'} gives token {content!r} the id {key}, but the next free id of "
                f"tokenizer.json is {got}; the two files are not of the same model"
            )


def _specials_around(backend: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer's own post-processing puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _asked_for(flag: Any, token: int | None, found: list[int]) -> list[int]:
    """``add_bos_token`` and ``add_eos_token`` of the configuration win over the post-processor, as in transformers."""
    if not isinstance(flag, bool) or token is None or flag == (token in found):
        return found
    return [token, *found] if flag else [i for i in found if i != token]


def _id_of(backend: Any, text: str | None) -> int | None:
    found: int | None = None if text is None else backend.token_to_id(text)
    return found


def _eos_ids(folder: Path, eos_id: int | None) -> set[int]:
    model = _read_json(folder / "config.json")
    found: set[int] = set() if eos_id is None else {eos_id}
    for part in (_read_json(folder / "generation_config.json"), model, model.get("text_config")):
        value = part.get("eos_token_id") if isinstance(part, dict) else None
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0)
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """``chat_template.jinja``, ``chat_template.json`` or ``tokenizer_config.json``, the first that is there."""
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        try:
            return plain.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{plain} cannot be read as UTF-8: {_short(error)}; correct it or remove it") from error
    found = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        named = {str(t.get("name")): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    return found if isinstance(found, str) else None


def _decoding_of(backend: Any, folder: Path) -> Decoding:
    """Reads the decoder section of a tokenizer. UnsupportedModel for one that our byte table cannot stand for."""
    decoder = backend.decoder
    steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(byte_level=True)
    mark, fallback, strip = False, False, False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " ":
            mark = True
        elif kind == "Metaspace" and step.get("replacement") == SPACE_MARK:
            mark, strip = True, step.get("prepend_scheme", "always") != "never"
        elif kind == "ByteFallback":
            fallback = True
        elif (
            kind == "Strip" and step.get("content") == " " and (step.get("start"), step.get("stop")) in {(1, 0), (0, 0)}
        ):
            strip = step.get("start") == 1
        elif kind != "Fuse":
            mark = False
            break
    if not mark:
        raise UnsupportedModel(
            f"{folder / 'tokenizer.json'} has the decoder {' + '.join(kinds) or 'none'}; supported are ByteLevel and "
            "the SentencePiece kinds (Replace or Metaspace, ByteFallback, Fuse, Strip)"
        )
    return Decoding(byte_level=False, byte_fallback=fallback, strips_leading_space=strip)


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
