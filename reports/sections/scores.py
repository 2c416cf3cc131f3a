"""Proxy and gold score side by side, where a gold reward model judged: over-optimisation's sign."""

from typing import Any

from eval.rates.scores import REFERENCE
from reports.collect import Record
from reports.page import Block, Heading, Note, Table, Text
from reports.verdict import MISSING, number, whole


def blocks(record: Record) -> list[Block]:
    """The section; none if another kind of judge judged."""
    found = record.results("win_rate").get("scores")
    if found is None:
        return []
    return [
        Heading("Proxy and gold score"),
        Text(_what(record)),
        _table(found),
        *(Note(one) for one in (_reading(name, found["gains"][name]) for name in found["gains"])),
    ]


def _what(record: Record) -> str:
    gold = record.results("judge")["gold"]
    return (
        "The proxy is the run's own reward model, which PPO was trained to raise. The gold reward"
        f" model is {gold['label']}, which no policy here was trained on:"
        f" {record.results('judge')['judge']['note']}. Each has its own unit, so compare signs and"
        " directions and not sizes. Proxy up and gold down is over-optimisation."
    )


def _table(found: dict[str, Any]) -> Table:
    rows = []
    for name in found["gold"]:
        gains = found["gains"].get(name, {})
        cells = [score(found[one].get(name)) for one in ("proxy", "gold")]
        label = name if name == REFERENCE else name.upper()
        rows.append([label, *cells, *(score(gains.get(one)) for one in ("proxy", "gold"))])
    posts = max(one["posts"] for one in found["gold"].values() if one)
    caption = (
        f"Mean scores of {whole(posts)} held-out posts in reward units, with normal 95% intervals"
        " over posts. Less SFT: the mean difference on the same posts."
    )
    header = ("", "proxy [95%]", "gold [95%]", "proxy less SFT", "gold less SFT")
    return Table(header, rows, caption)


def score(found: dict[str, Any] | None) -> str:
    """A mean score with its interval, in reward units; a dash for None."""
    if found is None:
        return MISSING
    estimate, low, high = (number(found[key]) for key in ("estimate", "low", "high"))
    return f"{estimate} [{low}, {high}]"


def _reading(name: str, gains: dict[str, Any]) -> str:
    """What the two differences from SFT say together."""
    proxy, gold = gains["proxy"], gains["gold"]
    if proxy is None or gold is None:
        return f"{name.upper()}: one of the two scores is missing, so nothing can be compared."
    moves = {scorer: _direction(one) for scorer, one in gains.items()}
    said = f"{name.upper()} against SFT: the proxy {moves['proxy']}, the gold score {moves['gold']}"
    if moves == {"proxy": "rose", "gold": "fell"}:
        return f"{said}. This is OVER-OPTIMISATION: the policy learned its reward model's mistakes."
    return f"{said}."


def _direction(found: dict[str, Any]) -> str:
    if found["low"] > 0:
        return "rose"
    return "fell" if found["high"] < 0 else "did not surely move"
