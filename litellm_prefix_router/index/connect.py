"""The one place that turns `redis_url` into a client.

`redis://`, `rediss://` (TLS) and `unix://` are redis-py's own URLs, with their query options (ssl_ca_certs, ...).
``redis+sentinel://[user:password@]host:port[,host:port...]/<service>[/<db>]`` asks Sentinels for the primary,
``redis+cluster://[user:password@]host:port[,host:port...]`` joins a Cluster; `rediss+sentinel` and `rediss+cluster` use
TLS. `memory://<name>` needs no server: one index per process and name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..settings import SettingsError

if TYPE_CHECKING:
    from ..settings import Settings

_EXAMPLE = "redis://127.0.0.1:6379/0"
_PLAIN = ("redis", "rediss", "unix")
_SCHEMES = (*_PLAIN, "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "memory")


def check_url(url: str) -> str:
    """The URL's scheme. Raises SettingsError with one line that says what is wrong; never shows a password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise SettingsError(
            f"redis_url: expected one of {', '.join(_SCHEMES)} (such as {_EXAMPLE}), got {_mask(url)!r}"
        )
    if scheme == "memory":
        return scheme
    if scheme == "unix":
        if not urlsplit(url).path:
            raise SettingsError(f"redis_url: expected unix:///path/to/socket, got {_mask(url)!r}")
        return scheme
    try:
        if not _nodes(rest):
            raise ValueError
    except ValueError:
        raise SettingsError(f"redis_url: expected a host and a port as in {_EXAMPLE}, got {_mask(url)!r}") from None
    if scheme.endswith("+sentinel") and not urlsplit(url).path.strip("/"):
        raise SettingsError(f"redis_url: expected the service's name after the hosts, got {_mask(url)!r}")
    path = urlsplit(url).path.strip("/")
    if scheme in ("redis", "rediss") and path and not path.isdigit():
        raise SettingsError(f"redis_url: expected a database number after the host, got {_mask(url)!r}")
    return scheme


def connect(url: str, settings: Settings, *, max_connections: int = 64) -> Any:
    """A redis.asyncio client for the running event loop; connects on first use. Raises SettingsError.

    No timeout on reads and no retries: RedisGuard bounds each call, and callers have something else to do.
    """
    scheme = check_url(url)
    from redis.asyncio import Redis, RedisCluster, Sentinel
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    options: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": max(settings.redis_timeout_ms / 1000, 0.25),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,  # saves two commands on every new connection, which some ACLs refuse
    }
    if scheme != "unix":
        options["socket_keepalive"] = True  # a host that vanishes without a word
    if scheme in _PLAIN:
        try:
            return Redis.from_url(url, max_connections=max_connections, **options)
        except (ValueError, TypeError) as error:
            raise SettingsError(f"redis_url: {error} (got {_mask(url)!r})") from None
    parts = urlsplit(url)
    for name, values in parse_qs(parts.query).items():
        options[name] = values[0]
    if parts.username:
        options["username"] = unquote(parts.username)
    if parts.password:
        options["password"] = unquote(parts.password)
    if scheme.startswith("rediss+"):
        options["ssl"] = True
    nodes = _nodes(url.partition("://")[2])
    if scheme.endswith("+cluster"):
        from redis.asyncio.cluster import ClusterNode

        startup = [ClusterNode(host, port) for host, port in nodes]
        return RedisCluster(startup_nodes=startup, max_connections=max_connections, **options)
    service, _, db = parts.path.strip("/").partition("/")
    asking = {name: value for name, value in options.items() if name not in ("username", "password")}
    asking |= {"username": options.pop("sentinel_username", None), "password": options.pop("sentinel_password", None)}
    sentinel = Sentinel(nodes, sentinel_kwargs=asking, db=int(db or 0), max_connections=max_connections, **options)
    return sentinel.master_for(service)


def _nodes(rest: str) -> list[tuple[str, int]]:
    """[(host, port)] of "user:pw@host:port,host:port/path?query"; IPv6 addresses in brackets."""
    authority = rest.split("/", 1)[0].split("?", 1)[0].rpartition("@")[2]
    nodes = []
    for item in authority.split(","):
        parts = urlsplit(f"//{item}")
        if not parts.hostname:
            raise ValueError(item)
        nodes.append((parts.hostname, parts.port or 6379))
    return nodes


def _mask(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    rest, options, _ = rest.partition("?")  # passwords may stand there, too
    credentials, at, where = rest.rpartition("@")
    shown = f"***@{where}" if at and credentials else rest
    return f"{scheme}{separator}{shown}{'?...' if options else ''}"
