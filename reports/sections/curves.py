"""Everything that training logged, as curves in groups."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from reports.parts import plots
from reports.parts.collect import Record
from reports.parts.page import Block, Details, Figure, Heading, Table, Text
from reports.parts.plots import Curve, Panel
from reports.parts.words import STRENGTH, Row, accuracy, named, number, whole

SHARES = {
    "policy/eos_rate",
    "policy/below_penalty",
    "policy/clipfrac_avg",
    "val/clipfrac_avg",
    "rewards/accuracies",
    "accuracy/train",
    "text/copied_title_words",
    "text/distinct_1",
    "text/distinct_2",
    "text/special_tokens",
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
            "KL coefficient": ("objective/kl_coef",),
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
    *("objective/kl_k1", "objective/kl_k3", "objective/non_score_reward"),
    *("val/num_eos_tokens", "policy/entropy_avg"),
}
WORDS = {
    "text/distinct_1": "words",
    "text/distinct_2": "pairs of words",
    "seconds/update": "whole update",
    "seconds/rollout": "of it sampling",
    "rewards/chosen": "chosen",
    "rewards/rejected": "rejected",
    "logps/chosen": "chosen",
    "logps/rejected": "rejected",
}
SHOWN = ("", "-text")  # the others are folded
SECOND = plots.RM  # colour of a panel's second curve
COUNTS = {"step", "episode"}
FRONTIER = ("objective/kl", "objective/scores")
FRONTIER_POINTS = 40


def blocks(record: Record) -> list[Block]:
    """The figures: supervised learning, each policy gradient in groups, its frontier, DPO."""
    return [
        _supervised(record),
        *(
            block
            for stage in record.gradient_stages
            for block in (*_gradient(record, stage), *_frontier(record, stage))
        ),
        *_dpo(record),
    ]


def _supervised(record: Record) -> Figure:
    rows = record.rows("sft")
    validation = plots.curve(rows, "loss/validation", "validation", plots.INK, dots=True)
    train = plots.curve(rows, "loss/train", "train", plots.SFT)
    panels, _ = _panels(record.rows("rm"), RM_PANELS, plots.RM)
    panels = [plots.lines("SFT loss, nats per token", [train, validation]), *panels]
    return plots.figure("supervised", "Supervised fine-tuning and the reward model.", panels)


def _gradient(record: Record, stage: str) -> list[Block]:
    """Everything that a policy-gradient stage logged; two figures first, the others folded."""
    rows, name = record.rows(stage), named(stage)
    known = {
        key for _, panels in GRADIENT_GROUPS.values() for keys in panels.values() for key in keys
    }
    rest: Panels = {
        in_words(key): (key,) for key in _logged(rows) if key not in known | SAME | COUNTS
    }
    groups = GRADIENT_GROUPS | {"-more": ("Everything else that was logged", rest)}
    figures: dict[str, Figure] = {}
    constant: list[str] = []
    for end, (what, titles) in groups.items():
        panels, same = _panels(rows, titles, plots.color_of(stage))
        constant += same
        if panels:
            caption = f"{what.format(name)}, update by update{_queries(record, stage)}."
            figures[end] = plots.figure(f"{stage}{end}", caption, panels)
    first = [figure for end, figure in figures.items() if end in SHOWN]
    more = {end: figure for end, figure in figures.items() if end not in SHOWN}
    critic = "critic, " if "-critic" in more else ""
    title = f"More of {name}: policy, {critic}work"
    folded = [Details(title, list(more.values()))] if more else []
    return [*first, *_constants(name, constant), *folded]


def _constants(name: str, lines: Sequence[str]) -> list[Block]:
    """A sentence on what never changed, in the place of plots of one value."""
    return [Text(f"The same at every update of {name}: {'; '.join(lines)}.")] if lines else []


def in_words(key: str) -> str:
    """The key of a metric as a title."""
    text = key.replace("/", ": ").replace("_", " ")
    return f"{text[:1].upper()}{text[1:]}"


def _logged(rows: list[Row]) -> list[str]:
    """The keys that hold numbers, in the order in which they first come."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(isinstance(row.get(key), int | float) for row in rows)]


def _panels(rows: list[Row], titles: Panels, color: str) -> tuple[list[Panel], list[str]]:
    """A panel for each title of which something was logged, and what never changed, in words."""
    panels, constant = [], []
    for title, keys in titles.items():
        logged = [key for key in keys if any(row.get(key) is not None for row in rows)]
        lines = [
            plots.curve(rows, key, WORDS.get(key, title), own)
            for key, own in zip(logged, (color, SECOND), strict=False)
        ]
        values = [value for line in lines for value in line.values]
        if lines and len(set(values)) <= 1:  # a plot would say no more
            plain = title if title[:2].isupper() else f"{title[0].lower()}{title[1:]}"
            constant += [f"{plain} {values[0]:g}" for _ in values[:1]]
        elif lines:
            panels.append(plots.lines(title, lines, share=logged[0] in SHARES))
    return panels, constant


