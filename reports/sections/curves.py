"""Everything that training logged, as curves in groups; other seeds of the run lie beneath."""

from collections.abc import Sequence
from typing import Any

from reports.parts import panels, plots
from reports.parts.collect import Record, rows_of_seeds
from reports.parts.page import Block, Details, Figure, Heading, Table, Text
from reports.parts.plots import Line
from reports.parts.verdict import STRENGTH, counted, interval, number, percent, whole

Row = dict[str, Any]
SHARES = {
    "policy/eos_rate",
    "policy/clipfrac_avg",
    "val/clipfrac_avg",
    "rewards/accuracies",
    "accuracy/train",
    "text/copied_title_words",
    "text/distinct_1",
    "text/distinct_2",
}
# Figure -> what it shows, and its panels: title -> the keys of metrics.jsonl drawn in it.
PPO_GROUPS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "ppo": (
        "What PPO optimised",
        {
            "Reward-model score": ("objective/scores",),
            "KL from SFT, nats per summary": ("objective/kl",),
            "RLHF reward: score less KL penalty": ("objective/rlhf_reward",),
            "KL estimates k1 and k3, nats": ("objective/kl_k1", "objective/kl_k3"),
            "KL penalty taken off the score": ("objective/non_score_reward",),
            "KL coefficient": ("objective/kl_coef",),
        },
    ),
    "ppo-text": (
        "What PPO wrote",
        {
            "Length, tokens": ("policy/response_length",),
            "Summaries that end by themselves": ("policy/eos_rate",),
            "Title words copied": ("text/copied_title_words",),
            "Different words and pairs of words": ("text/distinct_1", "text/distinct_2"),
            "Entropy, nats per summary": ("objective/entropy",),
            "Ends in a batch": ("val/num_eos_tokens",),
        },
    ),
    "ppo-policy": (
        "How the policy moved",
        {
            "Policy loss": ("loss/policy_avg",),
            "Clipped policy ratios": ("policy/clipfrac_avg",),
            "Approximate KL per update": ("policy/approxkl_avg",),
            "Ratio of new to old probability": ("val/ratio",),
            "Gradient norm of the policy": ("policy/grad_norm",),
            "Entropy per token, nats": ("policy/entropy_avg",),
        },
    ),
    "ppo-critic": (
        "How the critic learned",
        {
            "Value loss": ("loss/value_avg",),
            "Explained variance": ("val/explained_variance",),
            "Clipped values": ("val/clipfrac_avg",),
            "Gradient norm of the critic": ("critic/grad_norm",),
        },
    ),
    "ppo-work": (
        "How the work went",
        {
            "Seconds per update, and of it sampling": ("seconds/update", "seconds/rollout"),
            "Learning rate": ("lr",),
            "Passes over a batch": ("policy/epochs",),
            "Sampler against model, nats": ("val/sampler_mismatch",),
        },
    ),
}
DPO_GROUP = {
    "DPO loss": ("loss/train",),
    "DPO accuracy on training pairs": ("rewards/accuracies",),
    "DPO margin, reward units": ("rewards/margins",),
    "Implicit rewards": ("rewards/chosen", "rewards/rejected"),
    "Log probability, nats": ("logps/chosen", "logps/rejected"),
    "Learning rate": ("lr",),
}
SHOWN = ("ppo", "ppo-text")  # the others are folded
SECOND = plots.RM  # colour of a panel's second curve
COUNTS = {"step", "episode"}
NEIGHBOURS = "The line is the mean of neighbouring updates, the band their range."


def blocks(record: Record) -> list[Block]:
    """The section: supervised learning, PPO in groups, the frontier, DPO."""
    others = rows_of_seeds(record, "ppo")
    return [
        Heading("Learning curves"),
        *([Text(_beneath(sorted(others)))] if others else []),
        _supervised(record),
        *_ppo(record, others),
        *_frontier(record, others),
        *_dpo(record),
    ]


def _beneath(seeds: Sequence[int]) -> str:
    named = ", ".join(map(str, seeds))
    return f"Thin lines are the other finished seeds of this run with the same settings: {named}."


def _supervised(record: Record) -> Figure:
    sft, reward = record.rows("sft"), record.rows("rm")
    loss = [
        *_faint(rows_of_seeds(record, "sft"), "loss/train", plots.SFT),
        plots.curve(sft, "loss/train", "train", plots.SFT),
        plots.curve(sft, "loss/validation", "validation", plots.INK, dots=True),
    ]
    of_rm = {"RM loss": "loss/train", "RM accuracy on training pairs": "accuracy/train"}
    others = rows_of_seeds(record, "rm")
    drawn = [plots.lines("SFT loss, nats per token", loss)]
    for title, key in of_rm.items():
        lines = [*_faint(others, key, plots.RM), plots.curve(reward, key, "train", plots.RM)]
        drawn.append(plots.lines(title, lines, share=key in SHARES))
    return _figure(
        "supervised", f"Supervised fine-tuning and the reward model. {NEIGHBOURS}", drawn
    )


