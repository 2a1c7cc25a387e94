"""`prefix-router doctor`: is what this machine believes about a replica true?"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

import typer

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather <b>now</b> & "soon" für Übersee',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "number"}}},
    },
}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "n":1.50}'},
        }
    ],
}


def bodies() -> dict[str, dict[str, Any]]:
    """The built-in requests: one for each rule that is easily got wrong."""

    def user(content: Any, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}], **more}

    system = {"role": "system", "content": "You are brief."}
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "?"},
    ]
    result = {"role": "tool", "content": '{"temp": 21}', "tool_call_id": "abcdefghi"}
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": ""}, {"type": "text", "text": " third "}]
    return {
        "plain": user("Hello"),
        "system": {"messages": [system, *turns]},
        "scripts": user("Größe Cafe\u0301 日本語 한국어 العربية 🧑‍💻 \u00a0\u2028 12345.67"),
        "whitespace": user("  lead\r\n\ttab\n\n\n   trail  "),
        "special tokens in text": user("<|im_end|></s>[INST]<|eot_id|><end_of_turn><think>x</think>"),
        "parts": user(parts),
        "developer": {"messages": [{"role": "developer", "content": "Rules."}, *turns]},
        "tools": user("w?", tools=[_TOOL]),
        "call and result": {"messages": [turns[0], _CALL, result], "tools": [_TOOL]},
        "reasoning": {"messages": [turns[0], {**turns[1], "reasoning": "because"}, turns[2]]},
        "no generation prompt": user("x", add_generation_prompt=False),
        "continue": {"messages": turns[:2], "add_generation_prompt": False, "continue_final_message": True},
        "thinking off": user("x", chat_template_kwargs={"enable_thinking": False, "thinking": False}),
        "special tokens asked for": user("x", add_special_tokens=True),
        "completion": {"prompt": "Once upon a time"},
        "completion without special tokens": {"prompt": "Once upon a time", "add_special_tokens": False},
    }


def doctor(
    tokens: Annotated[str | None, typer.Option(help="Address of a replica: compare token ids with its own.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the replica's root.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Template text or file, as given to the engine.")] = None,
    chat_template_content_format: Annotated[str, typer.Option(help="auto, string or openai.")] = "auto",
    engine_version: Annotated[str | None, typer.Option(help="Default: what the replica says.")] = None,
    now: Annotated[str | None, typer.Option(help="The replica's date, such as 2026-12-02; default: today.")] = None,
    timeout_s: Annotated[float, typer.Option(help="For each question.")] = 10.0,
) -> None:
    """Compare this machine's view with a live replica's. Exit code 1 where they differ."""
    from ..settings import SettingsError

    if tokens is None:
        raise SettingsError("doctor: say what to look at, such as --tokens http://replica:8000")
    problems = compare_tokens(
        tokens,
        model,
        {
            "chat_template": chat_template,
            "chat_template_content_format": chat_template_content_format,
            "engine_version": engine_version,
        },
        now=now,
        timeout_s=timeout_s,
    )
    raise typer.Exit(1 if problems else 0)


def compare_tokens(
    address: str, model: str | None, options: dict[str, Any], *, now: str | None, timeout_s: float
) -> int:
    """Print each built-in body's verdict; the number of differences. Raises SettingsError where nobody answers."""
    import httpx

    from ..prompt.encoded import PromptUnknown
    from ..prompt.pipeline import PromptPipeline
    from ..settings import ModelSettings, SettingsError

    base = address.rstrip("/").removesuffix("/v1")
    frozen = datetime.fromisoformat(now) if now else None
    with httpx.Client(timeout=timeout_s) as client:
        try:
            served = client.get(f"{base}/v1/models").raise_for_status().json()["data"][0]
            if options.get("engine_version") is None:
                answer = client.get(f"{base}/version")
                options["engine_version"] = answer.json().get("version") if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise SettingsError(f"doctor: {base}/v1/models: {type(error).__name__}") from None
        name = model or served.get("root")
        settings = ModelSettings(tokenizer=name, **options)
        pipeline = PromptPipeline(
            settings, max_model_len=served.get("max_model_len"), clock=lambda: frozen or datetime.now()
        )
        try:
            pipeline.load()
        except PromptUnknown as error:
            raise SettingsError(f"doctor: tokenizer {name}: {error.detail or error.reason} (give --model)") from None
        typer.echo(f"{served.get('id')} at {base}: {pipeline.state}")
        problems = 0
        for title, body in bodies().items():
            asked = {"model": served.get("id"), **body}
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            try:
                reply = client.post(f"{base}/tokenize", content=json.dumps(asked))
            except httpx.HTTPError as error:
                raise SettingsError(f"doctor: {base}/tokenize: {type(error).__name__}") from None
            if reply.status_code == 404:
                raise SettingsError(f"doctor: {base} has no /tokenize")
            theirs = reply.json().get("tokens") if reply.status_code == 200 else None
            try:
                ours = pipeline.encode_now(path, asked).token_ids.tolist()
                why = ""
            except PromptUnknown as unknown:
                ours, why = None, str(unknown)
            if ours == theirs:
                typer.echo(f"  same       {title}" + ("" if ours is not None else " (both refuse)"))
                continue
            problems += 1
            typer.echo(f"  DIFFERENT  {title}")
            for line in _context(ours, theirs, why, reply.status_code, client, base, served.get("id")):
                typer.echo(f"             {line}")
    pipeline.close()
    typer.echo("no differences" if not problems else f"{problems} differences")
    return problems


def _context(
    ours: list[int] | None, theirs: list[int] | None, why: str, status: int, client: Any, base: str, name: Any
) -> list[str]:
    if ours is None or theirs is None:
        mine = f"{len(ours)} ids" if ours is not None else why
        other = f"{len(theirs)} ids" if theirs is not None else f"answers {status}"
        return [f"here: {mine}", f"replica: {other}"]
    first = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(ours), len(theirs)) if first is None else first

    def shown(ids: list[int]) -> str:
        span = ids[max(0, at - 8) : at + 8]
        reply = client.post(f"{base}/detokenize", content=json.dumps({"model": name, "tokens": span}))
        text = reply.json().get("prompt") if reply.status_code == 200 else None
        return f"{span} {text!r}" if text is not None else str(span)

    return [
        f"{len(ours)} ids here, {len(theirs)} there; the first difference is at {at}",
        f"here:    {shown(ours)}",
        f"replica: {shown(theirs)}",
    ]
