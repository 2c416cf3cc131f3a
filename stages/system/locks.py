"""Who works on a stage: a lock that dies with its process. Standard library only."""

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.settings.checks import UserError


@contextmanager
def held(path: Path, stage: str) -> Iterator[None]:
    """Hold a stage's lock. The lock of a dead process is free, even if its file still names it.

    Raises UserError if a living process holds the lock, and names that process.
    """
    while True:
        handle = path.open("a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder_of(path)
            who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
            handle.close()
            raise UserError(
                f"stage {stage} is already under way: {who} holds {path}: wait for it or stop it"
            ) from None
        if path.exists() and os.fstat(handle.fileno()).st_ino == path.stat().st_ino:
            break
        handle.close()  # whoever held it has just removed it
    try:
        handle.truncate(0)
        handle.write(json.dumps({"pid": os.getpid(), "host": platform.node()}))
        handle.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        handle.close()


def holder_of(path: Path) -> dict[str, Any] | None:
    """The living process that a lock names, or None; one on another machine counts as living."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if found["host"] == platform.node():
        try:
            os.kill(found["pid"], 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
    return dict(found)
