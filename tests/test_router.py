"""The pipeline's promise: every request is placed, by the best knowledge there is, and the receipt tells which."""

import asyncio
from random import Random

import pytest

from litellm_prefix_router.decision import Source
from litellm_prefix_router.fleet.discovery import ReplicaFacts
from litellm_prefix_router.fleet.pool import Fleet, Pool, Replica
from litellm_prefix_router.index.contract import IndexLookup, IndexUnavailable, ReplicaLoad, ReplicaRecord
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash
from litellm_prefix_router.prompt.encoded import CacheIdentity, EncodedPrompt, PromptUnknown
from litellm_prefix_router.request import RoutingRequest
from litellm_prefix_router.router import PrefixRouter
from litellm_prefix_router.settings import Settings

NAMES = tuple("abcd")
BLOCK = 16


class Encoder:
    """Token ids straight from the body, or a failure."""

    state = "ready"

    def __init__(self, failure: BaseException | None = None, wait_s: float = 0) -> None:
        self.failure, self.wait_s = failure, wait_s

    async def encode(self, path, body):
        await asyncio.sleep(self.wait_s)
        if self.failure is not None:
            raise self.failure
        identity = CacheIdentity(cache_salt=body.get("cache_salt"))
        return EncodedPrompt(as_token_ids(body["prompt"]), identity, "ids")

    def blocks(self, encoded, pool, block_size):
        root = root_hash(pool, encoded.identity.lora, encoded.identity.cache_salt)
        return chain_hashes(encoded.token_ids, block_size, root)


