"""The shipped tokenizer: its files, that other libraries read it alike, and what the template makes of bodies."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from litellm_prefix_router.sim.assets import TINY_MODEL
from litellm_prefix_router.sim.assets.build_tokenizer import CONTROL, MARKERS, configs, corpus
from litellm_prefix_router.sim.tokenizer import BadPrompt, SimTokenizer
from litellm_prefix_router.sim.words import prose

fastokens = pytest.importorskip("fastokens")

PLAIN = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
FAST = fastokens.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


def fast_ids(text: str) -> list[int]:
    return list(FAST.encode(text, add_special_tokens=False).ids)


def test_it_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in TINY_MODEL.iterdir()) < 1_000_000


def test_the_files_agree_with_one_another() -> None:
    for name, content in configs(PLAIN).items():
        assert json.loads((TINY_MODEL / name).read_text(encoding="utf-8")) == content
    vocabulary = PLAIN.get_vocab()
    assert sorted(vocabulary.values()) == list(range(6144))
    assert all(text in vocabulary for text in (*CONTROL, *MARKERS))


def test_fastokens_gives_the_same_ids_on_our_own_text() -> None:
    rng = Random(1)
    texts = [text for _, text in zip(range(300), corpus(seed=11), strict=False)]
    texts += [prose(rng, 500), "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think> <tool_call>{}</tool_call>"]
    for text in texts:
        assert fast_ids(text) == PLAIN.encode(text, add_special_tokens=False).ids


@given(st.text(max_size=200))
def test_fastokens_gives_the_same_ids_on_any_text(text: str) -> None:
    assert fast_ids(text) == PLAIN.encode(text, add_special_tokens=False).ids


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=100))
def test_text_comes_back(text: str) -> None:
    import unicodedata

    ids = PLAIN.encode(text, add_special_tokens=False).ids
    assert PLAIN.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "x-extra": 1,
    "function": {"strict": True, "name": "ship", "parameters": {"b": 1, "a": "ü"}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "ship", "arguments": '{"id":  1.50}'}}

RENDERED: dict[str, tuple[dict[str, Any], str]] = {
    "a question": ({"messages": [USER]}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    "no generation prompt": (
        {"messages": [USER], "add_generation_prompt": False},
        "<|im_start|>user\nHi<|im_end|>\n",
    ),
    "developer and parts": (
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}
            ]
        },
        "<|im_start|>system\nA\nB<|im_end|>\n<|im_start|>assistant\n",
    ),
    "thoughts before the last question are left out": (
        {"messages": [USER, {"role": "assistant", "content": "x", "reasoning": "hm"}, USER]},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "thoughts after it stay": (
        {"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "hm"}]},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nx<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "thinking off": (
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "calls and results": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
                {"role": "tool", "content": "r1"},
                {"role": "tool", "content": "r2"},
            ]
        },
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "ship", "arguments": {"id": 1.5}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ship", "arguments": {"id": 1.5}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "continued": (
        {"messages": [USER, {"role": "assistant", "content": "Well, "}], "continue_final_message": True},
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, ",
    ),
}


@pytest.mark.parametrize("case", RENDERED)
def test_rendering(tokenizer: SimTokenizer, case: str) -> None:
    body, expected = RENDERED[case]
    assert tokenizer.render(body) == expected


def test_tools_are_listed_as_the_engine_dumps_them(tokenizer: SimTokenizer) -> None:
    text = tokenizer.render({"messages": [{"role": "system", "content": "S"}, USER], "tools": [TOOL]})
    assert text.startswith("<|im_start|>system\nS\n\nYou can call these functions:\n<tools>\n")
    dumped = {"name": "ship", "description": None, "parameters": {"b": 1, "a": "ü"}, "strict": True}
    assert "\n" + json.dumps({"type": "function", "function": dumped}, ensure_ascii=False) + "\n</tools>" in text


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "x"},
        {"messages": [USER], "tools": []},
        {"messages": [USER], "chat_template_kwargs": 1},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_what_cannot_be_rendered(tokenizer: SimTokenizer, body: dict[str, Any]) -> None:
    with pytest.raises(BadPrompt):
        tokenizer.render(body)
