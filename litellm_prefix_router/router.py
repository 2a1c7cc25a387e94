"""The pipeline from request to decision: prompt -> token ids -> block hashes -> lookup -> candidates -> policy.

Here, at the edge of `PrefixRouter.route`, the promise is kept that routing never makes a request fail: whatever breaks
or takes too long, the request is placed by what was learned until then, and the receipt says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import msgspec

from .decision import Decision, Receipt, Source
from .fleet.confidence import ConfidenceTracker
from .fleet.ledger import LoadLedger
from .fleet.placements import PlacementMemory
from .fleet.pool import Fleet, Pool
from .fleet.prefill_rate import PrefillRates
from .index.contract import IndexReader, IndexUnavailable, ReplicaLoad
from .knowledge import Knowledge, extend_chain, served_from_cache
from .patience import PatientTimeout
from .policy import Candidate, Policy, PolicyInput, policy_named
from .policy.chwbl import ConsistentHash
from .policy.least_load import LeastLoad
from .prompt.blocks import root_hash
from .prompt.encoded import PromptUnknown
from .prompt.fingerprint import BYTES_PER_TOKEN, CHUNK_BYTES, estimate_tokens, fingerprint_blocks
from .request import RoutingRequest
from .settings import Settings

logger = logging.getLogger("litellm_prefix_router")

PROMPT_PATHS = ("/completions", "/responses", "/messages")
"""Ends of the API paths whose requests prefill a prompt; others (embeddings, audio) are routed by load."""
TURNS = 24
"""Turns of a busy event loop within the deadline: a hop to a thread and five round trips to Redis take a dozen."""


class Observer(Protocol):
    """Told of every decision and every outcome (metrics, audit)."""

    def decided(self, receipt: Receipt) -> None: ...

    def finished(self, receipt: Receipt, cached_tokens: int | None) -> None: ...


class PrefixRouter:
    """Places requests. All collaborators are passed in; `clock` gives monotonic seconds, `rng` breaks ties."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        index: Callable[[], IndexReader],
        *,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        """`index` gives the reader that belongs to the running event loop."""
        self.settings = settings
        self.fleet = fleet
        self.ledger = LoadLedger(clock, settings.reservation_ttl_s)
        self.placements = PlacementMemory(clock)
        self.rates = PrefillRates(settings.prefill_tokens_per_s)
        self.confidence = ConfidenceTracker(clock)
        self.policy: Policy = policy_named(settings.policy)
        self._index = index
        self._observer = observer
        self._clock = clock
        self._rng = rng or Random()
        self._others: dict[str, tuple[float, dict[str, ReplicaLoad]]] = {}

    async def route(self, request: RoutingRequest) -> Decision:
        """The replica to send the request to, within the deadline; never raises but for cancellation.

        Needs at least one candidate. The chosen replica's load is reserved: call `finished` when the request ends.
        """
        started = self._clock()
        known = Knowledge()
        pool = self.fleet.pool(request.pool)
        try:
            async with PatientTimeout(self.settings.deadline_ms / 1000, slices=TURNS):
                await self._learn(pool, request, known)
        except TimeoutError:
            known.failed(f"{known.stage}_timeout")
        except Exception:
            logger.exception("routing stage %r failed; placed by the next best knowledge", known.stage)
            known.failed("internal_error")
        try:
            decision = self._decide(pool, request, known, started)
        except Exception:
            logger.exception("the policy failed; placed on the first candidate")
            decision = self._last_resort(request, started)
        if self._observer is not None:
            self._observer.decided(decision.receipt)
        return decision

    def first_token(self, decision: Decision) -> None:
        """The first output token came: the request's prefill no longer waits. Harmless when repeated."""
        seconds = self.ledger.first_token(decision.reservation)
        if seconds is not None:
            self.rates.observe(decision.replica_id, decision.queued_tokens, seconds)

    def moved(self, decision: Decision, replica_id: str) -> Decision:
        """The gateway's own retry had another replica serve the request: its load and its prompt are there now.

        Go on with the decision that is returned; the receipt stays the one of the choice.
        """
        self.ledger.release(decision.reservation)
        self.placements.place(replica_id, decision.chain)
        uncached = max(decision.receipt.prompt_tokens - decision.receipt.token_credit, 1)
        key = self.ledger.reserve(
            decision.receipt.pool,
            replica_id,
            prefill_tokens=uncached,
            active_tokens=decision.receipt.prompt_tokens,
        )
        return msgspec.structs.replace(decision, replica_id=replica_id, reservation=key, queued_tokens=0)

    def released(self, decision: Decision) -> None:
        """The request no longer loads its replica; `finished` may still follow. Harmless when repeated."""
        self.ledger.release(decision.reservation)

    def finished(self, decision: Decision, cached_tokens: int | None = None) -> None:
        """The request ended, in whatever way: call once. `cached_tokens` is what the engine reported, None if it did
        not."""
        self.ledger.release(decision.reservation)
        receipt = decision.receipt
        if cached_tokens is not None and receipt.tokens_by:
            if receipt.source is Source.EXACT:
                self.confidence.observe(decision.replica_id, receipt.agrees_with(cached_tokens))
            if cached_tokens > receipt.match_tokens and decision.block_size:
                # the response proves that the replica holds these blocks, whatever the events told
                self.placements.place(decision.replica_id, decision.chain[: cached_tokens // decision.block_size])
        if self._observer is not None:
            self._observer.finished(receipt, cached_tokens)

    # --- learning: each stage may fail or be cut off -------------------------------------------------------------

    async def _learn(self, pool: Pool | None, request: RoutingRequest, known: Knowledge) -> None:
        known.note = request.note
        if pool is not None:
            known.block_size, known.cache_name = pool.block_size, pool.cache_name
        if not self.policy.uses_prefix:
            known.failed("policy")
        elif pool is None:
            known.failed("unknown_pool")
        elif not request.path.endswith(PROMPT_PATHS):
            known.failed("not_a_prompt")
        else:
            await self._learn_prompt(pool, request, known)
        if pool is not None:
            await self._learn_index(known)

    async def _learn_prompt(self, pool: Pool, request: RoutingRequest, known: Knowledge) -> None:
        known.stage = "encode"
        started = self._clock()
        try:
            if pool.encoder is None:
                raise PromptUnknown("tokenizer_missing", pool.encoder_problem or "")
            encoded = await pool.encoder.encode(request.path, request.body)
        except PromptUnknown as unknown:
            known.failed(unknown.reason)
            self._learn_likeness(request, known)
            return
        except BaseException:
            self._learn_likeness(request, known)
            raise
        finally:
            known.timings_ms["encode"] = (self._clock() - started) * 1e3
        known.stage = "hash"
        started = self._clock()
        identity = encoded.identity
        root = root_hash(known.cache_name, identity.lora, identity.cache_salt)
        known.blocks = pool.encoder.blocks(encoded, known.cache_name, known.block_size)
        known.chain = extend_chain(known.blocks, root, encoded.opaque_tail)
        known.chain_unit_tokens = known.block_size
        known.prompt_tokens = len(encoded.token_ids)
        known.tokens_by = encoded.source
        known.note = encoded.note or known.note
        known.timings_ms["hash"] = (self._clock() - started) * 1e3

    def _learn_likeness(self, request: RoutingRequest, known: Knowledge) -> None:
        root = root_hash(known.cache_name, "\0likeness")
        known.chain = fingerprint_blocks(request.body, root)
        known.chain_unit_tokens = CHUNK_BYTES // BYTES_PER_TOKEN
        known.prompt_tokens = estimate_tokens(request.body)

    async def _learn_index(self, known: Knowledge) -> None:
        known.stage = "lookup"
        started = self._clock()
        try:
            known.lookup = await self._index().lookup(known.cache_name, known.blocks)
        except IndexUnavailable as unavailable:
            known.failed("index_unavailable")
            known.note = known.note or str(unavailable)
        else:
            self._others[known.cache_name] = (self._clock(), dict(known.lookup.loads))
        finally:
            known.timings_ms["lookup"] = (self._clock() - started) * 1e3

    # --- deciding: no awaiting below this line --------------------------------------------------------------------

    def _decide(self, pool: Pool | None, request: RoutingRequest, known: Knowledge, started: float) -> Decision:
        policy_started = self._clock()
        names = [name for name in request.candidates if name not in request.avoid] or list(request.candidates)
        candidates = self._candidates(pool, names, known)
        key = known.prefix_key
        if key is None and request.session:  # a body that cannot be read: its session still meets its cache
            key = root_hash(known.cache_name, "\0session", request.session)
        source, policy = self._rung(candidates, known, key)
        ranking = policy.rank(
            PolicyInput(
                candidates=candidates,
                prompt_tokens=known.prompt_tokens,
                prefix_key=key,
                sequence=next(pool.sequence) if pool is not None else 0,
                backlog_weight=self.settings.backlog_weight,
                backlog_weight_max=self.settings.backlog_weight_max,
            ),
            self._rng,
        )
        costs = ranking.costs
        best = candidates[ranking.order[0]]
        if source is Source.EXACT and best.knowledge != "exact":
            # what its indexer itself does not vouch for must not be called exact
            source = Source.APPROXIMATE
            known.failed("replica_without_events" if best.knowledge == "none" else f"replica_{best.knowledge}")
        credit = int(best.credit({}))
        uncached = max(known.prompt_tokens - credit, 1)
        now = self._clock()
        known.timings_ms["policy"] = (now - policy_started) * 1e3
        known.timings_ms["total"] = (now - started) * 1e3
        receipt = Receipt(
            request_id=request.request_id,
            pool=request.pool,
            policy=policy.name,
            source=source,
            reason=known.reason,
            choice=best.replica_id,
            prompt_tokens=known.prompt_tokens if known.tokens_by else 0,
            blocks=len(known.blocks),
            match_tokens=best.match_tokens,
            token_credit=credit,
            candidates=tuple(candidates),
            costs=tuple(costs or ()),
            timings_ms=known.timings_ms,
            tokens_by=known.tokens_by,
            note=known.note,
        )
        ahead_s = best.pending_prefill_tokens / best.prefill_tokens_per_s
        refused = request.max_wait_s is not None and ahead_s > request.max_wait_s
        if not refused:
            self._remember(pool, best.replica_id, known)
        return Decision(
            replica_id=best.replica_id,
            ranking=tuple(candidates[i].replica_id for i in ranking.order),
            receipt=receipt,
            reservation=self.ledger.reserve(
                request.pool, best.replica_id, prefill_tokens=uncached, active_tokens=known.prompt_tokens
            ),
            queued_tokens=best.pending_prefill_tokens + uncached,
            refused=refused,
            chain=tuple(known.blocks),
            block_size=known.block_size,
        )

    def _candidates(self, pool: Pool | None, names: Sequence[str], known: Knowledge) -> list[Candidate]:
        lookup = known.lookup
        others = lookup.loads if lookup is not None else self._last_others(known)
        candidates = []
        for name in names:
            mine, theirs = self.ledger.load(name), others.get(name)
            load = mine if theirs is None else mine + theirs
            candidates.append(self._candidate(pool, name, known, load))
        return candidates

    def _candidate(self, pool: Pool | None, name: str, known: Knowledge, load: ReplicaLoad) -> Candidate:
        lookup, unit, prompt_tokens = known.lookup, known.chain_unit_tokens, known.prompt_tokens
        knowledge = known.level_of(name)
        followed = knowledge != "none"
        # without events the memory of what was sent there has to do, for longer
        age_s = self.settings.placement_ttl_s if followed else self.settings.approximate_ttl_s
        recent = self.placements.match(name, known.chain, age_s)
        match = 0
        lower: dict[str, int] = {}
        if lookup is not None:
            recent = max(recent, lookup.recent.get(name, 0))
            if followed:
                match = lookup.matches.get(name, 0)
                for tier, held in lookup.lower.items():
                    lower[tier] = served_from_cache(held.get(name, 0), unit, prompt_tokens)
        replica = pool.replicas.get(name) if pool is not None else None
        return Candidate(
            replica_id=name,
            match_tokens=served_from_cache(match, unit, prompt_tokens) if match else 0,
            recent_tokens=served_from_cache(recent, unit, prompt_tokens) if recent else 0,
            lower_tokens=lower,
            knowledge=knowledge,
            confidence=self.confidence.of(name, knowledge, known.life_of(name)),
            requests=load.requests,
            pending_prefill_tokens=load.prefill_tokens,
            active_tokens=load.active_tokens,
            capacity_tokens=replica.facts.capacity_tokens if replica is not None else 0,
            prefill_tokens_per_s=self.rates.rate(name),
        )

    def _rung(self, candidates: Sequence[Candidate], known: Knowledge, prefix_key: int | None) -> tuple[Source, Policy]:
        """The best rung of the ladder that this knowledge reaches, and the policy that decides there."""
        if not self.policy.uses_prefix:
            return Source.LEAST_LOAD, self.policy
        followed = any(c.knowledge != "none" for c in candidates)
        if known.tokens_by and followed:
            return Source.EXACT, self.policy
        if known.tokens_by and known.lookup is not None:
            known.failed("no_events")
        if any(c.recent_tokens for c in candidates):
            return Source.APPROXIMATE, self.policy
        if prefix_key is not None:
            return Source.HASH, ConsistentHash()
        return Source.LEAST_LOAD, LeastLoad()

    def _last_others(self, known: Knowledge) -> dict[str, ReplicaLoad]:
        """The other gateways' loads as last read, while their lease would still hold."""
        when, loads = self._others.get(known.cache_name, (float("-inf"), {}))
        return loads if self._clock() - when <= self.settings.load_lease_s else {}

    def _remember(self, pool: Pool | None, choice: str, known: Knowledge) -> None:
        if pool is None or not known.chain:
            return
        self.placements.place(choice, known.chain)
        if known.lookup is not None and known.blocks:
            followed = known.level_of(choice) != "none"
            ttl_s = self.settings.placement_ttl_s if followed else self.settings.approximate_ttl_s
            self._index().place(known.cache_name, choice, known.blocks, ttl_s)

    def _last_resort(self, request: RoutingRequest, started: float) -> Decision:
        choice = min(request.candidates, key=lambda name: self.ledger.load(name).requests)
        receipt = Receipt(
            request_id=request.request_id,
            pool=request.pool,
            policy="least-load",
            source=Source.LEAST_LOAD,
            reason="internal_error",
            choice=choice,
            timings_ms={"total": (self._clock() - started) * 1e3},
        )
        key = self.ledger.reserve(request.pool, choice, prefill_tokens=0, active_tokens=0)
        return Decision(choice, tuple(request.candidates), receipt, key)
