"""Texts that the scripts beside this file give to other tokenizers: prose, code, many scripts, odd whitespace."""

from __future__ import annotations

import random

WRITTEN = [
    "",
    "a",
    " ",
    "  ",
    "   leading and trailing   ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "It's they're we've I'll she'd I'm don't CAN'T You'LL",
    "12345 3.14159 1,000,000 0x1F 2026-11-30T23:59:59Z",
    "\n",
    "\n\n\n",
    "line one\nline two\r\nline three\n\n  indented\n\ttabbed",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nclass A:\n    pass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    '{"key": [1, 2, {"nested": null}], "text": "a\\nb"}',
    "https://example.org/a/b?c=d&e=f#g",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababababababa",
    "Grüße aus Köln: Straße, Fußgängerübergänge",
    "Ça va ? Élève, naïve, cœur, Noël",
    "e\u0301 is not \u00e9",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "你好，世界。修复错误",
    "こんにちは世界カタカナ",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "🌍🌎🌏 👩‍👩‍👧‍👦 🇩🇪 ❤️",
    "x² + y³ = z₁ ½ Ⅷ ٣",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β)",
    "tabs\t\tand\u00a0no-break\u3000ideographic\u2003em spaces",
    "zero\u200bwidth\u200djoiner",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> <|im_start|> x <|endoftext|>",
    "<0x0A> is not a newline, \u2581 is not a space",
    "...!!!???---===###",
    "a" * 300,
    " 1 22 333 4444 55555",
]

_ATOMS = [
    *("the", "The", "and", "running", "n't", "'s", "'S", " ", "  ", "\n", "\t", "1", "23", "4567", "é", "ß", "ü", "中"),
    *(
        "文",
        "の",
        "ひ",
        "и",
        "й",
        "ش",
        "ה",
        "🌍",
        "\u200d",
        ".",
        ",",
        "!",
        "(",
        ")",
        "_",
        "-",
        "/",
        "a",
        "b",
        "ab",
        "ba",
    ),
    *("z", "Q", "\u00a0", "\u2581", "½", "http", "://", "<", ">", "|", "im", "end"),
]


def texts() -> list[str]:
    """The written texts and 150 random joins, the same on every call."""
    draw = random.Random(20260401)
    joined = ["".join(draw.choices(_ATOMS, k=draw.randint(2, 40))) for _ in range(150)]
    return WRITTEN + joined
