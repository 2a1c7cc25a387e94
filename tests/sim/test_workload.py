"""The traffic is what it says: reproducible, ordered, growing sessions, shared system prompts, one-off prompts."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from litellm_prefix_router.sim.answers import Babble
from litellm_prefix_router.sim.ideal import IdealCache, ideal_hit_rate
from litellm_prefix_router.sim.tokenizer import SimTokenizer
from litellm_prefix_router.sim.workload import Message, TimedRequest, Workload, drive


def test_the_same_seed_gives_the_same_traffic() -> None:
    assert Workload(seed=3, requests=50).schedule() == Workload(seed=3, requests=50).schedule()
    assert Workload(seed=3, requests=50).schedule() != Workload(seed=4, requests=50).schedule()


def test_arrivals_come_in_order_and_at_the_rate() -> None:
    schedule = Workload(requests=2000, rate=20).schedule()
    times = [request.at_s for request in schedule]
    assert times == sorted(times)
    assert [request.index for request in schedule] == list(range(2000))
    assert times[-1] == pytest.approx(100, rel=0.1)


def test_sessions_grow_turn_by_turn() -> None:
    schedule = Workload(requests=400).schedule()
    last: dict[str, TimedRequest] = {}
    for request in schedule:
        before = last.get(request.session)
        assert request.previous == (None if before is None else before.index)
        assert request.turn == (0 if before is None else before.turn + 1)
        if before is not None:
            assert request.questions[:-1] == before.questions
            assert request.system == before.system
            assert request.at_s - before.at_s >= 2.0
        last[request.session] = request
    assert max(request.turn for request in schedule) >= 5


def test_tenants_share_a_system_prompt_and_one_offs_share_nothing() -> None:
    schedule = Workload(requests=1000, tenants=4).schedule()
    systems = {
        request.tenant: {item.system for item in schedule if item.tenant == request.tenant} for request in schedule
    }
    assert {len(group) for group in systems.values()} == {1}
    one_offs = [request for request in schedule if request.tenant is None]
    assert 60 <= len(one_offs) <= 140
    assert len({request.questions[0][:20] for request in one_offs}) == len(one_offs)
    popularity = Counter(request.tenant for request in schedule if request.tenant is not None)
    assert popularity[0] > 2 * popularity[3]


def test_system_prompts_have_the_promised_length(tokenizer: SimTokenizer) -> None:
    schedule = Workload(requests=300).schedule()
    lengths = [len(tokenizer.encode(system)) for system in {request.system for request in schedule} if system]
    assert all(400 < length < 2600 for length in lengths)
    assert max(lengths) > 1000


def test_messages_continue_the_answers() -> None:
    follow_up = next(request for request in Workload().schedule() if request.turn == 2)
    roles = [message["role"] for message in follow_up.messages(["one", "two"])]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    with pytest.raises(ValueError, match="continues 2 answers"):
        follow_up.messages(["one"])


async def test_drive_sends_a_turn_only_after_the_previous_answer() -> None:
    schedule = Workload(requests=60, rate=2000, sessions=4, min_gap_s=0, think_s=(0, 0.001)).schedule()
    done: set[int] = set()
    failed: list[int] = []

    async def send(request: TimedRequest, messages: list[Message]) -> str:
        assert request.previous is None or request.previous in done
        if request.previous is not None and request.previous not in failed:
            assert messages[-2]["content"] == f"answer {request.previous}"
        await asyncio.sleep(0.001)
        done.add(request.index)
        if request.index % 10 == 5:
            failed.append(request.index)
            raise ConnectionError(str(request.index))
        return f"answer {request.index}"

    results = await drive(schedule, send)
    assert done == set(range(60))
    assert [index for index, error in enumerate(results) if error] == sorted(failed)


def test_answers_come_back_as_the_same_tokens(tokenizer: SimTokenizer) -> None:
    babble = Babble(tokenizer)
    prompt = tokenizer.chat({"messages": [{"role": "user", "content": "Hello"}]})
    answer = babble(prompt, 300, stop=False)
    turn = {"role": "assistant", "content": tokenizer.decode(answer)}
    again = tokenizer.chat({"messages": [{"role": "user", "content": "Hello"}, turn]})
    assert again[: len(prompt) + 300] == prompt + answer
    assert babble(prompt, 300, stop=False) == answer
    stopped = babble(prompt, 20, stop=True)
    assert len(stopped) == 20 and stopped[-1] == tokenizer.eos_id


def test_the_ideal_cache_counts_every_token_once() -> None:
    cache = IdealCache(usable_blocks=100, block_size=4)
    assert cache.serve(range(20), range(100, 105)) == 0
    assert cache.serve([*range(20), *range(100, 105), 7]) == 24
    assert cache.serve(range(20)) == 16
    assert cache.serve(range(50, 70)) == 0


def test_the_ideal_cache_evicts_when_it_is_full() -> None:
    cache = IdealCache(usable_blocks=10, block_size=4)
    cache.serve(range(21))
    cache.serve(range(100, 121))
    assert cache.serve(range(100, 121)) == 20
    assert cache.serve(range(21)) < 20
    assert cache.serve(range(1000)) <= 20


def test_the_ideal_hit_rate_weighs_by_tokens() -> None:
    requests = [(range(17), ()), (range(17), ()), (range(100, 134), ())]
    assert ideal_hit_rate(requests, usable_blocks=100, block_size=16) == 16 / 68
    assert ideal_hit_rate([], usable_blocks=100, block_size=16) == 0.0


def test_the_ideal_is_high_for_this_traffic(tokenizer: SimTokenizer) -> None:
    babble = Babble(tokenizer)
    answers: dict[str, list[str]] = {}
    pairs = []
    for request in Workload(requests=120, system_words=(300, 600)).schedule():
        given = answers.setdefault(request.session, [])
        prompt = tokenizer.chat({"messages": request.messages(given)})
        answer = babble(prompt, request.max_tokens, stop=False)
        given.append(tokenizer.decode(answer))
        pairs.append((prompt, answer))
    assert ideal_hit_rate(pairs, usable_blocks=8000, block_size=16) > 0.6
    assert ideal_hit_rate(pairs, usable_blocks=300, block_size=16) < 0.6
