"""Models and data sets of the Hugging Face hub, each at one commit.

A branch of the hub can move during a study. So the commit that was loaded first is written to
`runs/hub.json`, and every later stage, seed and run uses that commit. It is read from the hub's
cache if it is there, so HF_HUB_OFFLINE=1 changes nothing. `id@commit` in a setting pins by hand.

huggingface_hub is imported only when something is fetched: importing it takes a second.
"""

import errno
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from filelock import FileLock

from stages.config import paths
from stages.config.errors import UserError, first_line
from stages.runs.files import read_record, write_json

RECORDS = "hub.json"
"""The file below `runs/` that lists the commits in use."""
MAIN = "main"
WEIGHTS = ("*.safetensors",)
# These are loaded only if there are no other weights.
OLD_WEIGHTS = ("*.bin",)
CONFIG_AND_TOKENIZER = ("*.json", "*.txt", "*.model", "*.jinja")
MODEL_FILES = (*CONFIG_AND_TOKENIZER, *WEIGHTS, *OLD_WEIGHTS)
COMMIT = re.compile(r"[0-9a-f]{40}")
ANSWER_SECONDS = 10.0
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# Errors before the first byte, by name, because their module differs between versions.
UNREACHABLE = {
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "HfHubHTTPError",
    "ConnectError",
    "ConnectTimeout",
    "ProxyError",
}
NETWORK = "run `make data PRESET=...` on a machine with network access"
LOGIN = "correct the id, or log in with `hf auth login` or HF_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder, or a repository of the hub at a revision, as a setting names it."""

    setting: str
    kind: str
    """`model` or `dataset`."""
    name: str
    """Folder or hub id."""
    configuration: str = ""
    """Of a data set; empty if the data set has only one."""
    revision: str = MAIN

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine."""
        return Path(self.name).is_dir()

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.setting}: {self.kind} {self.name}"

    @property
    def key(self) -> str:
        """Its name in `runs/hub.json`."""
        return f"{self.kind}s/{self.name}@{self.revision}"


def model_source(setting: str, text: str) -> Source:
    """Return the source that `folder` or `id[@revision]` names."""
    if Path(text).is_dir():
        return Source(setting=setting, kind="model", name=text)
    name, _, revision = text.partition("@")
    return Source(setting=setting, kind="model", name=name, revision=revision or MAIN)


def dataset_source(setting: str, text: str) -> Source:
    """Return the source that `folder` or `id[:configuration][@revision]` names."""
    source = replace(model_source(setting, text), kind="dataset")
    if source.is_folder:
        return source
    name, _, configuration = source.name.partition(":")
    return replace(source, name=name, configuration=configuration)


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A source that is on this machine."""

    source: Source
    folder: Path
    commit: str
    """Of the hub's repository, 40 digits; empty for a folder."""

    @property
    def size(self) -> str:
        """The number and size of its files, and its commit, as a text."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        return f"{len(files)} files, {megabytes:.1f} MB, at commit {self.commit or '-'}"

    @property
    def record(self) -> dict[str, str]:
        """What a manifest says about it."""
        return {
            "setting": self.source.setting,
            "repository": self.source.name,
            "configuration": self.source.configuration,
            "revision": self.source.revision,
            "commit": self.commit,
        }


def fetch_model(source: Source) -> Fetched:
    """Return a model with its weights; `.bin` files only if it has no others."""
    fetched = fetch(source, (*CONFIG_AND_TOKENIZER, *WEIGHTS))
    if not source.is_folder and not any(fetched.folder.glob(WEIGHTS[0])):
        return fetch(source, (*CONFIG_AND_TOKENIZER, *OLD_WEIGHTS))
    return fetched


def fetch_tokenizer(source: Source) -> Fetched:
    """Return a model's configuration and tokenizer, without its weights."""
    return fetch(source, CONFIG_AND_TOKENIZER)


