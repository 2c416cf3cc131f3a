"""The curves of training: which metrics are drawn, how they are called, and in which unit."""

from collections.abc import Sequence
from dataclasses import dataclass

from reports.plots import INK, REWARD_MODEL_COLOR, Figure, Line, Panel, color_of, figure, lines
from reports.results import RunResult, StageRecord, title_of


@dataclass(frozen=True)
class Metric:
    """A panel: its title, its unit, and the metrics that it draws."""

    title: str
    unit: str
    keys: tuple[str, ...]
    is_share: bool = False


@dataclass(frozen=True, kw_only=True)
class CurveGroup:
    """A figure of a policy-gradient stage. What was not logged is left out."""

    name: str
    caption: str
    metrics: tuple[Metric, ...]


SCORE_AND_KL = (
    Metric("Reward-model score", "mean score", ("objective/scores",)),
    Metric("KL from SFT", "nats per summary", ("objective/kl",)),
)

GRADIENT_GROUPS = (
    CurveGroup(
        name="reward",
        caption="what was optimized",
        metrics=(
            *SCORE_AND_KL,
            Metric("Reward: score minus KL penalty", "mean reward", ("objective/rlhf_reward",)),
        ),
    ),
    CurveGroup(
        name="text",
        caption="what the policy wrote",
        metrics=(
            Metric("Length of the summaries", "tokens", ("policy/response_length",)),
            Metric("Summaries that emit EOS", "share", ("policy/eos_rate",), is_share=True),
            Metric("Scored below a missing EOS", "share", ("policy/below_penalty",), is_share=True),
            Metric("Title words copied", "share", ("text/copied_title_words",), is_share=True),
            Metric(
                "Distinct words and word pairs",
                "share",
                ("text/distinct_1", "text/distinct_2"),
                is_share=True,
            ),
            Metric("Entropy", "nats per summary", ("objective/entropy",)),
            Metric(
                "Special tokens other than EOS", "share", ("text/special_tokens",), is_share=True
            ),
        ),
    ),
    CurveGroup(
        name="policy",
        caption="how the policy moved",
        metrics=(
            Metric("Policy loss", "loss", ("loss/policy_avg",)),
            Metric("Clipped policy ratios", "share", ("policy/clipfrac_avg",), is_share=True),
            Metric("Approximate KL within an update", "nats", ("policy/approxkl_avg",)),
            Metric("Ratio of new to old probability", "ratio", ("val/ratio",)),
            Metric("Gradient norm of the policy", "norm", ("policy/grad_norm",)),
        ),
    ),
    CurveGroup(
        name="critic",
        caption="how the critic learned",
        metrics=(
            Metric("Value loss", "loss", ("loss/value_avg",)),
            Metric(
                "Explained variance of the returns",
                "share",
                ("val/explained_variance", "val/explained_variance_realized"),
            ),
            Metric("Critic (1) or mean (0) used", "", ("policy/critic_used",)),
            Metric(
                "Variance of the advantages",
                "variance",
                ("val/advantage_variance_critic", "val/advantage_variance_mean"),
            ),
            Metric("Advantages and scores", "correlation", ("val/advantage_score_correlation",)),
            Metric("Mean advantage at EOS", "advantage", ("policy/advantage_at_eos",)),
            Metric("Clipped values", "share", ("val/clipfrac_avg",), is_share=True),
            Metric("Gradient norm of the critic", "norm", ("critic/grad_norm",)),
        ),
    ),
    CurveGroup(
        name="work",
        caption="how the computation went",
        metrics=(
            Metric("Time per update", "seconds", ("seconds/update", "seconds/rollout")),
            Metric("Learning rate", "", ("lr",)),
            Metric("Passes over a batch", "epochs", ("policy/epochs",)),
            Metric("Sampler compared with model", "nats", ("val/sampler_mismatch",)),
        ),
    ),
)