def _ppo(record: Record, others: dict[int, list[Row]]) -> list[Block]:
    rows = record.rows("ppo")
    known = {key for _, group in PPO_GROUPS.values() for keys in group.values() for key in keys}
    groups = dict(PPO_GROUPS)
    rest: dict[str, tuple[str, ...]] = {
        key: (key,) for key in _logged(rows) if key not in known | COUNTS
    }
    if rest:
        groups["ppo-more"] = ("Everything else that was logged", rest)
    figures: list[Figure] = []
    for name, (what, titles) in groups.items():
        drawn = _panels(rows, others, titles, plots.PPO)
        if drawn:
            caption = f"{what}, update by update{_queries(record)}. {NEIGHBOURS}"
            figures.append(_figure(name, caption, drawn))
    first = [figure for figure in figures if figure.name in SHOWN]
    more = [figure for figure in figures if figure.name not in SHOWN]
    return [*first, Details("More of PPO: policy, critic, work", more)] if more else [*first]


def _logged(rows: list[Row]) -> list[str]:
    """The keys that hold numbers, in the order in which they first come."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(isinstance(row.get(key), int | float) for row in rows)]


def _panels(
    rows: list[Row],
    others: dict[int, list[Row]],
    titles: dict[str, tuple[str, ...]],
    color: str,
) -> list[plots.Panel]:
    """A panel for each title of which something was logged."""
    panels = []
    for title, keys in titles.items():
        logged = [key for key in keys if any(row.get(key) is not None for row in rows)]
        lines: list[Line] = []
        for key, own in zip(logged, (color, SECOND), strict=False):
            label = key.partition("/")[2] or key
            lines += [*_faint(others, key, own), plots.curve(rows, key, label, own)]
        if lines:
            panels.append(plots.lines(title, lines, share=logged[0] in SHARES))
    return panels


def _faint(others: dict[int, list[Row]], key: str, color: str) -> list[Line]:
    curves = [plots.curve(rows, key, "", color) for rows in others.values()]
    return [
        Line("", color, curve.steps, curve.values, faint=True) for curve in curves if curve.steps
    ]


def _frontier(record: Record, others: dict[int, list[Row]]) -> list[Block]:
    """Score against KL, update by update: what each nat of distance bought."""
    runs = {record.seed: record.rows("ppo")} | others
    drawn = [_pair(rows, f"seed {seed}", faint=seed != record.seed) for seed, rows in runs.items()]
    if not drawn[0].steps:
        return []
    caption = (
        "Reward-model score against KL from SFT, from the first update to the last (means of"
        " neighbouring updates). Where the score goes on rising while the judge's rate falls, PPO"
        " over-optimises; this picture shows the score and not the judge's rate."
    )
    panel = panels.frontier(
        "Score against distance", drawn[::-1], "KL from SFT, nats per summary", "score"
    )
    return [_figure("frontier", caption, [panel], wide=1.4, high=1.2)]


def _pair(rows: list[Row], label: str, faint: bool) -> Line:
    keys = ("objective/kl", "objective/scores")
    kl, scores = (plots.curve([row for row in rows if _both(row, keys)], k, "", "") for k in keys)
    return Line("" if faint else label, plots.PPO, kl.values, scores.values, faint=faint)


def _both(row: Row, keys: tuple[str, str]) -> bool:
    return all(row.get(key) is not None for key in keys)


def _queries(record: Record) -> str:
    """Where PPO's queries came from, if not from the posts of SFT."""
    split = record.results("ppo").get("queries_from", "sft_train")
    return "" if split == "sft_train" else f"; queries from {split.replace('_', ' ')}"


def _dpo(record: Record) -> list[Block]:
    if "dpo" not in record.manifests:
        return []
    drawn = _panels(record.rows("dpo"), rows_of_seeds(record, "dpo"), DPO_GROUP, plots.PAPER)
    caption = "DPO, update by update, on training pairs before each step: all begin at an even bet."
    return [_figure("dpo", caption, drawn)] if drawn else []


def _figure(
    name: str, caption: str, drawn: Sequence[plots.Panel], wide: float = 1.0, high: float = 1.0
) -> Figure:
    parts = [plots.alone(panel, f"{name}{index}", wide, high) for index, panel in enumerate(drawn)]
    return Figure(name, caption, plots.together(drawn, wide, high), parts)


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
        ["reward model", _accuracy(reward), number(reward["loss"], 3)],
        ["DPO's implicit reward", _accuracy(dpo), number(dpo["loss"], 3)],
    ]
    tables = [_group_table(reward[key], dpo[key], what) for key, what in GROUPS if dpo.get(key)]
    return [Heading("DPO"), Text(text), Table(("", RANKED, "loss"), rows), *tables]


def _accuracy(results: dict[str, Any]) -> str:
    inside = interval(results["accuracy_low"], results["accuracy_high"])
    return f"{percent(results['accuracy'])} {inside}"


def _group_table(reward: dict[str, Any], dpo: dict[str, Any], what: str) -> Table:
    names = sorted(dpo, key=lambda name: (len(name), name))
    rows = []
    for name in names:
        shares = (counted(groups[name]) for groups in (reward, dpo))
        rows.append([name, *shares, whole(dpo[name]["pairs"])])
    return Table((what, "reward model [95%]", "DPO [95%]", "pairs"), rows)
