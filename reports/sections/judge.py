"""The judge's part of a page: who judged, every rate beside the raw one, controls."""

from typing import Any

from eval.control_texts import CONTROLS
from eval.judges.protocol import VERDICTS
from eval.win_rate import names_of_pair
from reports.parts.collect import RM_AGREES, Record
from reports.parts.page import Block, Details, Heading, Note, Table, Text
from reports.parts.verdict import (
    MISSING,
    at_equal_length,
    difference,
    estimate,
    interval,
    judge,
    named,
    number,
    p_value,
    percent,
    posts_of,
    turned_by_length,
    whole,
)
from stages.settings.judge import MOST_UNJUDGED

Row = dict[str, Any]
RATES = (
    ("raw", "raw [95%]"),
    ("order_balanced", "order-balanced"),
    ("length_controlled", "at equal length"),
    ("shown_first", "shown first"),
    ("shown_second", "shown second"),
)
RATES_CAPTION = (
    "Win rates; a tie counts half. Raw: share of all judgements, Wilson's interval over posts."
    " Order-balanced: mean of the rates when shown first and second, bootstrap over posts. At equal"
    " length: the same mean at a ratio of 1, by a logistic model of order and a bounded term of the"
    " log word ratio, standard errors clustered by post. It takes off what is gained by saying"
    " more, too, so it stands beside the raw rate and not in its place. The first two are one rate"
    " where every post has both verdicts; only the way to its interval differs."
)


def short_rows(numbers: Row) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the terminal's second table."""
    header = ["", "at equal length [95%]", "picks first", "same if swapped"]
    rows = []
    for policy in numbers["policies"]:
        statistics = _given(numbers, policy)
        rate = at_equal_length(statistics.get("length_controlled"))
        rows.append([named(policy, numbers["policies"]), rate, *_leanings(numbers, policy)])
    return header, rows


def _given(numbers: Row, policy: str) -> Row:
    """A policy's statistics; none if too much is unjudged for any rate."""
    given = numbers[f"{policy}/win_rate"] is not None
    return numbers[f"{policy}/statistics"] if given else {}


def _leanings(numbers: Row, policy: str) -> list[str]:
    statistics = numbers[f"{policy}/statistics"]
    shares = (statistics["share_first"], statistics["swap_consistency"])
    return [percent(share["estimate"]) if share else MISSING for share in shares]


def blocks(record: Record, numbers: Row) -> list[Block]:
    """The section of a run's page."""
    return [
        Heading("The judge"),
        Text(_who(numbers)),
        _counts(numbers),
        *rates(
            {
                named(policy, numbers["policies"]): _given(numbers, policy)
                for policy in numbers["policies"]
            },
            beside_the_result(numbers),
        ),
        _leanings_table(numbers),
        *([_differences(numbers)] if numbers["differences"] else []),
        Heading("Controls of the judge"),
        *controls(record.results("controls")),
    ]


def beside_the_result(numbers: Row) -> str:
    """How the result table's rates go with these."""
    if all(
        numbers[f"{policy}/statistics"]["posts"] == numbers["posts"]
        for policy in numbers["policies"]
    ):
        return "The result table shows the second interval."
    return (
        "Each row, here and below, counts all posts of its system; the result table counts only"
        " those that all systems have."
    )


def _who(numbers: Row) -> str:
    judged = (
        f"Judge: {judge(numbers)}, {whole(numbers['judgements'])} judgements, both orders of each"
        f" pair; a verdict that changes with the order is a tie. It prefers the summary shown first"
        f" in {percent(numbers['share_first'])} of the decided judgements."
    )
    if numbers["judge_models"]:
        judged += f" The server said it was {', '.join(numbers['judge_models'])}."
    if numbers["judge_note"]:
        judged += f" Its description: {numbers['judge_note']}."
    return judged


def _counts(numbers: Row) -> Table:
    rows = [
        [
            named(policy, numbers["policies"]),
            *(whole(numbers[f"{policy}/{key}"]) for key in ("wins", "ties", "losses")),
            percent(numbers[f"{policy}/unjudged"]),
            interval(numbers[f"{policy}/worst_low"], numbers[f"{policy}/worst_high"]),
        ]
        for policy in numbers["policies"]
    ]
    caption = (
        "Posts, against the reference. The worst case is the win rate if every post without a"
        " verdict had been lost, or won."
    )
    return Table(["", "wins", "ties", "losses", "unjudged", "worst case"], rows, caption)


def rates(
    statistics: dict[str, Row], result: str = "The result table shows the second interval."
) -> list[Block]:
    """Every rate side by side, what the model says, and the rates by length; `found` by name.

    `result`: how the page's result table goes with these rates.
    """
    rows = [
        [name, *(at_equal_length(statistics[name].get(key)) for key, _ in RATES)]
        for name in statistics
    ]
    made: list[Block] = [
        Table(["", *(title for _, title in RATES)], rows, f"{RATES_CAPTION} {result}")
    ]
    for name in statistics:
        note = _about_the_model(statistics[name].get("length_controlled"))
        made += (
            [Text(f"{name} at equal length: {note}{turned_by_length(statistics[name])}")]
            if note
            else []
        )
    bins = [
        [
            name,
            f"{part['from']:.2f} to {part['to']:.2f}",
            whole(part["judgements"]),
            estimate(part | {"estimate": part["rate"]}),
        ]
        for name in statistics
        for part in statistics[name].get("length_bins", [])
    ]
    if not bins:
        return made
    columns = ("", "words, summary over other", "judgements", "win rate")
    caption = "Win rate by length ratio, bins of about equal size where ratios differ enough."
    return [*made, Details("Win rate by length", [Table(columns, bins, caption)])]


