"""Typed results of finished runs, read from what the stages wrote.

Pages, the terminal and comparisons work with these types; nothing above this module reads a
manifest. Shares and rates are fractions. None means that a run does not have a number: it trained
no critic, or too many comparisons had no verdict for a win rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.calibration import calibration_of
from eval.scores import with_statistics
from eval.win_rate import names_of_pair
from stages.config import paths
from stages.config.config import Config
from stages.config.errors import UserError, unknown
from stages.config.judge import MOST_UNJUDGED
from stages.config.public import public_value
from stages.config.recorded import recorded_config
from stages.config.sections import COMPARISONS, RANDOM, TOY
from stages.config.stages import (
    POLICY_GRADIENT_STAGES,
    POLICY_STAGES,
    STAGES,
    is_part,
    stage_row,
)
from stages.rl.algorithms import ALGORITHMS
from stages.runs.files import read_lines, read_record
from stages.runs.manifest import check_run, read_manifest, stage_folder
from stages.runs.staleness import find_problem, refusal

Json = dict[str, Any]
"""An object of a manifest or of a JSONL file, as a stage wrote it."""

CALIBRATION = "calibration"
RELEASED = "released"
OUTPUTS = "outputs"
# Stages whose results belong to a run, in the order in which they run.
RUN_STAGES = tuple(name for name in STAGES if name in (*STAGES["report"].inputs, *POLICY_STAGES))


# -- what a run found ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval."""

    estimate: float
    low: float
    high: float

    def is_above(self, value: float) -> bool:
        """Whether the whole interval lies above a value."""
        return self.low > value

    def is_below(self, value: float) -> bool:
        """Whether the whole interval lies below a value."""
        return self.high < value


@dataclass(frozen=True)
class Curve:
    """A metric over the updates of a stage."""

    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LengthControlled:
    """The win rate at equal length, by a logistic model of length and order."""

    rate: Interval | None
    is_extrapolated: bool
    why_none: str
    """Why there is no rate; empty if there is one."""
    order_effect: Interval | None
    """Being shown first, in logits."""
    length_effect: Interval | None
    """Doubling the length, in logits."""
    nearly_equal_posts: int | None
    read_off_posts: int | None
    """The posts of equal length that the rate was read off, if the model had no finite fit."""


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """The win rate where the ratio of lengths lies between two numbers."""

    ratio_from: float
    ratio_to: float
    judgements: int
    rate: Interval


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy: how it was judged against the references, and what it wrote."""

    name: str
    title: str
    """As pages write it, such as PPO for `ppo`."""

    win_rate: Interval | None
    """Over posts, both orders averaged. None if too many posts have no verdict."""
    wins: int
    ties: int
    losses: int
    unjudged: float
    worst_case: tuple[float, float]
    """The win rate if all posts without a verdict had been lost, or won."""
    raw: Interval | None
    order_balanced: Interval | None
    shown_first: Interval | None
    shown_second: Interval | None
    at_equal_length: LengthControlled | None
    length_bins: tuple[LengthBin, ...]
    median_length_ratio: float | None
    picks_first: Interval | None
    """How often the judge picks the text that is shown first."""
    same_after_swap: Interval | None
    reward_model_agrees: Interval | None

    rouge_l: float | None
    tokens: float | None
    eos_rate: float | None
    score: float | None
    """Mean score of the run's reward model."""
    kl: float | None
    """From SFT, nats per summary, at the end of training."""
    special_tokens: float
    """Share of the summaries with special tokens other than EOS."""
    below_penalty: float | None
    """Share of SFT's samples that emit EOS and score below the penalty for a missing one."""
    identical: Mapping[str, float]
    """Share of the summaries that are the reference, the post, or one and the same text."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two policies' win rates on the same posts."""

    policy: str
    other: str
    interval: Interval | None
    """None if too many posts have no verdict."""
    p_value: float | None
    identical: float
    """Share of the posts on which both wrote the same text."""

    @property
    def turned(self) -> "Difference":
        """The same difference with the policies exchanged."""
        interval = self.interval
        if interval is not None:
            interval = Interval(estimate=-interval.estimate, low=-interval.high, high=-interval.low)
        return replace(self, policy=self.other, other=self.policy, interval=interval)


