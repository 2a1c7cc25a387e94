"""One engine rank's event stream as a state machine without I/O: frames in, index writes and requests out.

Theory of operation. Sequence numbers count up from 0 per engine process; nothing else tells one life of the engine from
the next. The tracker is LIVE (applies frames as they come) or REPLAYING (has asked the engine to send frames again and
queues what arrives meanwhile).

- next number: apply. A number that was seen, with the same payload: a repeat (replay and live stream overlap); skip.
- a number that was seen, with another payload: the engine restarted. Forget everything, begin a new incarnation.
  (Unless it is new to the live stream and older than what was applied: a frame that a replay has overtaken.)
- a gap, or a reconnected socket: ask for the replay *from the last frames that were applied*. If they come back byte
  for byte, it is the same life and nothing is lost. If not, or there is no replay: a new incarnation.

After a gap the names of blocks stay (dormant): what is held is unknown, but a child that the engine stores proves that
its ancestors are held. Hashes are computed from token ids here; the engine's are only names. A block whose chain does
not begin in view (a late join) cannot be named: it is counted, and `complete` is False.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, deque

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from ..prompt.blocks import chain_hashes, root_hash
from .codec import Cleared, MalformedBatch, Removed, Skipped, Stored, decode_batch, time_of, token_array
from .identity import split_extra_keys
from .ledger import Ledger, LedgerImage
from .outputs import Alarm, NewIncarnation, Output, Remove, RequestReplay, Store

_REMEMBERED = 8192
"""Recent frames whose digests are kept, to tell a repeat from a restart: more than a subscriber's queue is long."""
_LITTLE = sys.byteorder == "little"
_OVERLAP = 16
"""Frames before the last one that a replay has to confirm."""
_QUEUE_FRAMES = 100_000


class _Snapshot(msgspec.Struct, array_like=True):
    pool: str
    rank: int
    last: int
    digest: int
    block_size: int
    complete: bool
    free: list[int]
    image: LedgerImage


