"""Request body -> token ids -> block hashes: this project against the plain way, in the same run.

The plain way renders with Jinja, encodes the whole text with `tokenizers` and hashes block by block, without any memory
of earlier requests (and with transformers' own rendering, where that is installed). Uses the Qwen3 tokenizer beside the
checkout where there is one, else the simulated replica's own small one.

    python benchmarks/prompt.py [--json] [--model DIR] [--rounds N]
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash
from litellm_prefix_router.prompt.cache import PromptCache
from litellm_prefix_router.prompt.pipeline import PromptPipeline
from litellm_prefix_router.settings import ModelSettings

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "prompts" / "qwen3"
TINY = ROOT / "litellm_prefix_router" / "sim" / "assets" / "tiny"
CHAT = "/v1/chat/completions"
BLOCK_SIZE = 16
CACHE_MB = 64


def corpus() -> list[str]:
    """Lines of prose and code that every Python installation has."""
    library = Path(argparse.__file__).parent
    files = [library / name for name in ("argparse.py", "asyncio/tasks.py", "typing.py", "decimal.py", "pathlib.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return [line for line in text.splitlines() if len(line) > 20]


LINES = corpus()


def words(generator: random.Random, characters: int) -> str:
    """Lines in random order with a number in each, so that no text comes twice."""
    pieces: list[str] = []
    length = 0
    while length < characters:
        piece = f"{generator.choice(LINES)} {generator.randrange(10**6)}\n"
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:characters]


def tool(generator: random.Random, index: int) -> dict[str, Any]:
    """A function with five described parameters, about 700 characters of JSON."""
    properties = {f"p{n}": {"type": "string", "description": words(generator, 60)} for n in range(5)}
    function = {
        "name": f"tool_{index}",
        "description": words(generator, 160),
        "parameters": {"type": "object", "properties": properties, "required": ["p0"]},
    }
    return {"type": "function", "function": function}


def conversation(generator: random.Random, messages: int, characters: int) -> list[dict[str, Any]]:
    """A system message and turns that alternate, `characters` in all."""
    each = characters // messages
    turns = [{"role": ("user", "assistant")[n % 2], "content": words(generator, each)} for n in range(messages - 1)]
    return [{"role": "system", "content": words(generator, each)}, *turns]


class Plain:
    """Jinja on the raw body, `tokenizers` on the whole text, a hash a block."""

    def __init__(self, folder: Path) -> None:
        import jinja2.ext
        import jinja2.sandbox
        from tokenizers import Tokenizer

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string((folder / "chat_template.jinja").read_text(encoding="utf-8"))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def __call__(self, body: dict[str, Any]) -> int:
        text = self._template.render(messages=body["messages"], tools=body.get("tools"), add_generation_prompt=True)
        ids = as_token_ids(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return len(chain_hashes(ids, BLOCK_SIZE, root_hash("pool")))


def transformers_way(folder: Path) -> Callable[[dict[str, Any]], int] | None:
    """transformers' rendering and tokenizing, or None where it is not installed."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None
    tokenizer = AutoTokenizer.from_pretrained(str(folder))

    def run(body: dict[str, Any]) -> int:
        ids = tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False
        )
        return len(chain_hashes(as_token_ids(ids), BLOCK_SIZE, root_hash("pool")))

    return run


def milliseconds(run: Callable[[dict[str, Any]], Any], bodies: list[dict[str, Any]]) -> dict[str, float]:
    taken = []
    for body in bodies:
        start = time.perf_counter()
        run(body)
        taken.append((time.perf_counter() - start) * 1000)
    return {"p50_ms": statistics.median(taken), "min_ms": min(taken), "max_ms": max(taken)}