@dataclass(frozen=True, kw_only=True)
class JudgeResult:
    """Who judged, and the reasons not to trust it."""

    name: str
    kind: str
    is_llm: bool
    note: str
    models: tuple[str, ...]
    """What the server said that it was."""
    judgements: int
    failed_checks: tuple[str, ...]
    undecided_checks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CriticResult:
    """How PPO's critic explained the returns while the policy was trained."""

    updates: int
    below_zero: int
    """Updates in which it explained less than a constant would."""
    used: int
    """Updates whose advantages came from it."""
    first: float
    last: float
    realized_mean: float | None
    """Mean explained variance of the returns that followed, without the critic's own values; None
    in runs that did not log it."""
    realized_below_zero: float | None
    """Share of the updates in which that was below 0."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run trained, and on how much."""

    checkpoint: str
    is_pretrained: bool
    parameters: int
    sft_rows: int
    comparisons: int
    reward_taken_from: str
    """A reward function or another's reward model in place of our own; empty without one."""
    reward_accuracy: Interval | None
    reward_pairs: int
    episodes: int
    kl: float
    score: float


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """One stage of a run: its folder and its manifest."""

    name: str
    folder: Path
    manifest: Json

    @cached_property
    def results(self) -> Json:
        """What the stage found, with the statistics of its held-out pairs if it has any."""
        return with_statistics(self.manifest["results"], self.folder)

    def rows(self, file: str = "metrics.jsonl") -> list[Json]:
        """Return the rows of a JSONL file of the stage; none if it wrote none."""
        path = self.folder / file
        return read_lines(path) if path.exists() else []

    @cached_property
    def metrics(self) -> list[Json]:
        """The rows of metrics.jsonl."""
        return self.rows()

    def curve(self, key: str) -> Curve | None:
        """Return a metric over the updates; None if it was never logged."""
        rows = [row for row in self.metrics if row.get(key) is not None and isfinite(row[key])]
        if not rows:
            return None
        return Curve(
            key=key,
            steps=tuple(row["step"] for row in rows),
            values=tuple(row[key] for row in rows),
        )


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One finished run."""

    name: str
    preset: str
    seed: int
    policies: Mapping[str, PolicyResult]
    """By name, in the order of the training stages."""
    trained: str
    """The first policy trained by policy gradient; empty if the run trained none."""
    differences: tuple[Difference, ...]
    judge: JudgeResult
    training: TrainingResult | None
    """None if nothing was trained: a released policy, or existing summaries, were judged."""
    critic: CriticResult | None
    posts: int
    different_posts: int
    """Posts with different texts; equal ones count as one in every interval."""
    reference_tokens: float | None
    reference_score: float | None
    has_real_texts: bool
    """Whether posts and references are other people's words."""
    learned: Json
    """What of the held-out data is in the training data; empty if nothing was trained."""

    settings: Mapping[str, Json] = field(repr=False)
    """Section -> field -> value, as the stages recorded them."""
    stages: Mapping[str, StageRecord] = field(repr=False)
    calibration: Json | None = field(repr=False)
    """What the calibration of this judge found; None if there was none."""
    calibration_pairs: Sequence[Json] = field(repr=False)

    @property
    def main(self) -> PolicyResult | None:
        """The policy that the run trained by policy gradient."""
        return self.policies.get(self.trained)

    @property
    def is_released(self) -> bool:
        """Whether the run judges a policy that others trained."""
        return RELEASED in self.stages

    @property
    def gradient_stages(self) -> list[str]:
        """The policy-gradient stages of the run, in the order in which they ran."""
        return [stage for stage in POLICY_GRADIENT_STAGES if stage in self.stages]

    @property
    def ordered_differences(self) -> list[Difference]:
        """All differences, each minus the policy that comes first in the run."""
        order = list(self.policies)
        rows = []
        for difference in self.differences:
            is_turned = order.index(difference.policy) < order.index(difference.other)
            rows.append(difference.turned if is_turned else difference)
        return sorted(rows, key=lambda row: (order.index(row.other), order.index(row.policy)))

    @property
    def order_matters(self) -> bool:
        """Whether any verdict changed with the order in which the two summaries were shown."""
        same = [policy.same_after_swap for policy in self.policies.values()]
        return any(share is None or share.estimate < 1 for share in same)

    def difference(self, policy: str, other: str) -> Difference | None:
        """Return the difference of two policies on the same posts; None if none was measured."""
        for difference in self.differences:
            if (difference.policy, difference.other) == (policy, other):
                return difference
        return None


