"""One engine's KV memory as the engine accounts for it: fixed blocks, prefix reuse, least recently used eviction.

Rules, each seen in recordings of the real engine: only full blocks can be found again; a request's blocks are pinned
while it runs; freed blocks stay findable until their memory is needed and go to the end of the eviction queue, the
last block of a chain first; two requests may hold copies of one block, each announced, each removed by itself. Every
change that the outside is told of is appended to `events`, in order. No clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .hashing import Digest, short
from .wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash

MEDIUM = "GPU"
GROUP = 0
SPEC_KIND = "full_attention"


@dataclass(slots=True)
class Block:
    """One block of memory. `digest` is None while its content cannot be found by others."""

    number: int
    digest: Digest | None = None
    users: int = 0


@dataclass(frozen=True, slots=True)
class Labels:
    """What a request's events carry beside its tokens."""

    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None

    def extra_keys(self, position: int) -> list[str] | None:
        """Keys of the block at `position` of the chain, None where it has none."""
        keys = [] if self.lora_name is None else [self.lora_name]
        if position == 0 and self.cache_salt is not None:
            keys.append(self.cache_salt)
        return keys or None


class BlockCache:
    """The pool of blocks. `num_blocks` counts the one that the engine reserves; capacity is one less."""

    def __init__(self, num_blocks: int, block_size: int, *, integer_hashes: bool = True, events: bool = True) -> None:
        self.block_size = block_size
        self.capacity = num_blocks - 1
        self.events: list[Event] = []
        self._announce = events
        self._integer_hashes = integer_hashes
        self._free: OrderedDict[int, Block] = OrderedDict((n, Block(n)) for n in range(1, num_blocks))
        self._found: dict[Digest, dict[int, Block]] = {}

    @property
    def free(self) -> int:
        """Blocks that no running request uses; what they hold can still be found."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the capacity that running requests use, 0 to 1."""
        return 1.0 - self.free / self.capacity

    @property
    def copies(self) -> int:
        """Findable blocks, copies counted."""
        return sum(map(len, self._found.values()))

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._found

    def match(self, digests: Sequence[Digest], prompt_tokens: int) -> list[Block]:
        """The longest run of `digests` from the start that is held.

        It never covers the whole prompt: at least its last token has to be computed.
        """
        blocks: list[Block] = []
        for digest in digests[: (prompt_tokens - 1) // self.block_size]:
            copies = self._found.get(digest)
            if not copies:
                break
            blocks.append(next(iter(copies.values())))
        return blocks

    def fits(self, hits: Sequence[Block], new_blocks: int) -> bool:
        """Whether `new_blocks` can be had once `hits` are pinned."""
        return new_blocks + sum(not block.users for block in hits) <= self.free

    def pin(self, hits: Sequence[Block]) -> None:
        """Keep `hits` for one more user."""
        for block in hits:
            if not block.users:
                del self._free[block.number]
            block.users += 1

    def allocate(self, count: int) -> list[Block]:
        """`count` empty blocks, the least recently used first; what they held is removed. `fits` must hold."""
        blocks = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            if block.digest is not None:
                self._remove(block, block.digest)
            block.users = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[Block]) -> None:
        """One user of a chain is gone. Its last block becomes the first to be evicted."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self._free[block.number] = block
                if block.digest is None:  # holds nothing that could be found: the first to be used again
                    self._free.move_to_end(block.number, last=False)

    def store(
        self,
        blocks: Sequence[Block],
        digests: Sequence[Digest],
        tokens: Sequence[int],
        start: int,
        labels: Labels,
        *,
        report_from: int | None = None,
    ) -> None:
        """Make a chain's blocks from position `start` on findable, as far as there are `digests`, and announce them.

        `blocks`, `digests` and `tokens` are the whole chain from its first block on. `report_from`: announce from
        this position on instead, although what comes before `start` was findable already.
        """
        stop = len(digests)
        for position in range(start, stop):
            block, digest = blocks[position], digests[position]
            block.digest = digest
            self._found.setdefault(digest, {})[block.number] = block
        first = start if report_from is None else report_from
        if first >= stop or not self._announce:
            return
        size = self.block_size
        extra = [labels.extra_keys(position) for position in range(first, stop)]
        self.events.append(
            BlockStored(
                block_hashes=[self._name(digest) for digest in digests[first:stop]],
                parent_block_hash=self._name(digests[first - 1]) if first else None,
                token_ids=list(tokens[first * size : stop * size]),
                block_size=size,
                lora_id=labels.lora_id,
                medium=MEDIUM,
                lora_name=labels.lora_name,
                extra_keys=extra,
                group_idx=GROUP,
                kv_cache_spec_kind=SPEC_KIND,
                session_id=labels.session_id,
            )
        )

    def reset(self) -> bool:
        """Forget all content. False, and nothing happens, while requests hold blocks."""
        if self.free != self.capacity:
            return False
        self._found.clear()
        for block in self._free.values():
            block.digest = None
        if self._announce:
            self.events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def _remove(self, block: Block, digest: Digest) -> None:
        copies = self._found[digest]
        del copies[block.number]
        if not copies:
            del self._found[digest]
        block.digest = None
        if self._announce:
            self.events.append(BlockRemoved(block_hashes=[self._name(digest)], medium=MEDIUM, group_idx=GROUP))

    def _name(self, digest: Digest) -> Hash:
        return short(digest) if self._integer_hashes else digest
