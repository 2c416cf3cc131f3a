"""What training changed: the proxy and the gold score of policies, each less its SFT's, by seed.

The proxy is the reward model that a run's own policies learned from. Where it rises and the gold
score falls, the policy learned the proxy's mistakes (Gao et al. 2022, 2210.10760).
"""

from collections.abc import Sequence
from statistics import fmean

from eval.rates.formulas import mean_of_seeds
from reports.parts.page import Table
from reports.parts.paired import Entry
from reports.parts.words import MISSING, Row

SCORERS = {"proxy": "proxy", "gold": "gold score"}


def gains(entry: Entry, scorer: str) -> list[Row]:
    """The mean difference from SFT on the same posts with its interval over posts, of each run.

    In the scorer's unit. Empty if a run has none: its judge was no reward model, or SFT itself.
    """
    results = [run.results("win_rate").get("scores") or {} for run in entry.runs]
    each = [(scores.get("gains", {}).get(entry.policy) or {}).get(scorer) for scores in results]
    known = [gain for gain in each if gain is not None]
    return known if len(known) == len(each) else []


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
        " 0."
    )
    columns = ["", header[0], "by seed", header[1], "by seed"]
    return Table(columns, rows, caption, name="gained") if rows else None


def _cells(each: Sequence[Row]) -> list[str]:
    """The mean with its interval, and the difference of every seed."""
    if not each:
        return [MISSING] * 2
    middles = [gain["estimate"] for gain in each]
    bounds = mean_of_seeds(middles) or (each[0]["low"], each[0]["high"])
    mean = f"{fmean(middles):+.2f} [{bounds[0]:+.2f}, {bounds[1]:+.2f}]"
    return [mean, ", ".join(f"{gain['estimate']:.2f}{_sign(gain)}" for gain in each)]


def _sign(gain: Row) -> str:
    """Whether a seed's interval over posts lies above or below 0."""
    return " (+)" if gain["low"] > 0 else " (-)" if gain["high"] < 0 else ""


def sentence(entries: Sequence[Entry]) -> str:
    """In how many seeds each policy's scores rose or fell; empty where no policy has gains."""
    told = []
    for entry in entries:
        parts = [_seeds(scorer, gains(entry, scorer)) for scorer in SCORERS]
        if all(parts):
            told.append(f"{entry.label} {' and '.join(parts)}")
    return f"Against SFT: {'; '.join(told)}." if told else ""


def _seeds(scorer: str, each: Sequence[Row]) -> str:
    if not each:
        return ""
    rose, fell = (sum(_sign(gain) == sign for gain in each) for sign in (" (+)", " (-)"))
    fallen = f", lowers it in {fell}" if fell else ""
    return f"raises the {SCORERS[scorer]} in {rose} of {len(each)} seeds{fallen}"
