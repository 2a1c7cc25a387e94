"""The reference tokenizer's facts: the same from a child process, and from this one where no child will do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from litellm_prefix_router.prompt import reference as module
from litellm_prefix_router.prompt.cache import PromptCache
from litellm_prefix_router.prompt.encoded import PromptUnknown
from litellm_prefix_router.prompt.reference import Reference, reference
from litellm_prefix_router.prompt.tokenizer import TokenizerStore, choose_backend
from litellm_prefix_router.prompt.tokenizer_files import read_files

from .recordings import OWN_TOKENIZER, own_model


def facts(folder: Path) -> tuple[Reference, str]:
    with reference(read_files(folder)) as known:
        return known, known.text or known.file.read_text(encoding="utf-8")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose tokenizer puts a token in front."""
    return own_model("parts", tmp_path / "model")


def test_a_large_tokenizer_is_built_by_a_child(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, its_file = facts(model)
    assert here.prefix and not here.suffix
    monkeypatch.setattr(module, "_BUILT_HERE_BYTES", 0)
    monkeypatch.setattr(module, "build", lambda *_: pytest.fail("built in this process"))
    there, other_file = facts(model)
    assert other_file == its_file
    assert [getattr(there, name) for name in ("vocab_size", "added", "prefix", "suffix", "expected")] == [
        getattr(here, name) for name in ("vocab_size", "added", "prefix", "suffix", "expected")
    ]


@pytest.mark.parametrize("interpreter", ["", "/nonexistent/python", shutil.which("false")])
def test_without_a_child_it_is_built_here(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUILT_HERE_BYTES", 0)
    monkeypatch.setattr(module.sys, "executable", interpreter)
    known, _ = facts(OWN_TOKENIZER)
    assert known.vocab_size == 6144


def test_without_a_temporary_folder_it_is_built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: str) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(module, "_BUILT_HERE_BYTES", 0)
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", refuse)
    known, _ = facts(OWN_TOKENIZER)
    assert known.vocab_size == 6144 and choose_backend(known, "own").name == "fastokens"


def test_a_broken_file_is_told_whoever_builds_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "tokenizer.json").write_text("{", encoding="utf-8")
    for limit in (0, 1 << 20):
        monkeypatch.setattr(module, "_BUILT_HERE_BYTES", limit)
        with pytest.raises(PromptUnknown, match="not valid JSON"):
            facts(model)


def test_encoders_share_a_tokenizer_until_its_files_change(model: Path) -> None:
    store = TokenizerStore(PromptCache(1 << 20))
    first = store.get(read_files(model))
    assert store.get(read_files(model)) is first
    (model / "tokenizer.json").write_bytes((OWN_TOKENIZER / "tokenizer.json").read_bytes())
    assert store.get(read_files(model)).prefix_length == 0 < first.prefix_length
