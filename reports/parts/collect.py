"""Manifests, metrics and win rates of finished runs -> one row of numbers a run.

Everything that a page says is read here, from what the stages left on disk. A row is a flat dict,
so that many of them are a table: keys of one policy start with its name (`ppo/win_rate`), shares
are fractions, a number that a run does not have is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from eval.calibration import calibration_of
from eval.scores import with_statistics
from eval.win_rate import names_of_pair, pair_name
from reports.parts.words import Row, shown
from stages.config import config as settings
from stages.config.checks import unknown
from stages.config.command_line import recorded_config
from stages.config.config import RANDOM, TOY, Config, UserError, public_value
from stages.config.judge import MOST_UNJUDGED
from stages.config.sections import COMPARISONS
from stages.config.stages import POLICY_GRADIENT_STAGES, POLICY_STAGES, is_part, row_of
from stages.config.stages import STAGES as TABLE
from stages.runs.files import read_lines, read_record
from stages.runs.manifest import check_run, read_manifest, stage_folder
from stages.runs.staleness import find_problem, refusal

SIDE = "calibration"  # beside the run; shown if it is there
STAGES = tuple(name for name in TABLE if name in (*TABLE["report"].inputs, *POLICY_STAGES))
RELEASED = "released"  # the policy of a run that trains none
GIVEN = "outputs"  # the section of settings that only a run of given summaries has
MEMORY_KNOBS = tuple(f"memory.{name}" for name in settings.CUT_BATCHES)
EXPLAINED = "val/explained_variance"
WRITTEN = ("rouge1", "rouge2", "rougeL", "tokens", "eos_rate", "score")
ENDS = {"": "estimate", "_low": "low", "_high": "high"}  # of an interval, in a flat row
WINS = ("wins", "ties", "losses", "unjudged", "statistics", "identical")
NO_DIFFERENCE = {"headline": False, **dict.fromkeys(("estimate", "low", "high", "p_value"))}


@dataclass(frozen=True)
class Record:
    """One finished run: where its stages lie and what they wrote about themselves."""

    name: str
    preset: str
    seed: int
    folders: dict[str, Path]
    manifests: dict[str, Row]
    settings: dict[str, Row]
    """Section -> field -> value, each section as the last stage that it governs recorded it."""
    calibration: Row | None = None
    """What the calibration of this judge found; None if there was none."""
    calibration_pairs: list[Row] = field(default_factory=list)
    """The labelled pairs with the judge's answers, if it was calibrated."""
    _results: dict[str, Row] = field(default_factory=dict)

    def results(self, stage: str) -> Row:
        """What a stage found, with the statistics of its held-out pairs if it has any."""
        if stage not in self._results:
            results = self.manifests[stage]["results"]
            self._results[stage] = with_statistics(results, self.folders[stage])
        return self._results[stage]

    def rows(self, stage: str, file: str = "metrics.jsonl") -> list[Row]:
        """The rows of a JSONL file of a stage; none if it wrote none."""
        path = self.folders[stage] / file
        return read_lines(path) if path.exists() else []

    @property
    def gradient_stages(self) -> list[str]:
        """The policy-gradient stages that it has, in the order in which they run."""
        return [stage for stage in POLICY_GRADIENT_STAGES if stage in self.manifests]

    @property
    def policy(self) -> str:
        """The policy that its page is about: the first policy-gradient stage; empty without one."""
        return next(iter(self.gradient_stages), "")

    @property
    def is_released(self) -> bool:
        """Whether it judges a policy that others trained."""
        return RELEASED in self.manifests

    @property
    def has_real_texts(self) -> bool:
        """Whether posts and references are others' words, or nobody says that they are not."""
        data = self.settings.get("data")
        return "base" not in self.manifests or data is None or data["source"] != TOY


def policies_of(record: Record) -> list[str]:
    """The policies that were judged, in the order of the training stages; others by name."""
    judged = record.results("win_rate")["policies"]
    places = {name: place for place, name in enumerate(STAGES)}
    return sorted(judged, key=lambda name: (places.get(name, len(places)), name))


def load_run(config: Config) -> Record:
    """The run that a config names.

    Raises UserError, with the make command to run, if a stage is missing, or if an earlier stage
    has changed since it was made.
    """
    folders = _part_of_the_run(config)
    calibrated = [SIDE] if read_manifest(stage_folder(config, SIDE)) is not None else []
    for stage in (*folders, *calibrated):
        problem = find_problem(config, stage)
        if problem:
            raise refusal(config, stage, problem)
    return _read(config, folders)


