"""Batching rules with a clock that is moved by hand, and aborts of what waits."""

from __future__ import annotations

import time

from runtime.sequence import Sequence, Status
from tests.support.scheduling import World, limits


def _arrivals(world: World, count: int) -> list[Sequence]:
    return [world.submit([1, 2, n % 4], 3) for n in range(count)]


def test_continuous_batching_admits_at_every_step() -> None:
    world = World(40, 4, limits(max_seqs=3))
    a, b = _arrivals(world, 2)
    assert world.step().seqs == [a, b]
    (c,) = _arrivals(world, 1)
    assert c in world.step().seqs


def test_a_static_batch_runs_until_its_longest_is_done() -> None:
    world = World(40, 4, limits(max_seqs=4, batching="static", max_batch=2))
    short, long = world.submit([1], 1), world.submit([1, 2, 3], 8)
    rest = _arrivals(world, 3)
    assert world.step().seqs == [short, long]
    while long.status is Status.RUNNING:
        plan = world.step()
        assert plan.seqs == [long], "somebody joined a static batch"
    assert world.step().seqs == rest[:2]
    world.run()


def test_a_static_batch_takes_whoever_waits_when_it_is_made() -> None:
    world = World(40, 4, limits(max_seqs=4, batching="static"))
    a, b = _arrivals(world, 2)
    assert world.step().seqs == [a, b]
    (c,) = _arrivals(world, 1)
    assert world.step().seqs == [a, b]
    assert world.scheduler.next_admission() is None
    world.run()
    assert c.output == world.expected(c)


def test_a_static_batch_that_was_preempted_is_still_running() -> None:
    """The preempted one belongs to the batch: nobody joins before it is done."""
    world = World(5, 2, limits(max_len=10, max_seqs=2, batching="static"))
    a, b = world.submit([1, 2, 3], 5), world.submit([2, 2, 1], 5)
    world.step()
    late = _arrivals(world, 2)
    while b.status is not Status.FINISHED:
        assert not set(world.step().seqs) & set(late), "somebody joined a static batch"
    assert a.status is Status.FINISHED and world.scheduler.preemptions > 0
    assert world.step().seqs == late


def test_a_dynamic_batch_closes_when_it_is_full() -> None:
    world = World(40, 4, limits(batching="dynamic", max_batch=3, max_wait=10.0))
    seqs = _arrivals(world, 2)
    assert world.step().seqs == []
    seqs += _arrivals(world, 2)
    assert world.step().seqs == seqs[:3]
    assert seqs[3] not in world.step().seqs


def test_a_dynamic_batch_closes_a_while_after_its_first_request() -> None:
    world = World(40, 4, limits(batching="dynamic", max_batch=3, max_wait=10.0))
    (a,) = _arrivals(world, 1)
    assert world.scheduler.next_admission() == a.arrived + 10.0
    world.clock.now += 6
    (b,) = _arrivals(world, 1)
    assert world.step().seqs == []
    assert world.scheduler.next_admission() == a.arrived + 10.0
    world.clock.now = a.arrived + 9.99
    assert world.step().seqs == []
    world.clock.now = a.arrived + 10.0
    assert world.step().seqs == [a, b]
    assert world.scheduler.next_admission() is None


def test_the_next_dynamic_batch_starts_beside_the_one_that_runs() -> None:
    world = World(40, 4, limits(batching="dynamic", max_batch=2, max_wait=10.0))
    a, b = _arrivals(world, 2)
    assert world.step().seqs == [a, b]
    c, d = _arrivals(world, 2)
    assert world.step().seqs == [a, b, c, d]


def test_the_wait_of_a_batch_begins_with_the_first_that_is_still_there() -> None:
    world = World(40, 4, limits(batching="dynamic", max_batch=4, max_wait=10.0))
    (a,) = _arrivals(world, 1)
    world.clock.now += 6
    (b,) = _arrivals(world, 1)
    world.abort(a)
    assert world.scheduler.next_admission() == b.arrived + 10.0
    world.clock.now = a.arrived + 10.0
    assert world.step().seqs == []
    world.abort(b)
    assert world.scheduler.next_admission() is None


