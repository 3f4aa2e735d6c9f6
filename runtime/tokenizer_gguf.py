"""The tokenizer that a GGUF file carries in its metadata, rebuilt for the ``tokenizers`` library.

Two kinds: ``gpt2`` (byte-level BPE with merges and a named pre-tokenizer) and ``llama`` (SentencePiece BPE: pieces
with scores, from which the merges follow). The keys are those of the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer").
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import LoadError, UnsupportedModel
from runtime.tokenizer import SPACE_MARK, Decoding, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""``tokenizer.ggml.token_type``."""

_KEY = "tokenizer.ggml."
_CACHE_VERSION = b"jumar merges 1"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_TAIL}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_CASED_TAIL}"
)
_HAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into words before the merges.

    splits: regular expressions (Oniguruma), applied one after the other to what is left uncut; each match is a word.
    ignore_merges: a word that is itself a token is taken whole. adds_bos: unless the file says otherwise.
    nfc: the text is brought into Unicode normal form C first.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_LLAMA3_KIND = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_GPT2_KIND = PreTokenizer((_GPT2,))
_DIGITS_KIND = PreTokenizer((r"\p{N}", _GPT2))
_GPT4O_KIND = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2_KIND,
    "phi-2": _GPT2_KIND,
    "mpt": _GPT2_KIND,
    "olmo": _GPT2_KIND,
    "smollm": _DIGITS_KIND,
    "starcoder": _DIGITS_KIND,
    "refact": _DIGITS_KIND,
    "codeshell": _DIGITS_KIND,
    "command-r": _DIGITS_KIND,
    "minerva-7b": _DIGITS_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "megrez": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O_KIND,
    "llama4": _GPT4O_KIND,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""By the name in ``tokenizer.ggml.pre``. The expressions are those of the models' own tokenizer.json files; which name
means which is the reading of https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: NDArray[np.int32]
    ids: dict[str, int]

    def of_type(self, *types: int) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.isin(self.types, types))]


