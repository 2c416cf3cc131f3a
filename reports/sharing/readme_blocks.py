"""The README's two blocks of numbers, from what `reports.sharing.publish` recorded.

The result table stands between `<!-- results -->` and `<!-- /results -->`, what a terminal shows
between `<!-- headline -->` and `<!-- /headline -->`. Nobody writes these by hand.
"""

import re
from collections.abc import Sequence
from typing import Any

from reports.parts.words import MISSING, at_equal_length, number

README_RUN = "tiny"
COLUMNS = (
    "seed|RM accuracy|SFT win rate|PPO win rate|DPO win rate|PPO less SFT, points"
    "|PPO at equal length|KL, nats|tokens SFT / PPO"
).split("|")
Published = dict[str, Any]


def run_entries(published: Published) -> list[dict[str, Any]]:
    """What was published of each seed of the run that the README shows, in the order of seeds."""
    entries = published["pages"].values()
    shown = [entry for entry in entries if entry["numbers"].get("name") == README_RUN]
    return sorted(shown, key=lambda entry: int(entry["numbers"]["seed"]))


def in_readme(text: str, published: Published) -> str:
    """The README with both blocks as they should be; a text without markers stays as it is."""
    entries = run_entries(published)
    if not entries:
        return text
    headline = f"```\n{entries[0]['headline'].rstrip()}\n```"
    table = results_table([entry["numbers"] for entry in entries])
    return _put(_put(text, "results", table), "headline", headline)


def _put(text: str, name: str, block: str) -> str:
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marked.sub(lambda marker: f"{marker[1]}{block}\n{marker[2]}", text)


def results_table(rows: list[dict[str, Any]]) -> str:
    """One line a seed, in percent with 95% intervals."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    tokens = " / ".join(number(row[f"{policy}/tokens"], 1) for policy in ("sft", "ppo"))
    length = row["ppo/statistics"]["length_controlled"]
    given = None if row["ppo/win_rate"] is None else length["estimate"]
    rates = [
        _share([row.get(f"{policy}/{key}") for key in ("win_rate", "low", "high")])
        for policy in ("sft", "ppo", "dpo")
    ]
    return [
        str(row["seed"]),
        _share([row["accuracy"], row["accuracy_low"], row["accuracy_high"]]),
        *rates,
        _share([row["difference"], row["difference_low"], row["difference_high"]], "+"),
        at_equal_length(None if given is None else length).replace("%", ""),
        number(row["kl"], 1),
        tokens,
    ]


def _share(bounds: Sequence[float | None], sign: str = "") -> str:
    """A share and its interval in percent; a dash if it may not be given."""
    value, low, high = bounds
    if value is None or low is None or high is None:
        return MISSING
    return f"{100 * value:{sign}.1f} [{100 * low:.1f}, {100 * high:.1f}]"
