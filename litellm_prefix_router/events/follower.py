"""Follows one replica of one pool: finds its event stream, drives the tracker, hands the outputs on in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import httpx
import msgspec

from ..fleet.discovery import ReplicaFacts, ask_replica
from ..index.contract import ReplicaRecord
from ..settings import Settings
from .addresses import StreamAddress, from_engine, from_operator
from .outputs import Alarm, Output, RequestReplay
from .subscriber import Replay, SubscriberHub, Subscription
from .tracker import Tracker
from .vitals import Finding, VitalsWatch, ask_vitals

logger = logging.getLogger("litellm_prefix_router.events")

_ASK_AGAIN_S = 5.0
"""Between questions to a replica that has not told its event stream yet, doubling up to a minute."""
_ASK_AT_MOST_S = 60.0
_DOUBT_S, _DOUBT_AT_MOST_S = 120.0, 3600.0
"""Between the first two new beginnings that gateways' doubts cause, then doubling, however many gateways there are."""
_LOOK_S = 1.0
"""Between looks at whether a stream is still connected; where it is not, the replica is asked where it is now."""


class Follower:
    """One replica under this indexer's lease. `record` is what the roster should say of it.

    `on_output(follower, output)` gets Store, Remove and NewIncarnation in order, `on_change(follower,
    urgent)` says that the record changed (not urgent: by the time of its last event alone).
    """

    def __init__(
        self,
        pool: str,
        record: ReplicaRecord,
        fence: int,
        settings: Settings,
        hub: SubscriberHub,
        client: httpx.AsyncClient,
        on_output: Callable[[Follower, Output], None],
        on_change: Callable[[Follower, bool], None],
    ) -> None:
        self.pool = pool
        self.record = record
        self.fence = fence
        self.tracker: Tracker | None = None
        self.snapshot_seq = -1
        self._settings = settings
        self._hub = hub
        self._client = client
        self._on_output = on_output
        self._on_change = on_change
        self._subscription: Subscription | None = None
        self._replay: Replay | None = None
        self._address: StreamAddress | None = None
        self._connected = self._was_up = False
        self._alarm: Alarm | None = None
        self._unheard: tuple[int, str] | None = None
        """Frames at which the engine was found to work without being heard, and a note on it."""
        self._connections = 0
        self._settled_at = record.doubted_at
        self._doubt_again, self._doubt_wait_s = 0.0, _DOUBT_S
        self.closed = False

    @property
    def replica_id(self) -> str:
        return self.record.replica_id

    async def run(self, snapshot: bytes | None) -> None:
        """Find the stream (as long as it takes) and subscribe; from then on callbacks do the work, while this watches
        over them and finds the stream again when it has moved. Never returns; `close` after cancelling it."""
        wait_s = _ASK_AGAIN_S
        while True:
            facts, address, problem = await self._find()
            if address is not None:
                try:
                    self._begin(address, facts, snapshot)
                except OSError as error:
                    problem = str(error)
                else:
                    await self._until_moved()
                    self._disconnect()
                    snapshot, wait_s = None, _ASK_AGAIN_S
                    continue
            told = facts.reachable and "events" not in facts.unanswered
            if told or self.record.slot is None:
                self._publish(slot=None, knowledge="none", note=problem, block_size=facts.block_size or 0)
            else:  # taken over while it does not say: what the index says of it may well be true still
                self._publish(knowledge="stale", note=problem)
            await asyncio.sleep(wait_s if facts.reachable else min(wait_s, 1.0))
            wait_s = min(wait_s * 2, _ASK_AT_MOST_S) if facts.reachable else _ASK_AGAIN_S

    def doubt(self, doubted_at: float) -> None:
        """A gateway found at that (Unix) time that responses contradict the index: begin anew, at growing intervals.

        To be told again while it lasts. Whatever gateways doubted before the last beginning is settled by it.
        """
        tracker = self.tracker
        if tracker is None or tracker.replaying or self._address is None or doubted_at <= self._settled_at:
            return
        now = time.monotonic()
        if now < self._doubt_again:
            return
        self._doubt_again, self._doubt_wait_s = now + self._doubt_wait_s, min(2 * self._doubt_wait_s, _DOUBT_AT_MOST_S)
        self._settled_at = max(doubted_at, time.time())
        logger.warning("%s: responses contradict its events; reading them anew", self.replica_id)
        self._handle(tracker.distrusted())
        self.refresh()

    def close(self) -> None:
        """For good: nothing that it still says counts."""
        self.closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        if self._replay is not None:
            self._replay.cancel()
            self._replay = None

    def refresh(self) -> None:
        """Bring the record up to date; calls `on_change` if it changed."""
        tracker = self.tracker
        if tracker is None:
            return
        note: str | None = None
        if not self._connected:
            knowledge, note = "stale", "event stream disconnected"
        elif self._unheard is not None and self._unheard[0] == tracker.counts["frames"]:
            knowledge, note = "stale", self._unheard[1]
        elif tracker.replaying:
            knowledge, note = "degraded", "catching up"
        elif self.record.slot is None:
            knowledge, note = "none", self.record.note
        elif tracker.unconfirmed:
            knowledge, note = "degraded", "taken over: its next event tells whether one was missed"
        elif not tracker.complete:
            late = "joined late: some cached blocks are not known"
            knowledge, note = "degraded", self._alarm.detail if self._alarm else late
        elif self._alarm is not None and self._alarm.kind == "block_size":
            knowledge, note = "degraded", f"block size changed: {self._alarm.detail}"
        else:
            knowledge = "exact"
        self._publish(
            slot=self.record.slot,
            knowledge=knowledge,
            note=note,
            block_size=tracker.block_size or self.record.block_size,
            blocks=tracker.ledger.held["gpu"],
            last_event_at=tracker.last_ts,
        )

    async def _find(self) -> tuple[ReplicaFacts, StreamAddress | None, str]:
        """What the replica says of itself, its stream's address, and what is wrong where there is none."""
        record = self.record
        facts = await ask_replica(self._client, record.address)
        if record.events:
            return facts, from_operator(record.address, record.events, record.replay, record.dp_rank), ""
        return facts, *self._choose(facts)

    async def _until_moved(self) -> None:
        """Return when the replica's stream is at another address (it was restarted with other ports).

        Asked while the stream is down and once after each reconnect: another engine may have taken its port. Meanwhile
        compares events with the engine's own counters, see vitals.
        """
        watch = VitalsWatch()
        confirmed = self._connections + (not self._connected)
        compare_at = time.monotonic() + self._settings.vitals_interval_s
        ask_at, wait_s = 0.0, _LOOK_S
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if self._connected and self._connections <= confirmed:
                ask_at, wait_s = 0.0, _LOOK_S
                if self._settings.vitals_interval_s and now >= compare_at:
                    compare_at = now + self._settings.vitals_interval_s
                    await self._compare(watch)
            elif now >= ask_at:
                ask_at, wait_s = now + wait_s, min(2 * wait_s, _ASK_AT_MOST_S)
                connections = self._connections
                facts, address, _ = await self._find()
                if facts.reachable:
                    confirmed = connections
                if address is not None and address != self._address:
                    logger.warning("%s: its event stream is at %s now", self.replica_id, address.endpoint)
                    return

    async def _compare(self, watch: VitalsWatch) -> None:
        tracker, connections = self.tracker, self._connections
        assert tracker is not None
        assert self._address is not None
        frames = tracker.counts["frames"]
        vitals = await ask_vitals(self._client, self.record.address, self.record.dp_rank)
        if vitals is None or connections != self._connections:
            return
        finding = watch.look(vitals, frames, connections)
        if finding is Finding.RESTARTED:
            logger.warning("%s: another process answers there, and its beginning was missed", self.replica_id)
            self._handle(tracker.restarted())
        elif finding is Finding.SILENT:
            note = f"no event came while the engine computed {watch.unheard(vitals):,} tokens"
            if self._unheard is None or self._unheard[0] != frames:
                logger.warning("%s: %s; connecting again", self.replica_id, note)
            self._unheard = (frames, note)
            try:
                self._subscribe(self._address)
            except OSError as error:
                logger.warning("%s: %s", self.replica_id, error)
                self._address = None  # to be found, and subscribed to, again
        self.refresh()

    def _choose(self, facts: ReplicaFacts) -> tuple[StreamAddress | None, str]:
        if not facts.reachable:
            return None, "replica does not answer"
        if not facts.event_sources:
            return None, "publishes no KV events (or does not tell: set its event endpoint)"
        if len(facts.event_sources) > 1 and "#" not in self.replica_id:
            return None, f"has {len(facts.event_sources)} data-parallel ranks: announce each as a replica of its own"
        source = facts.event_sources.get(self.record.dp_rank)
        address = from_engine(self.record.address, source) if source else None
        return address, "" if address else f"publishes no KV events for rank {self.record.dp_rank}"

    def _begin(self, address: StreamAddress, facts: ReplicaFacts, snapshot: bytes | None) -> None:
        blocks = facts.capacity_tokens // facts.block_size if facts.block_size else 0
        tracker = Tracker(
            self.pool,
            self.record.dp_rank,
            can_replay=address.replay is not None,
            capacity_blocks=blocks + blocks // 50 + 16 if blocks else None,
            max_blocks=self._settings.max_blocks_per_replica,
        )
        if snapshot is not None and self.record.slot is not None:
            tracker.restore(snapshot)
        self._subscribe(address)
        self._address = address
        self.tracker = tracker
        self._alarm = self._unheard = None
        if facts.block_size and not self.record.block_size:
            self.record = msgspec.structs.replace(self.record, block_size=facts.block_size)
        self._handle(tracker.start())

    def _subscribe(self, address: StreamAddress) -> None:
        if self._subscription is not None:
            self._subscription.close()
        self._connected = False
        self._subscription = self._hub.subscribe(address, self._frame, self._connection)

    def _frame(self, seq: int, payload: bytes) -> None:
        if self.tracker is not None:
            self._handle(self.tracker.receive(seq, payload))

    def _connection(self, up: bool) -> None:
        # also when it is up for the first time: frames may have been sent between the replay and now
        if up and self.tracker is not None and (self._was_up or self.tracker.can_replay):
            self._handle(self.tracker.reconnected())
        self._was_up = self._was_up or up
        self._connections += up
        if up != self._connected:
            self._connected = up
            self.refresh()

    def _handle(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case RequestReplay():
                    self._ask_replay(output.start)
                case Alarm():
                    if self._alarm is None or self._alarm.kind != output.kind:
                        logger.warning("%s: %s: %s", self.replica_id, output.kind, output.detail)
                    self._alarm = output
                case _:
                    self._on_output(self, output)

    def _ask_replay(self, start: int) -> None:
        assert self._address is not None
        assert self._address.replay is not None
        assert self.tracker is not None
        if self._replay is not None:
            self._replay.cancel()
        tracker = self.tracker
        self._replay = self._hub.replay(
            self._address.replay,
            start,
            lambda seq, payload: self._handle(tracker.replayed(seq, payload)),
            self._replay_done,
            self._settings.replay_timeout_s,
        )

    def _replay_done(self, problem: str | None) -> None:
        self._replay = None
        if self.tracker is not None:
            self._handle(self.tracker.replay_ended() if problem is None else self.tracker.replay_failed(problem))
            self.refresh()

    def _publish(self, **changes: object) -> None:
        record = msgspec.structs.replace(self.record, **changes)
        if record != self.record:
            calm = {"last_event_at": record.last_event_at, "blocks": record.blocks}
            urgent = msgspec.structs.replace(self.record, **calm) != record
            self.record = record
            self._on_change(self, urgent)