def watched(load: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `load` gives in a thread of its own, the time it took, and the longest that this thread stood still."""
    with ThreadPoolExecutor(1) as thread:
        start = last = time.perf_counter()
        longest = 0.0
        done = thread.submit(load)
        while not done.done():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return done.result(), {"load_ms": (last - start) * 1000, "longest_stall_ms": longest * 1000}


def growing(start: list[dict[str, Any]], generator: random.Random, rounds: int) -> list[dict[str, Any]]:
    """Bodies of one conversation, each with an answer and a question of 400 characters more."""
    bodies = []
    messages = start
    for _ in range(rounds):
        answer = {"role": "assistant", "content": words(generator, 400)}
        messages = [*messages, answer, {"role": "user", "content": words(generator, 400)}]
        bodies.append({"messages": messages})
    return bodies


def cases(rounds: int, tokens_per_character: float) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """By name: bodies to warm up with, and bodies to measure."""
    generator = random.Random(17)

    def ask(characters: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": words(generator, characters)}]}

    tools = [tool(generator, index) for index in range(20)]
    characters = int(128_000 / tokens_per_character)
    found = {
        "32,000 characters of new text": ([ask(3000), ask(3000)], [ask(32_000) for _ in range(rounds)]),
        "20 tools and a short question": (
            [{**ask(40), "tools": tools}],
            [{**ask(40), "tools": tools} for _ in range(rounds)],
        ),
    }
    for messages in (40, 200):
        start = conversation(generator, messages, characters)
        name = f"further turn, 128k tokens in {messages} messages"
        found[name] = ([{"messages": start}], growing(start, generator, rounds))
    return found


def prepared(model: str | None, scratch: Path) -> tuple[str, Path]:
    if model is not None:
        return Path(model).name, Path(model)
    if not SHARED.is_dir():
        return "tiny (the simulated replica's)", TINY
    for name in ("tokenizer_config.json", "config.json", "chat_template.jinja"):
        (scratch / name).write_bytes((SHARED / name).read_bytes())
    (scratch / "tokenizer.json").write_bytes(gzip.decompress((SHARED / "tokenizer.json.gz").read_bytes()))
    return "Qwen3", scratch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--model", help="folder with tokenizer.json, tokenizer_config.json and chat_template.jinja")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        name, folder = prepared(arguments.model, Path(scratch))
        report = measure(name, folder, arguments.rounds)
    if arguments.json:
        print(json.dumps(report))
        return 0
    table = Table(title=f"Body to block hashes, p50 in ms ({report['model']}, {report['tokenizer']}, this machine)")
    for column in ("case", "tokens", "plain", "transformers", "ours", "times faster"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in report["cases"]:
        other = row["transformers"]
        table.add_row(
            row["case"],
            f"{row['tokens']:,}",
            f"{row['plain']['p50_ms']:.2f}",
            f"{other['p50_ms']:.2f}" if other else "–",
            f"{row['ours']['p50_ms']:.2f}",
            f"{row['plain']['p50_ms'] / row['ours']['p50_ms']:.0f}",
        )
    console = Console()
    console.print(table)
    stats = report["cache"]
    for way, times in report["loading"].items():
        console.print(
            f"loading, {way}: {times['load_ms']:.0f} ms, others stood still for {times['longest_stall_ms']:.0f}"
        )
    console.print(f"caches: {stats['used_bytes'] / 2**20:.1f} of {stats['max_bytes'] / 2**20:.0f} MiB")
    return 0


def measure(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    """The report that --json prints: times in milliseconds, sizes in bytes."""
    cache = PromptCache(CACHE_MB << 20)
    pipeline = PromptPipeline(ModelSettings(tokenizer=str(folder), max_model_len=10**7), cache=cache)
    _, loading = watched(pipeline.load)

    def ours(body: dict[str, Any]) -> int:
        return len(pipeline.blocks(pipeline.encode_now(CHAT, body), "pool", BLOCK_SIZE))

    plain, plainly = watched(lambda: Plain(folder))
    other = transformers_way(folder)
    sample = {"messages": [{"role": "user", "content": words(random.Random(1), 20_000)}]}
    ratio = len(pipeline.encode_now(CHAT, sample).token_ids) / 20_000
    rows = []
    for case, (warm_up, bodies) in cases(rounds, ratio).items():
        for body in warm_up:
            ours(body)
        few = bodies[: max(3, rounds // 7)]
        rows.append(
            {
                "case": case,
                "tokens": len(pipeline.encode_now(CHAT, bodies[0] if "turn" in case else warm_up[0]).token_ids)
                if "new text" not in case
                else int(32_000 * ratio),
                "ours": milliseconds(ours, bodies),
                "plain": milliseconds(plain, few),
                "transformers": milliseconds(other, few) if other else None,
            }
        )
    return {
        "model": name,
        "tokenizer": pipeline.state.split("(")[1].split(",")[0],
        "cases": rows,
        "loading": {"ours": loading, "plain": plainly},
        "cache": cache.stats(),
    }


if __name__ == "__main__":
    sys.exit(main())
