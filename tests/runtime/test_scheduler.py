"""The scheduler's invariants, checked from outside after every step of random schedules; and its rules one by one.

``World`` (tests/support/scheduling.py) plays the device, the sampler and the engine.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.scheduler import Limits
from runtime.sequence import Sequence, Status
from tests.support.scheduling import VOCAB, World, limits

MAX_LEN = 24


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    longest = -(-MAX_LEN // size)
    blocks = longest + draw(st.sampled_from([0, 0, 1, longest // 2, 2 * longest]))
    seqs = draw(st.integers(1, 6))
    chunked = draw(st.sampled_from([True, True, True, False]))
    tokens = draw(st.sampled_from([1, 2, 5, 8, 30])) if chunked else MAX_LEN + 6 * seqs
    batching = draw(st.sampled_from(["continuous", "continuous", "continuous", "dynamic", "static"]))
    made = Limits(
        max_seqs=seqs,
        max_tokens=tokens,
        max_rows=draw(st.sampled_from([1, 2, 4, 40])),
        max_len=MAX_LEN,
        chunk=draw(st.sampled_from([1, 3, tokens, tokens])) if chunked else tokens,
        batching=batching,
        max_batch=draw(st.sampled_from([0, 1, 2, seqs])) if batching != "continuous" else 0,
        max_wait=draw(st.sampled_from([0.0, 2.5])),
        prefix_cache=draw(st.sampled_from([True, True, False])),
        chunked_prefill=chunked,
    )
    return World(
        blocks, size, made, draw(st.integers(0, 2**16)), drafting=draw(st.booleans()), stops=draw(st.booleans())
    )


token = st.integers(0, VOCAB - 1)
stem = [1, 0, 2, 3, 1, 1, 0, 3, 2, 0, 1, 3, 0, 0, 2]
prompts = st.one_of(
    st.lists(token, min_size=1, max_size=MAX_LEN - 1),
    st.builds(lambda cut, tail: stem[:cut] + tail, st.integers(1, 15), st.lists(token, max_size=4)),
)
requests = st.tuples(
    prompts,
    st.integers(0, 20),  # output tokens
    st.sampled_from(["", "", "", "salt"]),
    st.sampled_from([None, None, None, 0]),  # prompt log-probabilities
    st.integers(0, 5),  # steps until the next arrives
    st.sampled_from([None, None, None, 0, 1, 4]),  # aborted so many steps after that
    st.sampled_from([0.0, 0.0, 1.0]),  # time until the next arrives
)


@settings(max_examples=1500, suppress_health_check=list(HealthCheck))
@given(world=worlds(), many=st.lists(requests, min_size=1, max_size=9))
def test_invariants_hold_in_every_schedule(world: World, many: list[tuple]) -> None:  # type: ignore[type-arg]
    dropped: list[tuple[int, Sequence]] = []
    steps = 0

    def go_on(until: int) -> None:
        nonlocal steps
        while steps < until:
            for _, seq in [d for d in dropped if d[0] <= steps]:
                world.abort(seq)
            world.step()
            steps += 1

    aborted = set()
    for prompt, wanted, salt, scores, gap, drop, pause in many:
        wanted = min(wanted, MAX_LEN - len(prompt))
        seq = world.submit(prompt, wanted, salt=salt, prompt_logprobs=scores)
        if drop is not None:
            dropped.append((steps + drop, seq))
            aborted.add(seq.id)
        go_on(steps + gap)
        world.clock.now += pause
    go_on(max([steps, *(at + 1 for at, _ in dropped)]))
    world.run()
    for seq in world.sequences:
        expected = world.expected(seq)
        if seq.id in aborted:
            assert seq.output == expected[: len(seq.output)]
        else:
            assert seq.output == expected
            assert seq.scored == (seq.prompt_len - 1 if seq.prompt_logprobs is not None else 0)


def test_the_random_schedules_reach_what_they_are_for() -> None:
    """They would hold trivially if nothing was ever preempted, shared, drafted or cut."""
    world = World(12, 2, limits(max_seqs=5, max_tokens=9, max_len=MAX_LEN), 1, drafting=True)
    seqs = [world.submit(stem[: 3 + n], 9, salt="" if n % 3 else "x") for n in range(12)]
    most = drafts = cut = 0
    while world.live():
        plan = world.step()
        most = max(most, len(plan))
        drafts += sum(plan.drafts)
        cut += sum(not s for s in plan.samples)
    assert world.scheduler.preemptions > 5 and world.saved > 5 and drafts > 20 and cut > 5 and most > 2
    assert world.scheduler.prefix_hits >= world.saved
    assert all(seq.output == world.expected(seq) for seq in seqs)


# ---------------------------------------------------------------- budgets and order


def test_the_token_budget_goes_to_the_oldest_first() -> None:
    world = World(40, 4, limits(max_tokens=10))
    a, b, c = world.submit([0] * 8, 2), world.submit([1] * 8, 2), world.submit([2] * 8, 2)
    assert [(s.id, n) for s, n in _items(world.step())] == [(a.id, 8), (b.id, 2)]
    assert [(s.id, n) for s, n in _items(world.step())] == [(a.id, 1), (b.id, 6), (c.id, 3)]


def test_a_chunk_leaves_room_for_others() -> None:
    world = World(40, 4, limits(max_tokens=10, chunk=4))
    world.submit([0] * 8, 2), world.submit([1] * 8, 2), world.submit([2] * 8, 2)
    assert [n for _, n in _items(world.step())] == [4, 4, 2]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Half of a step's tokens go to who came later; what nobody else wants the long one gets."""
    world = World(200, 8, limits(max_tokens=128, chunk=128, max_len=600))
    long = world.submit([0] * 500, 2)
    assert [n for _, n in _items(world.step())] == [128]
    short = world.submit([1] * 60, 4)
    assert [(s.id, n) for s, n in _items(world.step())] == [(long.id, 64), (short.id, 60)]
    assert len(short.output) == 1
    assert [(s.id, n) for s, n in _items(world.step())] == [(long.id, 127), (short.id, 1)]


