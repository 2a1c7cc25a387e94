"""The indexer: shares the announced replicas with other indexers by lease, follows them, keeps the index true.

Several may run; each holds its fair share of every pool. When one dies its leases lapse and the others take its
replicas over, each from the last snapshot plus the replay buffer, into the same slot: readers notice nothing. A
paused one that comes back is fenced. After Redis was emptied everything is written again from the trackers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from typing import Any

import httpx
import msgspec

from ..index import open_writer
from ..index.contract import Fenced, IndexUnavailable, IndexWriter, ReplicaRecord
from ..settings import Settings
from .follower import Follower
from .outputs import Output
from .subscriber import SubscriberHub
from .writing import PoolWriting

logger = logging.getLogger("litellm_prefix_router.events")

_ABSENT_ROUNDS = 3
"""A replica that no gateway announces for this many rounds is retired."""
_RETRY_S = 0.1
_TRANSFERS = 4
"""Snapshots under way to or from Redis at once: several hide its latency, many would starve the leases."""


class _PoolWork:
    """One pool at this indexer."""

    def __init__(self, writing: PoolWriting, flusher: asyncio.Task[None]) -> None:
        self.writing = writing
        self.flusher = flusher
        self.followers: dict[str, Follower] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.absent: dict[str, int] = {}
        self.epoch = ""
        self.grace_until = 0.0
        self.handing_over = False
        self.renewed_at: dict[str, float] = {}
        self.saved_at: dict[str, float] = {}


class Indexer:
    """`run` until `stop`; both belong to one event loop. Raises SettingsError for a bad `redis_url`."""

    def __init__(self, settings: Settings, *, indexer_id: str | None = None, writer: IndexWriter | None = None) -> None:
        self.settings = settings
        self.indexer_id = indexer_id or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(2).hex()}"
        self._writer = writer if writer is not None else open_writer(settings)
        self._pools: dict[str, _PoolWork] = {}
        self._stopping = asyncio.Event()
        self._reachable = True
        self._background: set[asyncio.Task[None]] = set()
        self._transfers = asyncio.Semaphore(_TRANSFERS)

    @property
    def following(self) -> dict[str, list[ReplicaRecord]]:
        """Pool -> records of the replicas that this indexer holds."""
        return {name: [f.record for f in work.followers.values()] for name, work in self._pools.items()}

    def stop(self) -> None:
        """Drain: save the trackers, give the leases up, end `run`."""
        self._stopping.set()

    async def run(self) -> None:
        interval = self.settings.indexer_lease_s / 3
        self._hub = SubscriberHub(busy=self._busy)
        self._client = httpx.AsyncClient()
        try:
            while not self._stopping.is_set():
                await self._round()
                try:
                    await asyncio.wait_for(self._stopping.wait(), interval)
                except TimeoutError:
                    pass
            await self._drain()
        finally:
            for work in self._pools.values():
                work.flusher.cancel()
                for task in work.tasks.values():
                    task.cancel()
                for follower in work.followers.values():
                    follower.close()
            for task in self._background:
                task.cancel()
            self._hub.close()
            await self._client.aclose()
            await self._writer.close()

    def _busy(self) -> bool:
        """So many writes wait that frames had better wait, too: in ZMQ, where there is a bound."""
        return any(w.writing.backlog_blocks > self.settings.write_backlog_blocks // 4 for w in self._pools.values())

    async def _round(self) -> None:
        """Renew, claim, release, and look after what is held."""
        try:
            listed = set(await self._writer.pools())
            for pool in self._pools.keys() - listed:
                if not self._pools[pool].followers:  # its gateways are long gone, and all its replicas are retired
                    self._pools.pop(pool).flusher.cancel()
            # all at once: one after another, a slow Redis would cost more than a lease
            await _at_once(map(self._tend, listed | self._pools.keys()))
        except IndexUnavailable as error:
            if self._reachable:
                logger.warning("indexer %s: %s", self.indexer_id, error)
            self._reachable = False
        else:
            if not self._reachable:
                logger.warning("indexer %s: Redis answers again", self.indexer_id)
            self._reachable = True

    async def _tend(self, pool: str) -> None:
        work = self._pools.get(pool)
        if work is None:
            writing = PoolWriting(pool, self._writer, self.settings)
            work = self._pools[pool] = _PoolWork(writing, asyncio.create_task(writing.run()))
        announced, roster = await asyncio.gather(self._writer.announced(pool), self._writer.roster(pool))
        wanted = dict.fromkeys((*announced, *roster), 0) | {n: f.fence for n, f in work.followers.items()}
        if not wanted:
            return
        claim = await self._writer.claim(pool, self.indexer_id, wanted, self.settings.indexer_lease_s)
        lost = (work.followers.keys() - claim.renewed) | work.writing.fenced
        work.writing.fenced.clear()
        emptied = bool(work.epoch) and claim.epoch != work.epoch
        work.epoch = claim.epoch
        for name in lost:
            follower = work.followers.get(name)
            if follower is not None and name in claim.claimed:
                follower.fence = claim.claimed[name]  # nobody had taken it: the lease was lost with Redis's memory
                work.writing.write_anew(follower)
            elif follower is not None:
                logger.warning("indexer %s: lost the lease on %s", self.indexer_id, name)
                self._leave(work, name)
        if emptied:
            # gateways announce again within a third of their lease; until then absence means nothing
            work.grace_until = time.monotonic() + self.settings.announce_ttl_s
            logger.warning("indexer %s: the index of %s was lost; writing it again from memory", self.indexer_id, pool)
            for follower in work.followers.values():
                if follower.record.slot is not None:
                    work.writing.write_anew(follower)
                else:
                    work.writing.changed(follower, True)
        for name, fence in claim.claimed.items():
            if name not in work.followers:
                self._take(work, pool, announced.get(name) or roster[name], roster.get(name), fence)
        for name, follower in list(work.followers.items()):
            told = announced.get(name)
            if told is None:
                continue
            follower.doubt(told.doubted_at)
            if (told.events, told.replay) != (follower.record.events, follower.record.replay):
                self._leave(work, name)  # the operator has named another event socket
                self._take(work, pool, told, roster.get(name), follower.fence)
        await self._retire_absent(work, pool, announced)
        surplus = len(work.followers) - claim.fair_share
        if surplus > 0 and claim.indexers > 1 and not work.handing_over:
            work.handing_over = True
            self._spawn(self._hand_over(work, pool, list(work.followers)[-surplus:]))
        self._look_after(work, pool)

    def _take(self, work: _PoolWork, pool: str, record: ReplicaRecord, known: ReplicaRecord | None, fence: int) -> None:
        record = msgspec.structs.replace(
            record,
            slot=known.slot if known else None,
            incarnation=known.incarnation if known else 0,
            epoch=known.epoch if known else "",
            block_size=record.block_size or (known.block_size if known else 0),
            indexer=self.indexer_id,
            knowledge="none",
            note="event stream not found yet",
        )
        writing = work.writing

        def on_output(follower: Follower, output: Output) -> None:
            writing.put(follower, output)

        follower = Follower(pool, record, fence, self.settings, self._hub, self._client, on_output, writing.changed)
        work.followers[record.replica_id] = follower
        task = work.tasks[record.replica_id] = asyncio.create_task(self._follow(pool, follower))
        task.add_done_callback(_report)
        now = time.monotonic()
        work.renewed_at[record.replica_id] = work.saved_at[record.replica_id] = now

    async def _follow(self, pool: str, follower: Follower) -> None:
        while True:
            try:
                async with self._transfers:
                    snapshot = await self._writer.load_snapshot(pool, follower.replica_id)
                break
            except IndexUnavailable:
                await asyncio.sleep(_RETRY_S)
        await follower.run(snapshot)

    async def _retire_absent(self, work: _PoolWork, pool: str, announced: Mapping[str, ReplicaRecord]) -> None:
        # with no gateway left at all there is nobody to serve and no hurry
        rounds = _ABSENT_ROUNDS if announced else 3 * self.settings.announce_ttl_s / self.settings.indexer_lease_s
        gone: dict[str, int] = {}
        for name in list(work.followers):
            if name in announced or time.monotonic() < work.grace_until:
                work.absent.pop(name, None)
                continue
            work.absent[name] = work.absent.get(name, 0) + 1
            if work.absent[name] >= rounds:
                gone[name] = work.followers[name].fence
                self._leave(work, name)
        await _at_once(self._retire(pool, name, fence) for name, fence in gone.items())

    async def _retire(self, pool: str, name: str, fence: int) -> None:
        try:
            await self._writer.retire(pool, name, fence)
        except Fenced:
            pass

    async def _hand_over(self, work: _PoolWork, pool: str, names: list[str]) -> None:
        """Beside the rounds, which go on renewing: saving a tracker's state may take a while."""
        try:
            await self._save(work, pool, names)
            leases = {name: work.followers[name].fence for name in names if name in work.followers}
            for name in leases:
                self._leave(work, name)
            await self._writer.release(pool, self.indexer_id, leases)
        finally:
            work.handing_over = False

    def _leave(self, work: _PoolWork, name: str) -> None:
        follower = work.followers.pop(name)
        follower.close()
        work.writing.drop(follower)
        work.tasks.pop(name).cancel()
        for table in (work.absent, work.renewed_at, work.saved_at):
            table.pop(name, None)

    def _look_after(self, work: _PoolWork, pool: str) -> None:
        """Records, snapshots and lifetimes, as far as they are due."""
        now = time.monotonic()
        third = self.settings.block_ttl_s / 3
        for name, follower in work.followers.items():
            follower.refresh()
            tracker = follower.tracker
            if tracker is None:
                continue
            if now - work.saved_at[name] > self.settings.snapshot_interval_s and tracker.last != follower.snapshot_seq:
                work.saved_at[name] = now
                self._spawn(self._save(work, pool, [name]))
            if now - work.renewed_at[name] > third:
                work.renewed_at[name] = now
                self._spawn(work.writing.renew(follower, third / 2))

    async def _save(self, work: _PoolWork, pool: str, names: list[str]) -> None:
        await _at_once(self._save_one(work, pool, name) for name in names)

    async def _save_one(self, work: _PoolWork, pool: str, name: str) -> None:
        async with self._transfers:
            follower = work.followers.get(name)
            if follower is None or follower.tracker is None or follower.record.slot is None:
                return
            seq, blob = follower.tracker.last, follower.tracker.snapshot()
            if blob is None or seq < 0:
                return
            await work.writing.settled()  # a snapshot is never ahead of the index
            try:
                await self._writer.save_snapshot(pool, name, follower.fence, blob)
                follower.snapshot_seq = seq
            except Fenced:
                work.writing.fenced.add(name)

    async def _drain(self) -> None:
        for pool, work in self._pools.items():
            try:
                async with asyncio.timeout(self.settings.indexer_lease_s):
                    await work.writing.settled()
                    await self._save(work, pool, list(work.followers))
                    leases = {name: follower.fence for name, follower in work.followers.items()}
                    await self._writer.release(pool, self.indexer_id, leases, leave=True)
            except (IndexUnavailable, TimeoutError) as error:
                logger.warning("indexer %s: leases of %s left to lapse (%s)", self.indexer_id, pool, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except IndexUnavailable as error:
                logger.debug("%s", error)

        task = asyncio.create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _at_once(works: Iterable[Awaitable[None]]) -> None:
    """Await all of them to their end; then raise the first failure."""
    for failure in await asyncio.gather(*works, return_exceptions=True):
        if failure is not None:
            raise failure


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("following a replica failed", exc_info=task.exception())
