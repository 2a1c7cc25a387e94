"""`prefix-router tokens`: the token ids of request bodies, as the model's engine would prefill them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer


def tokens(
    model: Annotated[str, typer.Option(help="Folder or Hugging Face id with the model's tokenizer.")],
    path: Annotated[str, typer.Option(help="API path that the bodies are sent to.")] = "/v1/chat/completions",
    chat_template: Annotated[str | None, typer.Option(help="Template text or file, as given to the engine.")] = None,
    chat_template_content_format: Annotated[str, typer.Option(help="auto, string or openai.")] = "auto",
    trust_request_chat_template: Annotated[bool, typer.Option(help="Use templates that requests bring.")] = False,
    default_chat_template_kwargs: Annotated[str | None, typer.Option(help="JSON object.")] = None,
    exclude_tools_when_tool_choice_none: Annotated[bool, typer.Option()] = False,
    tokenizer_mode: Annotated[str, typer.Option(help="auto, hf, mistral or harmony.")] = "auto",
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    engine_version: Annotated[str | None, typer.Option(help="Such as 0.32.0; default: the newest known.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context in tokens; default: what config.json says.")
    ] = None,
    lora_module: Annotated[list[str] | None, typer.Option(help="Model name that is an adapter; repeatable.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 16,
    now: Annotated[str | None, typer.Option(help="Freeze the templates' clock, such as 2026-12-02.")] = None,
) -> None:
    """Read request bodies as JSON lines; print for each {"ids", "blocks", "identity", "source"} or {"error"}."""
    from ..prompt.encoded import PromptUnknown
    from ..prompt.pipeline import PromptPipeline
    from ..settings import ModelSettings, SettingsError

    try:
        frozen = datetime.fromisoformat(now) if now is not None else None
    except ValueError:
        raise SettingsError(f"--now {now}: not a date") from None

    def clock() -> datetime:
        return frozen or datetime.now()

    values: dict[str, Any] = {
        "tokenizer": model,
        "chat_template": chat_template,
        "chat_template_content_format": chat_template_content_format,
        "trust_request_chat_template": trust_request_chat_template,
        "default_chat_template_kwargs": _object(default_chat_template_kwargs),
        "exclude_tools_when_tool_choice_none": exclude_tools_when_tool_choice_none,
        "tokenizer_mode": tokenizer_mode,
        "engine": engine,
        "engine_version": engine_version,
        "max_model_len": max_model_len,
        "lora_modules": lora_module or [],
    }
    try:
        settings = ModelSettings(**values)
    except ValueError as error:
        raise SettingsError(str(error).replace("\n", " ")) from None
    pipeline = PromptPipeline(settings, clock=clock, max_body_bytes=1 << 40)
    try:
        pipeline.load()
    except PromptUnknown as error:
        raise SettingsError(f"--model {model}: {error.detail or error.reason}") from None
    for line in _lines(sys.stdin.buffer):
        typer.echo(json.dumps(_answer(pipeline, path, line, block_size)))
    pipeline.close()


def _answer(pipeline: Any, path: str, line: bytes, block_size: int) -> dict[str, Any]:
    from ..prompt.encoded import PromptUnknown

    try:
        body = json.loads(line)  # duplicate keys, NaN, a BOM and UTF-16 are read as the engines' parser reads them
    except (ValueError, RecursionError) as error:
        return {"error": f"malformed: {type(error).__name__}"}
    if not isinstance(body, dict):
        return {"error": "malformed: the body must be an object"}
    try:
        encoded = pipeline.encode_now(path, body)
    except PromptUnknown as error:
        return {"error": str(error)}
    identity = encoded.identity
    answer: dict[str, Any] = {
        "ids": encoded.token_ids.tolist(),
        "blocks": len(encoded.token_ids) // block_size,
        "identity": {"lora": identity.lora, "cache_salt": identity.cache_salt},
        "source": encoded.source,
    }
    if not encoded.complete:
        answer |= {"complete": False, "note": encoded.note, "opaque_tail": [item.hex() for item in encoded.opaque_tail]}
    return answer


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines that are not empty. A line of UTF-16 ends in the middle of a character and is put together again."""
    pending = b""
    for line in stream:
        pending += line
        if pending[:2] in (b"\xff\xfe", b"\xfe\xff") and not _ends_utf16(pending):
            continue
        if pending.strip():
            yield pending.strip() if pending[:2] not in (b"\xff\xfe", b"\xfe\xff") else pending
        pending = b""
    if pending.strip():
        yield pending.rstrip(b"\n")


def _ends_utf16(raw: bytes) -> bool:
    return len(raw) % 2 == 0 and raw[-2:] in (b"\n\x00", b"\x00\n")


def _object(text: str | None) -> dict[str, Any]:
    from ..settings import SettingsError

    if text is None:
        return {}
    source = Path(text)
    try:
        value = json.loads(source.read_text(encoding="utf-8") if len(text) < 4096 and source.is_file() else text)
    except (OSError, ValueError):
        raise SettingsError("--default-chat-template-kwargs: not valid JSON") from None
    if not isinstance(value, dict):
        raise SettingsError("--default-chat-template-kwargs: expected a JSON object")
    return value
