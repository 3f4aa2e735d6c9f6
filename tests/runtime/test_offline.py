"""``Engine.load`` and ``generate``: the Python interface, on the tiny model and on one that says what it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from device.errors import RequestRejected
from runtime import Engine, GenerationRequest, SamplingParams
from runtime.offline import Choice, GenerationOutput, collect
from runtime.scheduler import Plan
from tests.support.engines import DATA, MODELS, scripted_engine, tiny_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = Engine.load(
        str(MODELS / "tiny"), tokenizer=str(DATA / "tiny_tokenizer"), device="cpu", dtype="float64", max_model_len=128
    )
    yield loaded
    loaded.shutdown()


def speaking(text: str, **settings: Any) -> Engine:
    """An engine that answers everything with this text."""
    return scripted_engine(lambda seq: tiny_tokenizer().encode(text, False), **settings)


@pytest.fixture(scope="module")
def speaker() -> Iterator[Engine]:
    made = speaking("one two three four")
    yield made
    made.shutdown()


def test_text_in_text_out(engine: Engine) -> None:
    (output,) = engine.generate("Hello there", GREEDY)
    assert isinstance(output, GenerationOutput) and output.choices == [output.choices[0]]
    assert engine.tokenizer is not None
    assert output.prompt_token_ids == engine.tokenizer.encode("Hello there")
    choice = output.choices[0]
    assert isinstance(choice, Choice) and choice.finish_reason in ("length", "stop") and choice.error is None
    assert len(choice.token_ids) <= 6 and output.text == choice.text
    ends = choice.finish_reason == "stop"
    assert choice.text == engine.tokenizer.decode(choice.token_ids[: len(choice.token_ids) - ends])


def test_token_ids_and_text_are_the_same_request(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("Hello there")
    by_text, by_ids, by_tuple = (engine.generate(p, GREEDY)[0] for p in ("Hello there", ids, [tuple(ids)]))
    assert by_text.choices == by_ids.choices == by_tuple.choices


def test_many_prompts_of_both_kinds_come_back_in_order(engine: Engine) -> None:
    prompts: list[Any] = [f"number {n}" if n % 2 else [n + 5, n + 6, n + 7] for n in range(40)]  # more than run at once
    together = engine.generate(prompts, GREEDY)
    assert len(together) == 40
    for prompt, output in list(zip(prompts, together, strict=True))[::7]:
        assert engine.generate([prompt], GREEDY)[0].choices == output.choices
        assert isinstance(prompt, str) or output.prompt_token_ids == prompt


def test_one_set_of_parameters_each(engine: Engine) -> None:
    lengths = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = engine.generate(["a", "b", "c"], lengths)
    assert [len(output.choices[0].token_ids) for output in outputs] == [1, 5, 3]
    assert all(output.choices[0].finish_reason == "length" for output in outputs)
    with pytest.raises(RequestRejected, match="3 prompts, but 2 sampling parameters"):
        engine.generate(["a", "b", "c"], lengths[:2])


def test_nothing_in_nothing_out(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_without_parameters_the_defaults_hold(engine: Engine) -> None:
    (output,) = engine.generate(["x"])
    assert output.choices[0].finish_reason in ("stop", "length") and len(output.choices) == 1


def test_choices_logprobs_and_prompt_logprobs(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    (output,) = engine.generate([[5, 6, 7]], params)
    assert [choice.index for choice in output.choices] == [0, 1, 2]
    for choice in output.choices:
        assert [lp.token for lp in choice.logprobs] == choice.token_ids and len(choice.token_ids) == 4
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [lp.token for lp in output.prompt_logprobs[1:] if lp] == [6, 7]
    assert engine.generate([[5, 6, 7]], params)[0] == output, "seeded: the same again"


def test_no_tokens_wanted(engine: Engine) -> None:
    (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert output.choices[0].token_ids == [] and output.text == "" and output.choices[0].finish_reason == "length"
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 3


def test_cached_tokens(engine: Engine) -> None:
    prompt = list(range(200, 240))
    assert engine.generate([prompt], GREEDY)[0].cached_tokens == 0
    assert engine.generate([prompt], GREEDY)[0].cached_tokens == 32


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ((), "one two three four", "stop"),
        (("three",), "one two ", "stop"),
        (("o t",), "one tw", "stop"),
        (("four", "wo"), "one t", "stop"),
        (("e four",), "one two thre", "stop"),
        (("five",), "one two three four", "stop"),
    ],
)
def test_stop_strings_end_the_text_and_are_no_part_of_it(
    speaker: Engine, stop: tuple[str, ...], text: str, reason: str
) -> None:
    (output,) = speaker.generate(["say"], SamplingParams(temperature=0.0, stop=stop, logprobs=0))
    choice = output.choices[0]
    assert (choice.text, choice.finish_reason) == (text, reason)
    assert len(choice.logprobs) == len(choice.token_ids)
    assert speaker.wait_idle(20)


def test_tokens_after_a_stop_string_do_not_count() -> None:
    """Drafts bring several tokens at once: those behind the stop string are dropped with their log-probabilities."""
    params = SamplingParams(temperature=0.0, stop=("abab",), logprobs=0, max_tokens=60)
    plain, drafting = (
        speaking("xy" + "ab" * 20),
        speaking("xy" + "ab" * 20, speculate="ngram", draft_tokens=8, ngram_min=1),
    )
    expected, found = (e.generate(["say"], params)[0].choices[0] for e in (plain, drafting))
    assert found == expected and found.text == "xy" and found.finish_reason == "stop"
    for made in (plain, drafting):
        assert made.wait_idle(20)
        made.shutdown()


def test_what_was_kept_back_comes_at_the_end(speaker: Engine) -> None:
    """The end of the text could have begun a stop string."""
    (output,) = speaker.generate(["say"], SamplingParams(temperature=0.0, stop=("r five",)))
    assert output.text == "one two three four"
    (output,) = speaker.generate(["say"], SamplingParams(temperature=0.0, stop=("ne t",), max_tokens=1))
    assert "one two three four".startswith(output.text) and output.choices[0].finish_reason == "length"


def test_a_choice_that_ends_by_its_string_leaves_the_others() -> None:
    texts = ["a stop here", "no end in sight", "s stop"]
    made = scripted_engine(lambda seq: tiny_tokenizer().encode(texts[seq.index], False))
    (output,) = made.generate(["say"], SamplingParams(temperature=0.0, n=3, stop=("stop",)))
    assert [choice.text for choice in output.choices] == ["a ", "no end in sight", "s "]
    made.shutdown()


def test_a_prompt_that_cannot_be_served_is_refused_and_nothing_is_left_behind(engine: Engine) -> None:
    before = engine.stats().generated_tokens
    with pytest.raises(RequestRejected, match="maximum context length is 128") as refused:
        engine.generate(["fine", [5] * 200, "fine too"], GREEDY)
    assert refused.value.code == "context_length_exceeded"
    assert engine.wait_idle(20)
    assert engine.stats().blocks_free == engine.stats().blocks_total
    assert engine.stats().generated_tokens <= before + 6


def test_a_queue_limit_is_for_strangers() -> None:
    """The caller waits for all its outputs anyhow."""
    made = speaking("yes", max_num_seqs=1, max_queue=0)
    assert [output.text for output in made.generate(["a"] * 9, GREEDY)] == ["yes"] * 9
    made.shutdown()


def test_an_engine_that_fails_says_so_in_every_output() -> None:
    def broken(plan: Plan) -> None:
        if len(plan) == 2:
            raise OSError("planted")
        time.sleep(0.005)  # so that the first does not end before the second comes

    made = speaking("yes" * 40, on_step=broken)
    for output in made.generate(["a", "b"], SamplingParams(temperature=0.0)):
        choice = output.choices[0]
        assert choice.finish_reason == "error" and "the engine failed" in (choice.error or "")
    made.shutdown()


def test_ids_of_numpy_are_ids(engine: Engine) -> None:
    expected = engine.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert engine.generate([np.array([5, 6, 7]), np.array([8, 9])], GREEDY) == expected
    (output,) = engine.generate(np.array([5, 6, 7]), GREEDY)
    assert output == expected[0] and all(type(token) is int for token in output.prompt_token_ids)


def test_text_without_a_tokenizer_is_refused() -> None:
    made = speaking("yes")
    made.tokenizer = None
    with pytest.raises(RequestRejected, match="no tokenizer; give token ids"):
        made.generate(["a"])
    (output,) = made.generate([[5, 6]], GREEDY)
    assert output.choices[0].token_ids and output.text == ""
    made.shutdown()


def test_an_output_can_be_collected_by_hand(engine: Engine) -> None:
    """``submit`` and ``collect`` are the parts ``generate`` is made of."""
    request = GenerationRequest((5, 6, 7), GREEDY)
    assert collect(engine, engine.submit(request), request) == engine.generate([[5, 6, 7]], GREEDY)[0]
