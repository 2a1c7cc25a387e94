"""LiteLLM's Router SDK without the proxy: the strategy set by the official call, asynchronous and synchronous."""

from __future__ import annotations

import asyncio

import pytest

litellm = pytest.importorskip("litellm")

from litellm import Router

from litellm_prefix_router.gateways.litellm.strategy import LiteLLMPrefixRouter
from litellm_prefix_router.gateways.litellm.tickets import note_of
from litellm_prefix_router.request import RoutingRequest
from litellm_prefix_router.settings import SettingsError, load_settings
from litellm_prefix_router.sim import SimConfig, SimReplica

from .conftest import until

LONG = "be helpful and brief, answer in whole sentences " * 30


@pytest.fixture
async def replicas():
    config = SimConfig(prefill_tokens_per_s=50_000, decode_tokens_per_s=500)
    first = SimReplica(config)
    found = [first, *(SimReplica(config, tokenizer=first.tokenizer) for _ in range(3))]
    for replica in found:
        await replica.start()
    yield found
    for replica in found:
        await replica.stop()


def deployment(replica, group="chat", **info):
    return {
        "model_name": group,
        "litellm_params": {"model": "hosted_vllm/tiny", "api_base": f"{replica.base_url}/v1", "api_key": "none"},
        "model_info": {"id": f"{group}-{replica.port}", **info},
    }


@pytest.fixture
def strategy(request):
    made = LiteLLMPrefixRouter(load_settings({"redis_url": f"memory://{request.node.name}", "deadline_ms": 1000}))
    yield made
    made.close()


def talk(i: int, text: str = "hello"):
    return [{"role": "system", "content": f"{i} {LONG}"}, {"role": "user", "content": text}]


async def followed(strategy, pool="tiny", count=4):
    async def check():
        roster = await strategy.service._reader().roster(pool)
        return sum(record.knowledge == "exact" for record in roster.values()) == count

    def loaded():
        return all(
            p.encoder is not None and p.encoder.state.startswith("ready") for p in strategy.service.fleet.pools.values()
        )

    await until(loaded, "the tokenizer")
    await until(check, "all replicas followed")


@pytest.fixture
def seen(strategy, monkeypatch):
    """Every receipt, in order."""
    receipts = []
    tally = strategy.service.tally
    decided = tally.decided
    monkeypatch.setattr(tally, "decided", lambda receipt: (receipts.append(receipt), decided(receipt)))
    return receipts


async def test_set_custom_routing_strategy_is_all_it_takes(replicas, strategy, seen):
    router = Router(model_list=[deployment(r) for r in replicas])
    router.set_custom_routing_strategy(strategy)
    await router.acompletion(model="chat", messages=talk(0), max_tokens=1)
    await followed(strategy)
    await router.acompletion(model="chat", messages=talk(1), max_tokens=1)

    async def matched():
        answer = await router.acompletion(model="chat", messages=talk(1, "again"), max_tokens=1)
        receipt = seen[-1]
        assert receipt.source == "exact"
        cached = answer.usage.prompt_tokens_details.cached_tokens
        return receipt.match_tokens > 200 and (receipt.match_tokens, cached)

    predicted, reported = await until(matched, "a match")
    assert predicted == reported
    await until(lambda: not strategy.service.router.ledger.loads(), "no load left")


async def test_synchronous_calls_are_routed_too(replicas, strategy, seen):
    router = Router(model_list=[deployment(r) for r in replicas])
    strategy.attach(router)
    await followed(strategy)
    for text in ("one", "two", "three"):
        answer = await asyncio.to_thread(router.completion, model="chat", messages=talk(2, text), max_tokens=1)
        # LiteLLM reports a synchronous call's end from a thread of its own
        await until(lambda: not strategy.service.router.ledger.loads(), "no load left")
    assert seen[-1].source == "exact"
    assert len({receipt.choice for receipt in seen[-2:]}) == 1
    assert answer.usage.prompt_tokens_details.cached_tokens > 200
    await until(lambda: not strategy.service.router.ledger.loads(), "no load left")


async def test_what_no_replica_answered_teaches_nothing(replicas, strategy, monkeypatch):
    """A fallback outside the pools, and LiteLLM's own response cache, report tokens that our replicas never saw."""
    told = []
    core = strategy.service.router
    finished = core.finished
    monkeypatch.setattr(
        core, "finished", lambda decision, cached=None: (told.append(cached), finished(decision, cached))
    )
    elsewhere = {
        "model_name": "hosted",
        "litellm_params": {"model": "openai/other", "api_key": "none", "mock_response": "from elsewhere"},
    }
    router = Router(
        model_list=[*(deployment(r) for r in replicas), elsewhere], fallbacks=[{"chat": ["hosted"]}], num_retries=0
    )
    strategy.attach(router)
    for replica in replicas:
        replica.faults.update({"fail_requests": 1000, "fail_status": 500})
    answer = await router.acompletion(model="chat", messages=talk(3), max_tokens=1)
    assert answer.choices[0].message.content == "from elsewhere"
    await until(lambda: told, "the end of the attempt that failed")
    await until(lambda: not core.ledger.loads(), "no load left")
    assert set(told) == {None}
    kwargs = {"cache_hit": True}
    request = RoutingRequest("chat", "/v1/chat/completions", {"messages": talk(4)}, [r.base_url for r in replicas])
    ticket = strategy.tickets.open(kwargs, await core.route(request), frozenset())
    strategy._succeeded(kwargs, {"usage": {"prompt_tokens_details": {"cached_tokens": 0}}})
    assert told[-1] is None and strategy.tickets.find(kwargs) is None and ticket.number