def title_of(policy: str, others: Sequence[str] = ()) -> str:
    """Return how pages write a policy: our own by its title, unless another is called like that."""
    if policy not in POLICY_STAGES:
        return policy
    if policy == RELEASED:
        title = "Released policy"
    elif policy in ALGORITHMS:
        title = ALGORITHMS[policy].title
    else:
        title = policy.upper()
    return policy if title in others else title


# -- finding runs ----------------------------------------------------------------------------------


def load_run(config: Config) -> RunResult:
    """Return the run that a config names.

    Raises UserError, with the command to run, if a stage is missing, or if an earlier stage has
    changed since it ran.
    """
    folders = _stage_folders(config)
    has_calibration = read_manifest(stage_folder(config, CALIBRATION)) is not None
    for stage in [*folders, CALIBRATION] if has_calibration else folders:
        problem = find_problem(config, stage)
        if problem:
            raise refusal(config, stage, problem)
    return _read_run(config, folders)


def find_runs(name: str, judge: str = "") -> tuple[list[RunResult], list[str]]:
    """Return the finished seeds of a run in their order, and a line about each other seed.

    `judge` is the folder of one judge, if several have judged the run. Raises UserError if no seed
    has finished, or if several judges have judged the run and none is named.
    """
    runs: list[RunResult] = []
    left_out: list[str] = []
    seeds = (paths.RUNS / name).glob("seed*")
    for folder in sorted(seeds, key=lambda path: (len(path.name), path.name)):
        config = _judged_config(folder, judge)
        if config is None:
            left_out.append(f"{name} {folder.name} is left out: stage win_rate is missing.")
            continue
        folders = _stage_folders(config)
        problem = _first_problem(config, folders)
        if problem:
            left_out.append(f"{name} {folder.name} is left out: {problem}.")
            continue
        runs.append(_read_run(config, folders))
    if not runs:
        raise _no_finished_run(name, judge)
    return runs, left_out


def find_all(names: Sequence[str], judge: str = "") -> tuple[list[RunResult], list[str]]:
    """Return all finished seeds of several runs, and a line about each that is left out."""
    runs: list[RunResult] = []
    left_out: list[str] = []
    for name in names:
        found, lines = find_runs(name, judge)
        runs += found
        left_out += lines
    return runs, left_out


def _judged_config(seed_folder: Path, judge: str) -> Config | None:
    """Return the recorded config of the win rates by the judge; None if there are none.

    Raises UserError if several judges are meant.
    """
    candidates = []
    for folder in sorted((seed_folder / "win_rate").glob("*")):
        is_meant = judge in ("", folder.name) and folder.suffix != ".partial"
        if is_meant and read_manifest(folder) is not None:
            candidates.append(folder)
    if len(candidates) > 1:
        names = ", ".join(folder.name for folder in candidates)
        raise UserError(f"{seed_folder} was judged by {names}: choose one with JUDGE=")
    return recorded_config(candidates[0]) if candidates else None


def _first_problem(config: Config, folders: Mapping[str, Path]) -> str:
    """Return what is wrong with the first stage that cannot be shown; empty if all can."""
    for stage in folders:
        problem = find_problem(config, stage)
        if problem:
            return f"stage {stage} {problem}"
    return ""


