"""Which endpoint of Envoy is which replica: the pools of the configuration, with names resolved to addresses.

An endpoint is an ip:port as Envoy's cluster lists it; a replica is known to the rest of the project by its API
address, with "#<rank>" behind it where several data-parallel ranks, each with a cache of its own, share one address.
Nothing here opens a socket: resolved addresses are handed in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...fleet.pool import Pool, Replica, address_of, rank_of
from ...settings import EndpointSettings, EnvoyPoolSettings, ModelSettings, Settings, SettingsError

Resolved = Mapping[str, Sequence[str]]
"""name:port -> its ip:port endpoints."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool with both directions of its mapping."""

    name: str
    settings: EnvoyPoolSettings
    pool: Pool
    address_at: Mapping[str, str] = field(default_factory=dict)
    """Endpoint -> API address."""
    endpoint_of: Mapping[str, str] = field(default_factory=dict)
    """API address -> endpoint."""
    draining: frozenset[str] = frozenset()
    """Addresses that get nothing new."""

    def replicas_at(self, addresses: Collection[str]) -> tuple[str, ...]:
        """Ids of the replicas at these addresses, one a rank, in the pool's order."""
        wanted = frozenset(addresses)
        return tuple(name for name, replica in self.pool.replicas.items() if replica.address in wanted)

    def served_by(self, endpoint: str, chosen: str) -> str | None:
        """The replica that answered at the endpoint: its rank is the chosen one's, which the request pins. None: an
        endpoint that is not of this pool."""
        address = self.address_at.get(endpoint)
        if address is None or address == address_of(chosen):
            return chosen if address is not None else None
        ranked = f"{address}#{rank_of(chosen)}"
        return ranked if ranked in self.pool.replicas else address

    def sent_model(self, asked: object) -> str | None:
        """The model name to send instead of the one asked for; None: leave it."""
        rewrites = self.settings.rewrite_model
        if not rewrites or not isinstance(asked, str):
            return None
        wanted = rewrites.get(asked, rewrites.get("*") if asked != self.settings.model else None)
        return wanted if wanted != asked else None

    def endpoints(self, ranking: Iterable[str], limit: int) -> str:
        """The beginning of a ranking of replica ids, as Envoy's list of endpoints.

        The request pins one rank wherever it goes, so endpoints that lack the first one's rank are left out.
        """
        found: dict[str, None] = {}
        pinned: str | None = None
        for replica_id in ranking:
            address, _, rank = replica_id.partition("#")
            if pinned is None:
                pinned = rank
            elif pinned and f"{address}#{pinned}" not in self.pool.replicas:
                continue
            endpoint = self.endpoint_of.get(address)
            if endpoint is not None:
                found[endpoint] = None
        return ",".join(list(found)[:limit])


class Directory:
    """The pools as they stand. `update` replaces them as a whole, so that a request in flight keeps its view."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for an endpoint that cannot be one."""
        self.pools: dict[str, PoolView] = {}
        self._resolved: Resolved = {}
        self.configure(settings)

    def configure(self, settings: Settings) -> bool:
        """Take the pools from these settings from now on; whether anything changed. Raises SettingsError."""
        names = {
            entry.endpoint
            for pool in settings.envoy.pools.values()
            for entry in _entries(pool)
            if not _is_address(entry.endpoint)
        }
        self._settings = settings
        self.names = frozenset(names)
        """name:port endpoints that have to be resolved."""
        return self.update(self._resolved)

    def update(self, resolved: Resolved) -> bool:
        """Build the pools with these resolutions; whether anything changed."""
        self._resolved = resolved
        pools = {name: self._view(name, given, resolved) for name, given in self._settings.envoy.pools.items()}
        changed = {name: _essence(view) for name, view in pools.items()} != {
            name: _essence(view) for name, view in self.pools.items()
        }
        if changed:
            self.pools = pools
        return changed

    def find(self, named: str | None, cluster: str | None, model: object) -> PoolView | None:
        """The pool of a request: the one that the route names, else the cluster's, the model's, or the only one."""
        for name in (named, cluster):
            if name is not None and name in self.pools:
                return self.pools[name]
        if named is not None:
            return None
        if len(self.pools) == 1:
            return next(iter(self.pools.values()))
        if not isinstance(model, str):
            return None
        for view in self.pools.values():
            if model in (view.name, view.settings.model) or model in view.settings.rewrite_model:
                return view
        return next((view for view in self.pools.values() if model in view.pool.lora_modules), None)

    def addresses(self) -> list[str]:
        """API addresses of all pools, each once."""
        return list(dict.fromkeys(address for view in self.pools.values() for address in view.endpoint_of))

    def _view(self, name: str, given: EnvoyPoolSettings, resolved: Resolved) -> PoolView:
        replicas: dict[str, Replica] = {}
        address_at: dict[str, str] = {}
        draining: set[str] = set()
        for entry in _entries(given):
            single = _is_address(entry.endpoint)
            for endpoint in (entry.endpoint,) if single else resolved.get(entry.endpoint, ()):
                address = (entry.address if single else None) or f"{given.scheme}://{endpoint}"
                address = address.rstrip("/").removesuffix("/v1")
                replicas[address] = Replica(
                    address, address, given.model, events=entry.events if single else None, replay=entry.replay
                )
                address_at[endpoint] = address
                if entry.drain:
                    draining.add(address)
        pool = Pool(name=name, replicas=replicas)
        pool.settings = self._model_settings(name, given.model) or pool.settings
        return PoolView(
            name, given, pool, address_at, {a: e for e, a in address_at.items()}, frozenset(draining)
        )  # fmt: skip

    def _model_settings(self, name: str, model: str) -> ModelSettings | None:
        return self._settings.models.get(name) or self._settings.models.get(model)


def _essence(view: PoolView) -> object:
    return view.settings, view.address_at, view.draining


def _entries(pool: EnvoyPoolSettings) -> list[EndpointSettings]:
    entries = []
    for given in pool.endpoints:
        entry = EndpointSettings.model_validate({"endpoint": given}) if isinstance(given, str) else given
        host, _, port = entry.endpoint.rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise SettingsError(f"envoy.pools: endpoint {entry.endpoint!r} is not ip:port or name:port")
        if entry.address is not None and not entry.address.startswith(("http://", "https://")):
            raise SettingsError(f"envoy.pools: address {entry.address!r} of {entry.endpoint!r} is not an http(s) URL")
        entries.append(entry)
    return entries


def _is_address(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
