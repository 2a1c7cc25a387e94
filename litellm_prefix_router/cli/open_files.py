"""The process's limit on open files, for commands that follow many replicas."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 65_536


def allow_many_files() -> None:
    """A replica's stream takes four descriptors; the usual limit, 1,024, is meant for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # then the streams that do not fit say so in `status`
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
