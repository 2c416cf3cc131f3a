"""What training changed: the proxy and the gold score of policies, each less its SFT's, by seed.

The proxy is the reward model that a run's own policies learned from. Where it rises and the gold
score falls, the policy learned the proxy's mistakes (Gao et al. 2022, 2210.10760).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from matplotlib.axes import Axes

from eval.scores import START, mean_gain
from eval.win_rate import posts_by_text, rows_by_policy
from reports.parts import plots
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, judged_row, policies_of
from reports.parts.page import Figure, Table
from reports.parts.paired import Entry
from reports.parts.sample_views import by_id
from reports.parts.words import Row, direction, seeds_mean

SCORERS = {"proxy": "proxy", "gold": "gold score"}
MOST_SEEDS = 6  # that are listed one by one


def gains(entry: Entry, scorer: str) -> list[Row]:
    """The mean difference from SFT on the same posts with its interval over posts, of each run.

    In the scorer's unit. Empty if a run has none: its judge was no reward model, or SFT itself.
    """
    results = [run.results("win_rate").get("scores") or {} for run in entry.runs]
    each = [(scores.get("gains", {}).get(entry.policy) or {}).get(scorer) for scores in results]
    return [gain for gain in each if gain is not None] if None not in each else []


def table(entries: Sequence[Entry]) -> list[Table]:
    """A row for each entry that has gains; no table without any."""
    rows = [
        [entry.label, *(cell for scorer in SCORERS for cell in _cells(gains(entry, scorer)))]
        for entry in entries
        if any(gains(entry, scorer) for scorer in SCORERS)
    ]
    header = [f"{title} - SFT [95%]" for title in SCORERS.values()]
    caption = (
        "Mean differences on the same posts, each scorer in its own unit; intervals over seeds, of"
        " one seed over posts. By seed: with a +, or a -, where the interval over posts leaves out"
        f" 0; of more than {MOST_SEEDS} seeds the lowest, the highest, and how many are + or -."
    )
    columns = ["", header[0], "by seed", header[1], "by seed"]
    return [Table(columns, rows, caption, name="gained")] if rows else []


def over_kl(entries: Sequence[Entry], colors: Sequence[str]) -> list[Figure]:
    """The gold score - SFT's over the square root of KL from it, a point for each seed.

    None where no entry has both. Source: Gao et al. 2022, 2210.10760, figure 1.
    """
    points = {}
    for entry, color in zip(entries, colors, strict=True):
        kls = [judged_row(run)[f"{entry.policy}/kl"] for run in entry.runs]
        golds = [gain["estimate"] for gain in gains(entry, "gold")]
        if golds and None not in kls:
            points[entry.label] = color, [max(0.0, kl) ** 0.5 for kl in kls], golds

    def draw(axes: Axes) -> None:
        for label, (color, roots, golds) in points.items():
            axes.plot(roots, golds, "o", ms=3.5, color=color, label=label)
        axes.axhline(0.0, color=plots.INK, lw=0.6, ls=":")
        axes.set_xlabel("square root of KL, nats")
        plots.legend(axes)

    about = " ".join(
        f"{label}: " + ", ".join(f"{y:.2f} at {x:.2f}" for x, y in zip(*both, strict=True)) + "."
        for label, (_, *both) in points.items()
    )
    caption = "A point is a seed. Below 0 the policy is worse than SFT by the gold score."
    panel = plots.Panel("Gold score - SFT", draw, about)
    return [plots.figure("gold-over-kl", caption, [panel], wide=1.4)] if points else []


def _cells(each: Sequence[Row]) -> list[object]:
    """The mean with its interval, and the difference of every seed."""
    if not each:
        return [MISSING] * 2
    middles = [gain["estimate"] for gain in each]
    first, *others = each
    mean = seeds_mean(middles, lambda value: Number(value, signed=True))
    if not others:
        mean = replace(mean, low=first["low"], high=first["high"])
    if len(each) > MOST_SEEDS:
        counts = (f"{sum(_sign(gain) == sign for gain in each)}{sign}" for sign in (" (+)", " (-)"))
        return [mean, f"{min(middles):.2f} to {max(middles):.2f}: {', '.join(counts)}"]
    return [mean, ", ".join(f"{gain['estimate']:.2f}{_sign(gain)}" for gain in each)]


def _sign(gain: Row) -> str:
    """Whether a seed's interval over posts lies above or below 0."""
    return {"rose": " (+)", "fell": " (-)"}.get(direction(gain), "")


def sentence(entries: Sequence[Entry]) -> str:
    """In how many seeds each policy's scores rose or fell; empty where no policy has gains."""
    counts = []
    for entry in entries:
        proxy, gold = (gains(entry, scorer) for scorer in SCORERS)
        if proxy and gold:
            counts.append(f"{entry.label} {_seeds(proxy)} and {_seeds(gold)} of {len(gold)}")
    return f"Seeds above SFT by proxy and by gold score: {'; '.join(counts)}." if counts else ""


def _seeds(each: Sequence[Row]) -> str:
    rose, fell = (sum(_sign(gain) == sign for gain in each) for sign in (" (+)", " (-)"))
    return f"{rose} ({fell} below)" if fell else str(rose)


# -- where the gain lies ---------------------------------------------------------------------------


class Gains(NamedTuple):
    """Mean differences from SFT on some posts."""

    posts: int
    proxy: Row | None
    gold: Row | None


def asks(summary: str) -> bool:
    """Whether a summary ends with a question."""
    return summary.rstrip(" \n\t\"'”’)").endswith("?")


# What tells posts apart -> whether a post is of the first kind, by the rows of a policy's summary
# and of SFT's. A closing question is a habit that a reward model may pay for, whatever the post
# says, and a summary that is cut off can score far below all others.
KINDS: dict[str, Callable[[Row, Row], bool]] = {
    "question": lambda own, sft: asks(own["summary"]) > asks(sft["summary"]),
    "ending": lambda own, sft: False in (own["has_eos"], sft["has_eos"]),  # None: not known
}


def by_kind(record: Record, key: str) -> dict[str, tuple[Gains, Gains]]:
    """The gains of each policy on the two kinds of posts; without posts of the first it is left
    out.
    """
    written = {name: record.rows("summaries", f"{name}.jsonl") for name in policies_of(record)}
    texts, post_of = {name: by_id(rows) for name, rows in written.items()}, posts_by_text(written)
    scored = {
        name: by_id(rows)
        for name, rows in rows_by_policy(record.rows("judge", "gold_scores.jsonl")).items()
    }
    is_first, both, gains = KINDS[key], (texts, scored), {}
    for name in [name for name in texts if name != START and name in scored and START in scored]:
        first = [post for post, row in texts[name].items() if is_first(row, texts[START][post])]
        rest = [post for post in texts[name] if post not in {*first}]
        if first:
            gains[name] = (
                Gains(len(first), *(_gain(x[name], x[START], first, post_of) for x in both)),
                Gains(len(rest), *(_gain(x[name], x[START], rest, post_of) for x in both)),
            )
    return gains


def _gain(
    own: dict[str, Row], start: dict[str, Row], posts: Sequence[str], post_of: Mapping[str, str]
) -> Row | None:
    """The mean difference of two policies' scores on some posts; None on fewer than two."""
    pairs = {post: (own[post]["score"], start[post]["score"]) for post in posts if post in start}
    known = {post: pair for post, pair in pairs.items() if None not in pair}
    return mean_gain({post: score - before for post, (score, before) in known.items()}, post_of)
