"""The tracker's rules one by one, and as a state machine against a model of the engine."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from litellm_prefix_router.events.identity import block_extra
from litellm_prefix_router.events.outputs import Alarm, NewIncarnation, Output, Remove, RequestReplay, Store
from litellm_prefix_router.events.tracker import Tracker
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash

SIZE = 4


def tokens(seed: int, blocks: int) -> list[int]:
    return [(seed * 7919 + at * 31) % 50000 for at in range(blocks * SIZE)]


def ours(ids: list[int], lora: str | None = None, salt: str | None = None, extra: Any = None) -> list[int]:
    return chain_hashes(as_token_ids(ids), SIZE, root_hash("p", lora, salt), extra)


def stored(names: list[int], ids: list[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": ids, "block_size": SIZE,
        "lora_id": None, "medium": "GPU", **more,
    }  # fmt: skip


def removed(*names: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, rank: int = 0, ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


class Index:
    """Applies outputs as an index would."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {"gpu": set(), "cpu": set(), "storage": set()}
        self.alarms: list[str] = []
        self.asked: list[int] = []
        self.reasons: list[str] = []

    def take(self, outputs: list[Output]) -> Index:
        for output in outputs:
            match output:
                case Store():
                    self.held[output.tier] |= set(np.frombuffer(output.blocks, "<u8").tolist())
                case Remove():
                    self.held[output.tier] -= set(np.frombuffer(output.blocks, "<u8").tolist())
                case NewIncarnation():
                    self.reasons.append(output.reason)
                    for blocks in self.held.values():
                        blocks.clear()
                case RequestReplay():
                    self.asked.append(output.start)
                case Alarm():
                    self.alarms.append(output.kind)
        return self

    @property
    def gpu(self) -> set[int]:
        return self.held["gpu"]


def begun(**options: Any) -> tuple[Tracker, Index]:
    tracker, index = Tracker("p", **options), Index()
    index.take(tracker.start())
    return tracker, index


def test_hybrid_models_whose_sliding_window_groups_reuse_block_hashes() -> None:
    tracker, index = begun()
    ids = tokens(1, 3)
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    index.take(tracker.receive(0, batch(stored([1, 2, 3], ids, **full), stored([1, 2, 3], ids, **window))))
    index.take(tracker.receive(1, batch(removed(1, group_idx=1, kv_cache_spec_kind="sliding_window"))))
    index.take(tracker.receive(2, batch(removed(2, group_idx=1))))
    assert index.gpu == set(ours(ids))
    assert tracker.counts["other_group"] == 3


def test_event_block_size_differs_from_the_one_before() -> None:
    tracker, index = begun()
    index.take(tracker.receive(0, batch(stored([1], tokens(1, 1)))))
    assert tracker.block_size == SIZE
    other = stored([2], tokens(1, 2)) | {"block_size": 2 * SIZE}
    index.take(tracker.receive(1, batch(other)))
    assert index.alarms == ["block_size"] and index.gpu == set(ours(tokens(1, 1)))


def test_lower_tiers_are_apart_and_placeholders_are_named_by_gpu_blocks() -> None:
    tracker, index = begun()
    ids = tokens(1, 2)
    index.take(tracker.receive(0, batch(stored([1, 2], ids))))
    placeholder = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [],
                   "block_size": 0, "lora_id": None, "medium": "CPU"}  # fmt: skip
    index.take(tracker.receive(1, batch(placeholder, removed(2), removed(1))))
    assert index.gpu == set() and index.held["cpu"] == {ours(ids)[0]}
    index.take(tracker.receive(2, batch(removed(1, medium="CPU"))))
    assert index.held["cpu"] == set() and len(tracker.ledger) == 0


def test_lora_salt_and_images_are_part_of_the_identity() -> None:
    tracker, index = begun()
    ids = tokens(1, 2)
    event = stored([1, 2], ids, lora_name="a", extra_keys=[["a", ["img", 3], "salt"], ["a", ["img", -1]]])
    index.take(tracker.receive(0, batch(event)))
    extra = {0: block_extra([("img", 3)]), 1: block_extra([("img", -1)])}
    assert index.gpu == set(ours(ids, "a", "salt", extra))
    assert block_extra([("a", 1), ("b", 2)]) != block_extra([("a", 1)]) + block_extra(["b"])


def test_a_salt_that_equals_the_adapters_name() -> None:
    tracker, index = begun()
    index.take(tracker.receive(0, batch(stored([1], tokens(1, 1), lora_name="x", extra_keys=[["x", "x"]]))))
    assert index.gpu == set(ours(tokens(1, 1), "x", "x"))


