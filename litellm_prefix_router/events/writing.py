"""Turns the outputs of a pool's trackers into index writes: in order, many at a time, and again after a failure.

While one write is under way the next ones gather, so batches grow with the load and lag stays at a round trip. Writes
that Redis does not take are kept up to a bound; past it, or when a lease or the roster was lost, the replica is written
anew from its tracker into a fresh slot, so what was missed cannot matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import msgspec

from ..index.contract import BlockWrite, Fenced, IndexUnavailable, IndexWriter
from ..settings import Settings
from .follower import Follower
from .outputs import NewIncarnation, Output, Remove, Store

logger = logging.getLogger("litellm_prefix_router.events")

_RETRY_S = 0.1
_RETRY_AFTER_FAULT_S = 1.0
_UNDER_WAY = 2
"""Batches on their way to the index: one is written while the next is made."""


class _Waiting:
    """One output of a tracker in the queue."""

    __slots__ = ("follower", "output", "sent")

    def __init__(self, follower: Follower, output: Output) -> None:
        self.follower = follower
        self.output = output
        self.sent = False

    @property
    def blocks(self) -> int:
        return len(self.output.blocks) // 8 if isinstance(self.output, (Store, Remove)) else 0


class PoolWriting:
    """Writes of one pool. `fenced` collects replicas whose lease was found to be lost."""

    def __init__(self, pool: str, writer: IndexWriter, settings: Settings) -> None:
        self.pool = pool
        self.fenced: set[str] = set()
        self.backlog_blocks = 0
        self.written_blocks = 0
        self._writer = writer
        self._settings = settings
        self._queue: deque[_Waiting] = deque()
        self._anew: dict[str, Follower] = {}
        self._records: dict[str, tuple[Follower, bool]] = {}
        self._work = asyncio.Event()
        self._accepted = self._done = 0

    def put(self, follower: Follower, output: Output) -> None:
        """One output of a tracker, in its order."""
        if follower.closed or follower.replica_id in self._anew:
            return  # gone, or the tracker's own state will be written
        item = _Waiting(follower, output)
        self._queue.append(item)
        self._accepted += 1
        self.backlog_blocks += item.blocks
        if self.backlog_blocks > self._settings.write_backlog_blocks:
            logger.warning("%s: too many writes wait for Redis; writing anew once it answers", self.pool)
            for waiting in {id(item.follower): item.follower for item in self._queue}.values():
                self.write_anew(waiting)
        self._work.set()

    def changed(self, follower: Follower, urgent: bool) -> None:
        """The replica's record is to be published; `urgent`: readers are to notice at once."""
        waiting = self._records.get(follower.replica_id)
        self._records[follower.replica_id] = (follower, urgent or (waiting is not None and waiting[1]))
        self._work.set()

    def write_anew(self, follower: Follower) -> None:
        """Begin a fresh incarnation and write everything that the tracker holds."""
        self.drop(follower)
        if follower.closed:
            return
        self._anew[follower.replica_id] = follower
        self._work.set()

    def drop(self, follower: Follower) -> None:
        """Forget what waits for this replica."""
        kept: deque[_Waiting] = deque()
        for item in self._queue:
            if item.follower is follower:
                self._forget(item)
            else:
                kept.append(item)
        self._queue = kept
        self._anew.pop(follower.replica_id, None)
        self._records.pop(follower.replica_id, None)

    async def settled(self) -> None:
        """Wait until everything that came so far is written."""
        target = self._accepted
        while self._done < target or self._anew:
            await asyncio.sleep(0.005)

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._flush()
            except IndexUnavailable as error:
                logger.debug("%s: %s", self.pool, error)
                await asyncio.sleep(_RETRY_S)
                self._work.set()
            except Exception:  # whatever it is: nothing would be written any more, while the leases are renewed
                logger.exception("%s: writing the index failed; trying again", self.pool)
                await asyncio.sleep(_RETRY_AFTER_FAULT_S)
                self._work.set()

    async def _flush(self) -> None:
        while self._anew:
            follower = next(iter(self._anew.values()))
            begun = await self._begin(follower)
            if self._anew.get(follower.replica_id) is follower:
                del self._anew[follower.replica_id]  # from here on its outputs queue up behind what is written now
            if begun:
                await self._write_all(follower)
        while self._queue:
            head = self._queue[0]
            if isinstance(head.output, NewIncarnation):
                await self._begin(head.follower)
                self._finish([head])
            else:
                await self._write_queued()
        while self._records:
            replica_id, (follower, urgent) = next(iter(self._records.items()))
            del self._records[replica_id]
            try:
                if not await self._writer.update(self.pool, follower.record, follower.fence, urgent=urgent):
                    self.write_anew(follower)
            except Fenced:
                self.fenced.add(replica_id)
            except Exception:
                self._records.setdefault(replica_id, (follower, urgent))
                raise
        if self._queue or self._anew:
            self._work.set()

    async def _begin(self, follower: Follower) -> bool:
        """A fresh slot; False if the lease was lost (what waits for the replica is then forgotten)."""
        try:
            begun = await self._writer.begin_incarnation(self.pool, follower.record, follower.fence)
        except Fenced:
            self.fenced.add(follower.replica_id)
            self.drop(follower)
            return False
        note = follower.record.note if begun.slot is not None else "no free slot: raise max_slots"
        follower.record = msgspec.structs.replace(
            follower.record, slot=begun.slot, incarnation=begun.incarnation, epoch=begun.epoch, note=note
        )
        follower.refresh()
        return True

    async def _write_queued(self) -> None:
        """The stores and removals at the queue's head; what follows a NewIncarnation waits for its slot.

        Batches overlap, and the index takes them in order. When one fails, those behind it may have been written all
        the same: they are sent again after it, which ends in the same state.
        """
        under_way: deque[tuple[list[_Waiting], asyncio.Task[frozenset[str]]]] = deque()
        at_once = 1  # until the first one is through: a server that does not know the script yet is asked twice
        try:
            while True:
                items = self._gather() if len(under_way) < at_once else []
                in_parts = sum(item.blocks for item in items) > self._settings.write_batch_blocks
                if items and not (in_parts and under_way):
                    under_way.append((items, self._send(items)))
                    if not in_parts:  # such a batch must not be overtaken
                        continue
                if not under_way:
                    return
                items, writing = under_way[0]
                refused = await writing
                under_way.popleft()
                at_once = _UNDER_WAY if self._writer.in_order else 1
                self.written_blocks += sum(item.blocks for item in items)
                self._finish(items)
                self._refused(refused, {item.follower.replica_id: item.follower for item in items})
        finally:
            for _, writing in under_way:
                writing.cancel()
            await asyncio.gather(*(writing for _, writing in under_way), return_exceptions=True)
            for item in self._queue:
                item.sent = False

    def _gather(self) -> list[_Waiting]:
        """The next items to send together."""
        items: list[_Waiting] = []
        blocks = 0
        for item in self._queue:
            if item.sent:
                continue
            if isinstance(item.output, NewIncarnation) or (
                items and blocks + item.blocks > self._settings.write_batch_blocks
            ):
                break
            blocks += item.blocks
            items.append(item)
        return items

    def _send(self, items: list[_Waiting]) -> asyncio.Task[frozenset[str]]:
        writes = []
        for item in items:
            item.sent = True
            follower, output = item.follower, item.output
            if follower.record.slot is not None and isinstance(output, (Store, Remove)):
                held = isinstance(output, Store)
                writes.append(BlockWrite(follower.record, follower.fence, held, output.blocks, output.tier))
        return asyncio.create_task(self._writer.apply(self.pool, writes))

    def _finish(self, items: list[_Waiting]) -> None:
        """Take written items off the queue; what was dropped meanwhile is no longer at its head."""
        for item in items:
            if self._queue and self._queue[0] is item:
                self._forget(self._queue.popleft())

    def _forget(self, item: _Waiting) -> None:
        self._done += 1
        self.backlog_blocks -= item.blocks

    async def _write_all(self, follower: Follower) -> None:
        """Everything that the tracker holds. Runs inside the flush, so that nothing overtakes it."""
        tracker, step = follower.tracker, self._settings.write_batch_blocks
        if tracker is None:
            return
        for tier in list(tracker.ledger.held):
            start = 0
            while start < tracker.ledger.rows and follower.record.slot is not None:
                part = tracker.ledger.hashes(tier, start, start + step)
                start += step
                if len(part):
                    write = BlockWrite(follower.record, follower.fence, True, part.tobytes(), tier)
                    if refused := await self._writer.apply(self.pool, [write]):
                        self._refused(refused, {follower.replica_id: follower})
                        return

    async def renew(self, follower: Follower, within_s: float) -> None:
        """Write again what is held, spread over `within_s`: lifetimes start anew, dead slots' bits go.

        Goes through the queue, so that a removal that comes meanwhile stays behind the write of the same block.
        """
        tracker, step = follower.tracker, self._settings.write_batch_blocks
        if tracker is None:
            return
        pause_s = min(within_s / (len(tracker.ledger.held) * (tracker.ledger.rows / step + 1)), 1.0)
        for tier in list(tracker.ledger.held):
            start = 0
            while start < tracker.ledger.rows:
                part = tracker.ledger.hashes(tier, start, start + step)
                start += step
                if follower.closed:
                    return
                if len(part):
                    self.put(follower, Store(tier, part.tobytes()))
                await asyncio.sleep(pause_s)

    def _refused(self, refused: frozenset[str], followers: dict[str, Follower]) -> None:
        for replica_id in refused:
            if replica_id in followers and not followers[replica_id].closed:
                logger.info("%s: write refused (lease or slot lost)", replica_id)
                self.write_anew(followers[replica_id])  # refused again, as fenced, if the lease is another's