class Index:
    """What replicas hold, by token ids; every replica is followed unless told otherwise."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.loads: dict[str, ReplicaLoad] = {}
        self.knowledge = dict.fromkeys(NAMES, "exact")
        self.block_size = dict.fromkeys(NAMES, BLOCK)
        self.failure: BaseException | None = None
        self.wait_s = 0.0
        self.placed: list[tuple[str, str, int]] = []

    def hold(self, name: str, ids: list[int], salt: str | None = None) -> None:
        self.held[name] = chain_hashes(as_token_ids(ids), BLOCK, root_hash("m", None, salt))

    async def lookup(self, pool, blocks):
        await asyncio.sleep(self.wait_s)
        if self.failure is not None:
            raise self.failure
        matches = {}
        for name, held in self.held.items():
            count = 0
            while count < min(len(held), len(blocks)) and held[count] == blocks[count]:
                count += 1
            if count:
                matches[name] = count
        roster = {
            name: ReplicaRecord(name, name, slot=i, block_size=self.block_size[name], knowledge=knowledge)
            for i, (name, knowledge) in enumerate(self.knowledge.items())
            if knowledge != "absent"
        }
        return IndexLookup(matches=matches, loads=self.loads, roster=roster)

    def place(self, pool, replica_id, blocks, ttl_s):
        self.placed.append((pool, replica_id, len(blocks)))


def build(index: Index | None = None, encoder: Encoder | None = None, **settings):
    index = index or Index()
    replicas = {name: Replica(name, name, "m", facts=ReplicaFacts(block_size=BLOCK)) for name in NAMES}
    pool = Pool("chat", replicas, encoder=encoder or Encoder())
    router = PrefixRouter(Settings(**settings), Fleet([pool]), lambda: index, rng=Random(1))
    return router, index


def ask(ids=(), path="/v1/completions", **more) -> RoutingRequest:
    fields = {"pool": "chat", "path": path, "body": {"prompt": list(ids)}, "candidates": NAMES, **more}
    return RoutingRequest(**fields)


PROMPT = list(range(100, 165))  # four blocks and a token


async def test_goes_where_the_prefix_is_and_says_so():
    router, index = build()
    index.hold("c", PROMPT)
    decision = await router.route(ask(PROMPT))
    receipt = decision.receipt
    assert (decision.replica_id, receipt.source, receipt.reason) == ("c", Source.EXACT, "ok")
    assert (receipt.match_tokens, receipt.prompt_tokens, receipt.blocks) == (64, 65, 4)
    assert set(decision.ranking) == set(NAMES)
    assert router.ledger.load("c") == ReplicaLoad(1, 1, 65)
    router.finished(decision, cached_tokens=64)
    assert router.ledger.loads() == {}


async def test_the_last_token_is_never_from_the_cache():
    router, index = build()
    index.hold("b", PROMPT[:64])
    decision = await router.route(ask(PROMPT[:64]))
    assert decision.receipt.match_tokens == 48


async def test_another_salt_is_another_cache():
    router, index = build()
    index.hold("c", PROMPT, salt="s")
    body = {"prompt": PROMPT, "cache_salt": "s"}
    assert (await router.route(ask(PROMPT, body=body))).receipt.match_tokens == 64
    assert (await router.route(ask(PROMPT))).receipt.match_tokens == 0


async def test_siblings_that_arrive_together_go_together_before_any_event():
    router, _ = build()
    long = list(range(4001))
    decisions = [await router.route(ask(long)) for _ in range(6)]
    assert len({d.replica_id for d in decisions}) == 1
    assert all(d.receipt.source is Source.EXACT for d in decisions)


async def test_load_of_other_gateways_counts():
    router, index = build()
    index.hold("a", PROMPT)
    index.loads = {"a": ReplicaLoad(50, 400_000, 400_000)}
    assert (await router.route(ask(PROMPT))).replica_id != "a"


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda router, index: setattr(index, "failure", IndexUnavailable("no answer")), "index_unavailable"),
        (lambda router, index: setattr(index, "failure", RuntimeError("bug")), "internal_error"),
        (lambda router, index: setattr(index, "wait_s", 60), "lookup_timeout"),
    ],
)
async def test_without_the_index_recent_placements_still_count(break_it, reason):
    router, index = build()
    first = await router.route(ask(PROMPT))
    router.finished(first)
    break_it(router, index)
    again = await router.route(ask(PROMPT))
    assert again.receipt.source is Source.APPROXIMATE
    assert again.receipt.reason == reason
    assert again.replica_id == first.replica_id
    other = await router.route(ask(range(5000, 5100)))
    assert other.receipt.source is Source.HASH


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (PromptUnknown("tokenizer_loading"), "tokenizer_loading"),
        (PromptUnknown("refused", "tools must not be empty"), "refused"),
        (RuntimeError("bug"), "internal_error"),
    ],
)
async def test_without_tokens_the_text_decides(failure, reason):
    router, _ = build(encoder=Encoder(failure))
    body = {"messages": [{"role": "user", "content": "hello " * 400}]}
    first = await router.route(ask(path="/v1/chat/completions", body=body))
    router.finished(first)
    again = await router.route(ask(path="/v1/chat/completions", body=body))
    assert (first.receipt.source, again.receipt.source) == (Source.HASH, Source.APPROXIMATE)
    assert first.receipt.reason == again.receipt.reason == reason
    assert first.replica_id == again.replica_id


async def test_a_slow_tokenizer_costs_the_deadline_and_no_more():
    router, _ = build(encoder=Encoder(wait_s=60), deadline_ms=10)
    decision = await asyncio.wait_for(router.route(ask(PROMPT)), 5)
    assert decision.receipt.reason == "encode_timeout"
    assert decision.receipt.source is not Source.EXACT


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": 7},
        {"messages": [None, 3, {"role": []}]},
        {"prompt": ""},
        {"messages": [{"role": "user", "content": "\ud800 lone"}]},
        {"messages": [{"role": "user", "content": "x" * 5_000_000}]},
    ],
)
async def test_odd_bodies_are_placed(body):
    router, _ = build(encoder=Encoder(PromptUnknown("malformed")))
    decision = await router.route(ask(path="/v1/chat/completions", body=body))
    assert decision.replica_id in NAMES and decision.receipt.reason == "malformed"


async def test_embeddings_are_placed_by_load():
    router, index = build()
    index.loads = {name: ReplicaLoad(3, 3, 3) for name in "abd"}
    decision = await router.route(ask(path="/v1/embeddings", body={"input": "text"}))
    assert (decision.replica_id, decision.receipt.source) == ("c", Source.LEAST_LOAD)
    assert decision.receipt.reason == "not_a_prompt"


async def test_a_replica_without_events_lives_on_placements_beside_exact_ones():
    router, index = build()
    index.knowledge["a"] = "none"
    index.hold("a", PROMPT)  # must not count: nobody keeps it true
    decision = await router.route(ask(PROMPT, candidates=("a",)))
    assert decision.receipt.source is not Source.EXACT
    assert decision.receipt.match_tokens == 0
    router.finished(decision)
    again = await router.route(ask(PROMPT))
    assert (again.replica_id, again.receipt.source) == ("a", Source.APPROXIMATE)
    assert again.receipt.reason == "replica_without_events"


@pytest.mark.parametrize("knowledge", ["degraded", "stale"])
async def test_what_the_indexer_does_not_vouch_for_is_not_called_exact(knowledge):
    router, index = build()
    index.hold("c", PROMPT)
    index.knowledge["c"] = knowledge
    receipt = (await router.route(ask(PROMPT, candidates=("c",)))).receipt
    assert (receipt.source, receipt.reason) == (Source.APPROXIMATE, f"replica_{knowledge}")
    assert receipt.match_tokens == 64


async def test_another_block_size_makes_a_replica_unknown():
    router, index = build()
    index.hold("d", PROMPT)
    index.block_size["d"] = 32
    decision = await router.route(ask(PROMPT))
    assert {c.replica_id: c.match_tokens for c in decision.receipt.candidates}["d"] == 0


async def test_a_failed_replica_is_avoided_unless_it_is_the_last():
    router, index = build()
    index.hold("c", PROMPT)
    assert (await router.route(ask(PROMPT, avoid=frozenset("c")))).replica_id != "c"
    assert (await router.route(ask(PROMPT, avoid=frozenset("c"), candidates=("c",)))).replica_id == "c"


async def test_wrong_predictions_cost_a_replica_its_credit():
    router, index = build()
    index.hold("c", PROMPT)
    for _ in range(20):
        decision = await router.route(ask(PROMPT, candidates=("c",)))
        router.finished(decision, cached_tokens=0)
    assert router.confidence.level("c", "exact") == "stale"
    router.placements.forget("c")
    decision = await router.route(ask(PROMPT))
    assert decision.receipt.token_credit < 64


async def test_an_unknown_pool_is_placed():
    router, _ = build()
    decision = await router.route(ask(PROMPT, pool="nobody"))
    assert decision.replica_id in NAMES and decision.receipt.reason == "unknown_pool"


async def test_a_policy_that_fails_does_not_fail_the_request():
    router, _ = build()

    class Broken:
        name, uses_prefix = "broken", True

        def rank(self, given, rng):
            raise ZeroDivisionError

    router.policy = Broken()
    decision = await router.route(ask(PROMPT))
    assert decision.replica_id in NAMES and decision.receipt.reason == "internal_error"
    router.finished(decision)
    assert router.ledger.loads() == {}


async def test_cancelling_the_caller_cancels_and_reserves_nothing():
    router, index = build(deadline_ms=60_000)
    index.wait_s = 60
    task = asyncio.create_task(router.route(ask(PROMPT)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.ledger.loads() == {}


async def test_the_receipt_header_holds_no_prompt():
    router, index = build()
    index.hold("c", PROMPT)
    header = (await router.route(ask(PROMPT))).receipt.header()
    assert header.startswith("replica=c; source=exact; match=64/65; policy=least-cost; reason=ok; ms=")


async def test_what_would_wait_too_long_is_refused_and_not_remembered():
    router, index = build()
    long = list(range(80_001))
    idle = await router.route(ask(long, max_wait_s=0.5))
    assert not idle.refused  # its own prefill is no wait
    index.loads = {name: ReplicaLoad(9, 10_000_000, 0) for name in NAMES}
    index.placed.clear()
    other = list(range(7, 80_008))
    decision = await router.route(ask(other, max_wait_s=0.5))
    router.finished(decision)
    assert decision.refused and index.placed == []
    again = await router.route(ask(other))
    assert not again.refused and again.receipt.token_credit == 0


async def test_what_cannot_be_read_is_placed_by_its_session():
    router, _ = build()
    seen: dict[str, set[str]] = {}
    for _ in range(4):
        for session in map(str, range(16)):
            decision = await router.route(ask(body={}, path="/v1/audio", session=session))
            router.finished(decision)
            seen.setdefault(session, set()).add(decision.replica_id)
            assert decision.receipt.source is Source.HASH
    assert all(len(choices) == 1 for choices in seen.values())
    assert set.union(*seen.values()) == set(NAMES)


async def test_placements_on_replicas_without_events_are_told_for_as_long_as_they_count():
    router, index = build(placement_ttl_s=30.0, approximate_ttl_s=600.0)
    told = []
    index.place = lambda pool, replica_id, blocks, ttl_s: told.append(ttl_s)
    await router.route(ask(PROMPT))
    index.knowledge = dict.fromkeys(NAMES, "none")
    await router.route(ask(PROMPT))
    assert told == [30.0, 600.0]