def test_unknown_events_fields_and_ranks_are_skipped_and_counted() -> None:
    tracker, index = begun()
    index.take(tracker.receive(0, batch({"type": "New", "x": 1}, stored([1], tokens(1, 1), novelty=1))))
    index.take(tracker.receive(1, batch(stored([5], tokens(2, 1)), rank=3)))
    index.take(tracker.receive(2, b"\xc1 no msgpack"))
    assert index.gpu == set(ours(tokens(1, 1)))
    assert (tracker.counts["unknown_event"], tracker.counts["other_rank"]) == (1, 1)
    assert index.alarms == ["malformed"]


def test_arrays_maps_and_signed_hashes_name_the_same_block() -> None:
    tracker, index = begun()
    ids = tokens(1, 2)
    index.take(tracker.receive(0, batch(["BlockStored", [-1], None, ids[:SIZE], SIZE, None])))
    index.take(tracker.receive(1, batch(stored([7], ids[SIZE:], parent=2**64 - 1))))
    assert index.gpu == set(ours(ids))
    index.take(tracker.receive(2, batch(["BlockRemoved", [b"\x00" * 24 + b"\xff" * 8]])))
    assert index.gpu == set(ours(ids)[1:])


def test_a_gap_without_replay_keeps_names_and_a_child_proves_its_ancestors() -> None:
    tracker, index = begun()
    ids = tokens(1, 4)
    index.take(tracker.receive(0, batch(stored([1, 2, 3], ids[: 3 * SIZE]))))
    index.take(tracker.receive(2, batch(stored([9], tokens(2, 1)))))
    assert index.reasons == ["start", "gap"] and index.gpu == set(ours(tokens(2, 1)))
    assert not tracker.complete
    index.take(tracker.receive(3, batch(stored([4], ids[3 * SIZE :], parent=3))))
    assert index.gpu == set(ours(ids)) | set(ours(tokens(2, 1)))


def test_a_gap_is_filled_by_replay_in_order() -> None:
    tracker, index = begun(can_replay=True)
    index.take(tracker.replay_ended())
    frames = [batch(stored([at], tokens(at, 1)), ts=float(at)) for at in range(6)]
    index.take(tracker.receive(0, frames[0]))
    index.take(tracker.receive(3, frames[3]))
    assert index.asked == [0, 0]
    index.take(tracker.receive(4, frames[4]))
    for seq in range(5):
        index.take(tracker.replayed(seq, frames[seq]))
    index.take(tracker.replay_ended())
    index.take(tracker.receive(4, frames[4]))  # still under way on the live stream: a repeat, no restart
    index.take(tracker.receive(5, frames[5]))
    assert index.gpu == {block for at in range(6) for block in ours(tokens(at, 1))}
    assert index.reasons == ["start"] and tracker.complete


def test_a_gap_that_opens_during_a_replay_is_asked_for_once() -> None:
    frames = [batch(stored([at], tokens(at, 1)), ts=float(at)) for at in range(8)]
    tracker, index = begun(can_replay=True)
    index.take(tracker.replay_ended())
    for seq in (0, 2, 6):
        index.take(tracker.receive(seq, frames[seq]))
    for seq in range(4):  # all that there was when the engine was asked
        index.take(tracker.replayed(seq, frames[seq]))
    index.take(tracker.replay_ended())
    assert index.asked == [0, 0, 0] and tracker.replaying
    index.take(tracker.replayed(3, frames[3]))
    index.take(tracker.replay_ended())  # its buffer has no more
    assert not tracker.replaying and not tracker.complete and index.alarms == ["gap"]
    index.take(tracker.receive(7, frames[7]))
    assert index.gpu == {block for at in (6, 7) for block in ours(tokens(at, 1))}


def test_a_distrusted_engine_is_read_anew() -> None:
    frames = [batch(stored([at], tokens(at, 1)), ts=float(at)) for at in range(6)]
    tracker, index = begun(can_replay=True)
    index.take(tracker.replay_ended())
    for seq in range(5):
        index.take(tracker.receive(seq, frames[seq]))
    index.take(tracker.distrusted())
    assert index.gpu == set() and index.reasons == ["start", "distrusted"] and index.asked == [0, 0]
    index.take(tracker.distrusted())  # once is enough
    index.take(tracker.receive(5, frames[5]))
    for seq in range(2, 6):  # all that its buffer still has
        index.take(tracker.replayed(seq, frames[seq]))
    index.take(tracker.replay_ended())
    assert index.gpu == {block for at in range(2, 6) for block in ours(tokens(at, 1))}
    assert not tracker.complete

    blind, index = begun()
    index.take(blind.receive(0, frames[0]))
    index.take(blind.distrusted())
    index.take(blind.receive(1, frames[1]))
    assert index.gpu == set(ours(tokens(1, 1))) and not blind.complete


