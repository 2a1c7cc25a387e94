"""Every request that was recorded from a real engine with the shipped tokenizer gives the engine's own token ids."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from .recordings import RECORDED_MODELS, differences, loaded, own_model, own_recordings, settings_of


@pytest.mark.parametrize("name", RECORDED_MODELS)
def test_every_recorded_request_gives_the_engines_ids(name: str, tmp_path: Path) -> None:
    """Prompts come out exactly; what the engine refuses has no prompt, so that it is placed by load."""
    meta, recordings = own_recordings(name)
    folder = own_model(name, tmp_path / name)
    pipeline = loaded(settings_of(meta, folder, max_model_len=meta["max_model_len"]))
    assert list(differences(pipeline, recordings)) == []
    prompts = Counter(recording["path"] for recording in recordings if recording["status"] == 200)
    assert min(prompts.values()) > 100 and len(prompts) == 4
    assert len(recordings) - prompts.total() > 300
