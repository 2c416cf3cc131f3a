"""A run at wandb, in trackio and in TensorBoard, if the environment asks for it.

Standard library at the top.

A seed has one wandb run. Its stages are processes of their own, so each resumes that run by an id
that lies in the seed's folder. The record stays metrics.jsonl and the manifests: whatever goes
wrong at wandb is printed in one line, and the stage goes on. trackio is told the same.
"""

import importlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.finished import read_manifest, stage_folder
from stages.running.files import read_lines, read_record, write_json
from stages.running.machine import code_version
from stages.runs import Mirror
from stages.settings import config as settings
from stages.settings.checks import UserError
from stages.settings.config import Config, public_settings, slug
from stages.settings.judge import MOST_UNJUDGED
from stages.settings.stages import STAGES, TRAINING_STAGES

WANDB, TRACKIO = "wandb", "trackio"
TRACKIO_RUN = "stages.driving.trackio_run"  # loaded by name, by those who ask for it
NOTE = "{}.json"  # of each of them, below a seed
EXPLAINED = "val/explained_variance"
FINISHED = "finished"  # in the note, in place of an attempt
SAMPLES = "samples.jsonl"
# What wandb would send beside what is logged: output of the terminal, command line, host, folder,
# and the address of the repository. Each of them can hold a name, a server or a key.
QUIET: dict[str, Any] = {
    "console": "off",
    "x_disable_meta": True,
    "disable_git": True,
    "disable_code": True,
    "host": "not shown",
}
INIT_SECONDS = 30.0
FINISH_SECONDS = 3600.0  # then what was not sent stays on this disk, and the pipeline goes on
MOST_ROWS = 200  # of a policy in a table
DEEPEST = 3
GROUPED = ("by_", "calibration", "statistics")  # results of many small groups
LONGEST_TAG = 64  # of wandb
DIRECTORY = "TENSORBOARD_LOGGING_DIR"
MISSING = "{setting} is set but {package} is missing: run `pip install {package}`, or unset it"


def open_mirrors(config: Config, stage: str, attempt: str) -> list[Mirror]:
    """The mirrors that the environment asks for; `attempt` names the settings and inputs.

    Raises UserError if a package that they need is missing, or if wandb refuses a setting.
    """
    mirrors: list[Mirror] = []
    if os.environ.get(DIRECTORY) and stage in TRAINING_STAGES:
        folder = Path(os.environ[DIRECTORY]) / config.name / f"seed{config.seed}" / stage
        try:
            mirrors.append(Board(folder))
        except ImportError:
            raise UserError(MISSING.format(setting=DIRECTORY, package="tensorboard")) from None
    if os.environ.get("WANDB_PROJECT") and os.environ.get("WANDB_MODE") != "disabled":
        note = note_for(config, stage, attempt)
        client = connect(config, stage, note["id"])
        if client is not None:
            mirrors.append(Tracker(config, stage, client, note))
    if os.environ.get("TRACKIO_PROJECT"):
        note = note_for(config, stage, attempt, TRACKIO)
        run = importlib.import_module(TRACKIO_RUN).connect(config, stage, note["id"])
        if run is not None:
            mirrors.append(Tracker(config, stage, run, note, TRACKIO))
    return mirrors


# -- TensorBoard -----------------------------------------------------------------------------------


class Board(Mirror):
    """The metrics of one stage as TensorBoard's event files."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written before the first step. Raises ImportError without tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.open = folder, SummaryWriter
        self.writer: Any = None
        """None before the first step, and after it has failed."""
        self.failed = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of one step; an earlier try's metrics from this step on are not shown.

        What goes wrong is printed once, and then this stage shows no more.
        """
        if self.failed:
            return
        try:
            self._log(step, metrics)
        except Exception as error:
            self._fail("logging", error)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self.writer is None:
            self.writer = self.open(str(self.folder), purge_step=step)
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def close(self, failed: bool) -> None:
        """Write the rest."""
        writer, self.writer = self.writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:
            self._fail("the end", error)

    def _fail(self, what: str, error: Exception) -> None:
        self.failed, self.writer = True, None
        text = f"{what} failed ({one_line(error)}): the stage goes on without TensorBoard"
        warn(text, "TensorBoard")


# -- wandb -----------------------------------------------------------------------------------------


