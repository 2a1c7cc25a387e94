"""The index as gateways read it, in Redis.

A lookup is one `MGET` of the roster's version, the other gateways' loads, placements and the plan's probes, and another
of the gaps where runs end. A third round trip happens only right after the roster changed. See layout for the keys.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from ..settings import Settings
from .connect import connect
from .contract import IndexLookup, IndexUnavailable, ReplicaLoad, ReplicaRecord
from .layout import Layout, pack_hashes, pools_key, replica_tag, state_key, states_key
from .placement_sender import PlacementSender
from .plan import LookupPlan, canonical_positions, probe_positions
from .records import as_fields, decode_loads, encode_announcement, encode_loads, sum_loads
from .redis_guard import RedisGuard
from .roster import Roster
from .scripts import ANNOUNCE, LOADS
from .wide_read import WideRead, tails

_ROSTER_AGE_S = 5.0
"""A roster is read again after this even when its version stands still: the times of last events move without it."""
_OFFSET_AGE_S = 60.0
_HEAD = 3
"""Keys in front of every lookup: version, gateways, the indexers' sign of life."""
_POOLS_TTL_S = 7200


class _PoolView:
    """What one reader knows about a pool between lookups."""

    __slots__ = (
        "announced", "gateways", "known", "layout", "loads", "loads_at", "loads_raw", "refresh", "roster", "roster_at",
        "tags",
    )  # fmt: skip

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.roster: Roster | None = None
        self.roster_at = float("-inf")
        self.refresh: asyncio.Task[None] | None = None
        self.tags: dict[bytes, str] = {}
        self.known: set[str] = set()
        self.announced: frozenset[str] = frozenset()
        self.gateways: tuple[str, ...] = ()
        self.loads: Mapping[str, ReplicaLoad] = {}
        self.loads_at = float("-inf")
        self.loads_raw: tuple[bytes | None, ...] = ()

    def take_roster(self, roster: Roster, now: float) -> None:
        self.roster, self.roster_at = roster, now
        if roster.valid:  # without an indexer nobody lists the replicas, and placements are all there is
            self.forget_but(self.announced | roster.records.keys())
        self.know(roster.records)

    def know(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.known:
                self.known.add(name)
                self.tags[replica_tag(name)] = name

    def forget_but(self, names: Set[str]) -> None:
        if not self.known <= names:
            self.known &= names
            self.tags = {tag: name for tag, name in self.tags.items() if name in names}


class RedisIndexReader:
    """IndexReader over Redis. Belongs to the event loop that first uses it; cheap, so make one per loop.

    Give all readers of one process the same `gateway_id`: a gateway's own load is left out of `IndexLookup.loads`.
    """

    def __init__(
        self,
        settings: Settings,
        gateway_id: str | None = None,
        *,
        client: Any = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.gateway_id = gateway_id or uuid.uuid4().hex[:12]
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._clock_offset_s = 0.0  # the server's wall clock minus ours
        self._offset_at = float("-inf")
        self._own = {self.gateway_id}
        self._pools: dict[str, _PoolView] = {}
        self._loads_age_s = settings.load_publish_ms / 4000
        self._guard = RedisGuard(
            client if client is not None else connect(settings.redis_url, settings),
            settings.redis_timeout_ms / 1000,
            settings.redis_probe_ms / 1000,
            clock,
        )
        self._placements = PlacementSender(self._guard)

    @property
    def breaker_state(self) -> str:
        """ "closed", "open" or "probing"."""
        return self._guard.breaker.state

    async def lookup(self, pool: str, blocks: Sequence[int]) -> IndexLookup:
        view = self._view(pool)
        roster = view.roster or await self._read_roster(view)
        if self._clock() - view.roster_at > _ROSTER_AGE_S:
            self._refresh(view)
        placed = canonical_positions(len(blocks)) if self._settings.placement_ttl_s > 0 else ()
        ends = tails(blocks, probe_positions(len(blocks)))  # which begin with the positions of placements
        for _ in range(3):  # more only if the roster changes with each round trip
            plan = LookupPlan(len(blocks), roster.live, len(roster.tiers), self._settings.lookup_max_reads)
            load_keys = self._load_keys(view)
            read = WideRead([view.layout.version, view.layout.gateways, view.layout.alive, *load_keys])
            read.add(view.layout.placed, ends[: len(placed)])
            for family in roster.families:
                read.add(family, ends[: len(plan.probes)])
            values = await self._guard.read(read)
            self._take_loads(view, values[1], values[_HEAD : _HEAD + len(load_keys)], len(load_keys) > 0)
            if values[0] == roster.version:
                break
            planned, roster = roster, await self._read_roster(view)
        else:
            roster = planned  # what was read can only be understood by the state that it was planned with
        first = _HEAD + len(load_keys)
        recent = self._recent(view, placed, values[first : first + len(placed)])
        probed = _levels(values[first + len(placed) :], len(plan.probes), len(plan.probes and roster.families))
        spans = plan.probed(probed)
        if spans:
            read, ends = WideRead(), tails(blocks, spans)
            for family in roster.families:
                read.add(family, ends)
            plan.filled(_levels(await self._guard.read(read), len(spans), len(roster.families)))
        return IndexLookup(
            matches=roster.by_replica(plan.matches()),
            recent=recent,
            lower={tier: roster.by_replica(plan.matches(level)) for level, tier in enumerate(roster.tiers) if level},
            loads=view.loads,
            roster=roster.seen(values[2] is not None),
        )

    async def roster(self, pool: str) -> Mapping[str, ReplicaRecord]:
        view = self._view(pool)
        roster = await self._read_roster(view)
        (alive,) = await self._mget([view.layout.alive])
        return roster.seen(alive is not None)

    async def announce(self, pool: str, replicas: Sequence[ReplicaRecord], ttl_s: float) -> None:
        view = self._view(pool)
        view.announced = frozenset(record.replica_id for record in replicas)
        view.know(view.announced)
        args = [self.gateway_id, int(ttl_s * 1000), encode_announcement(replicas)]
        await self._script(ANNOUNCE, [view.layout.announced], args)
        now = self._wall_clock()
        pools = pools_key(self._settings.key_prefix)
        await self._guard.execute("ZADD", pools, now, pool)
        await self._guard.execute("ZREMRANGEBYSCORE", pools, "-inf", now - _POOLS_TTL_S)
        await self._guard.execute("EXPIRE", pools, _POOLS_TTL_S)

    def place(self, pool: str, replica_id: str, blocks: Sequence[int], ttl_s: float) -> None:
        if not blocks or ttl_s <= 0:
            return
        view = self._view(pool)
        view.know([replica_id])
        hashes = pack_hashes([blocks[at] for at in canonical_positions(len(blocks))])
        self._placements.add(view.layout.placed, replica_tag(replica_id), max(1, round(ttl_s)), hashes)

    async def placed(self) -> None:
        await self._placements.sent()

    async def publish_loads(self, pool: str, gateway_id: str, loads: Mapping[str, ReplicaLoad], ttl_s: float) -> None:
        self._own.add(gateway_id)
        layout = self._view(pool).layout
        args = [gateway_id, int(ttl_s * 1000), encode_loads(loads)]
        await self._script(LOADS, [layout.gateways, layout.load(gateway_id)], args)

    async def publish_state(self, gateway_id: str, state: bytes, ttl_s: float) -> None:
        prefix, now = self._settings.key_prefix, self._wall_clock()
        listed = states_key(prefix)
        await self._guard.execute("SET", state_key(prefix, gateway_id), state, "PX", int(ttl_s * 1000))
        await self._guard.execute("ZADD", listed, now + ttl_s, gateway_id)
        await self._guard.execute("ZREMRANGEBYSCORE", listed, "-inf", now - ttl_s)
        await self._guard.execute("EXPIRE", listed, max(1, int(ttl_s * 2)))

    async def states(self) -> Mapping[str, bytes]:
        prefix = self._settings.key_prefix
        listed: list[bytes] = await self._guard.execute("ZRANGE", states_key(prefix), 0, -1)
        if not listed:
            return {}
        names = [name.decode() for name in listed]
        values = await self._mget([state_key(prefix, name) for name in names])
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    async def pools(self) -> Sequence[str]:
        key = pools_key(self._settings.key_prefix)
        listed: list[bytes] = await self._guard.execute("ZRANGE", key, 0, -1)
        return [name.decode() for name in listed]

    async def close(self) -> None:
        await self._placements.close()
        for view in self._pools.values():
            if view.refresh is not None:
                view.refresh.cancel()
        await self._guard.close()

    def _view(self, pool: str) -> _PoolView:
        view = self._pools.get(pool)
        if view is None:
            view = self._pools[pool] = _PoolView(Layout(self._settings.key_prefix, pool))
        return view

    async def _mget(self, keys: list[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = await self._guard.execute("MGET", *keys)
        return values

    async def _script(self, script: str, keys: list[bytes], args: list[Any]) -> None:
        await self._guard.run_script(script, keys, args)

    async def _read_roster(self, view: _PoolView) -> Roster:
        # the version first: if the roster changes in between, the next lookup sees a version newer than ours
        (version,) = await self._mget([view.layout.version])
        roster = Roster(view.layout, version, as_fields(await self._guard.execute("HGETALL", view.layout.roster)))
        view.take_roster(roster, self._clock())
        if self._clock() - self._offset_at > _OFFSET_AGE_S:
            seconds, micros = await self._guard.execute("TIME")
            self._clock_offset_s = int(seconds) + int(micros) / 1e6 - self._wall_clock()
            self._offset_at = self._clock()
        return roster

    def _refresh(self, view: _PoolView) -> None:
        """Read the roster again behind the decisions, which need not wait for it."""
        if view.refresh is None or view.refresh.done():
            view.refresh = asyncio.get_running_loop().create_task(self._refresh_now(view))

    async def _refresh_now(self, view: _PoolView) -> None:
        try:
            await self._read_roster(view)
        except IndexUnavailable:
            pass  # the lookup that asked for it meets the same

    def _load_keys(self, view: _PoolView) -> list[bytes]:
        if self._clock() - view.loads_at < self._loads_age_s:
            return []
        return [view.layout.load(gateway) for gateway in view.gateways]

    def _take_loads(self, view: _PoolView, listed: bytes | None, raw: list[bytes | None], asked: bool) -> None:
        gateways = tuple(
            name
            for line in (listed or b"").decode().split("\n")
            if (name := line.partition(" ")[2]) and name not in self._own
        )
        if asked or not gateways:
            view.loads_at = self._clock() if gateways else float("-inf")
            if tuple(raw) != view.loads_raw:
                view.loads_raw = tuple(raw)
                view.loads = sum_loads(decode_loads(share) for share in raw if share is not None)
        if gateways != view.gateways:
            view.gateways = gateways
            view.loads_at = float("-inf")  # the newcomer's load with the next lookup

    def _recent(self, view: _PoolView, positions: Sequence[int], values: list[bytes | None]) -> dict[str, int]:
        recent: dict[str, int] = {}
        now = 0
        for position, value in zip(reversed(positions), reversed(values), strict=True):
            if value is None:
                continue
            now = now or int(self._wall_clock() + self._clock_offset_s)
            for at in range(0, len(value), 8):
                name = view.tags.get(value[at : at + 4])
                if name and name not in recent and int.from_bytes(value[at + 4 : at + 8], "little") > now:
                    recent[name] = position + 1
        return recent


def _levels(values: Sequence[bytes | None], width: int, count: int) -> list[list[int]]:
    """Bitmaps of `count` key families as masks; each family's level includes the faster ones before it."""
    levels: list[list[int]] = []
    for level in range(count):
        row = [int.from_bytes(v, "little") if v else 0 for v in values[level * width : (level + 1) * width]]
        if levels:
            row = [mine | faster for mine, faster in zip(row, levels[-1], strict=True)]
        levels.append(row)
    return levels
