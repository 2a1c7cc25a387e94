"""Options that commands share which speak to the index of a set-up: where its settings are, and what to override."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..settings import Settings

ConfigOption = Annotated[
    Path | None, typer.Option(help="YAML file with the settings, or a LiteLLM config with a prefix_router section.")
]
RedisUrlOption = Annotated[str | None, typer.Option(help="Where the index is; overrides the settings.")]
KeyPrefixOption = Annotated[str | None, typer.Option(help="First part of every key; overrides the settings.")]


def settings_from(config: Path | None, redis_url: str | None, key_prefix: str | None) -> Settings:
    """The settings that these options name. Raises SettingsError."""
    from ..settings import load_settings, load_settings_file

    settings = load_settings_file(config) if config else load_settings()
    changes = {k: v for k, v in {"redis_url": redis_url, "key_prefix": key_prefix}.items() if v is not None}
    return settings.model_copy(update=changes)
