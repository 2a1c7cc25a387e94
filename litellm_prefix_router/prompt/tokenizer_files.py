"""A model's tokenizer files: where they are and what they say, before anything is built from them."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .encoded import PromptUnknown

_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json", "tekken.json"),
)

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class TokenizerFiles:
    """What a model's folder says about its tokenizer."""

    folder: Path
    tokenizer_bytes: int = 0
    """Size of tokenizer.json; 0 where there is none."""
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    special_tokens_map: dict[str, Any] = field(default_factory=dict)
    added_tokens: dict[str, int] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name; "default" is the one without a name."""
    processor_template: str | None = None
    has_processor: bool = False
    has_tekken: bool = False

    def read_tokenizer(self) -> dict[str, Any] | None:
        """tokenizer.json, parsed: large, and needed only while something is built from it.

        Raises PromptUnknown("tokenizer_missing") where it cannot be parsed.
        """
        return _json(self.folder, "tokenizer.json")

    def stamp(self) -> Stamp:
        """Names, sizes and times of the files in the folder: differs when one of them was changed."""
        found = [(path.name, path.stat()) for path in sorted(self.folder.glob("*.json*")) if path.is_file()]
        return tuple((name, status.st_size, status.st_mtime_ns) for name, status in found)

    @property
    def takes_media(self) -> bool:
        """Could the model take images or audio? Only a config.json without any sign of it says no."""
        signs = ("vision_config", "audio_config", "vision_tower", "mm_projector_type", "thinker_config", "visual")
        return not self.config or self.has_processor or any(sign in self.config for sign in signs)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type") or "")

    @property
    def max_model_len(self) -> int | None:
        """The engine's default context length in tokens, or None where config.json does not tell."""
        return _max_model_len(self.config, self.tokenizer_config)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the model's embedding, or None where config.json does not tell."""
        for config in (self.config, self.config.get("text_config")):
            size = config.get("vocab_size") if isinstance(config, dict) else None
            if isinstance(size, int):
                return size
        return None


def find_folder(name: str) -> Path:
    """The local folder of a model given as a folder, a file in it, or a Hugging Face id.

    An id is looked up in the usual cache and downloaded where that is allowed (HF_HUB_OFFLINE and the like count).
    Raises PromptUnknown("tokenizer_missing").
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or not name:
        raise PromptUnknown("tokenizer_missing", f"no such folder: {name}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PromptUnknown("tokenizer_missing", f"{name}: huggingface_hub is not installed") from None
    try:
        return Path(snapshot_download(name, allow_patterns=[*_NAMES, "additional_chat_templates/*"]))
    except Exception as error:  # the hub raises errors of several libraries
        raise PromptUnknown("tokenizer_missing", f"{name}: {type(error).__name__}") from None


def read_files(folder: Path) -> TokenizerFiles:
    """Raises PromptUnknown("tokenizer_missing") for files that cannot be read or parsed."""
    config = _json(folder, "tokenizer_config.json") or {}
    templates = _templates(config.get("chat_template"))
    separate = _text(folder, "chat_template.jinja")
    extra = folder / "additional_chat_templates"
    named = {path.stem: path.read_text(encoding="utf-8") for path in sorted(extra.glob("*.jinja"))}
    if separate is not None:
        named["default"] = separate
    if named:
        templates = named
    legacy = _json(folder, "chat_template.json")
    processor = legacy.get("chat_template") if legacy else None
    is_processor = (folder / "processor_config.json").is_file() or (folder / "preprocessor_config.json").is_file()
    if is_processor and processor is None:
        processor = separate
    return TokenizerFiles(
        folder=folder,
        tokenizer_bytes=_size(folder, "tokenizer.json"),
        tokenizer_config=config,
        config=_json(folder, "config.json") or {},
        special_tokens_map=_json(folder, "special_tokens_map.json") or {},
        added_tokens=_json(folder, "added_tokens.json") or {},
        templates=templates,
        processor_template=processor if isinstance(processor, str) else None,
        has_processor=is_processor,
        has_tekken=any((folder / name).is_file() for name in ("tekken.json", "tekken.json.gz")),
    )


def _templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            item["name"]: item["template"]
            for item in value
            if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        }
    return {}


def _text(folder: Path, name: str) -> str | None:
    for path in (folder / name, folder / f"{name}.gz"):
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        try:
            return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise PromptUnknown("tokenizer_missing", f"{path.name}: {type(error).__name__}") from None
    return None


def _size(folder: Path, name: str) -> int:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path.stat().st_size
    return 0


def _json(folder: Path, name: str) -> dict[str, Any] | None:
    text = _text(folder, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise PromptUnknown("tokenizer_missing", f"{name} is not valid JSON") from None
    return value if isinstance(value, dict) else None


_LENGTH_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_SCALED_ALREADY = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "default", "mrope", "dynamic_mrope"})


def _max_model_len(config: dict[str, Any], tokenizer_config: dict[str, Any]) -> int | None:
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**config, **text_config}
    lengths = [config[key] for key in _LENGTH_KEYS if isinstance(config.get(key), int)]
    if not lengths:
        return None
    length: int = min(lengths)
    limit = tokenizer_config.get("model_max_length")
    if isinstance(limit, (int, float)):
        length = min(length, int(limit))
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, dict) and "gemma3" not in str(config.get("model_type")):
        kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
        if kind == "longrope" and isinstance(config.get("original_max_position_embeddings"), int):
            return int(config["original_max_position_embeddings"])
        if kind not in _SCALED_ALREADY and isinstance(factor, (int, float)):
            length = int(length * factor)
    return length