def test_a_closed_batch_that_finds_no_room_at_once_goes_on_entering() -> None:
    """Its members need no second closing, and those that came later wait for theirs."""
    world = World(40, 4, limits(batching="dynamic", max_batch=3, max_wait=10.0, max_tokens=4))
    seqs = _arrivals(world, 3)
    assert world.step().seqs == seqs[:2]
    (late,) = _arrivals(world, 1)
    seen = set()
    for _ in range(4):
        seen |= set(world.step().seqs)
    assert seqs[2] in seen and late not in seen


def test_a_preempted_sequence_needs_no_new_batch_and_closes_none() -> None:
    world = World(6, 2, limits(max_len=12, batching="dynamic", max_batch=3, max_wait=10.0))
    prompts = ([1, 2, 3, 1], [2, 2, 1, 1], [3, 2, 0, 1])
    a, b, c = (world.submit(p, 4) for p in prompts)
    assert world.step().seqs == [a, b, c]
    world.clock.now += 60
    (late,) = _arrivals(world, 1)
    assert world.step().seqs == [a, b] and c.status is Status.WAITING
    for seq in (a, b):
        world.abort(seq)
    assert world.step().seqs == [c]
    assert world.scheduler.next_admission() == late.arrived + 10.0
    assert world.step().seqs == [c], "the wait of the preempted one is not that of the next batch"
    world.clock.now = late.arrived + 10.0
    assert late in world.step().seqs


def test_whole_prompts_without_chunking() -> None:
    world = World(40, 4, limits(max_tokens=20, chunk=20, chunked_prefill=False, max_len=16))
    a, b, c = world.submit([0] * 12, 3), world.submit([1] * 10, 3), world.submit([2] * 2, 3)
    assert world.step().counts == [12]
    assert a.computed == 12 and b.status is Status.WAITING
    plan = world.step()
    assert plan.seqs == [a, b, c] and plan.counts == [1, 10, 2] and all(plan.samples)


# ---------------------------------------------------------------- aborts


def test_aborts_in_the_queue_are_forgotten_lazily() -> None:
    """Each is O(1), and the queue holds no more than twice as many dead as living."""
    world = World(40, 4, limits(max_seqs=1))
    seqs = [world.submit([n % 4], 2) for n in range(2000)]
    s = world.scheduler
    for n, seq in enumerate(seqs):
        if n % 10:
            s.finish(seq)
            assert len(s.waiting) <= 2 * s.waiting_count + 64
            assert seq.status is Status.FINISHED
    assert s.waiting_count == 200
    world.check_books()
    order = []
    while world.live():
        order += [seq for seq in world.step().seqs if seq not in order]
    assert order == seqs[::10]


def test_the_front_may_be_aborted() -> None:
    world = World(40, 4, limits(max_seqs=1))
    a, b, c, d = (world.submit([n], 4) for n in range(4))
    world.step()
    world.abort(b)
    world.abort(c)
    world.abort(a)
    assert world.step().seqs == [d]


def _crowded() -> tuple[World, list[Sequence]]:
    """Three sequences in a full pool that all need a block in the next step; a fourth waits."""
    world = World(6, 2, limits(max_len=12))
    seqs = [world.submit(p, 4) for p in ([1, 2, 3, 1], [2, 2, 1, 1], [3, 2, 0, 1])]
    world.step()
    return world, [*seqs, world.submit([1, 1], 1)]


def test_an_abort_of_a_preempted_sequence() -> None:
    world, (a, b, c, d) = _crowded()
    world.step()
    world.abort(c)
    assert world.waiting() == [d]
    world.abort(c)
    world.run()
    assert a.output and b.output and d.output


def test_a_long_queue_costs_a_step_nothing() -> None:
    world = World(40, 4, limits(max_seqs=2, max_len=32))
    a, b = (world.submit([1, 2], 30) for _ in range(2))
    world.step()
    for _ in range(20000):
        world.scheduler.add(Sequence(10**6, [1], a.params, limit=4))
    start = time.perf_counter()
    for _ in range(200):
        world.scheduler.schedule()
    assert (time.perf_counter() - start) / 200 < 1e-3
    del b
