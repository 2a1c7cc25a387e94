"""A gateway's running core: the router with everything around it that goes on in the background.

It asks replicas what they are, builds prompt encoders when the tokenizers' whereabouts are known, announces the
replicas to the indexers, publishes this gateway's load, and runs the embedded indexer. Gateways own one service each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import httpx

from . import __version__
from .background import BackgroundLoop
from .decision import Decision
from .encoders import EncoderShelf
from .fleet.confidence import CONFIDENCE
from .fleet.discovery import ReplicaFacts, ask_replica
from .fleet.pool import Fleet, Pool, Replica
from .index import open_reader
from .index.contract import IndexReader, IndexUnavailable, ReplicaLoad, ReplicaRecord
from .observe.metrics import Metrics, Tally
from .policy import policy_named
from .request import RoutingRequest
from .router import PrefixRouter
from .settings import Settings

if TYPE_CHECKING:
    from .events import EmbeddedIndexer

logger = logging.getLogger("litellm_prefix_router")

REDISCOVER_S = 30.0
RETRY_DISCOVERY_S = 1.0
COMPLETE_DISCOVERY_S = 5.0
TICK_S = 1.0
STATE_TTL_S = 6.0
_WARM_POLL_S = 0.05

_metrics_lock = threading.Lock()
_metrics: list[Metrics] = []


def process_metrics() -> Metrics:
    """The process's metrics: Prometheus knows each name once."""
    with _metrics_lock:
        if not _metrics:
            _metrics.append(Metrics())
        return _metrics[0]


def check_settings(settings: Settings) -> None:
    """Everything that can be known to be wrong before the first request. Raises SettingsError."""
    policy_named(settings.policy)
    open_reader(settings)


def _ask_again_s(facts: ReplicaFacts) -> float:
    if not facts.reachable:
        return RETRY_DISCOVERY_S
    return COMPLETE_DISCOVERY_S if facts.unanswered else REDISCOVER_S


