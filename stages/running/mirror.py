"""The mirror of a run at wandb, where WANDB_PROJECT asks for one. Standard library at the top.

A seed has one wandb run. Its stages are processes of their own, so each of them resumes that run by
an id that lies in the seed's folder. The record stays metrics.jsonl and the manifests: whatever
goes wrong at wandb is said in one line, and the stage goes on.
"""

import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.finished import read_manifest, stage_folder, why_not
from stages.running.files import read_json, read_lines, write_json
from stages.running.machine import code_version
from stages.running.mirror_contents import (
    WEIGHTS,
    Bundle,
    bundle_of,
    key_of,
    results_of,
    sample_table,
    seed_folder,
    slug,
    table_of,
    tags_of,
)
from stages.settings.config import Config, UserError
from stages.settings.hidden import public_settings
from stages.settings.stages import STAGES, TRAINING_STAGES, is_part

NOTE = "wandb.json"  # below a seed
SAMPLES = "samples.jsonl"
# What wandb would send beside what is logged: output of the terminal, command line, host, folder,
# and the address of the repository. Each of them can hold a name, a server or a key.
QUIET = {
    "console": "off",
    "x_disable_meta": True,
    "disable_git": True,
    "disable_code": True,
    "host": "not shown",
}
INIT_SECONDS = 30.0
FINISH_SECONDS = 3600.0  # then what was not sent stays on this disk, and the pipeline goes on
MISSING = "WANDB_PROJECT is set but wandb is missing: run `pip install wandb`, or unset it"