async def test_each_data_parallel_rank_is_a_replica(strategy, seen):
    """Two addresses of two ranks each are four caches: a conversation stays on its rank, which a header pins."""
    config = SimConfig(prefill_tokens_per_s=50_000, decode_tokens_per_s=500, data_parallel_size=2)
    async with SimReplica(config) as one, SimReplica(config, tokenizer=one.tokenizer) as two:
        router = Router(model_list=[deployment(one), deployment(two)])
        strategy.attach(router)
        await followed(strategy)
        for i in range(8):
            await router.acompletion(model="chat", messages=talk(i), max_tokens=1)
        for i in range(8):

            async def matched(i=i):
                answer = await router.acompletion(model="chat", messages=talk(i, "again"), max_tokens=1)
                receipt = seen[-1]
                assert receipt.source == "exact" and len(receipt.candidates) == 4
                cached = answer.usage.prompt_tokens_details.cached_tokens
                return receipt.match_tokens > 200 and (receipt.match_tokens, cached)

            predicted, reported = await until(matched, f"a match of conversation {i}")
            assert predicted == reported
        # new conversations are spread at random: all eight on one of four ranks would be a fault, not chance
        assert len({receipt.choice for receipt in seen}) > 1


async def test_streams_release_their_load(replicas, strategy, seen):
    router = Router(model_list=[deployment(r) for r in replicas])
    strategy.attach(router)
    await followed(strategy)
    stream = await router.acompletion(model="chat", messages=talk(3), max_tokens=5, stream=True)
    assert sum(load.requests for load in strategy.service.router.ledger.loads().values()) == 1
    async for _ in stream:
        pass
    await until(lambda: not strategy.service.router.ledger.loads(), "no load left")


async def test_a_retry_goes_elsewhere_and_releases_the_first(replicas, strategy, seen):
    router = Router(model_list=[deployment(r) for r in replicas], num_retries=2, cooldown_time=0.01, allowed_fails=100)
    strategy.attach(router)
    await followed(strategy)
    await router.acompletion(model="chat", messages=talk(4), max_tokens=1)
    home = seen[-1].choice
    next(r for r in replicas if r.base_url == home).faults.update({"fail_requests": 1, "fail_status": 500})
    await router.acompletion(model="chat", messages=talk(4, "again"), max_tokens=1)
    assert seen[-1].choice != home
    await until(lambda: not strategy.service.router.ledger.loads(), "no load left")


async def test_groups_that_are_not_ours_are_left_to_the_stock_strategy(replicas, strategy, seen):
    router = Router(
        model_list=[
            *(deployment(r) for r in replicas),
            deployment(replicas[0], group="single"),
            {
                "model_name": "hosted",
                "litellm_params": {"model": "openai/gpt-4o", "mock_response": "hi", "api_key": "x"},
            },
            {
                "model_name": "hosted",
                "litellm_params": {"model": "openai/gpt-4o-mini", "mock_response": "hi", "api_key": "x"},
            },
        ]
    )
    strategy.attach(router)
    await router.acompletion(model="single", messages=talk(5), max_tokens=1)
    await router.acompletion(model="hosted", messages=talk(5), max_tokens=1)
    assert seen == []


async def test_choice_is_among_what_litellm_leaves(replicas, strategy, seen):
    """`order` and cooldowns filter before the choice: the home of a prefix that LiteLLM excludes is not chosen."""
    entries = [deployment(r) for r in replicas]
    for entry in entries:
        entry["litellm_params"]["order"] = 2
    entries[1]["litellm_params"]["order"] = 1
    router = Router(model_list=entries)
    strategy.attach(router)
    for i in range(4):
        await router.acompletion(model="chat", messages=talk(i), max_tokens=1)
    assert {receipt.choice for receipt in seen} == {replicas[1].base_url}


async def test_a_changed_model_list_is_noticed(replicas, strategy, seen):
    router = Router(model_list=[deployment(r) for r in replicas[:2]])
    strategy.attach(router)
    await router.acompletion(model="chat", messages=talk(6), max_tokens=1)
    assert len(seen[-1].candidates) == 2
    router.set_model_list([deployment(r) for r in replicas])
    await router.acompletion(model="chat", messages=talk(6), max_tokens=1)
    assert len(seen[-1].candidates) == 4


async def test_the_request_carries_its_receipt_and_nothing_of_the_prompt(replicas, strategy, seen):
    router = Router(model_list=[deployment(r) for r in replicas])
    strategy.attach(router)
    metadata = {}
    await router.acompletion(model="chat", messages=talk(7), max_tokens=1, metadata=metadata)
    note = note_of({"metadata": metadata})
    assert note["receipt"] == seen[-1].header()
    assert "helpful" not in str(metadata.get("prefix_router"))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"prefix_router": {"event": "x"}}, "unknown option 'event'"),
        ({"prefix_router": "yes"}, "must be a mapping"),
    ],
)
def test_options_that_cannot_be_used_are_named(strategy, info, message):
    router = Router(
        model_list=[
            {
                "model_name": "chat",
                "litellm_params": {
                    "model": "hosted_vllm/tiny",
                    "api_base": f"http://127.0.0.1:{port}/v1",
                    "api_key": "x",
                },
                "model_info": info,
            }
            for port in (1, 2)
        ]
    )
    with pytest.raises(SettingsError, match=message):
        strategy.attach(router)
