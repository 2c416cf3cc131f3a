"""The judge's part of a page: who judged, every rate beside the raw one, controls, calibration."""

from typing import Any

from eval.calibration import HUMAN_CEILING, correct
from eval.rates.table import MOST_UNJUDGED
from eval.win_rate import names_of_pair
from reports.collect import Record
from reports.page import Block, Details, Heading, Note, Table, Text
from reports.verdict import (
    MISSING,
    STRENGTH,
    difference,
    estimate,
    interval,
    judge,
    number,
    p_value,
    percent,
    whole,
)

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
    " length: what a logistic model of order and log word ratio gives at a ratio of 1 without a"
    " first place, standard errors clustered by post. It takes off what is gained by saying more,"
    " too, so it stands beside the raw rate and not in its place."
)


def short_rows(numbers: Row) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the terminal's second table."""
    header = ["", "at equal length [95%]", "picks first", "same if swapped"]
    rows = []
    for policy in numbers["policies"]:
        found = _given(numbers, policy)
        rate = estimate(found.get("length_controlled"))
        rows.append([policy.upper(), rate, *_leanings(numbers, policy)])
    return header, rows


def _given(numbers: Row, policy: str) -> Row:
    """A policy's statistics; none if too much is unjudged for any rate."""
    given = numbers[f"{policy}/win_rate"] is not None
    return numbers[f"{policy}/statistics"] if given else {}


def _leanings(numbers: Row, policy: str) -> list[str]:
    found = numbers[f"{policy}/statistics"]
    shares = (found["share_first"], found["swap_consistency"])
    return [percent(one["estimate"]) if one else MISSING for one in shares]


def blocks(record: Record, numbers: Row) -> list[Block]:
    """The section of a run's page."""
    return [
        Heading("The judge"),
        Text(_who(numbers)),
        _counts(numbers),
        *rates({one.upper(): _given(numbers, one) for one in numbers["policies"]}),
        _leanings_table(numbers),
        *([_differences(numbers)] if numbers["differences"] else []),
        Heading("Controls of the judge"),
        *controls(record.results("controls")),
        Heading("Calibration of the judge"),
        *_calibration(record),
    ]


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
            policy.upper(),
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


def rates(found: dict[str, Row]) -> list[Block]:
    """Every rate side by side, what the model says, and the rates by length; `found` by name."""
    rows = [[one, *(estimate(found[one].get(key)) for key, _ in RATES)] for one in found]
    said: list[Block] = [Table(["", *(title for _, title in RATES)], rows, RATES_CAPTION)]
    for one in found:
        note = _about_the_model(found[one].get("length_controlled"))
        said += [Text(f"{one} at equal length: {note}")] if note else []
    bins = [
        [
            one,
            f"{part['from']:.2f} to {part['to']:.2f}",
            whole(part["judgements"]),
            estimate(part | {"estimate": part["rate"]}),
        ]
        for one in found
        for part in found[one].get("length_bins", [])
    ]
    header = ("", "words, summary over other", "judgements", "win rate")
    caption = "Win rate by length ratio, bins of about equal size where ratios differ enough."
    return [*said, Details("Win rate by length", [Table(header, bins, caption)])]


def _about_the_model(found: Row | None) -> str:
    if found is None:
        return ""
    if found["estimate"] is None:
        return f"no rate, because {found['why']}."
    order, length = (found[key] for key in ("order_logits", "log_length_logits"))
    said = (
        f"being shown first is worth {number(order[0])} [{number(order[1])}, {number(order[2])}]"
        f" logits, a doubled length {number(0.6931 * length[0])}."
    )
    if found["extrapolated"]:
        said += (
            " A ratio of 1 lies outside the middle 90% of the ratios seen: this is the model's"
            " extrapolation, not an observation."
        )
    return said


def _leanings_table(numbers: Row) -> Table:
    rows = []
    for policy in numbers["policies"]:
        found = numbers[f"{policy}/statistics"]
        cells = [estimate(found[key]) for key in ("share_first", "swap_consistency")]
        rows.append([policy.upper(), *cells, number(found["median_length_ratio"])])
    header = ("", "picks the first shown", "same verdict after a swap", "median length ratio")
    return Table(header, rows, "What the judge leans to, and how much longer the summaries are.")


def _differences(numbers: Row) -> Table:
    rows = []
    for pair, found in numbers["differences"].items():
        p = p_value(found["p_value"] if found["headline"] else None)
        names = " less ".join(names_of_pair(pair)).upper()
        rows.append([names, difference(found), p])
    caption = (
        "Differences of win rates on the same posts: bootstrap over posts, and the p-value of a"
        " paired randomisation test."
    )
    return Table(("", "difference [95%]", "p-value"), rows, caption)


