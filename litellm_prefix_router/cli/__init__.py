"""The `prefix-router` command: one file a subcommand, imported when it runs so that `--help` is quick."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. Expected errors are one line on standard error and exit code 2; never a traceback."""
    from ..settings import SettingsError
    from .app import app

    try:
        app()
    except SettingsError as error:
        print(f"prefix-router: {error}", file=sys.stderr)
        raise SystemExit(2) from None
