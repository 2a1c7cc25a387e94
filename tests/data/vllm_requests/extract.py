"""Make the *.jsonl beside this file from the full recordings: python extract.py FOLDER_WITH_RECORDINGS

One line for each recorded call, in order: the token ids that went in (`prompt`) and came out (`answer`) of each of its
sequences, what identifies their cache, the `cached_tokens` that the engine reported, and the event payloads (base64)
that followed. Where several were sent at once, the frames show that the first ran a step ahead of the others.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIVES = {
    "first_life": [
        "a_shared_system",
        "b_multi_turn",
        "b_stream",
        "c_completions",
        "d_cache_salt",
        "e_tools",
        "k_report_mode_session",
        "l_duplicates",
        "f_eviction",
        "g_reset",
    ],
    "copies": ["r_dup_removed"],
    "bytes_lora_chunked": ["m_restart_bytes", "i_lora"],
    "two_ranks_cbor": ["j_data_parallel_2"],
}
PREVIOUS_LIFE = ("m1_before_restart",)


def entries(folder: Path, scenarios: list[str]) -> Iterator[dict[str, Any]]:
    """The calls of one engine life."""
    lines = [json.loads(line) for name in scenarios for line in (folder / f"{name}.jsonl").open(encoding="utf-8")]
    entry: dict[str, Any] | None = None
    for line in lines:
        if line["t"] == "frame" and entry is not None:
            entry["frames"].append(line["parts_b64"][2])
        elif line["t"] == "http":
            if entry and entry["id"].startswith("l2_") and line["id"].startswith("l2_"):
                entry["sequences"] += sequences(line)
                entry["cached_tokens"].append(cached_tokens(line))
                continue
            if entry and entry["id"] not in PREVIOUS_LIFE:
                yield entry
            entry = call(line)
    if entry:
        yield entry


def call(line: dict[str, Any]) -> dict[str, Any] | None:
    """One call without its frames; None for a refused one."""
    if line["status"] != 200:
        return None
    if line["path"] == "/reset_prefix_cache":
        return {"id": line["id"], "reset": True, "sequences": [], "cached_tokens": [], "frames": []}
    rank = (line["headers"] or {}).get("X-data-parallel-rank")
    return {
        "id": line["id"],
        "rank": None if rank is None else int(rank),
        "sequences": sequences(line),
        "cached_tokens": [cached_tokens(line)],
        "frames": [],
    }


def answered(line: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(usage, choices with their token ids), streamed or not."""
    answer = line["response"]
    if isinstance(answer, str):
        chunks = [json.loads(part[6:]) for part in answer.split("\n\n") if part.startswith("data: {")]
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []]
        return chunks[-1]["usage"], [{"prompt_token_ids": chunks[0]["prompt_token_ids"], "token_ids": tokens}]
    for choice in answer["choices"]:
        if not choice.get("prompt_token_ids"):  # told once for all choices
            choice["prompt_token_ids"] = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return answer["usage"], answer["choices"]


def cached_tokens(line: dict[str, Any]) -> int:
    """What the call reported: of its last sequence, where it had several."""
    return int(answered(line)[0]["prompt_tokens_details"]["cached_tokens"])


def sequences(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The sequences of one call, with what is not a default."""
    request = line["request"]
    common = {
        "lora": request["model"] if request["model"] != "tiny" else None,
        "cache_salt": request.get("cache_salt"),
        "session_id": request.get("session_id")
        or (line["headers"] or {}).get("X-Session-ID")
        or (request.get("vllm_xargs") or {}).get("session_id"),
        "prompt_logprobs": request.get("prompt_logprobs") is not None,
        "report_hits": bool((request.get("vllm_xargs") or {}).get("kv_cache_report_mode")),
    }
    common = {name: value for name, value in common.items() if value}
    return [
        {"prompt": choice["prompt_token_ids"], "answer": choice["token_ids"], **common} for choice in answered(line)[1]
    ]


def rank_of(frame: str) -> int:
    """The rank that sent a payload: its last byte, as ranks are small."""
    return base64.b64decode(frame)[-1]


def extract(folder: Path, life: str) -> str:
    """Content of one life's file."""
    lines = []
    for entry in entries(folder, LIVES[life]):
        if entry.get("rank") is None and entry["frames"]:
            entry["rank"] = rank_of(entry["frames"][0])
        lines.append(json.dumps(entry, separators=(",", ":")) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    for life in LIVES:
        target = Path(__file__).with_name(f"{life}.jsonl")
        target.write_text(extract(Path(sys.argv[1]), life), encoding="utf-8")