class Tracker(Mirror):
    """One stage in the wandb run of its seed; each stage has an axis for its own steps."""

    def __init__(
        self, config: Config, stage: str, client: Any, note: dict[str, Any], library: str = WANDB
    ) -> None:
        self.config, self.stage, self.note, self.library = config, stage, note, library
        self.client = client
        """wandb's run, or trackio's behind the same methods; None after it has failed."""
        self.warned = False
        self.samples: list[dict[str, Any]] = []
        """Those of one step, which become one table."""
        self._try("the beginning", self._begin)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of one step; a step that is logged again replaces itself on its axis."""
        self._try("logging", self._show_samples)
        self._try("logging", self._log, step, metrics)
        self._try("an alert", self._warn, step, metrics)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Collect the samples of a step; the first of the next step shows them."""
        if name == SAMPLES:
            if self.samples and self.samples[0]["step"] != row["step"]:
                self._try("a table of samples", self._show_samples)
            self.samples.append(row)

    def finish(self) -> None:
        """Show the stage's results."""
        self._try("the results", self._show_samples)
        self._try("the results", self._show_results)

    def close(self, failed: bool) -> None:
        """End the connection; the wandb run itself goes on with the next stage."""
        client, self.client = self.client, None
        if client is None:
            return
        try:
            client.finish(exit_code=int(failed))
        except Exception as error:
            mend = f": `wandb sync {client.sync_dir}`" if self.library == WANDB else ""
            warn(f"sending failed ({one_line(error)}){mend}", self.library)

    def _try(self, what: str, show: Callable[..., None], *arguments: Any) -> None:
        """Show something; what goes wrong is printed once, and then this stage shows no more."""
        if self.client is None:
            return
        try:
            show(*arguments)
        except Exception as error:
            text = f"{what} failed ({one_line(error)}): the stage goes on without {self.library}"
            warn(text, self.library)
            self.close(failed=True)

    def _begin(self) -> None:
        self._save_note()
        self.client.define_metric(f"{self.stage}/step", hidden=True)
        self.client.define_metric(f"{self.stage}/*", step_metric=f"{self.stage}/step")

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        named = {f"{self.stage}/{key}": value for key, value in metrics.items()}
        self.client.log({f"{self.stage}/step": step, **named})

    def _show_samples(self) -> None:
        rows, self.samples = self.samples, []
        if rows:
            self._log(rows[0]["step"], {"samples": self._table(rows)})

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        """Once, when the critic is worse than a constant after its updates without the policy."""
        alone = getattr(getattr(self.config, self.stage, None), "critic_updates", 0)
        explained = metrics.get(EXPLAINED, 0.0)
        if explained < 0 and step > alone and not self.warned:
            self.warned = True
            text = f"it is {explained:.2f} at step {step}: the critic is worse than a constant"
            self.client.alert(title=f"{self.stage}: {EXPLAINED} below 0", text=text, level="WARN")

    def _show_results(self) -> None:
        self.client.summary.update(results_of(self.config, self.stage))
        rows = texts_of(self.config, self.stage)
        if rows:
            self.client.log({f"{key_of(self.config, self.stage)}/texts": self._table(rows)})
        self.note["begun"][self.stage] = FINISHED
        self._save_note()

    def _save_note(self) -> None:
        write_json(_seed_folder(self.config) / NOTE.format(self.library), self.note)

    def _table(self, rows: Sequence[dict[str, Any]]) -> Any:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(key) for key in columns] for row in rows]
        return importlib.import_module(self.library).Table(columns=columns, data=data)


def note_for(config: Config, stage: str, attempt: str, library: str = WANDB) -> dict[str, Any]:
    """The `id` of the seed's wandb run, and the attempt of each stage that has `begun` there.

    A stage that learns begins a new wandb run if this one holds another try of it already: its
    curves would lie over each other.
    """
    note: dict[str, Any] | None = read_record(_seed_folder(config) / NOTE.format(library))
    again = note is not None and note["begun"].get(stage, attempt) != attempt
    if note is None or (again and stage in TRAINING_STAGES):
        number = f"{slug(config.name)[:60]}-{config.seed}-{secrets.token_hex(4)}"
        note = {"id": number, "begun": {}}
    note["begun"][stage] = attempt
    return note


def _seed_folder(config: Config) -> Path:
    return settings.RUNS / config.name / f"seed{config.seed}"


def connect(config: Config, stage: str, number: str) -> Any:
    """wandb's run of a seed; offline if the server cannot be reached, None if wandb fails.

    Raises UserError if wandb is not installed or refuses a setting.
    """
    try:
        import wandb
        from wandb.errors import AuthenticationError, UsageError
    except ImportError:
        raise UserError(MISSING.format(setting="WANDB_PROJECT", package="wandb")) from None
    more: dict[str, Any] = {"init_timeout": INIT_SECONDS}
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        more["finish_timeout"] = FINISH_SECONDS
    request: dict[str, Any] = {
        "id": number,
        "resume": "allow",
        "name": f"{config.name}-seed{config.seed}",
        "group": config.name,
        "job_type": config.kind,
        "tags": tags_of(config, stage),
        "config": {**public_settings(config), "code_version": code_version()},
    }
    try:
        request["settings"] = wandb.Settings(**QUIET, **more, allow_val_change=True)
        wait_for_a_free_second(number)
        return wandb.init(**request)
    except (UsageError, AuthenticationError, ValueError) as error:
        raise UserError(
            f"wandb: {one_line(error)} Correct it, or set WANDB_MODE=offline, or unset"
            " WANDB_PROJECT"
        ) from None
    except Exception as error:
        return _connect_offline(wandb, request, error)


