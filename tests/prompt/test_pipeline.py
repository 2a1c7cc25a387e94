"""The pipeline on a tokenizer of our own: plain clones prove the rules that need no third-party tokenizer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from datetime import datetime
from typing import Any

import pytest

from litellm_prefix_router.prompt.blocks import chain_hashes, root_hash
from litellm_prefix_router.prompt.cache import PromptCache
from litellm_prefix_router.prompt.chat import chat_form
from litellm_prefix_router.prompt.encoded import PromptUnknown
from litellm_prefix_router.prompt.pipeline import PromptPipeline
from litellm_prefix_router.settings import ModelSettings

from .recordings import DATA, REPOSITORY, clock, lines

TINY = REPOSITORY / "litellm_prefix_router" / "sim" / "assets" / "tiny"
CHAT = "/v1/chat/completions"
DUMP = """{{ {"messages": messages, "tools": tools, "documents": documents,
"add_generation_prompt": add_generation_prompt, "enable_thinking": enable_thinking | default(false),
"reasoning_effort": reasoning_effort | default(false)} | tojson }}"""


def make(**values: Any) -> PromptPipeline:
    values = {"tokenizer": str(TINY), "trust_request_chat_template": True, "max_model_len": 10_000_000, **values}
    pipeline = PromptPipeline(ModelSettings(**values), clock=clock)
    pipeline.load()
    return pipeline


@pytest.fixture(scope="module")
def pipeline() -> PromptPipeline:
    return make()


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_a_template_receives_what_vllm_gives_it(content_format: str) -> None:
    model = make(chat_template=DUMP, chat_template_content_format=content_format)._model
    assert model is not None
    _, recordings = lines(DATA / "normalized.jsonl")
    compared = 0
    for recording in recordings:
        if recording["format"] == content_format and recording.get("normalized") is not None:
            text, _ = model._render(chat_form(recording["request"], model._options, model.dialect))
            assert text == json.dumps(recording["normalized"], ensure_ascii=False), recording["id"]
            compared += 1
    assert compared > 90


def test_state_and_loading() -> None:
    empty = PromptPipeline(ModelSettings(tokenizer=str(TINY / "nowhere")))
    assert empty.state == "not started"
    with pytest.raises(PromptUnknown) as info:
        empty.encode_now(CHAT, user("x"))
    assert info.value.reason == "tokenizer_loading"
    with pytest.raises(PromptUnknown) as info:
        empty.load()
    assert info.value.reason == "tokenizer_missing"
    assert empty.state.startswith("failed: ")
    with pytest.raises(PromptUnknown) as info:
        empty.encode_now(CHAT, user("x"))
    assert info.value.reason == "tokenizer_missing"


async def test_loads_in_the_background() -> None:
    pipeline = PromptPipeline(ModelSettings(tokenizer=str(TINY)))
    pipeline.start()
    await pipeline.wait()
    assert pipeline.state.startswith("ready (")
    assert len((await pipeline.encode(CHAT, user("x"))).token_ids)
    pipeline.close()


def test_a_growing_conversation_costs_nothing_in_exactness(pipeline: PromptPipeline) -> None:
    generator = random.Random(5)
    words = ["alpha", " beta", "\n", "  ", "12", "é", "<|im_end|>", "</s>", "🙂", "{", '"x": 1}']
    for _ in range(3):
        messages: list[dict[str, Any]] = []
        for turn in range(12):
            text = "".join(generator.choices(words, k=generator.randrange(1, 400)))
            messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
            warm = pipeline.encode_now(CHAT, {"messages": messages})
            cold = make().encode_now(CHAT, {"messages": messages}) if turn % 5 == 4 else None
            if cold is not None:
                assert warm.token_ids.tolist() == cold.token_ids.tolist()
            root = root_hash("pool")
            assert pipeline.blocks(warm, "pool", 16) == chain_hashes(warm.token_ids, 16, root)


def test_identity(pipeline: PromptPipeline) -> None:
    adapters = make(lora_modules=["sql"])
    plain = adapters.encode_now(CHAT, user("hello " * 40, model="base"))
    lora = adapters.encode_now(CHAT, user("hello " * 40, model="sql"))
    salted = adapters.encode_now(CHAT, user("hello " * 40, cache_salt="s"))
    assert plain.identity.lora is None and lora.identity.lora == "sql" and salted.identity.cache_salt == "s"
    chains = [adapters.blocks(encoded, "pool", 16) for encoded in (plain, lora, salted)]
    assert len({chain[0] for chain in chains}) == 3
    assert adapters.blocks(plain, "other pool", 16)[0] != chains[0][0]
    with pytest.raises(PromptUnknown):
        adapters.encode_now(CHAT, user("x", cache_salt=""))


def test_ids_that_replace_the_prompt(pipeline: PromptPipeline) -> None:
    encoded = pipeline.encode_now(CHAT, user("x", kv_transfer_params={"prompt_token_ids": [5, 6, 7]}))
    assert encoded.token_ids.tolist() == [5, 6, 7] and encoded.source == "ids"


def test_completions(pipeline: PromptPipeline) -> None:
    path = "/v1/completions"
    assert pipeline.encode_now(path, {"prompt": [[5, 6], [7]]}).token_ids.tolist() == [5, 6]
    text = pipeline.encode_now(path, {"prompt": ["one", "two"]}).token_ids.tolist()
    assert text == pipeline.encode_now(path, {"prompt": "one"}).token_ids.tolist()
    assert pipeline.encode_now(path, {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}).token_ids.tolist() == [2, 3]
    embedded = pipeline.encode_now(path, {"prompt_embeds": "QUJD"})
    assert not embedded.complete and len(embedded.token_ids) == 0 and len(embedded.opaque_tail) == 1
    for prompt in ("", [], None, {}, [[]], [-1], [10**9], [1.5]):
        with pytest.raises(PromptUnknown):
            pipeline.encode_now(path, {"prompt": prompt})


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_images_are_exact_up_to_the_first(content_format: str, tmp_path: Any) -> None:
    folder = tmp_path / "vision"
    folder.mkdir()
    for file in TINY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {}}), encoding="utf-8")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}[IMAGE]{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}"
    )
    pipeline = make(tokenizer=str(folder), chat_template=template, chat_template_content_format=content_format)

    def ask(url: str, text: str = "look", **part: Any) -> Any:
        image = {"type": "image_url", "image_url": {"url": url}, **part}
        system = {"role": "system", "content": "Be brief. " * 30}
        question = {"role": "user", "content": [{"type": "text", "text": text}, image]}
        return pipeline.encode_now(CHAT, {"messages": [system, question]})

    first, same, other = ask("data:a"), ask("data:a"), ask("data:b")
    assert not first.complete and first.note == "image in the prompt"
    plain = pipeline.encode_now(CHAT, {"messages": [{"role": "system", "content": "Be brief. " * 30}]}).token_ids
    assert first.token_ids[: len(plain) - 2].tolist() == plain[:-2].tolist()
    assert first.opaque_tail == same.opaque_tail != other.opaque_tail
    assert first.token_ids.tolist() == other.token_ids.tolist()
    assert ask("data:a", uuid="u1").opaque_tail[0] == ask("data:b", uuid="u1").opaque_tail[0]


def test_a_previous_response_is_unknown(pipeline: PromptPipeline) -> None:
    body = {"input": "next", "instructions": "Rules. " * 20, "previous_response_id": "resp_1"}
    encoded = pipeline.encode_now("/v1/responses", body)
    assert not encoded.complete and encoded.note is not None and "previous_response_id" in encoded.note
    whole = pipeline.encode_now("/v1/responses", {"input": "next", "instructions": "Rules. " * 20}).token_ids.tolist()
    assert 0 < len(encoded.token_ids) < len(whole)
    assert whole[: len(encoded.token_ids)] == encoded.token_ids.tolist()


def test_not_a_prompt(pipeline: PromptPipeline) -> None:
    with pytest.raises(PromptUnknown) as info:
        pipeline.encode_now("/v1/embeddings", {"input": "x"})
    assert info.value.reason == "not_a_prompt"


BOMBS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "ranges without calls": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "repeat": "{{ 'x' * 10000000000 }}",
    "power": "{{ 9 ** 99999999 }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "replace": "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "filter loop": "{% set r = range(99999) %}{% for i in r %}{{ r | list | sort | sum }}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_not_end_is_ended(pipeline: PromptPipeline, name: str) -> None:
    start = time.monotonic()
    with pytest.raises(PromptUnknown) as info:
        pipeline.encode_now(CHAT, user("x", chat_template=BOMBS[name]))
    assert info.value.reason in ("template_error", "refused")
    assert time.monotonic() - start < 6


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
        "{% include 'x' %}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_a_template_stays_in_its_sandbox(pipeline: PromptPipeline, template: str) -> None:
    with pytest.raises(PromptUnknown) as info:
        pipeline.encode_now(CHAT, user("x", chat_template=template))
    assert info.value.reason == "refused"


def _nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


HOSTILE: dict[str, dict[str, Any]] = {
    "lone surrogate": user("a\ud83db"),
    "lone surrogate, long": user("a\ud83db" * 2000),
    "deep tool": user("x", tools=[{"type": "function", "function": {"name": "f", "parameters": _nested(50_000)}}]),
    "no messages": {},
    "messages is a number": {"messages": 5},
    "message is a string": {"messages": ["x"]},
    "content is a number": user(5),
    "tools is a string": user("x", tools="f"),
    "tool is null": user("x", tools=[None]),
    "kwargs is a list": user("x", chat_template_kwargs=[1]),
    "tool call is null": {"messages": [{"role": "assistant", "tool_calls": [None]}]},
    "documents is a string": user("x", documents="d"),
    "role is a list": {"messages": [{"role": [], "content": "x"}]},
    "part is a list": user([[]]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_unknown_prompts(pipeline: PromptPipeline, name: str) -> None:
    with pytest.raises(PromptUnknown):
        pipeline.encode_now(CHAT, HOSTILE[name])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/completions"])
@pytest.mark.parametrize("value", [None, 5, [], {}, [None], [[]], [{}], "x", [{"role": "user", "content": [None]}]])
def test_odd_values_raise_nothing_else(pipeline: PromptPipeline, path: str, value: Any) -> None:
    for name in ("input", "messages", "prompt", "system", "tools", "instructions", "reasoning", "thinking"):
        body = {
            "input": "x",
            "messages": [{"role": "user", "content": "x"}],
            "prompt": "x",
            "max_tokens": 5,
            name: value,
        }
        try:
            pipeline.encode_now(path, body)
        except PromptUnknown:
            pass


async def _longest_block(work: Any) -> float:
    """Runs `work` and says for how long the event loop did nothing else, in seconds."""
    longest = 0.0
    done = False

    async def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now
            await asyncio.sleep(0.001)
            last = time.perf_counter()

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    try:
        await work
    except PromptUnknown:
        pass
    done = True
    await watcher
    return longest


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("20 MB", user("lorem ipsum " * 1_700_000)),
        ("6 MB", user("lorem ipsum " * 500_000)),
        ("one long word", user("a" * 300_000)),
        ("many messages", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ("deep", user("x", metadata=_nested(100_000))),
        ("bomb", user("x", chat_template=BOMBS["nested ranges"])),
    ],
)
async def test_the_event_loop_goes_on(pipeline: PromptPipeline, name: str, body: dict[str, Any]) -> None:
    longest = await _longest_block(pipeline.encode(CHAT, body))
    for _ in range(3):
        if longest < 0.25:  # the bound is 50 ms
            return
        # a machine stalls now and then; a loop that is blocked is blocked each time
        longest = await _longest_block(make().encode(CHAT, body))
    assert longest < 0.25


def test_the_clock_is_the_templates_clock() -> None:
    pipeline = PromptPipeline(
        ModelSettings(tokenizer=str(TINY), chat_template="{{ strftime_now('%d %b %Y') }}"),
        clock=lambda: datetime(2031, 7, 4),
        cache=PromptCache(0),
    )
    pipeline.load()
    model = pipeline._model
    assert model is not None
    text, _ = model._render(chat_form(user("x"), model._options, model.dialect))
    assert text == "04 Jul 2031"
