"""What the page about algorithms is computed from: an algorithm in one seed at one setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean

from reports.posts import judged_posts, texts_of
from reports.results import RunResult, title_of
from stages.config.judge import BEST_OF
from stages.config.stages import POLICY_GRADIENT_STAGES

BASE = "ppo"
BEST_OF_N = "best-of-n"
SFT = "sft"


@dataclass(frozen=True, kw_only=True)
class Point:
    """An algorithm in one seed at one setting."""

    seed: int
    algorithm: str
    setting: str
    """The coefficient of the KL penalty, or n; empty for an algorithm without one."""
    kl: float
    """From SFT, nats per summary; of best-of-n the bound."""
    win_rate: float
    gold: float | None
    """The mean score by the judge, if it gives scores."""
    proxy: float | None
    """The mean score by the run's own reward model."""
    tokens: float | None
    seconds: float | None
    """Of training; None without training."""
    post_scores: Mapping[str, float] = field(default_factory=dict, repr=False)
    """The score of each judged post."""
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Post -> the first post with the same text."""

    @property
    def root(self) -> float:
        """The square root of KL, over which an algorithm is a straight line."""
        return sqrt(max(0.0, self.kl))


def points_of(runs: Sequence[RunResult]) -> list[Point]:
    """Return the points of all policies that have a win rate and a KL."""
    by_place: dict[tuple[int, str, str], Point] = {}
    for run in runs:
        for policy in run.policies:
            point = _point(run, policy)
            if point is not None:  # SFT is the same in every run
                by_place.setdefault((point.seed, point.algorithm, point.setting), point)
    return list(by_place.values())


def _point(run: RunResult, policy: str) -> Point | None:
    result = run.policies[policy]
    is_trained = policy in POLICY_GRADIENT_STAGES
    kl = result.kl
    if not is_trained and policy != SFT:
        # Measured on the held-out summaries: DPO, and the bound of best-of-n.
        kl = run.stages["summaries"].results["policies"][policy].get("kl")
    if kl is None or result.win_rate is None:
        return None

    setting = ""
    if is_trained:
        setting = f"{run.settings[policy]['kl_coef']:g}"
    is_best_of = policy.startswith(BEST_OF)
    if is_best_of:
        setting = policy.removeprefix(BEST_OF)
    scores = run.stages["win_rate"].results.get("scores") or {}
    gold = scores.get("gold", {}).get(policy)
    posts = judged_posts(run, policy).dropna(subset=["score"])
    return Point(
        seed=run.seed,
        algorithm=BEST_OF_N if is_best_of else policy,
        setting=setting,
        kl=kl,
        win_rate=result.win_rate.estimate,
        gold=gold["estimate"] if gold else None,
        proxy=result.score,
        tokens=result.tokens,
        seconds=run.stages[policy].manifest["seconds"] if is_trained else None,
        post_scores=dict(zip(posts["post"], posts["score"], strict=True)),
        texts=texts_of(posts),
    )


def named(algorithm: str) -> str:
    """Return how the page calls an algorithm."""
    return algorithm if algorithm == BEST_OF_N else title_of(algorithm)


def algorithms_of(points: Sequence[Point]) -> list[str]:
    """Return all algorithms, in the order of their first point."""
    return list(dict.fromkeys(point.algorithm for point in points))


def lines_of(points: Sequence[Point]) -> list[str]:
    """Return the algorithms that have a line: several points in some seed."""
    found = []
    for algorithm in algorithms_of(points):
        seeds = [point.seed for point in points if point.algorithm == algorithm]
        if algorithm != SFT and len(set(seeds)) < len(seeds):
            found.append(algorithm)
    return found


def settings_of(points: Sequence[Point], algorithm: str) -> list[tuple[str, list[Point]]]:
    """Return the settings of an algorithm in the order of their mean KL, each with its seeds."""
    by_setting: dict[str, list[Point]] = {}
    for point in points:
        if point.algorithm == algorithm:
            by_setting.setdefault(point.setting, []).append(point)
    return sorted(by_setting.items(), key=lambda item: fmean(point.kl for point in item[1]))
