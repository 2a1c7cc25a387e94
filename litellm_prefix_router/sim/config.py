"""Settings of one simulated replica. Plain data: nothing here opens a socket or reads a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .assets import TINY_MODEL

Script = Callable[[Sequence[int], int], Sequence[int]]
"""(prompt token ids, max_tokens) -> the token ids of the answer, at most max_tokens of them are used."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """How one simulated replica behaves. Port 0 means any free one."""

    host: str = "127.0.0.1"
    port: int = 0
    model_name: str = "tiny"
    model_folder: Path = TINY_MODEL
    """Tokenizer and chat template; also the `root` that /v1/models tells."""
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """Adapter name -> path (the path enters the engine's hashes)."""
    max_model_len: int = 32768

    block_size: int = 16
    num_blocks: int = 4096
    """KV blocks of the pool; one is reserved, so that num_blocks - 1 are usable, as in the engine."""
    max_batched_tokens: int = 2048
    """Tokens that one step computes at most (chunked prefill)."""
    max_requests: int = 256
    """Requests that run at once at most."""
    prefill_tokens_per_s: float = 8000.0
    decode_tokens_per_s: float = 50.0
    """Of one request; running requests decode together."""
    data_parallel_size: int = 1

    events: bool = True
    events_port: int = 0
    """Bound on `host`, rank r at port + r. What /kv_event_sources tells is `tcp://*:port`, which means `bound`."""
    replay_port: int | None = 0
    """Likewise; None: no replay."""
    events_endpoint: str | None = None
    """An endpoint as the engine takes it, instead of `events_port`: with `*`, `::`, ipc:// or inproc:// the engine
    binds, else it connects and the consumer binds."""
    replay_endpoint: str | None = None
    """Likewise, instead of `replay_port`; always bound."""
    topic: str = ""
    buffer_steps: int = 10_000
    """Batches that can be replayed."""

    hash_algorithm: str = "sha256"
    """"sha256" or "sha256_cbor"."""
    hash_seed: str = "vllm-none-hash"
    """What the chain's root is derived from (PYTHONHASHSEED, where that is set)."""
    integer_hashes: bool = True
    """Events name a block by 64 bits of its digest; False: by all 32 bytes."""

    default_max_tokens: int = 128
    """Length of an answer where the request sets none."""
    seed: int = 0
    """Of the answers' words."""
    script: Script | None = None
    """Answers to give instead of made-up ones (tests)."""

    def __post_init__(self) -> None:
        """Raises ValueError with one clear line for a value that cannot work."""
        positive = ("block_size", "max_batched_tokens", "max_requests", "data_parallel_size", "buffer_steps")
        for name in (*positive, "prefill_tokens_per_s", "decode_tokens_per_s", "max_model_len"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is reserved), got {self.num_blocks}")
        if self.hash_algorithm not in ("sha256", "sha256_cbor"):
            raise ValueError(f"hash_algorithm must be sha256 or sha256_cbor, got {self.hash_algorithm!r}")