def find_runs(name: str, judge: str = "") -> tuple[list[Record], list[str]]:
    """The finished seeds of a run, in the order of the seeds, and a line on each other seed.

    `judge`: the folder of one judge, if several have judged the run.
    Raises UserError if no seed has finished, or if several have judged the run and none is named.
    """
    records, left_out = [], []
    folders_of_seeds = (settings.RUNS / name).glob("seed*")
    for folder in sorted(folders_of_seeds, key=lambda path: (len(path.name), path.name)):
        config = _config_of(folder, judge)
        if config is None:
            left_out.append(f"{name} {folder.name} is left out: stage win_rate is missing.")
            continue
        folders = _part_of_the_run(config)
        problems = {stage: find_problem(config, stage) for stage in folders}
        wrong = next((f"stage {stage} {why}" for stage, why in problems.items() if why), "")
        if wrong:
            left_out.append(f"{name} {folder.name} is left out: {wrong}.")
        else:
            records.append(_read(config, folders))
    if not records:
        where = settings.RUNS / name
        check_run(name)
        judges = {path.name for path in where.glob("seed*/win_rate/*") if read_manifest(path)}
        if judge and judges and judge not in judges:
            raise unknown("judge", judge, sorted(judges))
        raise UserError(f"no finished run in {where}: run `make eval PRESET=<preset> NAME={name}`")
    return records, left_out


def _config_of(seed: Path, judge: str) -> Config | None:
    """The recorded config of the win rates by the judge that is meant; None without any.

    Raises UserError where several judges are.
    """
    there = sorted(path for path in (seed / "win_rate").glob("*") if results_of(path) is not None)
    chosen = [path for path in there if judge in ("", path.name) and path.suffix != ".partial"]
    if len(chosen) > 1:
        names = ", ".join(path.name for path in chosen)
        raise UserError(f"{seed} was judged by {names}: choose one with JUDGE=")
    return recorded_config(chosen[0]) if chosen else None


def find_all(names: Sequence[str], judge: str = "") -> tuple[list[Record], list[str]]:
    """All finished seeds of the runs, and a line on each that is not."""
    each = [find_runs(name, judge) for name in names]
    return [run for runs, _ in each for run in runs], [line for _, out in each for line in out]


def numbers_of(record: Record) -> Row:
    """The numbers of one run that a report shows or compares.

    Raises UserError for a run of what others made, which has no training to show.
    """
    if not record.policy:
        raise UserError(f"{record.name} judges what others made: only its own page shows it")
    base, reward, learned = (record.results(stage) for stage in ("base", "rm", record.policy))
    return {
        "preset": record.preset,
        "checkpoint": shown("base.checkpoint", record.settings["base"]["checkpoint"]),
        "parameters": base["parameters"],
        "sft_rows": base["tokens"]["sft_train"]["rows"],
        "comparisons": reward["training_pairs"],
        **{key: reward.get(key) for key in ("accuracy", "accuracy_low", "accuracy_high")},
        "pairs": reward.get("pairs", 0),
        "taken": reward.get("function") or public_value("", reward.get("checkpoint", "")),
        "episodes": learned["episodes"],
        "kl": learned["objective/kl"],
        "scores": learned["objective/scores"],
        **judged_row(record),
    }


def judged_row(record: Record) -> Row:
    """The numbers of the evaluation alone, of whatever policies were judged on whatever posts."""
    wins, judge, summaries = map(record.results, ("win_rate", "judge", "summaries"))
    policies, controls = policies_of(record), record.results("controls")
    checks, differences = (controls, record.calibration), _differences(wins)
    main = differences.get(pair_name(record.policy, "sft"), NO_DIFFERENCE)
    main = main if main["headline"] else NO_DIFFERENCE
    learned = record.results("base") if record.policy else {}  # empty: nothing was trained
    rows = learned.get("rows", {})
    labels = {split: rows[split] for split in COMPARISONS if split in rows}
    return {
        "name": record.name,
        "seed": record.seed,
        "policies": policies,
        "policy": record.policy,
        "explained_by_critic": explained_by_critic(record),
        "judge": wins["judge"]["name"],
        "is_llm": wins["judge"]["is_llm"],
        **{f"judge_{key}": wins["judge"][key] for key in ("kind", "note")},
        "judge_flags": flags_of(controls, record.calibration),
        "judge_undecided": [x["undecided"] for x in checks if x and x.get("undecided")],
        "released_policy": record.settings.get(RELEASED, {}).get("policy", ""),
        "posts": wins["posts"],
        "texts": wins["texts"],
        "judgements": judge["judgements"],
        "judge_models": judge["models"],
        "differences": differences,
        **{f"difference{end}": main[key] for end, key in ENDS.items()},
        "score_gain": wins["policies"].get(record.policy, {}).get("score_gain"),
        "reference/tokens": summaries["reference_tokens"],
        "reference/score": summaries["policies"][policies[-1]]["reference_score"],
        "pretrained": record.settings.get("base", {}).get("checkpoint") != RANDOM,
        "real_posts": record.has_real_texts,
        "data": learned and learned["learned"] | {"labels": labels},
        **{
            f"{policy}/{key}": value
            for policy in policies
            for key, value in _policy_row(record, policy).items()
        },
    }


