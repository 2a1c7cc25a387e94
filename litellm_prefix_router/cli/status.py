"""`prefix-router status`: one screen that says whether requests are placed by exact knowledge, and if not, why."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .index_options import ConfigOption, KeyPrefixOption, RedisUrlOption, settings_from

if TYPE_CHECKING:
    from ..observe.status import Status

DEGRADED = 1


def status(
    config: ConfigOption = None,
    redis_url: RedisUrlOption = None,
    key_prefix: KeyPrefixOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show gateways, indexers and replicas. Exit code 0: all exact; 1: degraded; 2: settings that cannot be used."""
    settings = settings_from(config, redis_url, key_prefix)
    # people wait longer than requests do
    settings = settings.model_copy(update={"redis_timeout_ms": max(settings.redis_timeout_ms, 2000.0)})
    found = asyncio.run(_read(settings))
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict()) + "\n")
    else:
        _show(found)
    if not found.healthy:
        raise typer.Exit(DEGRADED)


async def _read(settings: Any) -> Status:
    from ..index import open_reader
    from ..observe.status import read_status

    reader = open_reader(settings, "status")
    try:
        return await read_status(reader, settings.redis_url.rpartition("@")[2])
    finally:
        await reader.close()


def _show(found: Status) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    now = time.time()
    table = Table(
        "pool", "replica", "knowledge", "last event", "blocks", "requests", "pending tokens", "life", "indexer"
    )
    for r in sorted(found.replicas, key=lambda r: (r.pool, r.replica)):
        colour = {"exact": "green", "none": "red", "stale": "red"}.get(r.knowledge, "yellow")
        last = f"{now - r.last_event_at:.0f} s ago" if r.last_event_at else "-"
        cells = (str(r.blocks), str(r.requests), str(r.pending_prefill_tokens), str(r.incarnation), r.indexer or "-")
        table.add_row(r.pool, r.replica, f"[{colour}]{r.knowledge}[/]", last, *cells)
    if found.replicas:
        console.print(table)
    for g in found.gateways:
        console.print(_gateway_line(g), soft_wrap=True)
    if found.healthy:
        console.print("[green]All replicas are followed; requests are placed by exact knowledge.[/]")
    for problem in found.problems:
        console.print(f"[red]·[/] {problem}", soft_wrap=True)


def _gateway_line(g: dict[str, Any]) -> str:
    done = g["decisions"]
    total = max(done["decisions"], 1)
    parts = [f"gateway [bold]{g['gateway']}[/]: {g['policy']}, {done['decisions']} decisions"]
    parts += [f"{name} {count / total:.1%}" for name, count in done["by_source"].items()]
    if done["audited"]:
        parts.append(f"predicted = reported for {done['agreed'] / done['audited']:.1%} of {done['audited']} responses")
    parts.append("Redis ok" if g["breaker"] == "closed" else f"Redis breaker {g['breaker']}")
    parts += [f"tokenizer of {name}: {pool['tokenizer']}" for name, pool in g["pools"].items()]
    return ", ".join(parts)