def _no_finished_run(name: str, judge: str) -> UserError:
    """Return the error for a run without a finished seed."""
    check_run(name)
    folder = paths.RUNS / name
    judges = {path.name for path in folder.glob("seed*/win_rate/*") if read_manifest(path)}
    if judge and judges and judge not in judges:
        return unknown("judge", judge, sorted(judges))
    return UserError(f"no finished run in {folder}: run `make eval PRESET=<preset> NAME={name}`")


def _stage_folders(config: Config) -> dict[str, Path]:
    """Return the folders of a run's stages.

    An optional stage belongs to the run only if its policy wrote summaries.
    """
    folders = {
        stage: stage_folder(config, stage) for stage in RUN_STAGES if is_part(stage, config.kind)
    }
    summaries = read_manifest(folders["summaries"]) or {}
    summarized = summaries.get("inputs", {})
    return {
        stage: folder
        for stage, folder in folders.items()
        if not STAGES[stage].optional or stage in summarized
    }


# -- reading a run ---------------------------------------------------------------------------------


def _read_run(config: Config, folders: Mapping[str, Path]) -> RunResult:
    """Read all that is known of a finished run."""
    stages = {
        stage: StageRecord(name=stage, folder=folder, manifest=read_manifest(folder) or {})
        for stage, folder in folders.items()
    }
    settings = _recorded_settings(config, stages)
    calibration_folder = stage_folder(config, CALIBRATION)
    calibration = calibration_of(calibration_folder)
    pairs = read_lines(calibration_folder / "pairs.jsonl") if calibration else []

    trained = next((stage for stage in POLICY_GRADIENT_STAGES if stage in stages), "")
    wins = stages["win_rate"].results
    names = sorted(wins["policies"], key=_policy_order)
    policies = {name: _read_policy(stages, name, names) for name in names}
    summaries = stages["summaries"].results
    return RunResult(
        name=config.name,
        preset=Path(config.preset).name,  # of a preset file, without its folders
        seed=config.seed,
        policies=policies,
        trained=trained,
        differences=_read_differences(wins, policies),
        judge=_read_judge(stages, calibration),
        training=_read_training(stages, settings, trained),
        critic=_read_critic(stages, settings),
        posts=wins["posts"],
        different_posts=wins["texts"],
        reference_tokens=summaries["reference_tokens"],
        reference_score=summaries["policies"][names[-1]]["reference_score"],
        has_real_texts=_has_real_texts(stages, settings),
        learned=_read_learned(stages, trained),
        settings=settings,
        stages=stages,
        calibration=calibration,
        calibration_pairs=pairs,
    )


def _recorded_settings(config: Config, stages: Mapping[str, StageRecord]) -> dict[str, Json]:
    """Return each section of settings as the last stage that it governs recorded it."""
    settings: dict[str, Json] = {}
    for name, stage in stages.items():
        saved = read_record(stage.folder / "config.json")
        sections = list(stage_row(name, config.kind).sections)
        if STAGES[name].policy_gradient or name == RELEASED:
            sections.append("memory")
        settings |= {section: saved[section] for section in sections if section in saved}
    return settings


def _has_real_texts(stages: Mapping[str, StageRecord], settings: Mapping[str, Json]) -> bool:
    """Whether the texts are other people's, or nobody says that they are not."""
    data = settings.get("data")
    return "base" not in stages or data is None or data["source"] != TOY


def _policy_order(name: str) -> tuple[int, str]:
    """The key that sorts policies by training stage, and others by name."""
    place = RUN_STAGES.index(name) if name in RUN_STAGES else len(RUN_STAGES)
    return place, name


def interval_from(row: Mapping[str, Any] | None) -> Interval | None:
    """Return the interval that a stage wrote as `estimate`, `low` and `high`, if there is one."""
    if row is None or row.get("estimate") is None:
        return None
    return Interval(estimate=row["estimate"], low=row["low"], high=row["high"])


def _interval_from_triple(triple: Sequence[float] | None) -> Interval | None:
    if not triple:
        return None
    estimate, low, high = triple
    return Interval(estimate=estimate, low=low, high=high)