def wait_for_a_free_second(number: str) -> None:
    """wandb names an offline stage by id and second: two of one second would be one."""
    folder = Path(os.environ.get("WANDB_DIR", ".")) / "wandb"
    while any(folder.glob(f"*-{time.strftime('%Y%m%d_%H%M%S')}-{number}")):
        time.sleep(0.1)


def _connect_offline(wandb: Any, request: dict[str, Any], error: Exception) -> Any:
    """wandb's run on this disk alone; None if that fails too."""
    try:
        wandb.teardown()  # its service still holds the id for the try that failed
        client = wandb.init(**request, mode="offline")
    except Exception as again:
        warn(f"it fails ({one_line(error)}; {one_line(again)}): the stage goes on without wandb")
        return None
    warn(f"it does not answer ({one_line(error)}): `wandb sync {client.sync_dir}` sends it later")
    return client


def warn(text: str, library: str = WANDB) -> None:
    """Print one line about wandb, trackio or TensorBoard on stderr."""
    print(f"{library}: {text}", file=sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    """An error of wandb in one line; a setting that it refuses takes it several to say."""
    lines = [line.strip() for line in str(error).splitlines() if "further information" not in line]
    text = " ".join(line for line in lines if line)
    return text[:300] or type(error).__name__


# -- what is shown there ---------------------------------------------------------------------------


def key_of(config: Config, stage: str) -> str:
    """A stage of this run by its folder: `ppo`, or `judge/facts` where each judge has its own."""
    return f"{stage}/{config.judge.folder}" if STAGES[stage].per_judge else stage


def tags_of(config: Config, stage: str) -> list[str]:
    """The preset, the stages that made models, the judge's kind; then those of WANDB_TAGS.

    `stage` is under way.
    """
    made = [
        name
        for name in (*TRAINING_STAGES, "released")
        if name == stage or read_manifest(stage_folder(config, name)) is not None
    ]
    own = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]
    tags = [config.preset, *made, f"judge:{config.judge.kind}", *own]
    return list(dict.fromkeys(tag[:LONGEST_TAG] for tag in tags))


def results_of(config: Config, stage: str) -> dict[str, Any]:
    """A finished stage's results, flat: `results/ppo/objective/kl`; numbers alone, and how long.

    Results hold texts too, such as folders; those stay here.
    """
    manifest = read_manifest(stage_folder(config, stage)) or {}
    cost = {key: manifest[key] for key in ("seconds", "peak_memory_gib")}
    flat = _numbers(f"results/{key_of(config, stage)}", manifest["results"] | cost, 1)
    return flat | (headline(config, manifest["results"]) if stage == "win_rate" else {})


def _numbers(start: str, values: dict[str, Any], depth: int) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, int | float):
            flat[f"{start}/{key}"] = value
        elif isinstance(value, dict) and depth < DEEPEST and not key.startswith(GROUPED):
            flat |= _numbers(f"{start}/{key}", value, depth + 1)
    return flat


def headline(config: Config, results: dict[str, Any]) -> dict[str, Any]:
    """Each policy's win rate with its interval, and differences; none that may not be given."""
    given = {
        name: policy
        for name, policy in results["policies"].items()
        if policy["unjudged"] <= MOST_UNJUDGED and policy["win_rate"] is not None
    }
    rates: dict[str, Any] = {"judge": config.judge.folder}
    for name, policy in given.items():
        rates[f"win_rate/{name}"] = policy["win_rate"]
        rates |= {f"win_rate/{name}_{end}": policy[end] for end in ("low", "high")}
        equal = policy["statistics"]["length_controlled"]["estimate"]
        rates |= {} if equal is None else {f"win_rate/{name}_at_equal_length": equal}
    for pair, difference in results["differences"].items():
        if all(name in given for name in re.split(r" - |-(?=[^-]+$)", pair)):
            rates[f"win_rate/{pair}"] = difference["estimate"]
    return rates


def texts_of(config: Config, stage: str) -> list[dict[str, Any]]:
    """The first summaries of each policy, and with the win rates what each was given."""
    if stage not in ("summaries", "win_rate"):
        return []
    rows = [
        {"policy": path.stem, **row}
        for path in sorted(stage_folder(config, "summaries").glob("*.jsonl"))
        for row in read_lines(path)[:MOST_ROWS]
    ]
    if stage == "win_rate":
        scores = read_lines(stage_folder(config, "win_rate") / "post_scores.jsonl")
        points = {(row["policy"], row["id"]): row["score"] for row in scores}
        rows = [row | {"win": points.get((row["policy"], row["id"]))} for row in rows]
    return rows
