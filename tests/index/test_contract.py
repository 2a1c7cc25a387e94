"""One suite for every implementation of the index."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from litellm_prefix_router.index import BlockWrite, Fenced, ReplicaLoad, ReplicaRecord
from litellm_prefix_router.index.layout import pack_hashes

POOL = "llama"
NAMES = [f"http://10.0.0.{i}:8000" for i in range(5)]
CHAIN = [(i * 0x9E3779B97F4A7C15 + 1) % 2**64 for i in range(600)]


def record(name: str) -> ReplicaRecord:
    return ReplicaRecord(replica_id=name, address=name, block_size=16, knowledge="exact")


async def start(writer: Any, names: list[str] = NAMES, indexer: str = "ix") -> dict[str, tuple[ReplicaRecord, int]]:
    claim = await writer.claim(POOL, indexer, dict.fromkeys(names, 0), 30.0)
    return {n: (await writer.begin_incarnation(POOL, record(n), fence), fence) for n, fence in claim.claimed.items()}


async def write(writer: Any, who: tuple[ReplicaRecord, int], blocks: list[int], held: bool = True, tier: str = "gpu"):
    return await writer.apply(POOL, [BlockWrite(who[0], who[1], held, pack_hashes(blocks), tier)])


async def test_matches_are_the_leading_blocks_of_each_live_replica(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    fleet = await start(writer)
    lengths = dict(zip(NAMES, [600, 37, 1, 0, 250], strict=True))
    for name, length in lengths.items():
        assert not await write(writer, fleet[name], CHAIN[:length])
    for n in (1, 2, 3, 36, 37, 38, 250, 500, 600):
        found = await reader.lookup(POOL, CHAIN[:n])
        assert found.matches == {name: min(n, length) for name, length in lengths.items() if length}
    assert set(found.roster) == set(NAMES)
    assert (await reader.lookup(POOL, [])).matches == {}
    assert (await reader.lookup("another pool", CHAIN)).matches == {}


async def test_eviction_on_one_replica_leaves_the_others(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    fleet = await start(writer)
    for name in NAMES:
        await write(writer, fleet[name], CHAIN[:40])
    await write(writer, fleet[NAMES[2]], CHAIN[20:40], held=False)
    found = await reader.lookup(POOL, CHAIN[:40])
    assert found.matches == {n: 20 if n == NAMES[2] else 40 for n in NAMES}


async def test_a_new_incarnation_clears_at_once_and_late_writes_land_nowhere(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    fleet = await start(writer)
    await write(writer, fleet[NAMES[0]], CHAIN[:40])
    assert (await reader.lookup(POOL, CHAIN[:40])).matches == {NAMES[0]: 40}
    old, fence = fleet[NAMES[0]]
    new = await writer.begin_incarnation(POOL, record(NAMES[0]), fence)
    assert new.incarnation == old.incarnation + 1
    await write(writer, (old, fence), CHAIN[:40]) if index.kind == "redis" else None
    assert (await reader.lookup(POOL, CHAIN[:40])).matches == {}
    await write(writer, (new, fence), CHAIN[:7])
    assert (await reader.lookup(POOL, CHAIN[:40])).matches == {NAMES[0]: 7}


async def test_events_queued_before_removal_arriving_after_it(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    fleet = await start(writer)
    await write(writer, fleet[NAMES[0]], CHAIN[:40])
    await writer.retire(POOL, NAMES[0], fleet[NAMES[0]][1])
    assert await write(writer, fleet[NAMES[0]], CHAIN[:40]) == {NAMES[0]}
    found = await reader.lookup(POOL, CHAIN[:40])
    assert found.matches == {} and NAMES[0] not in found.roster


async def test_a_stale_fence_is_refused(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    fleet = await start(writer)
    await writer.release(POOL, "ix", {NAMES[0]: fleet[NAMES[0]][1]})
    again = await writer.claim(POOL, "other", {NAMES[0]: 0}, 30.0)
    assert again.claimed[NAMES[0]] > fleet[NAMES[0]][1]
    assert await write(writer, fleet[NAMES[0]], CHAIN[:3]) == {NAMES[0]}
    for call in (
        writer.begin_incarnation(POOL, record(NAMES[0]), fleet[NAMES[0]][1]),
        writer.update(POOL, fleet[NAMES[0]][0], fleet[NAMES[0]][1]),
        writer.save_snapshot(POOL, NAMES[0], fleet[NAMES[0]][1], b"x"),
        writer.retire(POOL, NAMES[0], fleet[NAMES[0]][1]),
    ):
        with pytest.raises(Fenced):
            await call
    assert (await reader.lookup(POOL, CHAIN[:3])).matches == {}


async def test_leases_are_shared_fairly_and_kept(index: Any) -> None:
    writer = index.writer()
    first = await writer.claim(POOL, "one", dict.fromkeys(NAMES, 0), 30.0)
    assert set(first.claimed) == set(NAMES)
    second = await writer.claim(POOL, "two", dict.fromkeys(NAMES, 0), 30.0)
    assert second.claimed == {} and second.indexers == 2 and second.fair_share == 3
    kept = await writer.claim(POOL, "one", first.claimed, 30.0)
    assert kept.renewed == set(NAMES) and not kept.claimed
    surplus = dict(list(first.claimed.items())[:2])
    await writer.release(POOL, "one", surplus)
    assert set((await writer.claim(POOL, "two", dict.fromkeys(NAMES, 0), 30.0)).claimed) == set(surplus)


async def test_lower_tiers_do_not_count_as_gpu(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    fleet = await start(writer)
    await write(writer, fleet[NAMES[0]], CHAIN[:10])
    await write(writer, fleet[NAMES[0]], CHAIN[:30], tier="cpu")
    await write(writer, fleet[NAMES[1]], CHAIN[:5], tier="cpu")
    reader = index.reader("fresh")
    found = await reader.lookup(POOL, CHAIN[:30])
    assert found.matches == {NAMES[0]: 10}
    assert found.lower["cpu"] == {NAMES[0]: 30, NAMES[1]: 5}


async def test_placements_are_shared_between_gateways(index: Any) -> None:
    writer, mine, other = index.writer(), index.reader("a"), index.reader("b")
    await start(writer)
    mine.place(POOL, NAMES[3], CHAIN[:500], 30.0)
    await mine.placed()
    found = await other.lookup(POOL, CHAIN[:600])
    assert found.matches == {} and found.recent == {NAMES[3]: 497}  # rounded down to a canonical position
    assert (await other.lookup(POOL, CHAIN[:16])).recent == {NAMES[3]: 16}


async def test_placements_need_no_indexer(index: Any) -> None:
    mine, other = index.reader("a"), index.reader("b")
    for reader in (mine, other):
        await reader.announce(POOL, [ReplicaRecord(NAMES[3], NAMES[3])], 30.0)
    mine.place(POOL, NAMES[3], CHAIN[:500], 30.0)
    await mine.placed()
    for reader in (mine, other, other):
        assert (await reader.lookup(POOL, CHAIN[:500])).recent == {NAMES[3]: 497}


async def test_lookups_that_overlap_with_roster_changes_see_one_state(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    fleet = await start(writer)
    record_0, fence = fleet[NAMES[0]]
    await write(writer, fleet[NAMES[1]], CHAIN[:30])
    done = False

    async def look() -> int:
        looked = 0
        while not done:
            found = await reader.lookup(POOL, CHAIN[:40])
            # of the changing one less may be seen while its blocks go from one life to the next, never more
            assert found.matches.pop(NAMES[0], 0) <= 20 and found.matches == {NAMES[1]: 30}
            looked += 1
            await asyncio.sleep(0)
        return looked

    async def live() -> None:
        nonlocal done
        for life in range(40):
            begun = await writer.begin_incarnation(POOL, record_0, fence)
            await writer.apply(POOL, [BlockWrite(begun, fence, True, pack_hashes(CHAIN[: 10 + 10 * (life % 2)]))])
        done = True

    *looked, _ = await asyncio.gather(*(look() for _ in range(8)), live())
    assert min(looked) > 0


async def test_loads_are_those_of_other_gateways(index: Any) -> None:
    a, b, c = index.reader("a"), index.reader("b"), index.reader("c")
    await a.publish_loads(POOL, "a", {NAMES[0]: ReplicaLoad(1, 10, 100), NAMES[1]: ReplicaLoad(2, 20, 200)}, 30.0)
    await b.publish_loads(POOL, "b", {NAMES[0]: ReplicaLoad(3, 30, 300)}, 30.0)
    await c.lookup(POOL, [])
    assert (await c.lookup(POOL, [])).loads == {NAMES[0]: ReplicaLoad(4, 40, 400), NAMES[1]: ReplicaLoad(2, 20, 200)}
    await a.lookup(POOL, [])
    assert (await a.lookup(POOL, [])).loads == {NAMES[0]: ReplicaLoad(3, 30, 300)}


async def test_announcements_of_several_gateways_are_merged(index: Any) -> None:
    a, b, writer = index.reader("a"), index.reader("b"), index.writer()
    await a.announce(POOL, [record(n) for n in NAMES[:3]], 30.0)
    await b.announce(POOL, [record(n) for n in NAMES[2:]], 30.0)
    assert POOL in await writer.pools()
    assert set(await writer.announced(POOL)) == set(NAMES)
    await b.announce(POOL, [], 30.0)
    assert set(await writer.announced(POOL)) == set(NAMES[:3])


async def test_a_replica_without_events_is_in_the_roster(index: Any) -> None:
    writer, reader = index.writer(), index.reader()
    claim = await writer.claim(POOL, "ix", {NAMES[0]: 0}, 30.0)
    silent = ReplicaRecord(replica_id=NAMES[0], address=NAMES[0], note="publishes no events")
    assert await writer.update(POOL, silent, claim.claimed[NAMES[0]])
    found = await reader.lookup(POOL, CHAIN[:4])
    assert found.roster[NAMES[0]].knowledge == "none" and found.matches == {}


async def test_snapshots_come_back(index: Any) -> None:
    writer = index.writer()
    fleet = await start(writer)
    assert await writer.load_snapshot(POOL, NAMES[0]) is None
    await writer.save_snapshot(POOL, NAMES[0], fleet[NAMES[0]][1], b"\x00state\xff")
    assert await writer.load_snapshot(POOL, NAMES[0]) == b"\x00state\xff"


async def test_a_pool_that_no_indexer_tends_is_stale(settings: Any) -> None:
    from litellm_prefix_router.index.redis_reader import RedisIndexReader
    from litellm_prefix_router.index.redis_writer import RedisIndexWriter

    writer, reader = RedisIndexWriter(settings), RedisIndexReader(settings)
    fleet = await start(writer)
    await write(writer, fleet[NAMES[0]], CHAIN[:9])
    assert (await reader.lookup(POOL, CHAIN[:9])).roster[NAMES[0]].knowledge == "exact"
    await writer._guard.execute("DEL", writer._layout(POOL).alive)
    found = await reader.lookup(POOL, CHAIN[:9])
    assert found.matches == {NAMES[0]: 9} and found.roster[NAMES[0]].knowledge == "stale"
    assert (await reader.roster(POOL))[NAMES[0]].note == "no indexer follows its events"
    await reader.close()
    await writer.close()