def _read_policy(
    stages: Mapping[str, StageRecord], name: str, all_names: Sequence[str]
) -> PolicyResult:
    judged = stages["win_rate"].results["policies"][name]
    written = stages["summaries"].results["policies"][name]
    statistics = judged["statistics"]
    has_rate = judged["unjudged"] <= MOST_UNJUDGED
    rates = statistics if has_rate else {}
    win_rate = None
    if has_rate:
        win_rate = Interval(estimate=judged["win_rate"], low=judged["low"], high=judged["high"])
    worst_low, worst_high = judged["worst_case"]
    return PolicyResult(
        name=name,
        title=title_of(name, all_names),
        win_rate=win_rate,
        wins=judged["wins"],
        ties=judged["ties"],
        losses=judged["losses"],
        unjudged=judged["unjudged"],
        worst_case=(worst_low, worst_high),
        raw=interval_from(rates.get("raw")),
        order_balanced=interval_from(rates.get("order_balanced")),
        shown_first=interval_from(rates.get("shown_first")),
        shown_second=interval_from(rates.get("shown_second")),
        at_equal_length=_read_length_controlled(rates.get("length_controlled")),
        length_bins=tuple(_read_length_bin(row) for row in rates.get("length_bins", [])),
        median_length_ratio=statistics["median_length_ratio"],
        picks_first=interval_from(statistics["share_first"]),
        same_after_swap=interval_from(statistics["swap_consistency"]),
        reward_model_agrees=interval_from(judged["rm_agrees"]),
        rouge_l=written["rougeL"],
        tokens=written["tokens"],
        eos_rate=written["eos_rate"],
        score=written["score"],
        kl=kl_from_sft(stages, name),
        special_tokens=written.get("special_tokens") or 0.0,
        below_penalty=_below_penalty(stages, name),
        identical=judged["identical"],
    )


def _read_length_controlled(row: Json | None) -> LengthControlled | None:
    if row is None:
        return None
    return LengthControlled(
        rate=interval_from(row),
        is_extrapolated=bool(row.get("extrapolated", False)),
        why_none=row.get("why", ""),
        order_effect=_interval_from_triple(row.get("order_logits")),
        length_effect=_interval_from_triple(row.get("doubled_length_logits")),
        nearly_equal_posts=row.get("near_equal"),
        read_off_posts=row.get("equal_posts"),
    )


def _read_length_bin(row: Json) -> LengthBin:
    return LengthBin(
        ratio_from=row["from"],
        ratio_to=row["to"],
        judgements=row["judgements"],
        rate=Interval(estimate=row["rate"], low=row["low"], high=row["high"]),
    )


def kl_from_sft(stages: Mapping[str, StageRecord], policy: str) -> float | None:
    """Return a policy's KL from SFT while it was trained, nats per summary.

    For `ppo-12`, a copy kept after update 12, it is that of the next update, which sampled from it.
    None if it was not measured.
    """
    if policy == "sft" and policy in stages:
        return 0.0
    stage, _, update = policy.partition("-")
    if stage not in POLICY_GRADIENT_STAGES or stage not in stages:
        return None
    row = stages[stage].metrics[int(update)] if update else stages[stage].results
    return float(row["objective/kl"])


def _below_penalty(stages: Mapping[str, StageRecord], policy: str) -> float | None:
    if policy not in POLICY_GRADIENT_STAGES or policy not in stages:
        return None
    metrics = stages[policy].metrics
    return metrics[0].get("policy/below_penalty") if metrics else None


def _read_differences(wins: Json, policies: Mapping[str, PolicyResult]) -> tuple[Difference, ...]:
    """Read the difference of each pair of policies; first those from the first policy.

    A pair is read in the direction in which it was measured. One without a post that both were
    judged on was not measured, and has no interval.
    """
    measured = {names_of_pair(pair): row for pair, row in wins["differences"].items()}
    differences = []
    for first, second in combinations(policies, 2):
        pair = (first, second) if (first, second) in measured else (second, first)
        policy, other = pair
        row = measured.get(pair, {})
        is_shown = policies[policy].win_rate is not None and policies[other].win_rate is not None
        difference = Difference(
            policy=policy,
            other=other,
            interval=interval_from(row) if is_shown else None,
            p_value=row.get("p_value") if is_shown else None,
            identical=row.get("alike", 0.0),
        )
        differences.append(difference)
    return tuple(differences)


