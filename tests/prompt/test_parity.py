"""Every recorded request gives the engine's own token ids, and every recorded refusal is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .recordings import PROMPTS, SHARED, WHY_SKIPPED, differences, lines, loaded, model_folder, settings_of

pytestmark = pytest.mark.skipif(not PROMPTS.is_dir(), reason=WHY_SKIPPED)

FAMILIES = ["qwen3", "llama3_2", "llama3_1", "gemma3", "mistral_nemo_hf", "llama2"]
VARIANTS = {
    "_qwen3_flags": "qwen3",
    "_gemma3_string_format": "gemma3",
    "_llama3_2_raw": "llama3_2",
    "_templates": "qwen3",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_every_recorded_request_gives_the_engines_ids(name: str, folders: Path) -> None:
    family = VARIANTS.get(name, name)
    folder = folders / family
    if not folder.is_dir():
        model_folder(family, folder)
    found = []
    count = 0
    for file in sorted((PROMPTS / name).glob("requests*.jsonl")):
        meta, recordings = lines(file)
        count += len(recordings)
        found += list(differences(loaded(settings_of(meta, folder)), recordings))
    assert count > 10
    assert found == []


@pytest.mark.parametrize(
    ("name", "library"), [("gpt_oss_harmony", "openai_harmony"), ("mistral_tekken", "mistral_common")]
)
def test_families_without_a_template(name: str, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is an optional dependency")
    found = []
    for file in sorted((PROMPTS / name).glob("requests*.jsonl")):
        meta, recordings = lines(file)
        # one request's ids could not be recorded, only their number
        known = [recording for recording in recordings if "prompt_token_ids" in recording or recording["status"] != 200]
        assert len(recordings) - len(known) <= 1
        mode = "mistral" if name.startswith("mistral") else "auto"
        found += list(differences(loaded(settings_of(meta, PROMPTS / name, tokenizer_mode=mode)), known))
    assert found == []


def test_what_the_template_receives(folders: Path) -> None:
    """The messages, tools and arguments after normalisation, through a template that prints them as JSON."""
    folder = folders / "qwen3"
    if not folder.is_dir():
        model_folder("qwen3", folder)
    _, recordings = lines(PROMPTS / "_normalized" / "dump.jsonl")
    pipelines = {}
    compared = 0
    for recording in recordings:
        wanted = recording.get("normalized")
        if wanted is None or recording["path"] != "/v1/chat/completions":
            continue
        chosen = recording["format"]
        if chosen not in pipelines:
            settings = settings_of({}, folder, chat_template=_DUMP, chat_template_content_format=chosen)
            pipelines[chosen] = loaded(settings)
        model = pipelines[chosen]._model
        assert model is not None
        from litellm_prefix_router.prompt.chat import chat_form

        text, _ = model._render(chat_form(recording["request"], model._options, model.dialect))
        got = json.loads(text)
        assert json.dumps(got) == json.dumps(wanted), recording["id"]
        compared += 1
    assert compared > 200


_DUMP = """{{ {"messages": messages, "tools": tools, "documents": documents,
"add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking | default(false),
"reasoning_effort": reasoning_effort | default(false)} | tojson }}"""


def test_recordings_made_together_with_cache_events() -> None:
    """The engine runs whose events were recorded: chat, completions, responses and messages of one small model."""
    model = SHARED / "vllm" / "model"
    pipeline = loaded(settings_of({}, model, max_model_len=2048))
    found = []
    count = 0
    for file in sorted((SHARED / "vllm" / "recorded").glob("*.jsonl")):
        if file.name.startswith("q_"):
            continue  # another tokenizer, which was not kept
        for line in file.read_text(encoding="utf-8").splitlines():
            recording = json.loads(line)
            ids = _recorded_ids(recording)
            if ids is None or not isinstance(recording.get("request"), dict):
                continue
            count += 1
            case = {"id": f"{file.stem}/{recording['id']}", "path": recording["path"], "request": recording["request"]}
            found += list(differences(pipeline, [{**case, "prompt_token_ids": ids}]))
    assert count > 100
    assert found == []


def _recorded_ids(recording: dict[str, object]) -> list[int] | None:
    response = recording.get("response")
    if recording.get("t") != "http" or recording.get("status") != 200 or not isinstance(response, dict):
        return None
    choices = response.get("choices") or [{}]
    ids = response.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
    return ids if isinstance(ids, list) else None