def controls(found: Row) -> list[Block]:
    """The controls' table, and a note if one of them failed."""
    rows = [_control(one) for one in found["controls"].values()]
    caption = (
        f"{whole(found['posts'])} posts, both orders. The judge must prefer the reference to each"
        " of these (the whole interval below 50%); the reference against itself must be a tie,"
        " which our protocol says without asking the judge."
    )
    table = Table(("against the reference", "preferred to it [95%]", "verdict"), rows, caption)
    if not found["failed"]:
        return [table]
    failed = ", ".join(found["controls"][name]["what"] for name in found["failed"])
    return [Note(f"The judge FAILED a control: {failed}. Its rates are no evidence."), table]


def _control(one: Row) -> list[str]:
    if one["passed"] is None:
        return [one["what"], MISSING, f"not available: {one['why']}"]
    cell = MISSING
    if one["preferred"] is not None:
        cell = f"{percent(one['preferred'])} {interval(one['low'], one['high'])}"
    return [one["what"], cell, "passed" if one["passed"] else "FAILED"]


def _calibration(record: Record) -> list[Block]:
    if record.calibration is None:
        return [
            Text(
                "This judge was not compared with labelled comparisons: `make judge-calibration`"
                " (with the same PRESET, SET and so on) does that."
            )
        ]
    return calibration(record.calibration, corrected_rates(record))


def corrected_rates(record: Record) -> dict[str, dict[str, Any] | None]:
    """For each policy the corrected win rate.

    None if it cannot be computed, or if too many posts have no verdict for any rate.
    """
    pairs = record.calibration_pairs
    scores: dict[str, list[float]] = {}
    for row in record.rows("win_rate", "post_scores.jsonl"):
        if row["score"] is not None:
            scores.setdefault(row["policy"], []).append(row["score"])
    judged = record.results("win_rate")["policies"]
    return {
        policy: _plain(correct(values, pairs))
        if judged[policy]["unjudged"] <= MOST_UNJUDGED
        else None
        for policy, values in scores.items()
    }


def _plain(found: Any) -> dict[str, Any] | None:
    return None if found is None else vars(found)


def calibration(found: Row, corrected: dict[str, dict[str, Any] | None]) -> list[Block]:
    """What the comparison with labels found, and the corrected win rates."""
    low, high = HUMAN_CEILING
    statistics = found["statistics"]
    flagged = [Note(f"This judge is FLAGGED: {flag}.") for flag in found["flags"]]
    cells = [
        ["agreement with the labels, a tie counting half", estimate(found["agreement"])],
        ["agreement where it decides", estimate(found["agreement_decided"])],
        ["Cohen's kappa where it decides", number(found["kappa"])],
        ["picks the first shown", estimate(statistics["share_first"])],
        ["same verdict after a swap", estimate(statistics["swap_consistency"])],
        ["unjudged", percent(statistics["unjudged"])],
    ]
    caption = (
        f"{whole(found['pairs'])} of {whole(found['of_pairs'])} labelled pairs"
        f" ({found['source']}), {whole(found['ties'])} ties. People agree with each other on"
        f" {100 * low:.0f} to {100 * high:.0f}% of real pairs (Stiennon et al. 2020): with"
        " labels by people, that is the ceiling for any judge."
    )
    if found["source"] == "built-in world":
        caption += " The built-in world's labels come from its own noisy labeller, not from people."
    groups = [
        [name, estimate(one), whole(one["pairs"])] for name, one in found["by_strength"].items()
    ]
    by_strength = Table((STRENGTH, "agreement [95%]", "pairs"), groups)
    return [
        *flagged,
        Table(("", "of this judge"), cells, caption),
        *([by_strength] if groups else []),
        *_corrected(found, corrected),
    ]


def _corrected(found: Row, corrected: dict[str, dict[str, Any] | None]) -> list[Block]:
    if not corrected:
        return []
    rows = [[policy.upper(), estimate(one)] for policy, one in corrected.items()]
    which = "pairs with a reference" if found["with_reference"] else "pairs, in the file's order,"
    caption = (
        "Win rate corrected for the judge's errors (Rogan and Gladen):"
        f" on {whole(found['error_pairs'])} labelled {which} it agrees with"
        f" {estimate(found['sensitivity'])} of the labels for the summary and with"
        f" {estimate(found['specificity'])} of those against it. The interval is a bootstrap over"
        " both samples. A dash: the judge's errors leave nothing to correct, or too many posts"
        " have no verdict. It holds as far as the judge errs on our summaries as it does on the"
        " labelled ones."
    )
    return [Table(("", "corrected win rate [95%]"), rows, caption)]
