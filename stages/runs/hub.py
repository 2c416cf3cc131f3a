"""Models and data sets of the Hugging Face hub, each at one commit. Standard library at the top.

A branch of the hub can move under a study. So the commit that was loaded first is written to
`runs/hub.json`, and every later stage, seed and run uses that commit: from the hub's cache if it is
there, so that HF_HUB_OFFLINE=1 changes nothing. `id@commit` in a setting is the same by hand.
"""

import errno
import fcntl
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stages.config import config as settings
from stages.config.checks import UserError
from stages.runs.files import read_record, write_json
from stages.runs.inputs import BESIDE_WEIGHTS, OLD_WEIGHTS, WEIGHTS, Source

RECORDS = "hub.json"  # below runs/
COMMIT = re.compile(r"[0-9a-f]{40}")
ANSWER_SECONDS = 10.0
ABOUT_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# Errors that come before the first byte, by name: their module differs between versions.
UNREACHABLE = {
    *("LocalEntryNotFoundError", "OfflineModeIsEnabled", "HfHubHTTPError"),
    *("ConnectError", "ConnectTimeout", "ProxyError"),
}
NETWORK = "run `make data PRESET=...` where there is a network"
LOGIN = "correct the id, or log in with `hf auth login` or HF_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Where a source lies on this machine."""

    source: Source
    folder: Path
    commit: str
    """Of the hub's repository, 40 digits; empty for a folder."""

    @property
    def size(self) -> str:
        """Its files and its commit, for people."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        return f"{len(files)} files, {megabytes:.1f} MB, at commit {self.commit or '-'}"

    @property
    def record(self) -> dict[str, str]:
        """What a manifest says of it."""
        about = vars(self.source) | {"repository": self.source.name, "commit": self.commit}
        names = ("setting", "repository", "configuration", "revision", "commit")
        return {name: about[name] for name in names}


def fetch_model(source: Source) -> Fetched:
    """A model's configuration, tokenizer and weights; `.bin` only where there is nothing newer."""
    fetched = fetch(source, (*BESIDE_WEIGHTS, *WEIGHTS))
    if not source.is_folder and not any(fetched.folder.glob(WEIGHTS[0])):
        return fetch(source, (*BESIDE_WEIGHTS, *OLD_WEIGHTS))
    return fetched


def fetch_tokenizer(source: Source) -> Fetched:
    """A model's files but for its weights."""
    return fetch(source, BESIDE_WEIGHTS)


def fetch(source: Source, patterns: tuple[str, ...]) -> Fetched:
    """The files of a source that match one of the patterns, at the commit that is recorded.

    Raises UserError for a source that is not there, not permitted, or does not come through.
    """
    if source.is_folder:
        return Fetched(source=source, folder=Path(source.name), commit="")
    commit = _commit_of(source)
    with _one_line(source):
        folder = _snapshot(source.name, source.kind, commit, patterns)
    return Fetched(source=source, folder=folder, commit=commit)


@cache
def _snapshot(name: str, kind: str, commit: str, patterns: tuple[str, ...]) -> Path:
    """The folder of a commit's files in the hub's cache; one process looks once."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # The client tells of each retry; `_one_line` tells of the last.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    # Subfolders of a model hold other formats of the same weights.
    elsewhere = ["*/*"] if kind == "model" else None
    filters: Any = {"allow_patterns": [*patterns], "ignore_patterns": elsewhere}
    return Path(snapshot_download(name, repo_type=kind, revision=commit, **filters))


def _commit_of(source: Source) -> str:
    """The commit that the setting names, or that `runs/hub.json` recorded, or the hub's now."""
    if COMMIT.fullmatch(source.revision):
        return source.revision
    if recorded := _recorded().get(source.key):
        return recorded
    with _one_line(source):
        now = _commit_now(source)
    return _record(source, now)


def _commit_now(source: Source) -> str:
    """The commit of a revision on the hub; if that does not answer, in the hub's cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted: Any = {"repo_type": source.kind, "revision": source.revision}
    try:
        return str(HfApi().repo_info(source.name, timeout=ANSWER_SECONDS, **wanted).sha)
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        with suppress(OSError):
            cached: Any = {"local_files_only": True, "allow_patterns": []} | wanted
            return Path(snapshot_download(source.name, **cached)).name
        raise


def _recorded() -> dict[str, str]:
    return read_record(settings.RUNS / RECORDS) or {}


def _record(source: Source, commit: str) -> str:
    """Record a commit unless another run has; the one on record. Runs at once take turns."""
    settings.RUNS.mkdir(parents=True, exist_ok=True)
    with (settings.RUNS / ".hub.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = {source.key: commit} | _recorded()
        write_json(settings.RUNS / RECORDS, records)
    return records[source.key]


@contextmanager
def _one_line(source: Source) -> Iterator[None]:
    """Turn what the hub's client raises into one line; an error of the disk stays what it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in ABOUT_THE_DISK:
            raise
        raise UserError(f"{source.label}{_reason(source, error)}") from error


def _reason(source: Source, error: Exception) -> str:
    """What is wrong and how to mend it, to be read after the source's label."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if source.kind == 'dataset' else ''}{source.name}"
    if isinstance(error, errors.GatedRepoError):
        return f" is gated: accept its terms at {page}, then log in (`hf auth login` or HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f" has no revision {source.revision}: correct what stands after @"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f" is neither a folder here nor on the hub, or it is private: {LOGIN}"
    if isinstance(error, errors.HFValidationError):
        return " is neither a folder here nor a hub id: correct it"
    if constants.is_offline_mode():
        return f" is not in the hub's cache, and HF_HUB_OFFLINE is set: {NETWORK}"
    why = _first_line(error)
    if UNREACHABLE & {kind.__name__ for kind in type(error).__mro__}:
        return f" is not in the hub's cache, and {constants.ENDPOINT} fails ({why}): {NETWORK}"
    return f": the download was cut off ({why}): the same command goes on from there"


def _first_line(error: Any) -> str:
    """The first line of the error at the bottom, which says most."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [""])[0][:120] or type(error).__name__