def _differences(wins: Row) -> Row:
    """Each difference, and whether it may be given; empty ones for pairs without a post of both."""
    none = {pair_name(b, a): NO_DIFFERENCE for a, b in combinations(wins["policies"], 2)}
    return none | {
        pair: difference | {"headline": all(_is_headline(wins, x) for x in names_of_pair(pair))}
        for pair, difference in wins["differences"].items()
    }


def _is_headline(wins: Row, policy: str) -> bool:
    """Whether so few of a policy's posts are unjudged that its rate may be given at all."""
    return bool(wins["policies"][policy]["unjudged"] <= MOST_UNJUDGED)


def flags_of(controls: Row | None, calibration: Row | None) -> list[str]:
    """Reasons not to trust a judge, from what its controls and its calibration found."""
    tried = controls["controls"].values() if controls else []
    failed = [control["what"] for control in tried if control["passed"] is False]
    flags = [f"it does not reliably prefer the reference to {', to '.join(failed)}"]
    return [*(flags if failed else []), *(calibration["flags"] if calibration else [])]


def _policy_row(record: Record, policy: str) -> Row:
    wins = record.results("win_rate")
    judged, written = (
        results["policies"][policy] for results in (wins, record.results("summaries"))
    )
    agrees = judged["rm_agrees"] or {}
    row = {key: judged[key] for key in ("win_rate", "low", "high")}
    row["controlled"] = judged["statistics"]["length_controlled"]["estimate"]
    if not _is_headline(wins, policy):
        row = dict.fromkeys(row)
    return {
        **row,
        **{key: judged[key] for key in WINS},
        **dict(zip(("worst_low", "worst_high"), judged["worst_case"], strict=True)),
        **{key: written[key] for key in WRITTEN},
        "kl": distance(record, policy),
        "below_penalty": below_penalty(record, policy),
        "special_tokens": written.get("special_tokens"),
        **{f"rm_agrees{end}": agrees.get(name) for end, name in ENDS.items()},
    }


def distance(record: Record, policy: str) -> float | None:
    """KL of a policy from SFT while it learned, nats a summary; None where it was not measured. Of
    `ppo-12`, kept after update 12, that of the next update, which sampled from it.
    """
    stage, _, update = policy.partition("-")
    if stage in record.gradient_stages:
        row = record.rows(stage)[int(update)] if update else record.results(stage)
        return float(row["objective/kl"])
    return 0.0 if policy == "sft" and policy in record.manifests else None


def below_penalty(record: Record, policy: str) -> float | None:
    """The first update's responses that end and score below what a missing EOS is given."""
    first = record.rows(policy)[:1] if policy in record.gradient_stages else []
    return first[0].get("policy/below_penalty") if first else None


def explained_by_critic(record: Record) -> Row | None:
    """How PPO's critic stood while the policy learned; None where nothing was logged of it.

    `updates`: the policy's; `below`: those in which the critic explained less than a constant;
    `used`: those whose advantages came from it; `first` and `last`: its variance at the ends.
    """
    if "ppo" not in record.folders:
        return None
    alone = record.settings["ppo"]["critic_updates"]
    rows = [row for row in record.rows("ppo") if row["step"] > alone and EXPLAINED in row]
    values = [row[EXPLAINED] for row in rows]
    if not values:
        return None
    below = sum(value < 0 for value in values)
    used = sum(row.get("policy/critic_used", 1) for row in rows)
    counts = {"updates": len(values), "below": below, "used": int(used)}
    return counts | {"first": values[0], "last": values[-1]}


def _read(config: Config, folders: dict[str, Path]) -> Record:
    side = stage_folder(config, SIDE)
    settings_read: dict[str, Any] = {}
    for stage, folder in folders.items():
        saved = read_record(folder / "config.json")
        learns_last = TABLE[stage].policy_gradient or stage == RELEASED
        sections = (*row_of(stage, config.kind).sections, *(("memory",) if learns_last else ()))
        settings_read |= {section: saved[section] for section in sections if section in saved}
    calibration = calibration_of(side)
    return Record(
        name=config.name,
        preset=Path(config.preset).name,  # of a file, without its folders
        seed=config.seed,
        folders=folders,
        manifests={stage: read_manifest(folder) or {} for stage, folder in folders.items()},
        settings=settings_read,
        calibration=calibration,
        calibration_pairs=read_lines(side / "pairs.jsonl") if calibration else [],
    )


def results_of(folder: Path) -> Row | None:
    """What the stage in a folder found; None if it has not finished."""
    manifest = read_manifest(folder)
    return manifest["results"] if manifest else None


def _part_of_the_run(config: Config) -> dict[str, Path]:
    """The folders of a run's stages, without optional ones whose policies were not summarised."""
    parts = [stage for stage in STAGES if is_part(stage, config.kind)]
    folders = {stage: stage_folder(config, stage) for stage in parts}
    summarised = (read_manifest(folders["summaries"]) or {}).get("inputs", {})
    return {
        stage: folder
        for stage, folder in folders.items()
        if not TABLE[stage].optional or stage in summarised
    }