def test_rows_are_a_budget_of_their_own() -> None:
    """Who gets no row computes all but the last token of a prompt, or waits for the next step."""
    world = World(40, 4, limits(max_rows=1))
    a, b = world.submit([0] * 4, 8), world.submit([1] * 4, 8)
    plan = world.step()
    assert plan.samples == [True, False] and plan.counts == [4, 3] and plan.rows == [1, 0]
    plan = world.step()
    assert plan.seqs == [a] and plan.rows == [1]
    assert b.computed == 3


def test_drafts_use_what_the_budgets_leave() -> None:
    world = World(40, 4, limits(max_tokens=6, max_rows=4))
    seq = world.submit([0, 1], 20)
    world.step()
    for count, expected in ((9, 3), (2, 2), (0, 0)):  # three: rows for the token itself and three drafts
        seq.drafts = [9] * count
        plan = world.plan()
        assert plan.drafts == [expected] and plan.counts == [expected + 1] and plan.rows == [expected + 1]
        world.compute_and_update(plan)


def test_drafts_never_reach_beyond_the_limit() -> None:
    world = World(40, 4, limits())
    seq = world.submit([0, 1], 4)
    world.step()
    assert len(seq.output) == 1
    seq.drafts = [9] * 9
    assert world.plan().drafts == [2]  # of the three tokens to come the last needs no draft before it


def test_a_guess_preempts_nobody() -> None:
    world = World(4, 4, limits(max_len=16))
    a, b = world.submit([0] * 4, 9), world.submit([1] * 5, 3)
    world.step()
    assert world.pool.free == 1
    a.drafts = [0] * 8
    plan = world.plan()
    assert plan.seqs == [a, b] and plan.drafts[0] == 0 and world.scheduler.preemptions == 0


def _items(plan: object) -> list[tuple[Sequence, int]]:
    return list(zip(plan.seqs, plan.counts, strict=True))  # type: ignore[attr-defined]


# ---------------------------------------------------------------- preemption


