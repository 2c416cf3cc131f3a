"""The README's block of numbers, from what `reports.sharing.publish` recorded.

The table stands between `<!-- results -->` and `<!-- /results -->`. Nobody writes it by hand.
"""

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from eval.rates.formulas import mean_of_seeds
from reports.parts.words import MISSING, number, percent, share

README_RUN = "tiny"
Published = dict[str, Any]
Row = dict[str, Any]


def run_entries(published: Published) -> list[dict[str, Any]]:
    """What was published of each seed of the run that the README shows, in the order of seeds."""
    entries = published["pages"].values()
    shown = [entry for entry in entries if entry["numbers"].get("name") == README_RUN]
    return sorted(shown, key=lambda entry: int(entry["numbers"]["seed"]))


def in_readme(text: str, published: Published) -> str:
    """The README with its block as it should be; a text without markers stays as it is."""
    entries = run_entries(published)
    if not entries:
        return text
    marked = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
    table = results_table([entry["numbers"] for entry in entries])
    return marked.sub(lambda marker: f"{marker[1]}{table}\n{marker[2]}", text)


def results_table(rows: Sequence[Row]) -> str:
    """SFT, PPO, and PPO at equal length: means over the seeds, with 95% t intervals over them."""
    controlled = [row["ppo/statistics"]["length_controlled"]["estimate"] for row in rows]
    cells = [
        ["", f"win rate, mean of {len(rows)} seeds", "lowest and highest seed", "tokens"],
        ["---"] * 4,
        _cells("SFT", [row["sft/win_rate"] for row in rows], [row["sft/tokens"] for row in rows]),
        _cells("PPO", [row["ppo/win_rate"] for row in rows], [row["ppo/tokens"] for row in rows]),
        _cells("PPO at equal length", controlled, []),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cells(name: str, rates: Sequence[float | None], tokens: Sequence[float]) -> list[str]:
    """A policy's row; dashes where a seed has no rate."""
    given = [rate for rate in rates if rate is not None]
    length = number(fmean(tokens), 1) if tokens else ""
    if len(given) < len(rates):
        return [name, MISSING, MISSING, length]
    mean, bounds = fmean(given), mean_of_seeds(given)
    rate = share(mean, *bounds) if bounds else percent(mean)
    return [name, rate, f"{percent(min(given))}, {percent(max(given))}", length]
