"""Sends the workload through a gateway and keeps what a client can see: time to first token, usage, receipt."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..decision import RECEIPT_HEADER
from ..sim.workload import Message, TimedRequest, drive
from .stack import GROUP, Stack

WARM_UP = "warm-up"


class RequestFailed(Exception):
    """A request without a complete answer."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it."""

    messages: list[Message] = field(default_factory=list)
    gateway: str = ""
    previous_gateway: str = ""
    """Where the conversation's previous turn went; empty for a first turn."""
    ok: bool = False
    answer: str = ""
    sent_at: float = 0.0
    ttft_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    receipt: dict[str, str] = field(default_factory=dict)


def read_receipt(header: str | None) -> dict[str, str]:
    """The receipt header as a mapping; empty if there is none."""
    pairs = (item.partition("=") for item in (header or "").split(";") if "=" in item)
    return {key.strip(): value.strip() for key, _, value in pairs}


async def ask(client: httpx.AsyncClient, stack: Stack, messages: list[Message], max_tokens: int) -> Seen:
    """One streamed chat completion. Raises RequestFailed or httpx.HTTPError."""
    seen = Seen(messages=messages, sent_at=time.perf_counter())
    body = {
        "model": GROUP,
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    finished = False
    url = f"{stack.url}/v1/chat/completions"
    async with client.stream("POST", url, json=body, headers=stack.headers()) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise RequestFailed(f"status {response.status_code}: {text[:200]}")
        seen.receipt = read_receipt(response.headers.get(RECEIPT_HEADER))
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                finished = True
                break
            _read_chunk(json.loads(data), seen, pieces)
    if not finished:
        raise RequestFailed("the stream ended early")
    seen.answer, seen.ok = "".join(pieces), True
    return seen


def _read_chunk(chunk: dict[str, Any], seen: Seen, pieces: list[str]) -> None:
    if "error" in chunk:
        raise RequestFailed(str(chunk["error"])[:200])
    for choice in chunk.get("choices") or ():
        text = (choice.get("delta") or {}).get("content")
        if text:
            if not pieces:
                seen.ttft_ms = (time.perf_counter() - seen.sent_at) * 1e3
            pieces.append(text)
    usage = chunk.get("usage")
    if usage:
        seen.prompt_tokens = usage.get("prompt_tokens", 0)
        seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def warm_up(client: httpx.AsyncClient, stack: Stack, wanted: str | None, timeout_s: float = 30.0) -> None:
    """Wake up every part before the clock starts, until decisions rest on `wanted` knowledge (None: any)."""
    deadline = time.monotonic() + timeout_s
    done = 0
    while time.monotonic() < deadline:
        try:
            seen = await ask(client, stack, [{"role": "user", "content": WARM_UP}], 2)
        except (RequestFailed, httpx.HTTPError):
            await asyncio.sleep(0.2)
            continue
        done += 1
        if done >= 4 and wanted in (None, seen.receipt.get("source")):
            return
        await asyncio.sleep(0.05)


async def run_workload(
    stacks: Sequence[Stack], schedule: Sequence[TimedRequest], progress: Callable[[], None], wanted: str | None
) -> list[Seen]:
    """Send the schedule in real time; returns what was seen, in order of the schedule. With several gateways each
    conversation changes from one to the next with every turn.
    """
    results = [Seen() for _ in schedule]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        for stack in stacks:
            await warm_up(client, stack, wanted)

        async def send(request: TimedRequest, messages: list[Message]) -> str:
            turn = zlib.crc32(request.session.encode()) + request.turn
            stack = stacks[turn % len(stacks)]
            try:
                results[request.index] = seen = await ask(client, stack, messages, request.max_tokens)
                seen.gateway = stack.gateway
                seen.previous_gateway = stacks[(turn - 1) % len(stacks)].gateway if request.turn else ""
                return seen.answer
            finally:
                progress()

        await drive(schedule, send)
    return results
