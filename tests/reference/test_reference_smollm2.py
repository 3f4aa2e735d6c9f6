"""Is ``smollm2_greedy`` what transformers says of SmolLM2-135M-Instruct.Q4_1.gguf today?"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.data.smollm2_prompts import PROMPTS
from tests.reference import forward
from tests.support.reference import SMOLLM2, ReferenceCase, compare_teacher_forced, smollm2_cases

CASES = smollm2_cases()
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return forward.smollm2_by_transformers(forward.find_gguf())


def test_data_belong_to_this_file() -> None:
    path = forward.find_gguf()
    meta = json.loads(SMOLLM2.read_text(encoding="utf-8"))
    assert path.name == meta["model"]
    assert forward.sha256(path) == meta["sha256"]


def test_transformers_and_gguf_dequantise_to_the_same_bits(model: Any) -> None:
    by_hand = forward.smollm2_by_gguf(forward.find_gguf()).state_dict()
    ours = model.state_dict()
    assert ours.keys() == by_hand.keys()
    assert [name for name in ours if not torch.equal(ours[name], by_hand[name])] == []


def test_prompts_are_the_texts_tokenised() -> None:
    tokenizer = forward.smollm2_tokenizer(forward.find_gguf())
    assert [case.name for case in CASES] == list(PROMPTS)
    for case in CASES:
        assert case.text == PROMPTS[case.name]
        assert tuple(tokenizer.encode(case.text, add_special_tokens=False).ids) == case.prompt
    lengths = sorted(len(case.prompt) for case in CASES)
    assert lengths[0] == 5 and 350 <= lengths[-1] <= 400 and len(lengths) == 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_greedy_tokens_and_logits(model: Any, case: ReferenceCase) -> None:
    count = len(case.tokens)
    assert count == 64
    report = compare_teacher_forced(case, lambda ids: forward.last_rows(model, ids, count), TOLERANCE)
    assert report.equal + report.excused == count
