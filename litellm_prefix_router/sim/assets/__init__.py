"""Files that ship with the simulated replica: `tiny/`, a model folder without weights."""

from __future__ import annotations

from pathlib import Path

TINY_MODEL = Path(__file__).parent / "tiny"
"""Folder with the tokenizer, chat template and config of the simulated model."""
