"""Everything that training logged, as curves in groups."""

from reports.parts import plots
from reports.parts.blocks import Block, Details, Figure
from reports.parts.collect import Record
from reports.parts.plots import Panel
from reports.parts.words import Row, named

SHARES = {
    *("policy/eos_rate", "policy/below_penalty", "policy/clipfrac_avg", "val/clipfrac_avg"),
    *("rewards/accuracies", "accuracy/train", "text/copied_title_words"),
    *("text/distinct_1", "text/distinct_2", "text/special_tokens"),
}
Panels = dict[str, tuple[str, ...]]
"""Title of a panel -> the keys of metrics.jsonl that are drawn in it."""
# Of a policy-gradient stage: end of a figure's name -> what it shows, and its panels. Only what was
# logged is drawn, so a stage without a critic has no figure of one.
GRADIENT_GROUPS: dict[str, tuple[str, Panels]] = {
    "": (
        "What {} optimised",
        {
            "Reward-model score": ("objective/scores",),
            "KL from SFT, nats per summary": ("objective/kl",),
            "Reward: score - KL penalty": ("objective/rlhf_reward",),
        },
    ),
    "-text": (
        "What {} wrote",
        {
            "Length, tokens": ("policy/response_length",),
            "Summaries that end by themselves": ("policy/eos_rate",),
            "Scored below a missing EOS": ("policy/below_penalty",),
            "Title words copied": ("text/copied_title_words",),
            "Different words and pairs of words": ("text/distinct_1", "text/distinct_2"),
            "Entropy, nats per summary": ("objective/entropy",),
            "Hold special tokens beside EOS": ("text/special_tokens",),
        },
    ),
    "-policy": (
        "How the policy moved",
        {
            "Policy loss": ("loss/policy_avg",),
            "Clipped policy ratios": ("policy/clipfrac_avg",),
            "KL within an update, approximately": ("policy/approxkl_avg",),
            "Ratio of new to old probability": ("val/ratio",),
            "Gradient norm of the policy": ("policy/grad_norm",),
        },
    ),
    "-critic": (
        "How the critic learned",
        {
            "Value loss": ("loss/value_avg",),
            "Explained variance": ("val/explained_variance",),
            "Critic (1) or mean (0) used": ("policy/critic_used",),
            "Variance of advantages": (
                "val/advantage_variance_critic",
                "val/advantage_variance_mean",
            ),
            "Advantages' correlation with scores": ("val/advantage_score_correlation",),
            "Mean advantage at EOS": ("policy/advantage_at_eos",),
            "Clipped values": ("val/clipfrac_avg",),
            "Gradient norm of the critic": ("critic/grad_norm",),
        },
    ),
    "-work": (
        "How the work went",
        {
            "Seconds per update, and of it sampling": ("seconds/update", "seconds/rollout"),
            "Learning rate": ("lr",),
            "Passes over a batch": ("policy/epochs",),
            "Sampler against model, nats": ("val/sampler_mismatch",),
        },
    ),
}
RM_PANELS: Panels = {
    "RM loss": ("loss/train",),
    "RM accuracy on training pairs": ("accuracy/train",),
}
DPO_PANELS: Panels = {
    "DPO loss": ("loss/train",),
    "DPO accuracy on training pairs": ("rewards/accuracies",),
    "DPO margin, reward units": ("rewards/margins",),
    "Implicit rewards": ("rewards/chosen", "rewards/rejected"),
    "Log probability, nats": ("logps/chosen", "logps/rejected"),
    "Learning rate": ("lr",),
}
# Logged, but each says what a curve that is drawn says: other estimates of the KL, the penalty as
# a multiple of it, ends as a count, entropy by the token.
SAME = {
    *("objective/kl_k3", "objective/non_score_reward"),
    *("val/num_eos_tokens", "policy/entropy_avg"),
}
SHOWN = ("", "-text")  # the others are folded
COUNTS = {"step", "episode"}


def blocks(record: Record) -> list[Block]:
    """The figures: supervised learning, each policy gradient in groups, DPO."""
    rows = record.rows("sft")
    validation = plots.curve(rows, "loss/validation", "validation", plots.INK, dots=True)
    train = plots.curve(rows, "loss/train", "train", plots.SFT)
    sft = plots.lines("SFT loss, nats per token", [train, validation])
    panels = [sft, *_panels(record.rows("rm"), RM_PANELS, plots.RM)]
    figures: list[Block] = [
        plots.figure("supervised", "Supervised fine-tuning and the reward model.", panels)
    ]
    for stage in record.gradient_stages:
        figures += _gradient(record, stage)
    if "dpo" in record.manifests:
        panels = _panels(record.rows("dpo"), DPO_PANELS, plots.PAPER)
        caption = "DPO, update by update, on training pairs before each step."
        figures += [plots.figure("dpo", caption, panels)] if panels else []
    return figures


def _gradient(record: Record, stage: str) -> list[Block]:
    """Everything that a policy-gradient stage logged; two figures first, the others folded."""
    rows, name = record.rows(stage), named(stage)
    queries = record.results(stage)["queries_from"].replace("_", " ")
    known = {
        key for _, panels in GRADIENT_GROUPS.values() for keys in panels.values() for key in keys
    }
    logged = dict.fromkeys(key for row in rows for key in row)  # in the order of their first rows
    rest: Panels = {key: (key,) for key in logged if key not in known | SAME | COUNTS}
    groups = GRADIENT_GROUPS | {"-more": ("Everything else that was logged", rest)}
    figures: dict[str, Figure] = {}
    for end, (what, titles) in groups.items():
        if panels := _panels(rows, titles, plots.color_of(stage)):
            caption = f"{what.format(name)}, update by update; queries from {queries}."
            figures[end] = plots.figure(f"{stage}{end}", caption, panels)
    first = [figure for end, figure in figures.items() if end in SHOWN]
    more = [figure for end, figure in figures.items() if end not in SHOWN]
    return [*first, *([Details(f"More of {name}", more)] if more else [])]


def _panels(rows: list[Row], titles: Panels, color: str) -> list[Panel]:
    """A panel for each title of which something was logged."""
    panels = []
    for title, keys in titles.items():
        lines = [
            plots.curve(rows, key, key.split("/")[-1].replace("_", " "), own)
            for key, own in zip(keys, (color, plots.RM), strict=False)
        ]
        lines = [line for line in lines if line.values]
        if lines:
            panels.append(plots.lines(title, lines, share=keys[0] in SHARES))
    return panels
