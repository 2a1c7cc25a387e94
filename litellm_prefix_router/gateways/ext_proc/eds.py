"""Envoy's endpoints in a file that Envoy watches (file-based EDS), for set-ups without a control plane.

Envoy reloads on a rename within the folder and not on a write in place; it takes an empty list for an order to serve
nobody. So: rename, and never an empty list.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def assignment(cluster: str, endpoints: Mapping[str, bool]) -> dict[str, Any]:
    """The file's content. `endpoints`: ip:port -> whether it drains (Envoy's own balancing then leaves it out)."""
    hosts = []
    for endpoint, drains in sorted(endpoints.items()):
        host, _, port = endpoint.rpartition(":")
        address = {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}
        entry: dict[str, Any] = {"endpoint": {"address": address}}
        if drains:
            entry["health_status"] = "DRAINING"
        hosts.append(entry)
    resource = {"@type": _TYPE, "cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}
    digest = hashlib.sha256(json.dumps(resource, sort_keys=True).encode()).hexdigest()
    return {"version_info": digest[:16], "resources": [resource]}


def endpoint_of_address(address: str) -> str:
    """host:port of a replica's base URL, the host as it stands there."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class EdsFile:
    """One EDS file. JSON, which is YAML too: Envoy goes by the name's ending (.yaml or .json)."""

    def __init__(self, path: Path, cluster: str) -> None:
        self._path = path
        self._cluster = cluster

    def write(self, endpoints: Mapping[str, bool]) -> str:
        """Put these endpoints in force: "written", "unchanged", or "refused" (none at all: the old ones stay).

        Raises OSError where the folder can't be written to.
        """
        if not endpoints:
            return "refused"
        content = json.dumps(assignment(self._cluster, endpoints), indent=1) + "\n"
        try:
            if self._path.read_text(encoding="utf-8") == content:
                return "unchanged"
        except (FileNotFoundError, UnicodeDecodeError):
            pass
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # Envoy may run as another user
            os.replace(name, self._path)
        except BaseException:
            os.unlink(name)
            raise
        return "written"
