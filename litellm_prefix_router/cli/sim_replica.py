"""`prefix-router sim-replica`: simulated replicas on this machine, until interrupted."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from ..sim import SimConfig, SimReplica


def sim_replica(
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port; 0: any free one. Replica i of several: port + i.")] = 8000,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas in this process.")] = 1,
    model_name: Annotated[str, typer.Option(help="Name that requests ask for.")] = "tiny",
    model_folder: Annotated[Path | None, typer.Option(help="Tokenizer and template; default: the one shipped.")] = None,
    lora_modules: Annotated[list[str] | None, typer.Option(help="Adapter as NAME=PATH; may be repeated.")] = None,
    max_model_len: Annotated[int, typer.Option(help="Tokens of prompt and answer.")] = 32768,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the cache (one is reserved).")] = 4096,
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step at most.")] = 2048,
    max_requests: Annotated[int, typer.Option(help="Requests running at once at most.")] = 256,
    prefill_tokens_per_s: Annotated[float, typer.Option(help="Speed of prefill.")] = 8000.0,
    decode_tokens_per_s: Annotated[float, typer.Option(help="Speed of one answer.")] = 50.0,
    data_parallel_size: Annotated[int, typer.Option(help="Engines behind one API address.")] = 1,
    events: Annotated[bool, typer.Option("--events/--no-events", help="Publish KV events.")] = True,
    events_port: Annotated[
        int, typer.Option(help="Port of the events, bound; 0: any free one. Further ranks and replicas: the next.")
    ] = 0,
    replay_port: Annotated[int, typer.Option(help="Port of the replay socket, likewise; -1: no replay.")] = 0,
    events_endpoint: Annotated[
        str | None, typer.Option(help="ZMQ endpoint by the engine's rule (without `*` it connects); one replica only.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Topic of the event frames.")] = "",
    buffer_steps: Annotated[int, typer.Option(help="Event batches that can be replayed.")] = 10_000,
    hash_algorithm: Annotated[str, typer.Option(help="sha256 or sha256_cbor.")] = "sha256",
    integer_hashes: Annotated[
        bool, typer.Option("--integer-hashes/--byte-hashes", help="How events name blocks.")
    ] = True,
    default_max_tokens: Annotated[int, typer.Option(help="Length of answers where the request sets none.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the answers.")] = 0,
) -> None:
    """Serve simulated replicas: vLLM's API, cache rules and KV events without a model, for trying and testing."""
    try:
        from ..sim import SimConfig
        from ..sim import replica as _  # noqa: F401  (the web server is an extra)
        from ..sim.assets import TINY_MODEL
    except ImportError as error:
        _fail(f"sim-replica needs the extra [sim]: pip install 'litellm-prefix-router[sim]' (missing: {error.name})")
    adapters = {}
    for item in lora_modules or ():
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            _fail(f"--lora-modules wants NAME=PATH, got {item!r}")
        adapters[name] = path
    if events_endpoint is not None and replicas > 1:
        _fail("--events-endpoint is one address; give --events-port where there are several replicas")
    folder = (model_folder or TINY_MODEL).absolute()
    if not (folder / "tokenizer.json").is_file():
        _fail(f"--model-folder {folder} has no tokenizer.json")
    try:
        first = SimConfig(
            host=host,
            port=port,
            model_name=model_name,
            model_folder=folder,
            lora_modules=adapters,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            max_batched_tokens=max_batched_tokens,
            max_requests=max_requests,
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_tokens_per_s=decode_tokens_per_s,
            data_parallel_size=data_parallel_size,
            events=events,
            events_port=events_port,
            replay_port=None if replay_port < 0 else replay_port,
            events_endpoint=events_endpoint,
            topic=topic,
            buffer_steps=buffer_steps,
            hash_algorithm=hash_algorithm,
            integer_hashes=integer_hashes,
            default_max_tokens=default_max_tokens,
            seed=seed,
        )
    except ValueError as error:
        _fail(str(error))
    configs = [_nth(first, position) for position in range(replicas)]
    try:
        asyncio.run(_serve(configs))
    except OSError as error:
        _fail(f"cannot listen: {error}")


def _nth(first: SimConfig, position: int) -> SimConfig:
    """The next replica's settings: its ports follow on the first one's; free ports stay free ones."""
    ranks = first.data_parallel_size
    return dataclasses.replace(
        first,
        port=first.port and first.port + position,
        events_port=first.events_port and first.events_port + position * ranks,
        replay_port=first.replay_port and first.replay_port + position * ranks,
    )


async def _serve(configs: list[SimConfig]) -> None:
    from ..sim.replica import SimReplica
    from ..sim.tokenizer import SimTokenizer

    tokenizer = SimTokenizer(configs[0].model_folder)
    replicas: list[SimReplica] = []
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        for config in configs:
            replica = SimReplica(config, tokenizer=tokenizer)
            await replica.start()
            replicas.append(replica)
            events = ", ".join(replica.event_endpoints) or "none"
            typer.echo(f"{replica.base_url} serves {config.model_name}; events: {events}")
        await stop.wait()
    finally:
        for replica in replicas:
            await replica.stop()


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)
