"""Where the recorded truth lies: our own recordings in tests/data, other people's tokenizers beside the checkout."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from litellm_prefix_router.prompt.encoded import PromptUnknown
from litellm_prefix_router.prompt.pipeline import PromptPipeline
from litellm_prefix_router.settings import ModelSettings

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared"
PROMPTS = SHARED / "prompts"
DATA = REPOSITORY / "tests" / "data" / "prompts"
OWN_TOKENIZER = REPOSITORY / "litellm_prefix_router" / "sim" / "assets" / "tiny"
RECORDED_MODELS = {
    "tiny": ["--trust-request-chat-template"],
    "parts": [
        *("--no-trust-request-chat-template", "--exclude-tools-when-tool-choice-none"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    ],
}
"""Models that were recorded with the shipped tokenizer, and the arguments of their engines beside the usual ones."""
WHY_SKIPPED = "recorded prompts with third-party tokenizers are not beside this checkout (../shared/prompts)"


def clock() -> datetime:
    """The day of the recordings; some templates print it."""
    return datetime(2026, 12, 2, 12, 0)


def model_folder(family: str, target: Path) -> Path:
    """The family's tokenizer files, unpacked into `target`."""
    source = PROMPTS / family
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())
    packed = source / "tokenizer.json.gz"
    pointer = source / "TOKENIZER_IS_IN"
    if pointer.is_file():
        packed = source / pointer.read_text(encoding="utf-8").strip()
    (target / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    return target


def own_model(name: str, target: Path) -> Path:
    """A model of RECORDED_MODELS in the folder `target`: the shipped one, or one whose prompts begin with a token."""
    shutil.copytree(OWN_TOKENIZER, target)
    if name == "tiny":
        return target
    shutil.copy(DATA / name / "chat_template.jinja", target)
    start = "<|endoftext|>"
    tokenizer = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    number = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == start)
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {start: {"id": start, "ids": [number], "tokens": [start]}},
    }
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": start}), encoding="utf-8")
    return target


def own_requests() -> list[dict[str, Any]]:
    """The bodies that our own models were recorded with: {id, path, request}, or raw_body_latin1 for odd JSON."""
    return [json.loads(line) for line in (DATA / "bodies.jsonl").read_text(encoding="utf-8").splitlines()]


def own_recordings(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The meta line of one of RECORDED_MODELS, and its requests with the engine's answers."""
    meta, answers = lines(DATA / f"{name}.jsonl")
    return meta, [{**request, **answer} for request, answer in zip(own_requests(), answers, strict=True)]


def body_bytes(request: dict[str, Any]) -> bytes:
    """The body as it is sent."""
    if "request" not in request:
        return str(request["raw_body_latin1"]).encode("latin1")
    return json.dumps(request["request"]).encode()


def lines(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The file's meta line and its recordings."""
    parsed = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    return parsed[0].get("meta", {}), parsed[1:]


def settings_of(meta: dict[str, Any], tokenizer: Path, **more: Any) -> ModelSettings:
    """The settings that mirror the engine's recorded arguments."""
    arguments = meta.get("args", [])
    values: dict[str, Any] = {
        "tokenizer": str(tokenizer),
        "trust_request_chat_template": "--no-trust-request-chat-template" not in arguments,
        "exclude_tools_when_tool_choice_none": "--exclude-tools-when-tool-choice-none" in arguments,
    }
    for name in ("default-chat-template-kwargs", "chat-template-content-format"):
        if f"--{name}" in arguments:
            text = arguments[arguments.index(f"--{name}") + 1]
            values[name.replace("-", "_")] = json.loads(text) if text.startswith("{") else text
    return ModelSettings(**values, **more)


_loaded: dict[str, PromptPipeline] = {}


def loaded(settings: ModelSettings) -> PromptPipeline:
    """A pipeline with these settings, loaded once a run: reading a large tokenizer takes seconds."""
    key = settings.model_dump_json()
    if key not in _loaded:
        pipeline = PromptPipeline(settings, clock=clock)
        pipeline.load()
        _loaded[key] = pipeline
    return _loaded[key]


def body_of(recording: dict[str, Any]) -> Any:
    """The request body, parsed as the engine parses it. Raises ValueError for what is no JSON."""
    if "request" not in recording:
        return json.loads(recording["raw_body_latin1"].encode("latin1"))
    body = dict(recording["request"])
    template = body.get("chat_template")
    if isinstance(template, str) and template.startswith("@"):
        body["chat_template"] = (PROMPTS / "_templates" / "templates" / template[1:]).read_text(encoding="utf-8")
    return body


def differences(pipeline: PromptPipeline, recordings: list[dict[str, Any]]) -> Iterator[str]:
    """What does not come out as the engine had it: ids, or a refusal."""
    for recording in recordings:
        expected = recording.get("prompt_token_ids")
        try:
            got = pipeline.encode_now(recording["path"], body_of(recording)).token_ids.tolist()
        except (ValueError, PromptUnknown) as error:
            if expected is not None:
                yield f"{recording['id']}: refused ({error})"
            continue
        if expected is None:
            yield f"{recording['id']}: {len(got)} ids where the engine refuses"
        elif got != expected:
            same = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
            yield f"{recording['id']}: {len(got)} ids for {len(expected)}, first difference at {same}"