def _about_the_model(model: Row | None) -> str:
    if model is None:
        return ""
    if model["estimate"] is None:
        extrapolated = " Any rate would be EXTRAPOLATED." if model.get("extrapolated") else ""
        return f"no rate, because {model['why']}.{extrapolated}"
    if "doubled_length_logits" not in model:
        return (
            "made by an earlier model, whose effect of length had no bound: remove the folder of"
            " stage win_rate and run make eval again."
        )
    order, length = (model[key] for key in ("order_logits", "doubled_length_logits"))
    text = "the two orders of each post were averaged first, because order decides nearly all."
    if "equal_posts" in model:
        text = (
            f"read off the {posts_of(model['equal_posts'])} whose two texts have equally many"
            " words. The model has no finite fit: length alone decides nearly every other verdict."
        )
    elif order is not None:
        text = (
            f"being shown first is worth {number(order[0])}"
            f" [{number(order[1])}, {number(order[2])}] logits, a doubled length"
            f" {number(length[0])} [{number(length[1])}, {number(length[2])}]."
        )
    if model["extrapolated"]:
        text += (
            f" EXTRAPOLATED: only {posts_of(model['near_equal'])} of nearly equal length, or a"
            " ratio of 1 outside the middle 90% of those seen. The model answers, not the data."
        )
    return text


def _leanings_table(numbers: Row) -> Table:
    rows = []
    for policy in numbers["policies"]:
        statistics = numbers[f"{policy}/statistics"]
        cells = [estimate(statistics[key]) for key in ("share_first", "swap_consistency")]
        agrees = {name: numbers[f"{policy}/rm_agrees{end}"] for end, name in RM_AGREES.items()}
        cells += [number(statistics["median_length_ratio"]), estimate(agrees)]
        rows.append([named(policy, numbers["policies"]), *cells])
    header = ("", "picks the first shown", "same after a swap", "median length ratio", "RM agrees")
    caption = (
        "What the judge leans to, and how much longer the summaries are. RM agrees: of the posts"
        " that the judge decided, those on which the reward model's higher score is on its choice"
        " (Huang et al. 2024, detail 17)."
    )
    return Table(header, rows, caption)


def _differences(numbers: Row) -> Table:
    rows = []
    places = {policy: place for place, policy in enumerate(numbers["policies"])}

    def order(pair: str) -> list[int]:
        """First those against the first policy; each group in the order of the result table."""
        return [places.get(name, len(places)) for name in reversed(names_of_pair(pair))]

    for pair in sorted(numbers["differences"], key=order):
        gap = numbers["differences"][pair]
        p = p_value(gap["p_value"] if gap["headline"] else None)
        names = " less ".join(named(name, places) for name in names_of_pair(pair))
        rows.append([names, difference(gap), p])
    caption = (
        "Differences of win rates on the same posts: bootstrap over posts, and the p-value of a"
        " paired randomisation test."
    )
    return Table(("", "difference [95%]", "p-value"), rows, caption)


def controls(results: Row) -> list[Block]:
    """The controls' table, and a note if one of them failed."""
    rows = [_control(name, control) for name, control in results["controls"].items()]
    caption = (
        f"{posts_of(results['posts'])}, both orders; a post that has no such text is left out. The"
        " judge must prefer the reference to each of these (the whole interval below 50%, and above"
        f" {percent(MOST_UNJUDGED)} unjudged, which gives no rate, even if all of those had gone"
        " against the reference); the reference against itself must be a tie, which our protocol"
        " says without asking the judge."
    )
    header = "against the reference|posts|preferred to it [95%]|unjudged|verdict|a pass shows"
    table = Table(header.split("|"), rows, caption)
    if not results["failed"]:
        return [table]
    failed = ", ".join(results["controls"][name]["what"] for name in results["failed"])
    return [Note(f"The judge FAILED a control: {failed}. Its rates are no evidence."), table]


def _control(name: str, control: Row) -> list[str]:
    unjudged = control.get("unjudged")  # an older run may not say
    what = [control["what"], whole(control["judgements"] / len(VERDICTS))]
    if control["passed"] is None:
        return [*what, MISSING, MISSING, f"not available: {control['why']}", CONTROLS[name].proves]
    cell = MISSING
    if control["preferred"] is not None and (unjudged or 0) <= MOST_UNJUDGED:
        cell = f"{percent(control['preferred'])} {interval(control['low'], control['high'])}"
    verdict = "passed" if control["passed"] else "FAILED"
    return [*what, cell, percent(unjudged), verdict, CONTROLS[name].proves]
