"""`prefix-router ext-proc`: the external processor for Envoy, in one or several processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .open_files import allow_many_files

if TYPE_CHECKING:
    from ..gateways.ext_proc.server import ExtProcServer
    from ..settings import Settings


def ext_proc(
    config: Annotated[Path, typer.Option(help="YAML file with settings; its `envoy` section is the processor's.")],
    listen: Annotated[str | None, typer.Option(help="host:port or unix:///path instead of envoy.listen.")] = None,
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve Envoy's ext_proc filter: name the endpoints for each request, best first. SIGHUP reloads the pools."""
    missing = _missing_parts()
    if missing:
        typer.echo(
            f"ext-proc needs the extra [envoy]: pip install 'litellm-prefix-router[envoy]' (missing: {missing})",
            err=True,
        )
        raise typer.Exit(2)
    from ..settings import load_settings_file

    settings = load_settings_file(config)
    if listen is not None:
        settings.envoy.listen = listen
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    if settings.envoy.workers > 1 and worker is None:
        from ..gateways.ext_proc.workers import run_workers

        raise typer.Exit(run_workers(settings.envoy.workers, _command(config, listen)))
    allow_many_files()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, config, worker))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: a decision takes about a quarter less CPU on it."""
    from importlib.util import find_spec

    if find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _missing_parts() -> str:
    from importlib.util import find_spec

    def there(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    parts = {"grpcio": "grpc", "grpcio-health-checking": "grpc_health", "xds-protos": "envoy.service.ext_proc"}
    return ", ".join(name for name, module in parts.items() if not there(module))


def _command(config: Path, listen: str | None) -> list[str]:
    start = "from litellm_prefix_router.cli import main; main()"
    command = [sys.executable, "-c", start, "ext-proc", "--config", str(config)]
    return command if listen is None else [*command, "--listen", listen]


async def _serve(settings: Settings, config: Path, worker: int | None) -> None:
    from ..gateways.ext_proc.server import ExtProcServer

    server = ExtProcServer(settings, worker=worker or 0)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(server, config))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    await server.start()
    # what has been imported stays: looking through it for garbage again and again costs requests milliseconds
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    watch = loop.create_task(_end_with_parent(stop)) if worker is not None else None
    typer.echo(f"ext_proc listens on {server.address}; pools: {', '.join(settings.envoy.pools)}")
    try:
        await stop.wait()
    finally:
        if watch is not None:
            watch.cancel()
        await server.stop()


async def _reload(server: ExtProcServer, config: Path) -> None:
    """SIGHUP: pools and endpoints as the file has them now; a file that cannot be used changes nothing."""
    from ..settings import SettingsError, load_settings_file

    try:
        await server.reload(load_settings_file(config))
    except SettingsError as error:
        typer.echo(f"prefix-router: not reloaded: {error}", err=True)
    else:
        typer.echo("pools reloaded")


async def _end_with_parent(stop: asyncio.Event) -> None:
    """A worker whose parent was killed would hold its address against the next one."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(0.5)
    stop.set()
