"""The JSON of the answers: chat, completions, responses and messages, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .bodies import Job

FINGERPRINT = "sim-0.32.0"


@dataclass(slots=True)
class Choice:
    """One answer as it grows. `index` counts over prompts and choices."""

    index: int
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class Usage:
    """Token counts of one call, as the engine sums them up."""

    prompt: int
    completion: int
    cached: int
    created: int

    @classmethod
    def of(cls, job: Job, choices: Sequence[Choice], block_size: int) -> Usage:
        """Prompts count once however many answers they get; the last answer says what was cached."""
        prompt = sum(len(item) for item in job.prompts)
        cached = choices[-1].cached_tokens
        created = len(job.prompts[-1]) // block_size * block_size - cached
        return cls(prompt, sum(len(choice.tokens) for choice in choices), cached, max(created, 0))

    def openai(self, *, chat: bool) -> dict[str, Any]:
        """As the completion endpoints report it."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached,
                "created_cache_tokens": self.created if chat else None,
            },
        }


class Shape:
    """One call's identity and the JSON built around it."""

    def __init__(self, job: Job, *, chat: bool) -> None:
        self._job = job
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:16]}"
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        body = self._head("chat.completion" if self._chat else "text_completion")
        body["choices"] = [self._choice(choice) for choice in choices]
        body["usage"] = usage.openai(chat=self._chat)
        if self._chat:
            body["prompt_token_ids"] = list(choices[0].prompt) if self._job.return_token_ids else None
        return body

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk that opens a chat answer; completions have none."""
        if not self._chat:
            return None
        delta = {"role": "assistant", "content": ""}
        body = self._head("chat.completion.chunk")
        body["choices"] = [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]
        if self._job.return_token_ids:
            body["prompt_token_ids"] = list(choice.prompt)
        return body

    def chunk(self, choice: Choice, text: str, tokens: Sequence[int]) -> dict[str, Any]:
        """A piece of an answer: its next `text` from its next `tokens`."""
        body = self._head("chat.completion.chunk" if self._chat else "text_completion")
        item: dict[str, Any] = {"index": choice.index}
        item.update({"delta": {"content": text}} if self._chat else {"text": text})
        item.update({"logprobs": None, "finish_reason": choice.finish_reason})
        if choice.finish_reason is not None:
            item["stop_reason"] = None
        if self._job.return_token_ids:
            item["token_ids"] = list(tokens)
            if not self._chat and len(choice.tokens) == len(tokens):
                item["prompt_token_ids"] = list(choice.prompt)
        body["choices"] = [item]
        return body

    def last(self, usage: Usage) -> dict[str, Any]:
        """The chunk that carries the usage."""
        body = self._head("chat.completion.chunk" if self._chat else "text_completion")
        return {**body, "choices": [], "usage": usage.openai(chat=self._chat), "system_fingerprint": FINGERPRINT}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._job.model}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        item: dict[str, Any] = {"index": choice.index}
        if self._chat:
            item["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            item["text"] = choice.text
        item.update({"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": None})
        if self._job.return_token_ids:
            item["token_ids"] = choice.tokens
            if not self._chat:
                item["prompt_token_ids"] = list(choice.prompt)
        return item


def responses_body(job: Job, choice: Choice, usage: Usage) -> dict[str, Any]:
    """The answer of /v1/responses."""
    complete = choice.finish_reason == "stop"
    return {
        "id": f"resp_{uuid.uuid4().hex[:16]}",
        "object": "response",
        "created_at": int(time.time()),
        "model": job.model,
        "status": "completed" if complete else "incomplete",
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "output": [
            {
                "id": f"msg_{uuid.uuid4().hex[:16]}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": choice.text, "annotations": []}],
            }
        ],
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "max_output_tokens": job.max_tokens,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.created},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        },
    }


def messages_body(job: Job, choice: Choice, usage: Usage) -> dict[str, Any]:
    """The answer of /v1/messages; its input_tokens leave out what was cached, as the engine reports it."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex[:16]}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": choice.text}],
        "model": job.model,
        "stop_reason": "end_turn" if choice.finish_reason == "stop" else "max_tokens",
        "usage": {
            "input_tokens": usage.prompt - usage.cached,
            "output_tokens": usage.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
        },
    }
