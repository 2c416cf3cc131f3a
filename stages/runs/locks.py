"""Locks of stages, so that two processes never run the same stage of a run at the same time."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from stages.config.errors import UserError
from stages.runs.manifest import lock_of

LOCK_SECONDS = 1.0
"""How long a stage waits for a lock: `make status` may hold it for a moment."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


@contextmanager
def held(path: Path, stage: str) -> Iterator[None]:
    """Hold the lock of a stage. The kernel releases it if this process dies.

    Raises UserError if another process holds it, or if the disk cannot lock files.
    """
    lock = FileLock(path, timeout=LOCK_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"stage {stage} is already running in another process ({path.parent}): "
            "wait for it or stop it"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        # The error of the lock itself does not name the file.
        raise UserError(
            f"{path}: {os.strerror(error.errno)}: put runs/ on a disk that can lock files"
        ) from None
    try:
        yield
    finally:
        # Before the release: a waiting process sees that its file is gone, and opens a new one.
        path.unlink(missing_ok=True)
        lock.release()


def is_under_way(folder: Path) -> bool:
    """Return whether a process holds the lock of a stage's folder."""
    path = lock_of(folder)
    if not path.exists():
        return False
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # Another user's run, or a disk that cannot lock files.
        return False
    lock.release()
    return False