def test_a_restart_that_looks_like_a_gap() -> None:
    tracker, index = begun(can_replay=True)
    index.take(tracker.replay_ended())
    index.take(tracker.receive(0, batch(stored([1], tokens(1, 1)))))
    new = [batch(stored([at], tokens(at, 1)), ts=9.0 + at) for at in range(2, 7)]
    index.take(tracker.receive(4, new[4]))  # of another life
    index.take(tracker.replayed(0, new[0]))
    assert index.asked == [0, 0, 0] and index.gpu == set()
    for seq in range(5):
        index.take(tracker.replayed(seq, new[seq]))
    index.take(tracker.replay_ended())
    assert index.gpu == {block for at in range(2, 7) for block in ours(tokens(at, 1))}
    assert tracker.complete


def test_an_idle_engine_that_restarted_is_found_by_the_reconnect() -> None:
    tracker, index = begun(can_replay=True)
    index.take(tracker.replay_ended())
    index.take(tracker.receive(0, batch(stored([1], tokens(1, 1)))))
    index.take(tracker.reconnected())
    index.take(tracker.replay_ended())  # nothing to replay: the buffer is of another life
    assert index.gpu == set()
    index.take(tracker.replay_ended())
    index.take(tracker.receive(0, batch(stored([2], tokens(2, 1)), ts=5.0)))
    assert index.gpu == set(ours(tokens(2, 1))) and tracker.complete


def test_more_blocks_than_the_engine_can_hold_begin_anew() -> None:
    tracker, index = begun(capacity_blocks=3)
    index.take(tracker.receive(0, batch(stored([1, 2, 3, 4], tokens(1, 4)))))
    assert index.gpu == set() and "capacity" in index.alarms


def test_a_snapshot_continues_where_the_stream_proves_it() -> None:
    tracker, index = begun(can_replay=True)
    index.take(tracker.replay_ended())
    frames = [batch(stored([at], tokens(at, 1)), ts=float(at)) for at in range(3)]
    index.take(tracker.receive(0, frames[0]))
    index.take(tracker.receive(1, frames[1]))
    blob = tracker.snapshot()
    assert blob is not None
    successor = Tracker("p", can_replay=True)
    assert successor.restore(blob)
    assert successor.start() == [RequestReplay(1)]
    for seq in (1, 2):
        index.take(successor.replayed(seq, frames[seq]))
    index.take(successor.replay_ended())
    assert index.reasons == ["start"] and set(successor.ledger.hashes().tolist()) == index.gpu
    assert not Tracker("another pool").restore(blob) and not Tracker("p").restore(b"junk")


def test_a_snapshot_without_a_replay_counts_if_the_next_frame_follows_it() -> None:
    frames = [batch(stored([at], tokens(at, 1)), ts=float(at)) for at in range(6)]
    for nothing_missed in (True, False):
        tracker, index = begun()
        for seq in (0, 1):
            index.take(tracker.receive(seq, frames[seq]))
        blob = tracker.snapshot()
        assert blob is not None
        successor = Tracker("p")
        assert successor.restore(blob) and successor.start() == [] and successor.unconfirmed
        index.take(successor.receive(2 if nothing_missed else 4, frames[2]))
        assert not successor.unconfirmed and successor.complete is nothing_missed
        assert len(index.gpu) == (3 if nothing_missed else 1)
        assert set(successor.ledger.hashes().tolist()) == index.gpu


def test_ledger_costs_at_most_200_bytes_a_block() -> None:
    import tracemalloc

    tracker, _ = begun()
    count = 20_000
    names = [(at * 0x9E3779B97F4A7C15 + 1) % 2**64 for at in range(count)]
    frames = [batch(stored([name], tokens(at, 1), parent=None)) for at, name in enumerate(names)]
    tracemalloc.start()
    for seq, frame in enumerate(frames):
        tracker.receive(seq, bytes(frame))
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(tracker.ledger) == count
    assert grown / count <= 200 + 8192 * 250 / count  # the digests of recent frames are bounded on their own


