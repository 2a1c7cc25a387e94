"""Encoders of changing pools: one tokenizer for all of a model's, and no more encoders than are of use."""

from __future__ import annotations

import threading

import pytest

from litellm_prefix_router import encoders
from litellm_prefix_router.encoders import EncoderShelf
from litellm_prefix_router.fleet.discovery import ReplicaFacts
from litellm_prefix_router.fleet.pool import Pool, Replica
from litellm_prefix_router.prompt.pipeline import PromptPipeline
from litellm_prefix_router.settings import ModelSettings, Settings
from litellm_prefix_router.sim.assets import TINY_MODEL


async def test_adapters_that_come_and_go_load_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of LoRA adapters has an encoder of its own; they share the tokenizer, and old ones end."""
    monkeypatch.setattr(encoders, "KEPT", 4)
    shelf = EncoderShelf(Settings.model_validate({}))
    pool = Pool("chat", {}, settings=ModelSettings(tokenizer=str(TINY_MODEL)))
    tokenizers = set()
    for number in range(20):
        pool.settings = ModelSettings(tokenizer=str(TINY_MODEL), lora_modules=[f"adapter-{number}"])
        shelf.equip(pool)
        assert isinstance(pool.encoder, PromptPipeline)
        await pool.encoder.wait()
        assert pool.encoder._model is not None and pool.encoder._model.lora_modules == {f"adapter-{number}"}
        tokenizers.add(id(pool.encoder._model.tokenizer))
    assert len(tokenizers) == 1
    assert sum(thread.name.startswith("prompt_") for thread in threading.enumerate()) <= 5
    shelf.close()


def test_an_engines_tokenizer_is_asked_at_the_replicas_of_now() -> None:
    shelf = EncoderShelf(Settings.model_validate({}))
    encoder = None
    for names in (("http://old1", "http://old2"), ("http://new1", "http://new2")):
        replicas = {name: Replica(name, name, "m", facts=ReplicaFacts(reachable=True)) for name in names}
        pool = Pool("chat", replicas, settings=ModelSettings(tokenizer=str(TINY_MODEL)))
        shelf.equip(pool)
        assert encoder is None or pool.encoder is encoder
        encoder = pool.encoder
        assert isinstance(encoder, PromptPipeline)
        assert shelf._engines[encoder]._addresses() == list(names)
    shelf.close()
