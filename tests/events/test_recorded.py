"""The tracker against a recorded engine: every chain equals the tokens, cached_tokens are predicted exactly."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from litellm_prefix_router.events.codec import Cleared, Removed, Stored, decode_batch
from litellm_prefix_router.events.outputs import NewIncarnation, Output, Remove, RequestReplay, Store
from litellm_prefix_router.events.tracker import Tracker
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash

DATA = Path(__file__).parents[1] / "data" / "vllm"
BLOCK = 32
STALE_BY_ONE_STEP = "g2_next_request"  # the reset is announced with this very request's events


class Held:
    """What an index would hold of one rank, from the tracker's outputs alone."""

    def __init__(self, rank: int = 0) -> None:
        self.tracker = Tracker("tiny", rank)
        self.blocks: set[int] = set()
        self.incarnations: list[str] = []
        self.take(self.tracker.start())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Store():
                    self.blocks |= set(np.frombuffer(output.blocks, "<u8").tolist())
                case Remove():
                    self.blocks -= set(np.frombuffer(output.blocks, "<u8").tolist())
                case NewIncarnation():
                    self.blocks.clear()
                    self.incarnations.append(output.reason)

    def run(self, ids: list[int], lora: str | None, salt: str | None) -> int:
        chain = chain_hashes(as_token_ids(ids), BLOCK, root_hash("tiny", lora, salt))
        return next((at for at, block in enumerate(chain) if block not in self.blocks), len(chain))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def payload(line: dict[str, Any]) -> bytes:
    return base64.b64decode(line["payload"])


def replay_life(name: str) -> tuple[Counter[str], dict[int, Held]]:
    """Feed a life request by request; every prediction and every chain is asserted on the way."""
    seen: Counter[str] = Counter()
    ranks: dict[int, Held] = {}
    script = [line for line in lines(name) if line["t"] != "replay"]
    while script:
        line = script.pop(0)
        after = []
        while script and script[0]["t"] == "frame":
            after.append(script.pop(0))
        rank = line["rank"] if line["rank"] >= 0 else decode_batch(payload(after[0]))[1] if after else 0
        held = ranks.setdefault(rank, Held(rank))
        ids, lora, salt = line["ids"], line["lora"], line["salt"]
        if line["check"] == "all" and not line["restart"]:
            predicted = min(held.run(ids, lora, salt), (len(ids) - 1) // BLOCK) * BLOCK
            if line["id"] == STALE_BY_ONE_STEP:
                assert (line["cached"], predicted) == (0, 480)
            else:
                assert predicted == line["cached"], line["id"]
                seen["predicted"] += 1
        for frame in after:
            other = ranks.setdefault(owner := decode_batch(payload(frame))[1], Held(owner))
            other.take(other.tracker.receive(frame["seq"], payload(frame)))
            seen["frames"] += 1
        if line["check"] != "no":
            whole = ids + line["answer"][:-1]
            assert held.run(whole, lora, salt) == len(whole) // BLOCK, line["id"]
            seen["chains"] += 1
    return seen, ranks


@pytest.mark.parametrize(
    ("life", "predicted", "chains"),
    [
        ("first_life", 49, 51),
        ("restart_bytes_lora", 6, 7),
        ("two_ranks", 11, 11),
        ("late_join", 6, 7),
        ("copies", 5, 5),
    ],
)
def test_cached_tokens_and_chains_are_exact(life: str, predicted: int, chains: int) -> None:
    """Before a request: the match is what the engine reports. After its frames: the full blocks of prompt and answer
    (but its last token) are held."""
    seen, _ = replay_life(life)
    assert (seen["predicted"], seen["chains"]) == (predicted, chains)


def test_copies_are_counted() -> None:
    """Evicting one of two copies is announced although the block still hits."""
    seen, ranks = replay_life("copies")
    assert seen["predicted"] == 5
    assert ranks[0].tracker.counts["duplicates"] > 0 and ranks[0].tracker.counts["removed"] > 0


def test_restart_is_seen_by_the_sequence_number() -> None:
    _, ranks = replay_life("restart_bytes_lora")
    assert ranks[0].incarnations == ["start", "restart"]


def test_reset_while_idle_takes_effect_with_the_next_step() -> None:
    _, ranks = replay_life("first_life")
    assert ranks[0].incarnations[-1] == "cleared"


def test_late_join_is_complete_after_the_replay() -> None:
    script = lines("late_join")
    held = Held()
    held.tracker = Tracker("tiny", 0, can_replay=True)
    (begin, ask) = held.tracker.start()
    assert begin == NewIncarnation("start") and ask == RequestReplay(0)
    replays = [line for line in script if line["t"] == "replay"]
    first = next(line for line in script if line["t"] == "frame")
    held.take(held.tracker.receive(first["seq"], payload(first)))
    for line in replays:
        held.take(held.tracker.replayed(line["seq"], payload(line)))
    held.take(held.tracker.replay_ended())
    assert held.tracker.last >= replays[-1]["seq"]
    assert held.tracker.complete == (replays[0]["seq"] == 0)


def test_twenty_vllm_versions_decode_alike() -> None:
    versions = lines("schema_versions")
    assert len(versions) == 20
    for version in versions:
        for kind, raw in version["payloads_b64"].items():
            ts, rank, events = decode_batch(base64.b64decode(raw))
            assert (ts, rank) == (1700000000.5, 1)
            if kind == "stored_int":
                (event,) = events
                assert isinstance(event, Stored)
                assert event.blocks == [2**63 + 5, 7] and event.parent is None and event.block_size == 16
                assert event.tokens == list(range(100, 132)) and event.tier == "gpu" and event.lora is None
            elif kind == "stored_bytes_lora":
                (event,) = events
                assert isinstance(event, Stored)
                assert event.blocks == [0x0101010101010101] and event.parent == 0x0202020202020202
                assert event.lora is not None
            elif kind == "removed":
                assert events == [Removed([7], "gpu")]
            elif kind == "cleared":
                assert events == [Cleared()]
            elif kind == "mixed":
                assert [type(event) for event in events] == [Removed, Stored, Cleared]
