"""The process's limit on open files, for commands that follow many replicas."""

from __future__ import annotations

import resource


def allow_many_files() -> None:
    """A replica's stream takes four descriptors; the usual limit, 1,024, is meant for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