class Mirror:
    """What one stage shows to others while it is under way; off unless it was asked for."""

    def __init__(self, config: Config, stage: str) -> None:
        self.config, self.stage = config, stage
        self.wandb: Any = None
        """The module; None if wandb was not asked for, or has failed."""
        self.client: Any = None
        """wandb's run."""
        self.board: Board | None = None
        self.note: dict[str, Any] = {}
        self.samples: list[dict[str, Any]] = []
        """Those of one step, which become one table."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of one step; a step that is logged again replaces itself on its axis."""
        if self.board is not None:
            self.board.log(step, metrics)
        if self.client is not None:
            with self._trying("logging"):
                self._show_samples(self.stage)
                self._log(self.stage, step, metrics)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """A row that the stage appended to one of its files."""
        if self.client is not None and name == SAMPLES:
            with self._trying("a table of samples"):
                if self.samples and self.samples[0]["step"] != row["step"]:
                    self._show_samples(self.stage)
                self.samples.append(row)

    def finish(self) -> None:
        """Show what the stage found and made; it lies in its place by now."""
        if self.client is None:
            return
        with self._trying("the results"):
            self._show_samples(self.stage)
            self._show_finished(self.stage)

    def close(self, failed: bool = False) -> None:
        """End the connection; the wandb run itself goes on with the next stage."""
        if self.board is not None:
            self.board.close()
            self.board = None
        client, self.client = self.client, None
        if client is None:
            return
        try:
            client.finish(exit_code=int(failed))
        except Exception as error:
            say(f"sending failed ({_line(error)}): `wandb sync {client.sync_dir}`")

    # -- how it is shown ---------------------------------------------------------------------------

    def begin(self, note: dict[str, Any]) -> None:
        """Resume the seed's wandb run, and bring it what finished before it was asked for.

        Raises UserError for a setting of wandb that it refuses.
        """
        self.client = _client(self.wandb, self.config, self.stage, note["id"])
        if self.client is None:
            return
        with self._trying("the beginning"):
            self.note = note
            self._save()
            self._axis(self.stage)
            for stage in _before(self.config, self.stage):
                if key_of(self.config, stage) not in note["finished"]:
                    self._replay(stage)

    def _replay(self, stage: str) -> None:
        """Show a stage that finished without wandb."""
        folder = stage_folder(self.config, stage)
        self._axis(stage)
        samples = read_lines(folder / SAMPLES) if (folder / SAMPLES).exists() else []
        metrics = folder / "metrics.jsonl"
        for row in read_lines(metrics) if metrics.exists() else []:
            self._log(stage, row["step"], {k: v for k, v in row.items() if k != "step"})
            self.samples = [one for one in samples if one["step"] == row["step"]]
            self._show_samples(stage)
        self._show_finished(stage)

    def _axis(self, stage: str) -> None:
        """Each stage counts its own steps."""
        self.client.define_metric(f"{stage}/step", hidden=True)
        self.client.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def _log(self, stage: str, step: int, metrics: dict[str, Any]) -> None:
        named = {f"{stage}/{key}": value for key, value in metrics.items()}
        self.client.log({f"{stage}/step": step, **named})

    def _show_samples(self, stage: str) -> None:
        rows, self.samples = self.samples, []
        if rows:
            self._log(stage, rows[0]["step"], {"samples": self._table(*sample_table(rows))})

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        return self.wandb.Table(columns=list(columns), data=[list(row) for row in rows])

    def _show_finished(self, stage: str) -> None:
        self.client.summary.update(results_of(self.config, stage))
        table = table_of(self.config, stage)
        if table is not None:
            self.client.log({f"{key_of(self.config, stage)}/texts": self._table(*table)})
        bundle = bundle_of(self.config, stage)
        if bundle is not None:
            self._show_bundle(stage, bundle)
        self.note["finished"].append(key_of(self.config, stage))
        self._save()

    def _show_bundle(self, stage: str, bundle: Bundle) -> None:
        """An artifact; its version is also an alias, so that later stages name it exactly."""
        manifest = read_manifest(stage_folder(self.config, stage)) or {}
        about = {key: manifest[key] for key in ("settings_hash", "code_version", "finished")}
        about["made_from"] = self._use_inputs(manifest["inputs"])
        artifact = self.wandb.Artifact(bundle.name, type=bundle.kind, metadata=about)
        for name, path in bundle.files.items():
            if not (path.suffix == WEIGHTS and os.environ.get("WANDB_LOG_MODEL") == "false"):
                artifact.add_file(
                    str(path.resolve()), name=name, policy="immutable", skip_cache=True
                )
        logged = self.client.log_artifact(artifact, aliases=["latest", bundle.version])
        if not self.client.offline and stage != self.stage:
            logged.wait()  # this very stage may be about to use it

    def _use_inputs(self, stages: Iterable[str]) -> dict[str, str]:
        """Note the stages that something was made from as wandb's inputs; name and version of each.

        Offline, wandb takes no inputs: then the names in the artifact's metadata are all there is.
        """
        bundles = [bundle_of(self.config, name) for name in stages if name in STAGES]
        found = {one.name: one.version for one in bundles if one is not None}
        for name, version in found.items() if not self.client.offline else ():
            try:
                self.client.use_artifact(f"{name}:{version}")
            except Exception as error:  # of an upstream that was made without wandb, as an example
                say(f"has no artifact {name} to be named as an input ({_line(error)})")
        return found

    def _save(self) -> None:
        write_json(seed_folder(self.config) / NOTE, self.note)

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Say what goes wrong, once; from then on this stage shows nothing more."""
        try:
            yield
        except Exception as error:
            say(f"{what} failed ({_line(error)}): the stage goes on without wandb")
            self.close(failed=True)


def open_mirror(config: Config, stage: str, attempt: str) -> Mirror:
    """The mirror that the environment asks for; `attempt` names the settings and inputs.

    Raises UserError if a package that it needs is missing, or if wandb refuses a setting.
    """
    mirror = Mirror(config, stage)
    if stage in TRAINING_STAGES:
        mirror.board = open_board(config, stage)
    if os.environ.get("WANDB_PROJECT") and os.environ.get("WANDB_MODE") != "disabled":
        try:
            import wandb
        except ImportError:
            raise UserError(MISSING) from None
        mirror.wandb = wandb
        mirror.begin(note_for(config, stage, attempt))
    return mirror


def note_for(config: Config, stage: str, attempt: str) -> dict[str, Any]:
    """The id of the seed's wandb run, and what that run has been shown.

    A stage that learns begins a new wandb run if this one holds another try of it already: its
    curves would lie over each other.
    """
    note = read_json(seed_folder(config) / NOTE)
    if note is not None and stage in TRAINING_STAGES:
        again = stage in note["finished"] or note["begun"].get(stage, attempt) != attempt
        note = None if again else note
    if note is None:
        number = f"{slug(config.name)[:60]}-{config.seed}-{secrets.token_hex(4)}"
        note = {"id": number, "begun": {}, "finished": []}
    note["begun"][stage] = attempt
    return dict(note)


def _before(config: Config, stage: str) -> list[str]:
    """The run's own stages before one that are finished and still as asked."""
    names = list(STAGES)[: list(STAGES).index(stage)]
    own = [one for one in names if not (config.upstream and STAGES[one].shared)]
    return [one for one in own if is_part(one, config.kind) and why_not(config, one) is None]