def _crowded(spare: int = 0) -> tuple[World, list[Sequence]]:
    """Three sequences that all need a block in the next step, when ``spare`` are free; a fourth waits for one."""
    world = World(6 + spare, 2, limits(max_len=12))
    seqs = [world.submit(p, 4) for p in ([1, 2, 3, 1], [2, 2, 1, 1], [3, 2, 0, 1])]
    world.step()
    assert world.pool.free == spare and len(world.scheduler.running) == 3
    return world, [*seqs, world.submit([1, 1], 1)]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    world, (a, b, c, d) = _crowded()
    plan = world.step()
    assert plan.seqs == [a, b] and world.scheduler.preemptions == 1
    assert c.status is Status.WAITING and c.blocks == [] and c.computed == 0 and c.row == -1
    assert world.waiting() == [c, d]
    admitted = []
    while len(admitted) < 2:
        admitted += [seq for seq in world.step().seqs if seq in (c, d) and seq not in admitted]
    assert admitted == [c, d]
    world.run()
    assert all(seq.output == world.expected(seq) for seq in (a, b, c, d))


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    """Not even who would fit: it would take what the preempted one needs."""
    world, (a, b, c, d) = _crowded(spare=1)
    assert world.step().seqs == [a, b]
    assert world.scheduler.preemptions == 1 and world.pool.free == 1
    assert c.status is d.status is Status.WAITING
    world.run()
    assert all(seq.output == world.expected(seq) for seq in (a, b, c, d))


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    world, (a, b, c, _) = _crowded(spare=1)
    world.step()
    world.abort(a)
    world.abort(b)
    world.step()
    assert c.computed == 5 and world.scheduler.prefix_hits == 2
    assert c.cached == 0, "what is told to the client is what its prompt found at its first admission"


def test_the_only_sequence_may_use_the_whole_pool() -> None:
    world = World(4, 2, limits(max_len=16))
    seq = world.submit([1, 1, 0], 6)  # ends at nine tokens: the KV of the last is never stored
    assert not world.scheduler.fits(3, 10) and world.scheduler.fits(3, 9)
    world.run()
    assert seq.output == world.expected(seq)


# ---------------------------------------------------------------- prefix cache


def _run_one(world: World, prompt: list[int], **params: object) -> Sequence:
    seq = world.submit(prompt, 2, **params)  # type: ignore[arg-type]
    world.run()
    return seq


@pytest.mark.parametrize(("length", "hit"), [(7, 4), (8, 4), (9, 8), (4, 0), (5, 4), (3, 0)])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    world = World(20, 4, limits())
    prompt = [1, 2, 3, 0, 1, 1, 2, 2, 3][:length]
    assert _run_one(world, prompt).cached == 0
    assert _run_one(world, prompt).cached == hit


def test_salts_do_not_share() -> None:
    world = World(20, 4, limits())
    prompt = [1, 2, 3, 0, 1, 1]
    assert _run_one(world, prompt, salt="a").cached == 0
    assert _run_one(world, prompt, salt="b").cached == 0
    assert _run_one(world, prompt, salt="").cached == 0
    assert _run_one(world, prompt, salt="a").cached == 4


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    world = World(20, 2, limits())
    _run_one(world, [1, 1, 2, 3, 0])
    assert _run_one(world, [0, 1, 2, 3, 0]).cached == 0
    assert _run_one(world, [1, 1, 2, 3, 1]).cached == 4


def test_a_request_for_prompt_logprobs_takes_no_hit_but_leaves_its_blocks() -> None:
    world = World(20, 2, limits())
    prompt = [1, 1, 2, 3, 0]
    _run_one(world, prompt)
    queries = world.scheduler.prefix_queries
    assert _run_one(world, prompt, prompt_logprobs=1).cached == 0
    assert world.scheduler.prefix_queries == queries
    world = World(20, 2, limits())
    _run_one(world, prompt, prompt_logprobs=1)
    assert _run_one(world, prompt).cached == 4


def test_output_is_shared_like_a_prompt() -> None:
    world = World(20, 2, limits())
    first = _run_one(world, [1, 1, 2])
    conversation = [*first.tokens, 0, 3]
    assert _run_one(world, conversation).cached == 4


