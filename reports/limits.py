"""When a limitation is worth a line: the thresholds and questions of the list of limitations.

The lines themselves are in `templates/macros.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.stats.table import leaning
from reports.paper import is_comparable
from reports.results import PolicyResult, RunResult, interval_from
from reports.scores import ROSE, GainByKind, direction
from stages.config.judge import MOST_UNJUDGED as MOST_UNJUDGED
from stages.config.judge_models import family_of_model
from stages.config.ppo import MANY_BELOW

SMALL_SHARE = 0.01  # of held-out rows or labels; nothing is said up to it
NEARLY_ALL = 0.9  # of a policy's summaries
MANY_CONTRADICTED = 0.25  # of the labels; people who label a pair twice may differ that often
FEWEST_LABELS = 10
FEW_EOS = 0.9  # of a policy's summaries
MANY_SPECIAL_TOKENS = 0.05  # of a policy's summaries
MANY_BELOW_PENALTY = MANY_BELOW
WIDE_SPREAD = 0.1  # of a win rate, from the lowest seed to the highest
EVEN = 0.5
IDENTICAL = {
    "reference": "the reference",
    "post": "the post",
    "summary": "one and the same text",
}


@dataclass(frozen=True)
class PoorCritic:
    """The updates of a run, over its seeds, in which the critic explained less than a constant."""

    name: str
    updates: int
    below_zero: int
    used: int


def is_paper_setup(run: RunResult) -> bool:
    """Whether a run is the paper's setup: a Pythia model on the real data."""
    return is_comparable(run.preset)


def judge_family(run: RunResult) -> str:
    """Return who made both the LLM judge and a policy's model; empty if nobody did."""
    if not run.judge.is_llm:
        return ""
    maker = family_of_model(run.judge.name)
    models = [*run.policies, run.settings.get("released", {}).get("policy", "")]
    if run.training is not None:
        models.append(run.training.checkpoint)
    is_shared = any(name and family_of_model(name) == maker for name in models)
    return maker if maker and is_shared else ""


def lead_is_length(policy: PolicyResult) -> bool:
    """Whether a policy beats the references, but not significantly at equal length."""
    at_length = policy.at_equal_length
    if policy.win_rate is None or at_length is None or at_length.rate is None:
        return False
    return policy.win_rate.is_above(EVEN) and at_length.rate.low <= EVEN


def leans_to_place(run: RunResult) -> PolicyResult | None:
    """Return the policy in whose comparisons the order decides most; None if it decides nothing."""
    shares = {
        name: vars(policy.picks_first) | {"posts": 0} if policy.picks_first else None
        for name, policy in run.policies.items()
    }
    found = leaning(shares)
    if not found:
        return None

    def distance(name: str) -> float:
        picks_first = run.policies[name].picks_first
        return abs(picks_first.estimate - EVEN) if picks_first else 0.0

    return run.policies[max(found, key=distance)]


def poor_critics(runs: Sequence[RunResult]) -> list[PoorCritic]:
    """Return the runs whose critic explained less than a constant in some updates."""
    by_name: dict[str, list[RunResult]] = {}
    for run in runs:
        if run.critic is not None:
            by_name.setdefault(run.name, []).append(run)
    rows = []
    for name, seeds in by_name.items():
        critics = [run.critic for run in seeds if run.critic is not None]
        row = PoorCritic(
            name=name,
            updates=sum(critic.updates for critic in critics),
            below_zero=sum(critic.below_zero for critic in critics),
            used=sum(critic.used for critic in critics),
        )
        if row.below_zero:
            rows.append(row)
    return rows


def slow_kl_coefs(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs, one seed of each, whose KL coefficient had little time to adapt.

    Its horizon is half of the run's episodes or more.
    """
    slow: dict[str, RunResult] = {}
    for run in runs:
        ppo = run.settings.get("ppo", {})
        if ppo.get("kl_target") and 2 * ppo["kl_horizon"] >= ppo["total_episodes"]:
            slow.setdefault(run.name, run)
    return list(slow.values())


def is_over_optimized(run: RunResult) -> bool:
    """Whether the reward model's score rose while the win rate fell below SFT's."""
    difference = run.difference(run.trained, "sft")
    if difference is None or difference.interval is None or not difference.interval.is_below(0):
        return False
    gain = run.stages["win_rate"].results["policies"][run.trained]["score_gain"]
    return direction(interval_from(gain)) == ROSE


def question_explains(gain: GainByKind) -> bool:
    """Whether a gold score rose only, or more, where a policy adds a question at the end."""
    if gain.gold is None or gain.other_gold is None or not gain.gold.is_above(0):
        return False
    return rose_only_there(gain) or gain.gold.low > gain.other_gold.high


def rose_only_there(gain: GainByKind) -> bool:
    """Whether the gold score did not reliably rise on the other posts."""
    return gain.other_gold is not None and direction(gain.other_gold) != ROSE


def cut_off_explains(gain: GainByKind) -> bool:
    """Whether a proxy rose, but not reliably on the posts where both summaries emit EOS."""
    if gain.proxy_gain is None or gain.other_proxy is None:
        return False
    return direction(gain.proxy_gain) == ROSE and direction(gain.other_proxy) != ROSE


def were_judged_differently(runs: Sequence[RunResult]) -> bool:
    """Whether runs differ in their judge, or in the number of judged posts."""
    return len({(run.judge.name, run.posts) for run in runs}) > 1
