"""`prefix-router eds`: keep the file with Envoy's endpoints in step with the replicas."""

from __future__ import annotations

import asyncio
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..gateways.ext_proc.eds import EdsFile
    from ..settings import Settings

    Ask = Callable[[], Awaitable[dict[str, bool]]]
    """Endpoint -> whether it drains."""


class Source(StrEnum):
    """Where the endpoints come from."""

    CONFIG = "config"
    ROSTER = "roster"


def eds(
    config: Annotated[Path, typer.Option(help="YAML file with settings, as for ext-proc.")],
    output: Annotated[Path, typer.Option(help="File that Envoy's EDS cluster watches.")],
    pool: Annotated[str | None, typer.Option(help="Pool of envoy.pools; default: the only one.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Envoy's name of the cluster; default: the pool's name.")] = None,
    source: Annotated[
        Source, typer.Option(help="config: the pool's endpoints, names resolved; roster: the replicas in the index.")
    ] = Source.CONFIG,
    interval_s: Annotated[float, typer.Option(min=0.05, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, then end.")] = False,
) -> None:
    """Write Envoy's endpoints by atomic rename, whenever they change; never an empty list."""
    from ..gateways.ext_proc.eds import EdsFile
    from ..settings import SettingsError, load_settings_file

    settings = load_settings_file(config)
    names = list(settings.envoy.pools)
    name = pool or (names[0] if len(names) == 1 else None)
    if name is None or name not in names:
        raise SettingsError(f"--pool: choose one of {', '.join(names) or '(envoy.pools is empty)'}")
    if not output.parent.is_dir():
        raise SettingsError(f"--output: {output.parent} is not a folder")
    ask = _from_config(settings, name) if source is Source.CONFIG else _from_roster(settings, name)
    wrote = asyncio.run(_keep(ask, EdsFile(output, cluster or name), interval_s, once))
    if once and not wrote:
        typer.echo("prefix-router eds: no endpoints are known; the file is as it was", err=True)
        raise typer.Exit(1)


async def _keep(ask: Ask, file: EdsFile, interval_s: float, once: bool) -> bool:
    """Whether the file holds what was asked last."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    said = ""
    while True:
        endpoints = await ask()
        outcome = file.write(endpoints)
        if outcome == "written":
            typer.echo(f"{len(endpoints)} endpoints written: {', '.join(sorted(endpoints))}")
        elif outcome == "refused" != said and not once:
            typer.echo("no endpoints are known: the file stays as it was", err=True)
        said = outcome
        if once:
            return outcome != "refused"
        try:
            await asyncio.wait_for(stop.wait(), interval_s)
            return True
        except TimeoutError:
            pass


def _from_config(settings: Settings, pool: str) -> Ask:
    from ..gateways.ext_proc.directory import Directory
    from ..gateways.ext_proc.prober import resolve

    directory = Directory(settings)
    resolved: dict[str, list[str]] = {}

    async def ask() -> dict[str, bool]:
        for name in sorted(directory.names):
            resolved[name] = await resolve(name) or resolved.get(name, [])
        directory.update(resolved)
        view = directory.pools[pool]
        return {endpoint: address in view.draining for endpoint, address in view.address_at.items()}

    return ask


def _from_roster(settings: Settings, pool: str) -> Ask:
    from ..gateways.ext_proc.eds import endpoint_of_address
    from ..gateways.ext_proc.prober import resolve
    from ..index import IndexUnavailable, open_reader

    model = settings.envoy.pools[pool].model
    reader = None
    resolved: dict[str, list[str]] = {}

    async def ask() -> dict[str, bool]:
        nonlocal reader
        reader = reader or open_reader(settings)
        try:
            roster = await reader.roster(model)
        except IndexUnavailable:
            return {}
        found: dict[str, bool] = {}
        for record in roster.values():
            name = endpoint_of_address(record.address)
            resolved[name] = await resolve(name) or resolved.get(name, [])
            found.update(dict.fromkeys(resolved[name], False))
        return found

    return ask
