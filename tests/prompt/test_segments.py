"""Cached is the same as uncached: segments, block hashes, whole conversations."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from litellm_prefix_router.prompt import segments
from litellm_prefix_router.prompt.backend import Backend, TokenizersBackend
from litellm_prefix_router.prompt.blocks import chain_hashes
from litellm_prefix_router.prompt.cache import PromptCache
from litellm_prefix_router.prompt.effective import effective_tokenizer
from litellm_prefix_router.prompt.hashing import BlockHasher
from litellm_prefix_router.prompt.reference import reference
from litellm_prefix_router.prompt.segments import SegmentEncoder, cut_tokens
from litellm_prefix_router.prompt.tokenizer import choose_backend
from litellm_prefix_router.prompt.tokenizer_files import TokenizerFiles, read_files

from .recordings import PROMPTS, REPOSITORY

TINY = REPOSITORY / "litellm_prefix_router" / "sim" / "assets" / "tiny"
MODELS = ["tiny", *(["qwen3", "llama3_2", "llama2", "mistral_nemo_hf"] if PROMPTS.is_dir() else [])]
RELAXED = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def tokenizer(model: str) -> Any:
    return effective_tokenizer(files(model))


@cache
def fast(model: str) -> Backend:
    with reference(files(model)) as known:
        return choose_backend(known, model)


def files(model: str) -> TokenizerFiles:
    return read_files(TINY if model == "tiny" else Path(PROMPTS / model))


def texts(model: str) -> st.SearchStrategy[str]:
    added = [token.content for token in tokenizer(model).get_added_tokens_decoder().values()][:24]
    pieces = st.one_of(
        st.sampled_from(added),
        st.sampled_from([" ", "\n", "  ", "\n\n", "<", "|", ">", "<|", "_start|>", "s>", "[INST", "é", "e\u0301", "▁"]),
        st.text(max_size=12).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
        *[st.sampled_from([token[:-1], token[1:]]) for token in added[:4]],
    )
    return st.lists(pieces, max_size=40).map("".join)


@pytest.mark.parametrize("model", MODELS)
def test_segments_give_the_ids_of_the_whole_text(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MIN_CHARACTERS", 0)
    monkeypatch.setattr(segments, "_GROUP_BYTES", 12)
    slow = TokenizersBackend(tokenizer(model))
    added = tokenizer(model).get_added_tokens_decoder()
    for chosen in {slow.name: slow, fast(model).name: fast(model)}.values():
        encoder = SegmentEncoder(chosen, added, PromptCache(1 << 20))
        _compare(encoder, slow, model)
        for cut in list(cut_tokens(added).values())[:6]:
            encoder._cut = cut.encode()
            _compare(encoder, slow, model)


def _compare(encoder: SegmentEncoder, reference: TokenizersBackend, model: str) -> None:
    @RELAXED
    @given(text=texts(model))
    def check(text: str) -> None:
        expected = reference.encode(text)
        assert encoder.encode(text) == expected
        assert encoder.encode(text) == expected, "again, from the cache"

    check()


@pytest.mark.parametrize("model", MODELS)
def test_there_is_something_to_cut_at(model: str) -> None:
    assert cut_tokens(tokenizer(model).get_added_tokens_decoder())


def test_tokens_that_hide_one_another_are_not_cut_at() -> None:
    from tokenizers import AddedToken

    def plain(content: str, **flags: bool) -> Any:
        return AddedToken(content, normalized=False, **flags)

    added = dict(
        enumerate(
            [
                plain("<a>"),
                plain("x<a>"),  # hides <a>; nothing hides it
                plain("<b>"),
                plain("c<"),  # may swallow the beginning of <b>
                plain("[ok]"),
                plain("[l]", lstrip=True),
                plain("[r]", rstrip=True),
                plain("[w]", single_word=True),
                AddedToken("[n]", normalized=True),
                plain("=aba="),  # its end is its own beginning
            ]
        )
    )
    assert cut_tokens(added) == {1: "x<a>", 3: "c<", 4: "[ok]"}


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=3000),
    block_size=st.sampled_from([1, 2, 3, 16]),
    root=st.integers(0, 2**64 - 1),
    grow=st.lists(st.integers(0, 2**32 - 1), max_size=400),
)
def test_hashes_are_those_of_the_plain_chain(ids: list[int], block_size: int, root: int, grow: list[int]) -> None:
    hasher = BlockHasher(PromptCache(1 << 20))
    for values in (ids, ids + grow, ids):
        array = np.asarray(values, dtype="<u4")
        assert hasher.hashes(array, block_size, root) == chain_hashes(array, block_size, root)


def test_the_cache_keeps_its_bound() -> None:
    cache_ = PromptCache(100_000)
    generator = random.Random(1)
    for index in range(2000):
        size = generator.randrange(5000)
        cache_.put(index, b"", size)
        assert cache_.used_bytes <= 100_000
    cache_.put("huge", b"", 200_000)
    assert cache_.get_many(["huge", 1999]) == [None, b""]
    assert cache_.stats()["entries"] < 2000
