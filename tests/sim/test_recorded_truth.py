"""The simulated engine against a real one: same requests, same cached_tokens, the same event payloads byte for byte."""

from __future__ import annotations

import base64
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from litellm_prefix_router.sim.block_cache import BlockCache, Labels
from litellm_prefix_router.sim.engine import Engine, Request
from litellm_prefix_router.sim.hashing import BlockHasher
from litellm_prefix_router.sim.wire import encode_batch

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "vllm_requests"
RECORDINGS = ROOT.parent / "shared" / "vllm" / "recorded"
LORA_PATH = "./fixtures/lora"
TIMESTAMP_BYTES = slice(1, 10)


@dataclass(frozen=True)
class Life:
    """How the recorded engine was started, and how much of it is recorded."""

    calls: int
    frames: int
    ranks: int = 1
    algorithm: str = "sha256"
    seed: str = "vllm-none-hash"
    integer_hashes: bool = True
    max_batched_tokens: int = 2048

    def engine(self) -> Engine:
        cache = BlockCache(72, 32, integer_hashes=self.integer_hashes)
        return Engine(cache, BlockHasher(self.algorithm, self.seed), max_batched_tokens=self.max_batched_tokens)


LIVES = {
    "first_life": Life(calls=55, frames=66),
    "copies": Life(calls=5, frames=5),
    "bytes_lora_chunked": Life(calls=5, frames=8, integer_hashes=False, max_batched_tokens=128),
    "two_ranks_cbor": Life(calls=11, frames=10, ranks=2, algorithm="sha256_cbor", seed="0"),
}


def requests(entry: dict[str, Any]) -> list[Request]:
    return [
        Request(
            item["prompt"],
            item["answer"],
            Labels(
                lora_id=1 if item.get("lora") else None,
                lora_name=item.get("lora"),
                cache_salt=item.get("cache_salt"),
                session_id=item.get("session_id"),
            ),
            lora_path=LORA_PATH if item.get("lora") else None,
            read_cache=not item.get("prompt_logprobs"),
            report_hits=item.get("report_hits", False),
        )
        for item in entry["sequences"]
    ]


def run(engine: Engine, call: list[Request], rank: int) -> list[bytes]:
    """Payloads of one call. Of several sequences the first was a step ahead, as the recorded frames show."""
    frames = []
    late = call[1:]
    for request in call[:1]:
        engine.add(request)
    while not engine.idle or late:
        engine.complete(engine.plan())
        events = engine.take_events()
        if events:
            frames.append(encode_batch(0.5, events, rank))
        for request in late:
            engine.add(request)
        late = []
    return frames


def without_time(frame: bytes) -> bytes:
    return frame[: TIMESTAMP_BYTES.start] + frame[TIMESTAMP_BYTES.stop :]


@pytest.mark.parametrize("name", LIVES)
def test_same_hits_and_same_bytes(name: str) -> None:
    life = LIVES[name]
    engines = [life.engine() for _ in range(life.ranks)]
    calls = frames = 0
    for line in (DATA / f"{name}.jsonl").open(encoding="utf-8"):
        entry = json.loads(line)
        if entry.get("reset"):
            assert all(engine.reset() for engine in engines)
            continue
        rank = entry["rank"] or 0
        call = requests(entry)
        produced = run(engines[rank], call, rank)
        reported = entry["cached_tokens"]
        assert [request.cached_tokens for request in call][-len(reported) :] == reported, entry["id"]
        recorded = [base64.b64decode(frame) for frame in entry["frames"]]
        assert [without_time(item) for item in produced] == [without_time(item) for item in recorded], entry["id"]
        calls += 1
        frames += len(recorded)
    assert (calls, frames) == (life.calls, life.frames)


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the full recordings are not beside this checkout")
@pytest.mark.parametrize("name", LIVES)
def test_the_data_is_what_was_recorded(name: str) -> None:
    spec = importlib.util.spec_from_file_location("extract", DATA / "extract.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.extract(RECORDINGS, name) == (DATA / f"{name}.jsonl").read_text(encoding="utf-8")
