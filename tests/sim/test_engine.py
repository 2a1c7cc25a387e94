"""Scheduling and memory: chunks, decode blocks, pressure, aborts; and what holds for any sequence of requests."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_prefix_router.sim.block_cache import BlockCache, Labels
from litellm_prefix_router.sim.engine import Engine, Request
from litellm_prefix_router.sim.hashing import BlockHasher
from litellm_prefix_router.sim.wire import AllBlocksCleared, BlockRemoved, BlockStored

SIZE = 4


def engine(num_blocks: int = 65, **options: int) -> Engine:
    return Engine(BlockCache(num_blocks, SIZE), BlockHasher(), **options)


def finish(target: Engine, *requests: Request) -> int:
    """Run to the end; the number of steps."""
    for request in requests:
        target.add(request)
    steps = 0
    while not target.idle:
        step = target.plan()
        assert step.work, "nothing can run"
        target.complete(step)
        steps += 1
    return steps


def request(length: int, answer: int = 1, first: int = 0, **options: object) -> Request:
    return Request(list(range(first, first + length)), list(range(9000, 9000 + answer)), **options)  # type: ignore[arg-type]


def test_a_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    target = engine(max_batched_tokens=8)
    long = request(20)
    target.add(long)
    steps = [target.plan() for _ in range(1)]
    target.complete(steps[0])
    assert steps[0].prefill_tokens == 8
    while not target.idle:
        steps.append(target.plan())
        target.complete(steps[-1])
    assert [step.prefill_tokens for step in steps] == [8, 8, 4]


def test_decodes_are_counted_apart_from_prefill() -> None:
    target = engine()
    target.add(request(6, answer=3))
    seen = []
    while not target.idle:
        step = target.plan()
        seen.append((step.prefill_tokens, step.decodes))
        target.complete(step)
    assert seen == [(6, 0), (0, 1), (0, 1)]


@pytest.mark.parametrize(("prompt", "answer", "stored"), [(3, 1, 0), (3, 2, 1), (4, 1, 1), (7, 5, 2), (7, 6, 3)])
def test_the_last_sampled_token_is_not_stored(prompt: int, answer: int, stored: int) -> None:
    target = engine()
    finish(target, request(prompt, answer))
    assert target.cache.copies == stored


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, cached: int) -> None:
    target = engine()
    finish(target, request(16))
    again = request(length)
    finish(target, again)
    assert again.cached_tokens == cached


def test_lora_and_salt_separate_caches() -> None:
    target = engine()
    kinds = [
        {},
        {"labels": Labels(cache_salt="a")},
        {"labels": Labels(cache_salt="b")},
        {"labels": Labels(lora_id=1, lora_name="x"), "lora_path": "/x"},
    ]
    for kind in kinds:
        for expected in (0, 8):
            one = request(9, **kind)
            finish(target, one)
            assert one.cached_tokens == expected


def test_a_request_waits_while_running_ones_hold_the_memory() -> None:
    target = engine(num_blocks=9)  # 8 usable: 32 tokens
    first, second = request(20, answer=3), request(20, first=100)
    target.add(first)
    target.add(second)
    target.complete(target.plan())
    assert (len(target.running), len(target.waiting)) == (1, 1)
    assert target.cache.usage == 5 / 8
    finish(target)
    assert first.finished and second.finished
    assert target.cache.usage == 0.0


def test_the_youngest_running_request_is_preempted_and_still_gets_its_whole_answer() -> None:
    target = engine(num_blocks=9)
    old, young = request(12, answer=12), request(12, answer=12, first=100)
    finish(target, old, young)
    assert target.stats.preemptions >= 1
    assert old.tokens[12:] == young.tokens[12:] == list(range(9000, 9012))
    assert target.cache.free == target.cache.capacity
    assert young.cached_tokens == 0  # of its first life


def test_an_abort_frees_memory_and_keeps_what_was_computed() -> None:
    target = engine()
    gone = request(9, answer=50)
    target.add(gone)
    step = target.plan()
    target.abort(gone)
    target.abort(gone)
    assert target.complete(step) == []
    assert target.idle and target.cache.free == target.cache.capacity
    again = request(9)
    finish(target, again)
    assert again.cached_tokens == 8
    assert target.stats.finished["abort"] == 1


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 2 blocks of 4"):
        engine(num_blocks=3).add(request(9))


def test_reset_is_refused_while_blocks_are_held_and_announced_once() -> None:
    target = engine()
    target.add(request(9, answer=2))
    target.plan()
    assert not target.reset()
    finish(target)
    target.take_events()
    assert target.reset()
    assert target.take_events() == [AllBlocksCleared()]
    again = request(9)
    finish(target, again)
    assert again.cached_tokens == 0


shapes = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 10), st.booleans()), min_size=1, max_size=25
)


@given(shapes, st.integers(12, 40), st.integers(3, 32))
def test_events_tell_exactly_what_is_held(shapes: list[tuple[int, int, int, bool]], blocks: int, budget: int) -> None:
    """Copies counted, the stored minus the removed are the cache's content, whatever ran and whatever was aborted."""
    target = engine(num_blocks=blocks, max_batched_tokens=budget)
    held: Counter[int | bytes] = Counter()
    for family, length, answer, abort in shapes:
        one = request(length, answer, first=family * 1000)
        target.add(one)
        if abort:
            target.plan()
            target.abort(one)
    finish(target)
    for event in target.take_events():
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or held[event.parent_block_hash] > 0
            assert len(event.token_ids) == SIZE * len(event.block_hashes)
            held.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                assert held[name] > 0
                held[name] -= 1
    assert held.total() == target.cache.copies <= target.cache.capacity
    assert target.cache.free == target.cache.capacity