def test_a_hit_on_free_blocks_counts_as_use_of_them() -> None:
    """The pool has three free blocks, two of which are the hit itself: four blocks are not to be had."""
    world = World(5, 2, limits(max_len=10))
    _run_one(world, [1, 2, 3, 0, 1])
    holder = world.submit([2, 2, 2], 4)
    plan = world.plan()
    assert plan.seqs == [holder]
    world.compute_and_update(plan)
    assert world.pool.free == 3
    seq = world.submit([1, 2, 3, 0, 1, 1, 0], 2)
    assert len(world.cached_prefix(seq)) == 2
    world.plan()
    assert seq.status is Status.WAITING


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    world = World(20, 2, limits(prefix_cache=False))
    _run_one(world, [1, 2, 3, 0, 1])
    assert not world.pool.by_hash
    assert _run_one(world, [1, 2, 3, 0, 1]).cached == 0
    assert world.scheduler.prefix_queries == 0


def test_blocks_of_rejected_drafts_are_let_go_and_never_published() -> None:
    world = World(20, 2, limits())
    prompt = [1, 2, 3, 1]
    seq = world.submit(prompt, 12)
    world.step()
    wrong = (world.expected(seq)[1] + 1) % VOCAB
    seq.drafts = [wrong] * 6
    before = world.pool.free
    plan = world.plan()
    assert plan.drafts == [6]
    world.compute_and_update(plan)
    assert seq.computed == 5 and len(seq.blocks) == 3
    assert world.pool.free == before - 1
    assert len(world.pool.by_hash) == 2  # those of the prompt


# ---------------------------------------------------------------- its own check


def _corruptions() -> dict[str, object]:
    def table(s: object) -> None:
        s.table[s.running[0].row, 0] += 1  # type: ignore[attr-defined]

    def waiting_with_blocks(s: object) -> None:
        s.waiting[0].computed = 2  # type: ignore[attr-defined]

    def miscounted(s: object) -> None:
        s.waiting_count += 1  # type: ignore[attr-defined]

    def same_row(s: object) -> None:
        s.running[0].row = s.running[1].row  # type: ignore[attr-defined]

    def row_lost(s: object) -> None:
        s._rows.pop()  # type: ignore[attr-defined]

    def row_twice(s: object) -> None:
        s._rows.append(s.running[0].row)  # type: ignore[attr-defined]

    def order(s: object) -> None:
        s.running.reverse()  # type: ignore[attr-defined]

    def young_runs(s: object) -> None:
        s.running[1].id = 99  # type: ignore[attr-defined]

    def status(s: object) -> None:
        s.running[0].status = Status.WAITING  # type: ignore[attr-defined]

    def computed(s: object) -> None:
        s.running[0].computed += 2  # type: ignore[attr-defined]

    def shared_unhashed(s: object) -> None:
        block = s.running[0].blocks[0]  # type: ignore[attr-defined]
        del s.pool.by_hash[s.pool.hash_of[block]]  # type: ignore[attr-defined]
        s.pool.hash_of[block] = None  # type: ignore[attr-defined]

    def shared_unfilled(s: object) -> None:
        for seq in s.running:  # type: ignore[attr-defined]
            seq.computed = 1
            s.pool.release(seq.blocks[1:])  # type: ignore[attr-defined]
            del seq.blocks[1:]

    return {name: corrupt for name, corrupt in locals().items()}


@pytest.mark.parametrize("name", sorted(_corruptions()))
def test_check_integrity_sees(name: str) -> None:
    world = World(20, 2, limits(max_seqs=3))
    _run_one(world, [1, 2, 0])
    world.submit([1, 2, 3], 8), world.submit([1, 2, 1], 8)
    world.step()
    first, second = world.scheduler.running
    assert first.blocks[0] == second.blocks[0]
    world.submit([1], 2)
    world.scheduler.check_integrity()
    _corruptions()[name](world.scheduler)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        world.scheduler.check_integrity()