def fetch(source: Source, patterns: tuple[str, ...]) -> Fetched:
    """Return the files of a source that match one of the patterns, at the recorded commit.

    Raises UserError if the source does not exist or access is denied, or if a download fails.
    """
    if source.is_folder:
        return Fetched(source=source, folder=Path(source.name), commit="")
    commit = _commit_of(source)
    with _hub_errors_as_user_errors(source):
        folder = _snapshot(source.name, source.kind, commit, patterns)
    return Fetched(source=source, folder=folder, commit=commit)


@cache
def _snapshot(name: str, kind: str, commit: str, patterns: tuple[str, ...]) -> Path:
    """Return the folder of a commit's files in the hub's cache; each process looks it up once."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # The client reports each retry; `_hub_errors_as_user_errors` reports the last.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = snapshot_download(
        name,
        repo_type=kind,
        revision=commit,
        allow_patterns=list(patterns),
        # Subfolders of a model hold other formats of the same weights.
        ignore_patterns=["*/*"] if kind == "model" else None,
    )
    return Path(folder)


def _commit_of(source: Source) -> str:
    """Return the commit of the setting, else that of `runs/hub.json`, else the hub's newest."""
    if COMMIT.fullmatch(source.revision):
        return source.revision
    recorded = _recorded().get(source.key)
    if recorded is not None:
        return recorded
    with _hub_errors_as_user_errors(source):
        newest = _newest_commit(source)
    return _record(source, newest)


def _newest_commit(source: Source) -> str:
    """Return the commit of a revision on the hub, or in the hub's cache if the hub is down."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().repo_info(
            source.name,
            repo_type=source.kind,
            revision=source.revision,
            timeout=ANSWER_SECONDS,
        )
        return str(info.sha)
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        with suppress(OSError):
            cached = snapshot_download(
                source.name,
                repo_type=source.kind,
                revision=source.revision,
                local_files_only=True,
                allow_patterns=[],
            )
            return Path(cached).name
        raise


def _recorded() -> dict[str, str]:
    return read_record(paths.RUNS / RECORDS) or {}


def _record(source: Source, commit: str) -> str:
    """Record a commit, unless another run has recorded one; return the recorded commit."""
    paths.RUNS.mkdir(parents=True, exist_ok=True)
    with FileLock(paths.RUNS / ".hub.lock"):
        records = {source.key: commit} | _recorded()
        write_json(paths.RUNS / RECORDS, records)
    return records[source.key]


@contextmanager
def _hub_errors_as_user_errors(source: Source) -> Iterator[None]:
    """Turn an error of the hub's client into one line. An error of the disk passes unchanged."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        raise UserError(f"{source.label}{_reason(source, error)}") from error


def _reason(source: Source, error: Exception) -> str:
    """Return what is wrong and how to fix it, to be read after the source's label."""
    from huggingface_hub import constants, errors

    folder = "datasets/" if source.kind == "dataset" else ""
    page = f"{constants.ENDPOINT}/{folder}{source.name}"
    if isinstance(error, errors.GatedRepoError):
        return f" is gated: accept its terms at {page}, then log in (`hf auth login` or HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f" has no revision {source.revision}: correct the part after @"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f" is neither a folder nor on the hub, or it is private: {LOGIN}"
    if isinstance(error, errors.HFValidationError):
        return " is neither a folder nor a hub id: correct it"
    if constants.is_offline_mode():
        return f" is not in the hub's cache, and HF_HUB_OFFLINE is set: {NETWORK}"
    line = first_line(_cause(error))[:120]
    if UNREACHABLE & {kind.__name__ for kind in type(error).__mro__}:
        return f" is not in the hub's cache, and {constants.ENDPOINT} fails ({line}): {NETWORK}"
    return f": the download was interrupted ({line}): run the same command to continue it"


def _cause(error: BaseException) -> BaseException:
    """Return the error that caused the others, which is the most specific one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
