"""Proxy and gold score side by side, where a gold reward model judged: over-optimisation's sign."""

from typing import Any

from eval.rates.scores import REFERENCE
from reports.parts import panels, plots
from reports.parts.collect import Record, policies_of
from reports.parts.page import Block, Figure, Heading, Note, Table, Text
from reports.parts.verdict import MISSING, estimate, number, percent, whole


def blocks(record: Record) -> list[Block]:
    """The section; none if another kind of judge judged."""
    results = record.results("win_rate").get("scores")
    if results is None:
        return []
    return [
        Heading("Proxy and gold score"),
        Text(_what(record)),
        _table(results),
        *(
            Note(sentence)
            for sentence in (_reading(name, results["gains"][name]) for name in results["gains"])
        ),
    ]


def _what(record: Record) -> str:
    gold = record.results("judge")["gold"]
    return (
        "The proxy is the run's own reward model, which PPO was trained to raise. The gold reward"
        f" model is {gold['label']}, which no policy here was trained on:"
        f" {record.results('judge')['judge']['note']}. Each has its own unit, so compare signs and"
        " directions and not sizes. Proxy up and gold down is over-optimisation."
    )


def _table(results: dict[str, Any]) -> Table:
    rows = []
    for name in results["gold"]:
        gains = results["gains"].get(name, {})
        cells = [score(results[scorer].get(name)) for scorer in ("proxy", "gold")]
        label = name if name == REFERENCE else name.upper()
        rows.append([label, *cells, *(score(gains.get(scorer)) for scorer in ("proxy", "gold"))])
    posts = max(mean["posts"] for mean in results["gold"].values() if mean)
    caption = (
        f"Mean scores of {whole(posts)} held-out posts in reward units, with normal 95% intervals"
        " over posts. Less SFT: the mean difference on the same posts."
    )
    header = ("", "proxy [95%]", "gold [95%]", "proxy less SFT", "gold less SFT")
    return Table(header, rows, caption)


def score(mean: dict[str, Any] | None) -> str:
    """A mean score with its interval, in reward units; a dash for None."""
    if mean is None:
        return MISSING
    estimate, low, high = (number(mean[key]) for key in ("estimate", "low", "high"))
    return f"{estimate} [{low}, {high}]"


def _reading(name: str, gains: dict[str, Any]) -> str:
    """What the two differences from SFT say together."""
    proxy, gold = gains["proxy"], gains["gold"]
    if proxy is None or gold is None:
        return f"{name.upper()}: one of the two scores is missing, so nothing can be compared."
    moves = {scorer: _direction(gain) for scorer, gain in gains.items()}
    text = f"{name.upper()} against SFT: the proxy {moves['proxy']}, the gold score {moves['gold']}"
    if moves == {"proxy": "rose", "gold": "fell"}:
        return f"{text}. This is OVER-OPTIMISATION: the policy learned its reward model's mistakes."
    return f"{text}."


def _direction(gain: dict[str, Any]) -> str:
    if gain["low"] > 0:
        return "rose"
    return "fell" if gain["high"] < 0 else "did not surely move"


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
    known = {name: results for name, results in scorers.items() if results.get("length")}
    if not known:
        return []
    rows = [
        [
            name,
            estimate(_accuracy(results)),
            estimate(results["length"]["near_equal"]),
            estimate(results["length"]["at_equal_length"]),
        ]
        for name, results in known.items()
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


def _accuracy(results: dict[str, Any]) -> dict[str, float]:
    bounds = {key: results[f"accuracy_{key}"] for key in ("low", "high")}
    return {"estimate": results["accuracy"], **bounds}


def _notes(known: dict[str, dict[str, Any]]) -> list[Block]:
    """A warning for each scorer that is not surely better than length."""
    notes: list[Block] = []
    for scorer, results in known.items():
        name = f"{scorer[0].upper()}{scorer[1:]}"
        above, model = results["length"]["above_longer"], results["length"]["at_equal_length"]
        if model["estimate"] is None:
            notes.append(Note(f"{name}: no accuracy at equal length: {model['why']}."))
        if above["low"] <= 0:
            bounds = ", ".join(number(100 * above[key], 1) for key in ("low", "high"))
            notes.append(
                Note(
                    f"{name} is NOT surely better than taking the longer summary:"
                    f" {100 * above['estimate']:+.1f} points [{bounds}] on the same pairs."
                )
            )
    return notes


Row = dict[str, Any]
SPREAD_CAPTION = (
    "How the held-out summaries are spread: outlines are shares of the posts, dashed lines are"
    " means. What lies beyond the ends counts in the first or the last bar."
)


def spread_blocks(record: Record) -> list[Block]:
    """The section; none where the summaries have neither scores nor tokens."""
    rows = {policy: record.rows("summaries", f"{policy}.jsonl") for policy in policies_of(record)}
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
