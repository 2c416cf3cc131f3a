"""What training changed: the proxy and the gold score of policies, each less its SFT's, by seed.

The proxy is the reward model that a run's own policies learned from. Where it rises and the gold
score falls, the policy learned the proxy's mistakes (Gao et al. 2022, 2210.10760).
"""

from collections.abc import Sequence
from typing import NamedTuple

from eval.win_rate import START, mean_gain, rows_by_policy
from reports.parts.collect import Record, policies_of
from reports.parts.page import Table
from reports.parts.paired import Entry
from reports.parts.sample_views import by_id
from reports.parts.style import asks
from reports.parts.words import MISSING, Row, direction, seeds_mean

SCORERS = {"proxy": "proxy", "gold": "gold score"}
MOST_SEEDS = 6  # that are listed one by one
CHOSEN = (
    "The policy chose where to ask, so this shows where the gain lies, not what would be left"
    " without the question."
)


def gains(entry: Entry, scorer: str) -> list[Row]:
    """The mean difference from SFT on the same posts with its interval over posts, of each run.

    In the scorer's unit. Empty if a run has none: its judge was no reward model, or SFT itself.
    """
    results = [run.results("win_rate").get("scores") or {} for run in entry.runs]
    each = [(scores.get("gains", {}).get(entry.policy) or {}).get(scorer) for scores in results]
    return [gain for gain in each if gain is not None] if None not in each else []


def tables(entries: Sequence[Entry]) -> list[Table]:
    """The tables of what training changed; none for entries without gains."""
    return [x for x in (table(entries), question_table(entries)) if x is not None]


def table(entries: Sequence[Entry]) -> Table | None:
    """A row for each entry that has gains; None without any."""
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
    return Table(columns, rows, caption, name="gained") if rows else None


def _cells(each: Sequence[Row]) -> list[str]:
    """The mean with its interval, and the difference of every seed."""
    if not each:
        return [MISSING] * 2
    middles = [gain["estimate"] for gain in each]
    (first, *others), form = each, "{:+.2f}".format
    mean = seeds_mean(middles, form)
    if not others:
        mean += f" [{form(first['low'])}, {form(first['high'])}]"
    if len(each) > MOST_SEEDS:
        counts = (f"{sum(_sign(gain) == sign for gain in each)}{sign}" for sign in (" (+)", " (-)"))
        return [mean, f"{min(middles):.2f} to {max(middles):.2f}: {', '.join(counts)}"]
    return [mean, ", ".join(f"{gain['estimate']:.2f}{_sign(gain)}" for gain in each)]


def _sign(gain: Row) -> str:
    """Whether a seed's interval over posts lies above or below 0."""
    return {"rose": " (+)", "fell": " (-)"}.get(direction(gain), "")


def sentence(entries: Sequence[Entry]) -> str:
    """In how many seeds each policy's scores rose or fell; empty where no policy has gains."""
    told = []
    for entry in entries:
        proxy, gold = (gains(entry, scorer) for scorer in SCORERS)
        if proxy and gold:
            told.append(f"{entry.label} {_seeds(proxy)} and {_seeds(gold)} of {len(gold)}")
    return f"Seeds above SFT by proxy and by gold score: {'; '.join(told)}." if told else ""


def _seeds(each: Sequence[Row]) -> str:
    rose, fell = (sum(_sign(gain) == sign for gain in each) for sign in (" (+)", " (-)"))
    return f"{rose} ({fell} below)" if fell else str(rose)


# -- closing questions -----------------------------------------------------------------------------


class Gains(NamedTuple):
    """Mean differences from SFT on some posts."""

    posts: int
    proxy: Row | None
    gold: Row | None


def question_table(entries: Sequence[Entry]) -> Table | None:
    """The gold score's gain by seed, where a summary adds a closing question and elsewhere."""
    rows = []
    for entry in entries:
        parts = [by_question(run).get(entry.policy) for run in entry.runs]
        seeds = [both for both in parts if both is not None]
        if seeds and len(seeds) == len(parts):
            added, rest = zip(*seeds, strict=True)
            cells = (cell for each in (added, rest) for cell in _where(each))
            rows.append([entry.label, *cells])
    header = ["", "adds a question to", "gold score - SFT", "other posts", "gold score - SFT"]
    caption = (
        "By seed, as above: posts on which the summary ends with a question and SFT's does not,"
        f" then all others. {CHOSEN}"
    )
    return Table(header, rows, caption, name="closing-questions") if rows else None


def _where(each: Sequence[Gains]) -> list[str]:
    gold = [gain.gold for gain in each]
    told = (MISSING if gain is None else f"{gain['estimate']:.2f}{_sign(gain)}" for gain in gold)
    return [", ".join(str(gain.posts) for gain in each), ", ".join(told)]


def by_question(record: Record) -> dict[str, tuple[Gains, Gains]]:
    """The gains of each policy that added closing questions: where it did, and on other posts.

    A closing question is a habit that a reward model may pay for, whatever the post says.
    """
    texts = {name: by_id(record.rows("summaries", f"{name}.jsonl")) for name in policies_of(record)}
    scored = {
        name: by_id(rows)
        for name, rows in rows_by_policy(record.rows("judge", "gold_scores.jsonl")).items()
    }
    gains = {}
    for name in [name for name in texts if name in scored and START in scored]:
        asking = {post: asks(row["summary"]) for post, row in texts[name].items()}
        added = [post for post in asking if asking[post] > asks(texts[START][post]["summary"])]
        rest = [post for post in asking if post not in {*added}]
        if added:
            gains[name] = (
                Gains(len(added), *(_gain(x[name], x[START], added) for x in (texts, scored))),
                Gains(len(rest), *(_gain(x[name], x[START], rest) for x in (texts, scored))),
            )
    return gains


def _gain(ours: dict[str, Row], start: dict[str, Row], posts: Sequence[str]) -> Row | None:
    """The mean difference of two policies' scores on some posts; None on fewer than two."""
    pairs = [(ours[post]["score"], start[post]["score"]) for post in posts if post in start]
    return mean_gain([score - before for score, before in pairs if None not in (score, before)])