def _read_judge(stages: Mapping[str, StageRecord], calibration: Json | None) -> JudgeResult:
    judge = stages["win_rate"].results["judge"]
    asked = stages["judge"].results
    controls = stages["controls"].results if "controls" in stages else None
    checks = [check for check in (controls, calibration) if check]
    return JudgeResult(
        name=judge["name"],
        kind=judge["kind"],
        is_llm=judge["is_llm"],
        note=judge["note"],
        models=tuple(asked["models"]),
        judgements=asked["judgements"],
        failed_checks=tuple(failed_checks(controls, calibration)),
        undecided_checks=tuple(check["undecided"] for check in checks if check.get("undecided")),
    )


def failed_checks(controls: Json | None, calibration: Json | None) -> list[str]:
    """Return the reasons not to trust a judge that its controls and its calibration found."""
    reasons = []
    if controls:
        rows = controls["controls"].values()
        failed = [control["what"] for control in rows if control["passed"] is False]
        if failed:
            reasons.append(f"it does not reliably prefer the reference to {', to '.join(failed)}")
    if calibration:
        reasons += calibration["flags"]
    return reasons


def _read_training(
    stages: Mapping[str, StageRecord], settings: Mapping[str, Json], trained: str
) -> TrainingResult | None:
    if not trained:
        return None
    base = stages["base"].results
    reward = stages["rm"].results
    learned = stages[trained].results
    accuracy = None
    if reward.get("pairs"):
        accuracy = Interval(
            estimate=reward["accuracy"], low=reward["accuracy_low"], high=reward["accuracy_high"]
        )
    checkpoint = settings["base"]["checkpoint"]
    return TrainingResult(
        checkpoint=str(public_value("base.checkpoint", checkpoint)) or "(empty)",
        is_pretrained=checkpoint != RANDOM,
        parameters=base["parameters"],
        sft_rows=base["tokens"]["sft_train"]["rows"],
        comparisons=reward["training_pairs"],
        reward_taken_from=str(
            reward.get("function") or public_value("", reward.get("checkpoint", ""))
        ),
        reward_accuracy=accuracy,
        reward_pairs=reward.get("pairs", 0),
        episodes=learned["episodes"],
        kl=learned["objective/kl"],
        score=learned["objective/scores"],
    )


def _read_critic(
    stages: Mapping[str, StageRecord], settings: Mapping[str, Json]
) -> CriticResult | None:
    """Read how the critic did while the policy was trained; None if nothing was logged."""
    if "ppo" not in stages:
        return None
    warm_up = settings["ppo"]["critic_updates"]
    key = "val/explained_variance"
    rows = [row for row in stages["ppo"].metrics if row["step"] > warm_up and key in row]
    if not rows:
        return None
    explained = [row[key] for row in rows]
    realized_key = "val/explained_variance_realized"
    realized = [row[realized_key] for row in rows if realized_key in row]
    return CriticResult(
        updates=len(rows),
        below_zero=sum(value < 0 for value in explained),
        used=int(sum(row.get("policy/critic_used", 1) for row in rows)),
        first=explained[0],
        last=explained[-1],
        realized_mean=fmean(realized) if realized else None,
        realized_below_zero=fmean(value < 0 for value in realized) if realized else None,
    )


def _read_learned(stages: Mapping[str, StageRecord], trained: str) -> Json:
    """Read what of the held-out data is in the training data, and what is odd about the labels."""
    if not trained:
        return {}
    base = stages["base"].results
    rows = base.get("rows", {})
    labels = {split: rows[split] for split in COMPARISONS if split in rows}
    return {**base["learned"], "labels": labels}