class RouterService:
    """Start once, then route from any event loop or thread. Raises SettingsError for settings that cannot work."""

    def __init__(self, settings: Settings, *, gateway_id: str | None = None) -> None:
        check_settings(settings)
        self.settings = settings
        self.gateway_id = gateway_id or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self.tally = Tally(process_metrics())
        self.fleet = Fleet()
        self.encoders = EncoderShelf(settings)
        self.router = PrefixRouter(settings, self.fleet, self._reader, observer=self.tally)
        self.every_tick: list[Callable[[], object]] = [self.router.ledger.expire]
        self._readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, IndexReader] = weakref.WeakKeyDictionary()
        self._background = BackgroundLoop("prefix-router")
        self._indexer: EmbeddedIndexer | None = None
        self._started = False
        self._warm_by = 0.0
        self._started_at = time.time()
        self._told: set[str] = set()
        self._asked: dict[str, float] = {}
        """Replica address -> when it was asked last what it is."""

    def start(self) -> None:
        """Begin background work. Harmless when repeated."""
        if self._started:
            return
        self._started = True
        self._warm_by = time.monotonic() + self.settings.startup_wait_s
        for work in (self._discover, self._announce, self._publish_loads, self._publish_state, self._tick):
            self._background.submit(_forever(work))
        if self.settings.embedded_indexer:
            from .events import EmbeddedIndexer  # sockets and decoders: only where they are used

            self._indexer = EmbeddedIndexer(self.settings)
            self._indexer.start()

    def stop(self) -> None:
        """End background work and close connections."""
        if self._indexer is not None:
            self._indexer.stop()
        self._background.stop()
        self.encoders.close()
        self._started = False

    @property
    def warming(self) -> bool:
        """Whether a gateway that starts had better leave requests to others: a replica has yet to be asked what it is,
        or a tokenizer is being loaded. For `startup_wait_s` at most, and replicas that do not answer delay nothing."""
        return time.monotonic() < self._warm_by and any(
            any(replica.address not in self._asked for replica in pool.replicas.values())
            or (pool.encoder is not None and pool.encoder.state == "loading")
            for pool in self.fleet.pools.values()
        )

    async def warm_up(self) -> None:
        """Return when decisions on the running loop can be exact, or when it has taken `startup_wait_s`."""
        while self.warming:
            await asyncio.sleep(_WARM_POLL_S)
        await self.open_index()

    async def open_index(self) -> None:
        """Connect the running loop's reader and read the rosters: the first decision would not have the time."""
        while True:
            try:
                for name in self.fleet.by_cache_name():
                    await self._reader().roster(name)
                return
            except IndexUnavailable:  # slow only, perhaps: this process has just started
                if time.monotonic() > self._warm_by:
                    return
            await asyncio.sleep(_WARM_POLL_S)

    def set_pools(self, pools: Mapping[str, Pool]) -> None:
        """Replace the pools; what is known of replicas that stay is kept."""
        before = {name: r for pool in self.fleet.pools.values() for name, r in pool.replicas.items()}
        facts = {r.address: r.facts for r in before.values()}
        for pool in pools.values():
            for replica in pool.replicas.values():
                if not replica.facts.reachable and replica.address in facts:
                    replica.facts = facts[replica.address]
            pool.learned()
            self.encoders.equip(pool)
        gone = before.keys() - {r for pool in pools.values() for r in pool.replicas}
        for replica_id in gone:
            self.router.placements.forget(replica_id)
            self.router.confidence.forget(replica_id)
            self.router.rates.forget(replica_id)
            process_metrics().gone(replica_id)
        self.fleet.pools = dict(pools)

    def route_sync(self, request: RoutingRequest) -> Decision:
        """`route` for callers without an event loop."""
        return self._background.submit(self.router.route(request)).result()

    def _reader(self) -> IndexReader:
        loop = asyncio.get_running_loop()
        reader = self._readers.get(loop)
        if reader is None:
            for ended in [other for other in self._readers if other.is_closed()]:
                del self._readers[ended]  # its reader refers to it: neither would ever be collected
            reader = self._readers[loop] = open_reader(self.settings, self.gateway_id)
        return reader

    # --- background work ------------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Ask every replica what it is; again soon while one has not answered, and now and then later."""
        async with httpx.AsyncClient() as client:
            while True:
                now = time.monotonic()
                due: dict[str, list[Replica]] = {}
                for pool in self.fleet.pools.values():
                    for replica in pool.replicas.values():
                        wait_s = _ask_again_s(replica.facts)
                        if now - self._asked.get(replica.address, float("-inf")) >= wait_s:
                            due.setdefault(replica.address, []).append(replica)
                if due:
                    answers = await asyncio.gather(*(ask_replica(client, address) for address in due))
                    for replicas, facts in zip(due.values(), answers, strict=True):
                        for replica in replicas:
                            if facts.reachable:
                                replica.facts = facts.after(replica.facts)
                    for pool in self.fleet.pools.values():
                        pool.learned()
                        self.encoders.equip(pool)
                        self._tell(pool)
                    self._asked.update(dict.fromkeys(due, time.monotonic()))
                await asyncio.sleep(0.2)

    def _tell(self, pool: Pool) -> None:
        """Log each problem of a pool once, and once more if it comes back."""
        for line in pool.describe_problems():
            if line not in self._told:
                self._told.add(line)
                logger.warning("prefix-router: %s", line)

    async def _announce(self) -> None:
        """Tell the indexers which replicas to follow."""
        announced: dict[str, list[ReplicaRecord]] = {}
        last = float("-inf")
        while True:
            served = self.fleet.by_cache_name()
            wanted = {name: [self._record(r) for r in replicas] for name, replicas in served.items()}
            if wanted != announced or time.monotonic() - last > self.settings.announce_ttl_s / 3:
                try:
                    for name in announced.keys() - wanted.keys():
                        await self._reader().announce(name, [], self.settings.announce_ttl_s)
                    for name, records in wanted.items():
                        await self._reader().announce(name, records, self.settings.announce_ttl_s)
                    announced, last = wanted, time.monotonic()
                except IndexUnavailable:
                    pass  # tried again below; decisions report it
            await asyncio.sleep(0.2)

    def _record(self, replica: Replica) -> ReplicaRecord:
        return ReplicaRecord(
            replica_id=replica.replica_id,
            address=replica.address,
            dp_rank=replica.dp_rank,
            events=replica.events,
            replay=replica.replay,
            doubted_at=self.router.confidence.doubted_at(replica.replica_id),
        )

    async def _publish_state(self) -> None:
        """Say how this gateway is, for `prefix-router status` and in the metrics."""
        while True:
            for replica_id in {r for pool in self.fleet.pools.values() for r in pool.replicas}:
                level = self.router.confidence.current(replica_id)
                if level is not None:
                    process_metrics().believed(replica_id, CONFIDENCE[level])
            try:
                await self._reader().publish_state(self.gateway_id, json.dumps(self.state()).encode(), STATE_TTL_S)
            except IndexUnavailable:
                pass
            await asyncio.sleep(STATE_TTL_S / 3)

    def state(self) -> dict[str, object]:
        """This gateway for people and programs: pools, decisions so far, load; no prompt, no token ids."""
        confidence = self.router.confidence
        return {
            "gateway": self.gateway_id,
            "version": __version__,
            "policy": self.settings.policy,
            "started_at": self._started_at,
            "breaker": self._reader().breaker_state,
            "pools": {
                pool.name: {
                    "cache_name": pool.cache_name,
                    "block_size": pool.block_size,
                    "replicas": list(pool.replicas),
                    "tokenizer": pool.encoder_problem or (pool.encoder.state if pool.encoder else "not started"),
                    "problems": list(pool.describe_problems()),
                }
                for pool in self.fleet.pools.values()
            },
            "decisions": self.tally.as_dict(),
            "confidence": {
                r: {"level": confidence.current(r) or "none", "mismatch": round(confidence.mismatch(r), 3)}
                for p in self.fleet.pools.values()
                for r in p.replicas
            },
            "expired_reservations": self.router.ledger.expired,
            "loads": {name: [load.requests, load.prefill_tokens] for name, load in self.router.ledger.loads().items()},
        }

    async def _publish_loads(self) -> None:
        """Tell the other gateways this one's load: at once when it changed, else to renew the lease."""
        last: dict[str, Mapping[str, ReplicaLoad]] = {}
        renewed: dict[str, float] = {}
        while True:
            loads = self.router.ledger.loads()
            for name, replicas in self.fleet.by_cache_name().items():
                mine = {r.replica_id: loads[r.replica_id] for r in replicas if r.replica_id in loads}
                overdue = time.monotonic() - renewed.get(name, 0.0) > self.settings.load_lease_s / 3
                if mine != last.get(name) or overdue:
                    try:
                        await self._reader().publish_loads(name, self.gateway_id, mine, self.settings.load_lease_s)
                        last[name], renewed[name] = mine, time.monotonic()
                    except IndexUnavailable:
                        pass
            await asyncio.sleep(self.settings.load_publish_ms / 1e3)

    async def _tick(self) -> None:
        while True:
            for work in self.every_tick:
                work()
            await asyncio.sleep(TICK_S)


async def _forever(work: Callable[[], Awaitable[None]]) -> None:
    """Background work that fails is logged and begun again; decisions go on meanwhile."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("background work %s failed; beginning again", work.__name__)
            await asyncio.sleep(TICK_S)