SFT_METRICS = (Metric("SFT loss", "nats per token", ("loss/train",)),)
REWARD_MODEL_METRICS = (
    Metric("Reward-model loss", "loss", ("loss/train",)),
    Metric("Accuracy on training pairs", "share", ("accuracy/train",), is_share=True),
)
DPO_METRICS = (
    Metric("DPO loss", "loss", ("loss/train",)),
    Metric("DPO accuracy on training pairs", "share", ("rewards/accuracies",), is_share=True),
    Metric("DPO margin", "implicit reward", ("rewards/margins",)),
    Metric("Implicit rewards", "reward", ("rewards/chosen", "rewards/rejected")),
    Metric("Log-probabilities", "nats", ("logps/chosen", "logps/rejected")),
    Metric("Learning rate of DPO", "", ("lr",)),
)

# Logged, but a curve that is drawn says the same: other estimates of the KL, the penalty as a
# multiple of it, EOS as a count, entropy per token.
NOT_DRAWN = {
    "step",
    "episode",
    "objective/kl_k3",
    "objective/non_score_reward",
    "val/num_eos_tokens",
    "policy/entropy_avg",
}


def score_and_kl(run: RunResult) -> Figure | None:
    """Draw the two curves that a page opens with, for every policy-gradient stage of the run."""
    panels = []
    for metric in SCORE_AND_KL:
        found = []
        for stage in run.gradient_stages:
            curve = run.stages[stage].curve(metric.keys[0])
            if curve is not None:
                line = Line(label=title_of(stage), color=color_of(stage), curve=curve)
                found.append(line)
        if found:
            panels.append(lines(metric.title, metric.unit, found))
    return figure("score-and-kl", panels)


def supervised_figure(run: RunResult) -> Figure | None:
    """Draw the losses of SFT and of the reward model."""
    panels = []
    if "sft" in run.stages:
        stage = run.stages["sft"]
        found = _lines_of(stage, ("loss/train",), color_of("sft"))
        validation = stage.curve("loss/validation")
        if validation is not None:
            line = Line(label="validation", color=INK, curve=validation, has_dots=True)
            found.append(line)
        if found:
            panels.append(lines("SFT loss", "nats per token", found))
    if "rm" in run.stages:
        panels += _panels(run.stages["rm"], REWARD_MODEL_METRICS, REWARD_MODEL_COLOR)
    return figure("supervised", panels)


def gradient_figures(run: RunResult, stage: str) -> list[tuple[str, Figure]]:
    """Draw everything that a policy-gradient stage logged, in groups: captions and figures."""
    record = run.stages[stage]
    figures = []
    for group in (*GRADIENT_GROUPS, _other_metrics(record)):
        drawn = figure(f"{stage}-{group.name}", _panels(record, group.metrics, color_of(stage)))
        if drawn is not None:
            figures.append((group.caption, drawn))
    return figures


def dpo_figure(run: RunResult) -> Figure | None:
    """Draw what DPO logged; None without DPO."""
    if "dpo" not in run.stages:
        return None
    return figure("dpo", _panels(run.stages["dpo"], DPO_METRICS, color_of("dpo")))


def _other_metrics(record: StageRecord) -> CurveGroup:
    """Return a group of all metrics that no other group draws, such as those a user logs."""
    drawn = {key for group in GRADIENT_GROUPS for metric in group.metrics for key in metric.keys}
    logged = dict.fromkeys(key for row in record.metrics for key in row)
    rest = [key for key in logged if key not in drawn | NOT_DRAWN]
    return CurveGroup(
        name="other",
        caption="other metrics",
        metrics=tuple(Metric(key, "", (key,)) for key in rest),
    )


def _panels(record: StageRecord, metrics: Sequence[Metric], color: str) -> list[Panel]:
    """Return a panel for each metric that was logged."""
    panels = []
    for metric in metrics:
        found = _lines_of(record, metric.keys, color)
        if found:
            panels.append(lines(metric.title, metric.unit, found, is_share=metric.is_share))
    return panels


def _lines_of(record: StageRecord, keys: Sequence[str], color: str) -> list[Line]:
    """Return a line for each key that was logged; the second has another color."""
    found = []
    for key, line_color in zip(keys, (color, INK), strict=False):
        curve = record.curve(key)
        if curve is not None:
            label = key.split("/")[-1].replace("_", " ")
            found.append(Line(label=label, color=line_color, curve=curve))
    return found
