"""`prefix-router settings`: the reference of all settings, printed from the one place that defines them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


def settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: name -> details.")] = False,
) -> None:
    """List every setting with its default and meaning."""
    if markdown:
        sys.stdout.write(settings_markdown())
    elif as_json:
        rows = {name: {"default": default, "description": text} for name, default, text in _all_rows()}
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        _show()


def settings_markdown() -> str:
    """The whole reference as Markdown."""
    from ..settings import EndpointSettings, EnvoyPoolSettings, EnvoySettings, ModelSettings, Settings

    lines = [
        "# Settings",
        "",
        "Printed by `prefix-router settings --markdown`. In LiteLLM's `config.yaml` they stand under",
        "`callback_settings.prefix_router`, in the YAML file of a command at the top; each can also be set by an",
        "environment variable: `PREFIX_ROUTER_` and the name in capitals, `__` between levels.",
    ]
    sections = (
        ("All gateways and indexers", Settings, ""),
        ("One model: `models.<name>`", ModelSettings, "models.<name>."),
        ("Envoy: `envoy`", EnvoySettings, "envoy."),
        ("One pool of Envoy's: `envoy.pools.<name>`", EnvoyPoolSettings, "envoy.pools.<name>."),
        ("One endpoint, where ip:port does not say it all", EndpointSettings, "envoy.pools.<name>.endpoints[]."),
    )
    for title, model, prefix in sections:
        lines += ["", f"## {title}", "", "| setting | default | meaning |", "|---|---|---|"]
        for name, default, text in _rows(model, prefix):
            lines.append(f"| `{name}` | {f'`{default}`' if default else ''} | {text} |")
    return "\n".join(lines) + "\n"


def _all_rows() -> Iterator[tuple[str, str, str]]:
    from ..settings import EndpointSettings, EnvoyPoolSettings, EnvoySettings, ModelSettings, Settings

    yield from _rows(Settings, "")
    yield from _rows(ModelSettings, "models.<name>.")
    yield from _rows(EnvoySettings, "envoy.")
    yield from _rows(EnvoyPoolSettings, "envoy.pools.<name>.")
    yield from _rows(EndpointSettings, "envoy.pools.<name>.endpoints[].")


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        text = field.description or ""
        choices = get_args(field.annotation)
        if choices and all(isinstance(choice, str) for choice in choices):
            text = f"{text} One of: {', '.join(choices)}.".strip()
        yield f"{prefix}{name}", _default(field), text.replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        made: Any = field.default_factory() if field.default_factory is not None else None  # type: ignore[call-arg]
        return json.dumps(made) if isinstance(made, (dict, list)) and made else ""
    if field.default is None or isinstance(field.default, BaseModel):
        return ""
    return json.dumps(field.default) if isinstance(field.default, (bool, list, dict)) else str(field.default)


def _show() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "default", "meaning")
    for name, default, text in _all_rows():
        table.add_row(name, default, text)
    Console(highlight=False).print(table)