def _queries(record: Record, stage: str) -> str:
    """Where a stage's queries came from, if not from the posts of SFT."""
    split = record.results(stage)["queries_from"]
    return "" if split == "sft_train" else f"; queries from {split.replace('_', ' ')}"


def _dpo(record: Record) -> list[Block]:
    if "dpo" not in record.manifests:
        return []
    panels, constant = _panels(record.rows("dpo"), DPO_PANELS, plots.PAPER)
    caption = "DPO, update by update, on training pairs before each step; both are equal at first."
    drawn = [plots.figure("dpo", caption, panels)] if panels else []
    return [*drawn, *_constants("DPO", constant)]


# -- score against distance ------------------------------------------------------------------------


def _frontier(record: Record, stage: str) -> list[Block]:
    """Score against KL, update by update: what each nat of distance gained."""
    run = path(record.rows(stage), f"seed {record.seed}", plots.color_of(stage))
    if not run.steps:
        return []
    caption = (
        "Reward-model score against KL from SFT, from the first update to the last (means of"
        " neighbouring updates). Where the score goes on rising while the judge's rate falls,"
        f" {named(stage)} over-optimises; this picture shows the score and not the judge's rate."
    )
    panel = frontier("Score against distance", [run], "KL from SFT, nats per summary")
    name = "frontier" if stage == record.policy else f"{stage}-frontier"
    return [plots.figure(name, caption, [panel], wide=1.4, high=1.2)]


def path(rows: list[Row], label: str, color: str) -> Curve:
    """Where a seed went: KL across and score up."""
    both = [row for row in rows if all(row.get(key) is not None for key in FRONTIER)]
    kl, scores = (plots.curve(both, key, "", "") for key in FRONTIER)
    return Curve(label, color, kl.values, scores.values)


def frontier(title: str, runs: Sequence[Curve], x: str, ends: bool = True) -> Panel:
    """Where training went: the score against another number, update by update.

    A run is a curve whose `steps` are that number; neighbouring updates are averaged. `ends`:
    whether the first and the last are named.
    """

    def draw(axes: Axes) -> None:
        for run in runs:
            across, up = plots.smoothed(run, FRONTIER_POINTS)
            axes.plot(across, up, color=run.color, label=run.label or None)
            if not up or not ends:
                continue
            axes.scatter(across, up, s=9, color=run.color, zorder=3)
            for place, word in ((0, "start"), (-1, "end")):
                axes.annotate(
                    word, (across[place], up[place]), (4, -10), textcoords="offset points"
                )
        axes.set_xlabel(x)
        axes.set_ylabel("score")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4))
        plots.legend(axes)

    return Panel(title, draw, " ".join(_in_words(run) for run in runs if run.label))


def _in_words(run: Curve) -> str:
    across, up = plots.smoothed(run, FRONTIER_POINTS)
    if not up:
        return f"{run.label}: no points."
    return (
        f"{run.label}: from {up[0]:.4g} at {across[0]:.4g} to {up[-1]:.4g} at {across[-1]:.4g};"
        f" the highest, {max(up):.4g}, at {across[up.index(max(up))]:.4g}."
    )


# -- DPO beside the reward model -------------------------------------------------------------------

GROUPS = (("by_split", "split"), ("by_strength", STRENGTH), ("by_batch", "batch"))
RANKED = "pairs ranked as the labellers did [95%]"


def dpo_blocks(record: Record) -> list[Block]:
    """The section; none if the run was made without DPO."""
    if "dpo" not in record.manifests:
        return []
    dpo, reward = record.results("dpo"), record.results("rm")
    beta = record.settings["dpo"]["beta"]
    text = (
        f"A policy learned by DPO is a reward model too: beta ({number(beta)}) times how much"
        " likelier it makes a summary than the SFT model does, in nats. On the same"
        f" {whole(dpo['pairs'])} held-out comparisons as the reward model's, after learning from"
        " the same training pairs:"
    )
    rows = [
        ["reward model", accuracy(reward), number(reward["loss"], 3)],
        ["DPO's implicit reward", accuracy(dpo), number(dpo["loss"], 3)],
    ]
    tables = [_group_table(reward[key], dpo[key], what) for key, what in GROUPS if dpo[key]]
    return [Heading("DPO"), Text(text), Table(("", RANKED, "loss"), rows), *tables]


def _group_table(reward: Row, dpo: Row, what: str) -> Table:
    rows = [
        [name, accuracy(reward[name]), accuracy(dpo[name]), whole(dpo[name]["pairs"])]
        for name in sorted(dpo, key=lambda name: (len(name), name))
    ]
    return Table((what, "reward model [95%]", "DPO [95%]", "pairs"), rows)