class EngineAndTracker(RuleBasedStateMachine):
    """An engine with restarts, resets, evictions and copies; a channel that loses, repeats and delays frames."""

    def __init__(self) -> None:
        super().__init__()
        self.life = 0
        self.tracker = Tracker("p", can_replay=True)
        self.index = Index()
        self.replay: list[tuple[int, bytes]] | None = None
        self.notice_in = 0
        self.new_life()
        self.take(self.tracker.start())

    def new_life(self) -> None:
        self.life += 1
        self.seq = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.cache: OrderedDict[int, tuple[int, int | None]] = OrderedDict()  # name -> (our hash, parent)
        self.wire: list[tuple[int, bytes]] = []

    def take(self, outputs: list[Output]) -> None:
        self.index.take(outputs)
        for output in outputs:
            if isinstance(output, RequestReplay):
                self.replay = [frame for frame in self.buffer if frame[0] >= output.start]

    def publish(self, *events: Any) -> None:
        frame = (self.seq, batch(*events, ts=self.life * 1000.0 + self.seq))
        self.seq += 1
        self.buffer = [*self.buffer, frame][-12:]
        self.wire.append(frame)

    @rule(seed=st.integers(1, 4), blocks=st.integers(1, 5))
    def serve(self, seed: int, blocks: int) -> None:
        ids = tokens(seed, blocks)
        chain = ours(ids)
        names = [hash((self.life, block)) % 2**64 for block in chain]
        have = next((at for at, name in enumerate(names) if name not in self.cache), blocks)
        if have == blocks:
            return
        parent = names[have - 1] if have else None
        for at in range(have, blocks):
            self.cache[names[at]] = (chain[at], names[at - 1] if at else None)
        self.publish(stored(names[have:], ids[have * SIZE :], parent))

    @precondition(lambda self: self.cache)
    @rule()
    def evict(self) -> None:
        parents = {parent for _, parent in self.cache.values()}
        name = next(name for name in self.cache if name not in parents)  # tails first
        del self.cache[name]
        self.publish(removed(name))

    @rule()
    def reset(self) -> None:
        self.cache.clear()
        self.publish(CLEARED)

    @rule(notice_in=st.integers(0, 3))
    def restart(self, notice_in: int) -> None:
        """The connection breaks, too; the news of it may come after some frames of the new life."""
        self.new_life()
        self.notice_in = notice_in
        if not notice_in:
            self.take(self.tracker.reconnected())

    @rule()
    def distrust(self) -> None:
        self.take(self.tracker.distrusted())

    @precondition(lambda self: self.wire)
    @rule()
    def deliver(self) -> None:
        self.take(self.tracker.receive(*self.wire.pop(0)))
        if self.notice_in:
            self.notice_in -= 1
            if not self.notice_in:
                self.take(self.tracker.reconnected())

    @precondition(lambda self: self.wire)
    @rule()
    def lose(self) -> None:
        self.wire.pop(0)

    @precondition(lambda self: self.wire)
    @rule()
    def repeat(self) -> None:
        self.take(self.tracker.receive(*self.wire[0]))

    @precondition(lambda self: self.replay is not None)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def answer_replay(self, fails: bool) -> None:
        self.finish_replay(fails)

    def finish_replay(self, fails: bool = False) -> None:
        asked = self.replay
        for frame in asked or ():
            if fails or self.replay is not asked:
                break
            self.take(self.tracker.replayed(*frame))
        if self.replay is asked:
            self.replay = None
            self.take(self.tracker.replay_failed("test") if fails else self.tracker.replay_ended())

    @invariant()
    def the_index_claims_nothing_that_the_tracker_does_not_hold(self) -> None:
        # less where two names stand for one block: an engine with random hashes whose restart went unnoticed so far
        assert self.index.gpu <= set(self.tracker.ledger.hashes().tolist())

    def teardown(self) -> None:
        """Once events flow again: no block that the engine does not hold, and all of them if nothing was lost."""
        self.notice_in = 0
        self.take(self.tracker.reconnected())
        for _ in range(50):
            if self.replay is None and not self.wire:
                break
            while self.replay is not None:
                self.finish_replay()
            while self.wire and self.replay is None:
                self.deliver()
        assert not self.tracker.replaying
        assert self.index.gpu <= {block for block, _ in self.cache.values()}
        if self.tracker.complete:
            assert self.index.gpu == {block for block, _ in self.cache.values()}
        self.reset()
        self.serve(1, 3)
        while self.wire:
            self.deliver()
        assert self.index.gpu == set(ours(tokens(1, 3)))


TestEngineAndTracker = pytest.mark.filterwarnings("ignore")(EngineAndTracker.TestCase)
TestEngineAndTracker.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