def _client(wandb: Any, config: Config, stage: str, number: str) -> Any:
    """wandb's run of a seed; offline if the server cannot be reached, None if wandb fails."""
    from wandb.errors import AuthenticationError, UsageError

    more: dict[str, Any] = {"init_timeout": INIT_SECONDS}
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        more["finish_timeout"] = FINISH_SECONDS
    asked: dict[str, Any] = {
        "id": number,
        "resume": "allow",
        "name": f"{config.name}-seed{config.seed}",
        "group": config.name,
        "job_type": config.kind,
        "tags": tags_of(config, stage),
        "config": {**public_settings(config), "code_version": code_version()},
    }
    try:
        asked["settings"] = wandb.Settings(**QUIET, **more, allow_val_change=True)
        return wandb.init(**asked)
    except (UsageError, AuthenticationError, ValueError) as error:
        raise UserError(
            f"wandb: {_line(error)} Correct it, or set WANDB_MODE=offline, or unset WANDB_PROJECT"
        ) from None
    except Exception as error:
        return _offline_client(wandb, asked, error)


def _offline_client(wandb: Any, asked: dict[str, Any], error: Exception) -> Any:
    """wandb's run on this disk alone; None if that fails too."""
    try:
        wandb.teardown()  # its service still holds the id for the try that failed
        client = wandb.init(**asked, mode="offline")
    except Exception as again:
        say(f"it fails ({_line(error)}; {_line(again)}): the stage goes on without wandb")
        return None
    say(f"it does not answer ({_line(error)}): `wandb sync {client.sync_dir}` sends it later")
    return client


def say(text: str) -> None:
    """One line about wandb."""
    print(f"wandb: {text}", file=sys.stderr, flush=True)


def _line(error: Exception) -> str:
    """An error of wandb in one line; a setting that it refuses takes it several to say."""
    lines = [line.strip() for line in str(error).splitlines() if "further information" not in line]
    text = " ".join(line for line in lines if line)
    return text[:300] or type(error).__name__


DIRECTORY = "TENSORBOARD_LOGGING_DIR"
BOARD_MISSING = (
    f"{DIRECTORY} is set but tensorboard is missing: run `pip install tensorboard`, or unset it"
)


class Board:
    """The scalars of one stage."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written before the first step. Raises ImportError without tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.open = folder, SummaryWriter
        self.writer: Any = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of one step; an earlier try's metrics from this step on are not shown."""
        if self.writer is None:
            self.writer = self.open(str(self.folder), purge_step=step)
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()


def open_board(config: Config, stage: str) -> Board | None:
    """Where the scalars of a stage go, if they are asked for.

    Raises UserError if the package is missing.
    """
    asked = os.environ.get(DIRECTORY)
    if not asked:
        return None
    try:
        return Board(Path(asked) / config.name / f"seed{config.seed}" / stage)
    except ImportError:
        raise UserError(BOARD_MISSING) from None
