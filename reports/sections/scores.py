"""Proxy and gold score side by side, where a gold reward model judged: over-optimisation's sign."""

from typing import Any

from eval.rates.scores import REFERENCE
from reports.parts import panels, plots
from reports.parts.collect import Record, policies_of
from reports.parts.page import Block, Figure, Heading, Note, Table, Text
from reports.parts.verdict import MISSING, estimate, number, percent, whole


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


LONGER = ("longer", "longer_near_equal")
CAPTION = (
    "Pairs ranked as the labellers did, with 95% intervals. The longer one: how often the summary"
    " with more tokens is the preferred one, an equal length counting half. Two texts"
    " alike have equal scores, which counts as wrong of all pairs, as in the paper's code, and"
    " half elsewhere. Nearly equal: pairs"
    " whose lengths differ by at most 10% of the longer. At equal length: what a logistic model"
    " with bounded terms of the length ratio gives at a ratio of 1, standard errors clustered by"
    " post."
)


def length_blocks(scorers: dict[str, dict[str, Any]]) -> list[Block]:
    """A table of scorers (name -> results of their stage), and what it means; none without data."""
    known = {name: one for name, one in scorers.items() if one.get("length")}
    if not known:
        return []
    rows = [
        [
            name,
            estimate(_accuracy(found)),
            estimate(found["length"]["near_equal"]),
            estimate(found["length"]["at_equal_length"]),
        ]
        for name, found in known.items()
    ]
    length = next(iter(known.values()))["length"]
    rows.append(["the longer one", *(estimate(length[key]) for key in LONGER), percent(0.5)])
    near = length["near_equal"]
    header = (
        "",
        "all pairs [95%]",
        f"nearly equal length (n = {whole(near['pairs'] if near else 0)})",
        "at equal length",
    )
    return [Table(header, rows, CAPTION), *_notes(known)]


def _accuracy(found: dict[str, Any]) -> dict[str, float]:
    bounds = {key: found[f"accuracy_{key}"] for key in ("low", "high")}
    return {"estimate": found["accuracy"], **bounds}


def _notes(known: dict[str, dict[str, Any]]) -> list[Block]:
    """A warning for each scorer that is not surely better than length."""
    found: list[Block] = []
    for scorer, one in known.items():
        name = f"{scorer[0].upper()}{scorer[1:]}"
        above, model = one["length"]["above_longer"], one["length"]["at_equal_length"]
        if model["estimate"] is None:
            found.append(Note(f"{name}: no accuracy at equal length: {model['why']}."))
        if above["low"] <= 0:
            bounds = ", ".join(number(100 * above[key], 1) for key in ("low", "high"))
            found.append(
                Note(
                    f"{name} is NOT surely better than taking the longer summary:"
                    f" {100 * above['estimate']:+.1f} points [{bounds}] on the same pairs."
                )
            )
    return found


Row = dict[str, Any]
SPREAD_CAPTION = (
    "How the held-out summaries are spread: outlines are shares of the posts, dashed lines are"
    " means. What lies beyond the ends counts in the first or the last bar."
)


def spread_blocks(record: Record) -> list[Block]:
    """The section; none where the summaries have neither scores nor tokens."""
    rows = {one: record.rows("summaries", f"{one}.jsonl") for one in policies_of(record)}
    first = next(iter(rows.values()), [])
    drawn = [
        _panel("Reward-model score", "score", rows, _numbers(first, "reference_score")),
        _panel("Length, tokens", "tokens", rows, _numbers(first, "reference_tokens")),
        _panel("KL from SFT, nats per summary", "kl", rows, []),
    ]
    shown = [panel for panel in drawn if panel is not None]
    if not shown:
        return []
    parts = [plots.alone(panel, f"spread{index}") for index, panel in enumerate(shown)]
    figure = Figure("spread", SPREAD_CAPTION, plots.together(shown), parts)
    return [Heading("How the summaries are spread"), figure]


def _panel(
    title: str, key: str, rows: dict[str, list[Row]], reference: list[float]
) -> plots.Panel | None:
    """A panel of the policies that have a number; None if none has."""
    groups = [(REFERENCE, plots.INK, reference)] if reference else []
    for policy, written in rows.items():
        values = _numbers(written, key)
        if values:
            color = plots.POLICY_COLORS.get(policy, plots.OTHER)
            groups.append((policy.upper(), color, values))
    of_policies = groups[1:] if reference else groups
    return panels.spread(title, groups, title) if of_policies else None


def _numbers(rows: list[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]