def load_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from ``tokenizer.ggml.*`` and ``tokenizer.chat_template``.

    metadata: values as Python scalars, strings, lists or NumPy arrays.
    Raises UnsupportedModel for a kind or pre-tokenizer that is not implemented, LoadError for metadata that
    contradict themselves.
    """
    kind = metadata.get(_KEY + "model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{_KEY}model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE). "
            "Serve the model from its Hugging Face folder with tokenizer.json instead"
        )
    vocabulary = _read_vocabulary(metadata)
    if kind == "gpt2":
        backend, decoding, adds_bos = _byte_level(metadata, vocabulary)
        named = {}
    else:
        backend, decoding, adds_bos = _sentencepiece(metadata, vocabulary)
        named = {"bos": 1, "eos": 2, "unknown": 0}  # what the specification of the kind assumes when a file is silent
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        given = _token_id(metadata, name, len(vocabulary.tokens))
        if given is not None:
            named[name] = given
    named = {name: i for name, i in named.items() if i < len(vocabulary.tokens)}
    _add_tokens(backend, vocabulary, {named[n] for n in ("bos", "eos", "eot", "eom") if n in named})
    return Tokenizer(
        backend,
        decoding,
        vocab_size=len(vocabulary.tokens),
        bos_id=named.get("bos"),
        eos_ids={named[n] for n in ("eos", "eot", "eom") if n in named},
        special_tokens=_names(vocabulary, named),
        prefix_ids=_added_id(metadata, "add_bos_token", adds_bos, named.get("bos")),
        suffix_ids=_added_id(metadata, "add_eos_token", False, named.get("eos")),
        chat_template=metadata.get("tokenizer.chat_template"),
        source="GGUF metadata",
    )


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = metadata.get(_KEY + "tokens")
    if tokens is None or not len(tokens):
        raise LoadError(f"the file has no {_KEY}tokens; it is not a language model or its conversion was cut short")
    tokens = list(tokens)
    types = metadata.get(_KEY + "token_type")
    types = np.full(len(tokens), NORMAL, np.int32) if types is None else np.asarray(types, np.int32)
    if len(types) != len(tokens):
        raise LoadError(f"{_KEY}token_type has {len(types)} entries for {len(tokens)} tokens; convert the model again")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise LoadError(f"{_KEY}tokens has {twice!r} twice (ids {tokens.index(twice)} and {ids[twice]}); convert again")
    return _Vocabulary(tokens, types, ids)


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"{_KEY}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not 0 <= int(value) < size:
        raise LoadError(f"{key} is {value}, but the vocabulary has the ids 0 to {size - 1}; convert the model again")
    return int(value)


def _added_id(metadata: Mapping[str, Any], flag: str, default: bool, token: int | None) -> tuple[int, ...]:
    if not bool(metadata.get(_KEY + flag, default)):
        return ()
    if token is None:
        raise LoadError(f"{_KEY}{flag} is true, but the file names no such token; convert the model again")
    return (token,)


def _names(vocabulary: _Vocabulary, named: Mapping[str, int]) -> dict[str, str]:
    long = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {long[name]: vocabulary.tokens[i] for name, i in named.items() if name in long}


def _add_tokens(backend: Any, vocabulary: _Vocabulary, always: set[int]) -> None:
    """Control tokens (special) and user-defined ones (shown) are matched in the text before anything else."""
    from tokenizers import AddedToken

    special = sorted(set(vocabulary.of_type(CONTROL, UNKNOWN)) | always)
    shown = sorted(set(vocabulary.of_type(USER_DEFINED)) - always)
    tokens = vocabulary.tokens
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special if tokens[i]])
    # SentencePiece looks for user-defined symbols after it has marked the spaces; a file writes them unmarked. (With a
    # space prefix the library would put the prefix into the symbol as well.)
    marked = backend.normalizer is not None and backend.normalizer.normalize_str(" ") == SPACE_MARK
    backend.add_tokens([AddedToken(tokens[i], normalized=marked and " " in tokens[i]) for i in shown if tokens[i]])


# --- byte-level BPE -------------------------------------------------------------------------------------------------


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Any, Decoding, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get(_KEY + "pre")
    pre = PRE_TOKENIZERS.get(str(name))
    if pre is None:
        what = f"{name!r} is not known" if name is not None else "is missing"
        raise UnsupportedModel(
            f"the pre-tokenizer {_KEY}pre {what}; known are {', '.join(sorted(PRE_TOKENIZERS))}. Guessing would cut "
            "words in the wrong places: convert the model with a newer converter, or serve its Hugging Face folder"
        )
    lines = metadata.get(_KEY + "merges")
    if lines is None:
        raise LoadError(f"the file has no {_KEY}merges, which its kind 'gpt2' needs; convert the model again")
    merges = [tuple(line.split(" ")) for line in lines]
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"{_KEY}merges do not fit {_KEY}tokens ({error}); convert the model again") from error
    backend = Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, Decoding(byte_level=True), pre.adds_bos


# --- SentencePiece BPE ----------------------------------------------------------------------------------------------


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Any, Decoding, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if len(metadata.get(_KEY + "precompiled_charsmap", ())):
        raise UnsupportedModel(
            f"{_KEY}precompiled_charsmap (a SentencePiece normalisation table) is not supported for the kind 'llama'; "
            "serve the model from its Hugging Face folder with tokenizer.json instead"
        )
    scores = metadata.get(_KEY + "scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        got = "absent" if scores is None else f"{len(scores)} long"
        raise LoadError(f"{_KEY}scores is {got}; expected one for each of the {len(vocabulary.tokens)} tokens")
    merges = _cached_merges(vocabulary, np.asarray(scores, np.float32))
    fallback = all(f"<0x{b:02X}>" in vocabulary.ids for b in range(256))
    unknown = _token_id(metadata, "unknown", len(vocabulary.tokens))
    unknown = unknown if unknown is not None else next(iter(vocabulary.of_type(UNKNOWN)), 0)
    tokens = vocabulary.tokens
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=list(zip(*(map(tokens.__getitem__, side) for side in merges.T.tolist()), strict=True)),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=fallback,
        )
    )
    prefix = bool(metadata.get(_KEY + "add_space_prefix", True))
    mark: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), *mark] if prefix else mark)
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    backend.decoder = decoders.Sequence(steps)
    return backend, Decoding(byte_level=False, byte_fallback=fallback, strips_leading_space=prefix), True


def derive_merges(tokens: Sequence[str], scores: NDArray[np.float32], types: NDArray[np.int32]) -> NDArray[np.int32]:
    """The merges [M, 2] (ids of left and right piece), best first, that do what SentencePiece's scores do.

    SentencePiece joins the neighbours whose joint piece has the highest score, the leftmost first (Kudo and
    Richardson 2018, arXiv 1808.06226). Every way to cut a piece into two pieces is a merge, ranked by the score of
    the whole; of one piece's ways the one with the longer left part comes first, as in transformers' conversion.
    """
    usable = np.isin(types, (NORMAL, USER_DEFINED, UNUSED))
    ids = {token: i for i, token in enumerate(tokens) if usable[i]}
    whole: list[int] = []
    left: list[int] = []
    right: list[int] = []
    find = ids.get
    for piece, i in ids.items():
        for cut in range(len(piece) - 1, 0, -1):
            head = find(piece[:cut])
            if head is not None:
                tail = find(piece[cut:])
                if tail is not None:
                    whole.append(i)
                    left.append(head)
                    right.append(tail)
    lengths = np.array([len(token) for token in tokens], np.int32)
    pairs = np.array([left, right], np.int32).reshape(2, -1).T
    order = np.lexsort((-lengths[pairs[:, 1]], -lengths[pairs[:, 0]], -scores[np.array(whole, np.int64)]))
    return np.ascontiguousarray(pairs[order])


def _cached_merges(vocabulary: _Vocabulary, scores: NDArray[np.float32]) -> NDArray[np.int32]:
    """`derive_merges`, kept in the user's cache folder under a hash of what it depends on."""
    digest = hashlib.sha256(_CACHE_VERSION)
    for part in (
        "\0".join(vocabulary.tokens).encode("utf-8", "surrogatepass"),
        scores.tobytes(),
        vocabulary.types.tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    path = cache_folder() / f"merges-{digest.hexdigest()[:32]}.bin"
    found = _read_merges(path, len(vocabulary.tokens))
    if found is None:
        found = derive_merges(vocabulary.tokens, scores, vocabulary.types)
        _write_merges(path, found)
    return found


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/jumar``, by default ``~/.cache/jumar`` (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "jumar"


def _read_merges(path: Path, size: int) -> NDArray[np.int32] | None:
    """None if the file is absent, unreadable or damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    digest, body = raw[:32], raw[32:]
    if len(body) % 8 or hashlib.sha256(_CACHE_VERSION + body).digest() != digest:
        return None
    pairs = np.frombuffer(body, "<i4").astype(np.int32).reshape(-1, 2)
    return pairs if not pairs.size or (pairs.min() >= 0 and pairs.max() < size) else None


def _write_merges(path: Path, pairs: NDArray[np.int32]) -> None:
    """A cache that cannot be written only costs the time to build the merges again."""
    body = pairs.astype("<i4").tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(_CACHE_VERSION + body).digest() + body)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError:
        return