class Tracker:
    """State of one (pool, replica, rank). `pool` is the name that requests use: it seeds the block hashes."""

    def __init__(
        self,
        pool: str,
        rank: int = 0,
        *,
        can_replay: bool = False,
        capacity_blocks: int | None = None,
        max_blocks: int = 4_000_000,
    ) -> None:
        self.pool = pool
        self.rank = rank
        self.can_replay = can_replay
        self.capacity_blocks = capacity_blocks
        self.ledger = Ledger()
        self.last = -1
        """Sequence number of the last frame applied, -1 before the first."""
        self.last_ts = 0.0
        self.block_size = 0
        self.complete = True
        """This life was followed from its first frame (or its last clearing) on."""
        self.unconfirmed = False
        """Restored, and no replay can tell what came since: the next frame's number does."""
        self.counts: Counter[str] = Counter()
        """frames, stored, removed, repeats, gaps, restarts, distrusted, unanchored, duplicates, unknown_removed, and
        skips."""
        self._max_blocks = max_blocks
        self._replaying = False
        self._unproven = False
        self._prove_again = False
        self._asked_after = -1
        self._queue: deque[tuple[int, bytes, bool]] = deque()
        self._live_seq = -1
        self._digests: dict[int, int] = {}
        self._roots: dict[tuple[str | None, str | None], int] = {}
        self._out: list[Output] = []
        self._restored = False

    @property
    def replaying(self) -> bool:
        return self._replaying

    def start(self) -> list[Output]:
        """First call, once frames may arrive."""
        if self._restored and self.can_replay:
            self._ask(prove=True)
        elif self._restored:
            self.unconfirmed = True
        else:
            self._begin("start")
            if self.can_replay:
                self._ask(prove=False)
        return self._take()

    def receive(self, seq: int, payload: bytes) -> list[Output]:
        """One frame of the live stream."""
        advances = seq > self._live_seq
        if advances or xxh3_64_intdigest(payload) != self._digests.get(seq):
            self._live_seq = seq
        self._live(seq, payload, advances)
        return self._take()

    def replayed(self, seq: int, payload: bytes) -> list[Output]:
        """One frame of the replay that was asked for, in ascending order."""
        if not self._replaying:
            return []
        if self._unproven:
            known = self._digests.get(seq)
            if (
                seq > self.last
                or (known is None and seq == self.last)
                or known not in (None, xxh3_64_intdigest(payload))
            ):
                self._begin("gap" if seq > self.last else "restart")
                self.last = -1
                self._ask(prove=False)
            elif seq == self.last:
                self._unproven = False
        elif seq > self.last:
            if seq > self.last + 1:
                self._missed(f"replay begins at {seq}, wanted {self.last + 1}")
            self._apply(seq, payload)
        return self._take()

    def replay_ended(self) -> list[Output]:
        """The end marker came."""
        if self._replaying:
            if self._unproven:  # the last frame is not in its buffer: most likely an engine that has just restarted
                self._begin("restart")
                self.last = -1
                self._ask(prove=False)
            else:
                # frames after the last replayed one may be in the buffer by now; never ask twice for the same gap
                self._resume(accept_gap=self.last == self._asked_after)
        return self._take()

    def replay_failed(self, detail: str) -> list[Output]:
        """No (complete) answer: go on without."""
        if self._replaying:
            if self._unproven:
                self._begin("gap")
                self.last = -1
            self.complete = self.complete and self.last >= 0
            self._out.append(Alarm("gap", f"replay failed: {detail}"))
            self._resume(accept_gap=True)
        return self._take()

    def reconnected(self) -> list[Output]:
        """The stream's connection was lost and is back: the engine may be another one, frames may be missing."""
        self.unconfirmed = False
        if self._replaying:
            # what is replayed now, and what came until now, may be of the life before
            self._prove_again = True
            self._queue.clear()
        else:
            if self.can_replay:
                self._ask(prove=self.last >= 0)
            elif self.last >= 0:
                self._begin("gap")
                self.last = -1
                self.complete = False
        return self._take()

    def restarted(self) -> list[Output]:
        """The caller knows that the engine is another process now."""
        self._forget("restart")
        if self.can_replay:
            self._ask(prove=False)
        return self._take()

    def distrusted(self) -> list[Output]:
        """What the engine does contradicts what is known of it: begin anew with what it can replay."""
        if self._replaying:
            return []
        self.counts["distrusted"] += 1
        self.unconfirmed = False
        self._begin("distrusted")
        self.last = -1
        if self.can_replay:
            self._ask(prove=False)
        else:
            self.complete = False
        return self._take()

    def snapshot(self) -> bytes | None:
        """The state for a successor; None while replaying."""
        if self._replaying:
            return None
        digest = self._digests.get(self.last, 0)
        image = self.ledger.image()
        return msgspec.msgpack.encode(
            _Snapshot(
                self.pool, self.rank, self.last, digest, self.block_size, self.complete, self.ledger.free_rows, image
            )
        )

    def restore(self, blob: bytes) -> bool:
        """Take over a predecessor's state before `start`. False: unusable, nothing changed."""
        try:
            saved = msgspec.msgpack.decode(blob, type=_Snapshot)
            ledger = Ledger.of(saved.image, saved.free)
        except (msgspec.DecodeError, ValueError):
            return False
        if (saved.pool, saved.rank) != (self.pool, self.rank) or saved.last < 0:
            return False
        self.ledger, self.last, self.block_size, self.complete = ledger, saved.last, saved.block_size, saved.complete
        self._digests = {saved.last: saved.digest}
        self._restored = True
        return True

    # -- sequence ------------------------------------------------------------------------------------------------

    def _live(self, seq: int, payload: bytes, advances: bool) -> None:
        if self.unconfirmed:
            self.unconfirmed = False
            if seq != self.last + 1:
                self._begin("gap")
                self.last = -1
        if self._replaying:
            self._queue.append((seq, payload, advances))
            if len(self._queue) > _QUEUE_FRAMES:
                self._out += self.replay_failed("too many frames arrived meanwhile")
        elif seq == self.last + 1:
            self.complete = self.complete or seq == 0
            self._apply(seq, payload)
        elif self._digests.get(seq) == xxh3_64_intdigest(payload):
            self.counts["repeats"] += 1
        elif seq > self.last:
            if self.can_replay:
                self.counts["gaps"] += 1
                self._queue.append((seq, payload, advances))
                self._ask(prove=self.last >= 0)
            else:
                self._missed(f"frames {self.last + 1} to {seq - 1} are missing")
                self._apply(seq, payload)
        elif advances and time_of(payload) < self.last_ts:
            self.counts["overtaken"] += 1
        else:
            self._forget("restart")
            if seq and self.can_replay:
                self._ask(prove=False)  # which brings this frame, too; queueing it might find a "restart" for ever
            else:
                self._live(seq, payload, advances)

    def _missed(self, detail: str) -> None:
        """Frames are lost for good."""
        self.complete = False
        if self.last < 0:
            self._out.append(Alarm("late_join", detail))
        else:
            self.counts["gaps"] += 1
            self._out.append(Alarm("gap", detail))
            self._begin("gap")

    def _ask(self, *, prove: bool) -> None:
        self._replaying = True
        self._unproven = prove
        self._asked_after = self.last
        if not prove:
            self.complete = True  # until the replay turns out to begin later
        start = self.last if prove else 0
        # several frames: one of another life that happened to carry the next number may have been applied already
        while prove and self.last - start < _OVERLAP and start - 1 in self._digests:
            start -= 1
        self._out.append(RequestReplay(start))

    def _resume(self, *, accept_gap: bool) -> None:
        self._replaying = self._unproven = False
        waiting, self._queue = self._queue, deque()
        for seq, payload, advances in waiting:
            if accept_gap and seq > self.last + 1 and not self._replaying:
                self._missed(f"frames {self.last + 1} to {seq - 1} are missing")
                self._apply(seq, payload)
            else:
                self._live(seq, payload, advances)
        if self._prove_again and not self._replaying:
            self._prove_again = False
            self._ask(prove=self.last >= 0)

    def _begin(self, reason: str) -> None:
        """A new incarnation that still knows the old one's names."""
        self.ledger.sleep()
        self._digests.clear()
        self._out.append(NewIncarnation(reason))

    def _forget(self, reason: str) -> None:
        self.counts["restarts"] += 1
        self.unconfirmed = False
        self.ledger.clear()
        self._digests.clear()
        self._queue.clear()
        self._replaying = self._unproven = False
        self.last = -1
        self.complete = True
        self.block_size = 0
        self._out.append(NewIncarnation(reason))

    def _take(self) -> list[Output]:
        out, self._out = self._out, []
        return out

    # -- content -------------------------------------------------------------------------------------------------

    def _apply(self, seq: int, payload: bytes) -> None:
        self.last = seq
        self._digests[seq] = xxh3_64_intdigest(payload)
        if len(self._digests) > _REMEMBERED:
            del self._digests[next(iter(self._digests))]
        self.counts["frames"] += 1
        try:
            ts, rank, events = decode_batch(payload)
        except MalformedBatch as error:
            self.counts["malformed"] += 1
            self.complete = False
            self._out.append(Alarm("malformed", str(error)))
            return
        if rank != self.rank:
            self.counts["other_rank"] += 1
            return
        self.last_ts = ts
        for event in events:
            match event:
                case Stored():
                    self._stored(event)
                case Removed():
                    self._removed(event)
                case Cleared():
                    self.ledger.clear()
                    self.complete = True
                    self._out.append(NewIncarnation("cleared"))
                case Skipped():
                    self.counts[event.reason] += 1
        held = self.ledger.held["gpu"]
        if (self.capacity_blocks is not None and held > self.capacity_blocks) or len(self.ledger) > self._max_blocks:
            self._out.append(Alarm("capacity", f"{held} blocks held, room for {self.capacity_blocks}"))
            if len(self.ledger) > self._max_blocks:
                self.ledger.clear()
            self.complete = False
            self._begin("capacity")
            self._digests[seq] = xxh3_64_intdigest(payload)

    def _stored(self, event: Stored) -> None:
        names, parent = event.blocks, event.parent
        self.counts["stored"] += len(names)
        if not event.tokens:  # a slower tier's placeholder: the name is all there is
            pairs = [(name, block) for name in names if (block := self.ledger.our_hash(name)) is not None]
            self.counts["unanchored"] += len(names) - len(pairs)
            names, hashes, parent = [name for name, _ in pairs], [block for _, block in pairs], None
        elif event.block_size <= 0 or len(event.tokens) != event.block_size * len(names):
            self.counts["odd_length"] += 1
            return
        else:
            if self.block_size != event.block_size:
                if self.block_size:
                    self.counts["other_block_size"] += len(names)
                    self._out.append(Alarm("block_size", f"{event.block_size}, was {self.block_size}"))
                    return
                self.block_size = event.block_size
            salt, extra = self._extra(event)
            if parent is None:
                seed = self._root(event.lora, event.cache_salt or salt)
            else:
                known = self.ledger.our_hash(parent)
                if known is None:
                    self.counts["unanchored"] += len(names)
                    return
                seed = known
                if event.tier == "gpu" and (woken := self.ledger.wake(parent)):
                    self._emit(Store, "gpu", woken)
            hashes = chain_hashes(token_array(event.tokens), event.block_size, seed, extra or None)
        fresh = self.ledger.extend(names, hashes, parent, event.tier)
        self.counts["duplicates"] += len(names) - len(fresh)
        self._emit(Store, event.tier, fresh)

    def _removed(self, event: Removed) -> None:
        self.counts["removed"] += len(event.blocks)
        gone = []
        for name in event.blocks:
            if self.ledger.copies(name, event.tier) == 0:
                self.counts["unknown_removed"] += 1
            ours = self.ledger.drop(name, event.tier)
            if ours is not None:
                gone.append(ours)
        self._emit(Remove, event.tier, gone)

    def _extra(self, event: Stored) -> tuple[str | None, dict[int, bytes]]:
        salt: str | None = None
        extra: dict[int, bytes] = {}
        for at, keys in enumerate(event.extra_keys or ()):
            if keys:
                found, mixed = split_extra_keys(keys, event.lora, at == 0 and event.parent is None)
                salt = salt or found
                if mixed:
                    extra[at] = mixed
        return salt, extra

    def _root(self, lora: str | None, salt: str | None) -> int:
        if salt is not None:
            return root_hash(self.pool, lora, salt)
        key = (lora, salt)
        if key not in self._roots:
            if len(self._roots) > 1024:
                self._roots.clear()
            self._roots[key] = root_hash(self.pool, lora, salt)
        return self._roots[key]

    def _emit(self, kind: type[Store] | type[Remove], tier: str, blocks: list[int]) -> None:
        """Add blocks to the outputs, joined with the one before where that is the same kind."""
        if not blocks:
            return
        packed = array("Q", blocks).tobytes() if _LITTLE else np.array(blocks, "<u8").tobytes()
        previous = self._out[-1] if self._out else None
        if isinstance(previous, kind) and previous.tier == tier:
            self._out[-1] = kind(tier, previous.blocks + packed)
        else:
            self._out.append(kind(tier, packed))
