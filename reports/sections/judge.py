"""The judge's part of a page: who judged, every rate beside the raw one, controls, calibration."""

from itertools import combinations
from typing import Any

from eval.calibration import HUMAN_CEILING, correct, correct_difference
from eval.control_texts import CONTROLS
from eval.judges.protocol import VERDICTS
from eval.rates.correction import SHIFT, Corrected
from eval.rates.simple_judges import NAMES
from eval.rates.table import MOST_UNJUDGED
from eval.win_rate import names_of_pair
from reports.collect import RM_AGREES, Record, policies_of
from reports.page import Block, Details, Heading, Note, Table, Text
from reports.verdict import (
    MISSING,
    STRENGTH,
    at_equal_length,
    clipped,
    difference,
    estimate,
    interval,
    judge,
    kappa,
    number,
    p_value,
    percent,
    turned_by_length,
    whole,
)

Row = dict[str, Any]
Differences = dict[tuple[str, str], Corrected | str]
"""(later policy, earlier one) -> the corrected difference, or why there is none."""
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
    " where every post has both verdicts; only the way to its interval differs. The result table"
    " shows the second interval."
)


def short_rows(numbers: Row) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the terminal's second table."""
    header = ["", "at equal length [95%]", "picks first", "same if swapped"]
    rows = []
    for policy in numbers["policies"]:
        found = _given(numbers, policy)
        rate = at_equal_length(found.get("length_controlled"))
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
    rows = [[one, *(at_equal_length(found[one].get(key)) for key, _ in RATES)] for one in found]
    said: list[Block] = [Table(["", *(title for _, title in RATES)], rows, RATES_CAPTION)]
    for one in found:
        note = _about_the_model(found[one].get("length_controlled"))
        said += (
            [Text(f"{one} at equal length: {note}{turned_by_length(found[one])}")] if note else []
        )
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
        extrapolated = " Any rate would be EXTRAPOLATED." if found.get("extrapolated") else ""
        return f"no rate, because {found['why']}.{extrapolated}"
    if "doubled_length_logits" not in found:
        return (
            "made by an earlier model, whose effect of length had no bound: remove the folder of"
            " stage win_rate and run `make eval` again."
        )
    order, length = (found[key] for key in ("order_logits", "doubled_length_logits"))
    said = "the two orders of each post were averaged first, because order decides nearly all."
    if order is not None:
        said = (
            f"being shown first is worth {number(order[0])}"
            f" [{number(order[1])}, {number(order[2])}] logits, a doubled length"
            f" {number(length[0])} [{number(length[1])}, {number(length[2])}]."
        )
    if found["extrapolated"]:
        said += (
            f" EXTRAPOLATED: {whole(found['near_equal'])} posts have nearly equal lengths, or a"
            " ratio of 1 lies outside the middle 90% of those seen. The model answers, not the"
            " data."
        )
    return said


def _leanings_table(numbers: Row) -> Table:
    rows = []
    for policy in numbers["policies"]:
        found = numbers[f"{policy}/statistics"]
        cells = [estimate(found[key]) for key in ("share_first", "swap_consistency")]
        agrees = {name: numbers[f"{policy}/rm_agrees{end}"] for end, name in RM_AGREES.items()}
        cells += [number(found["median_length_ratio"]), estimate(agrees)]
        rows.append([policy.upper(), *cells])
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
        found = numbers["differences"][pair]
        p = p_value(found["p_value"] if found["headline"] else None)
        names = " less ".join(name.upper() for name in names_of_pair(pair))
        rows.append([names, difference(found), p])
    caption = (
        "Differences of win rates on the same posts: bootstrap over posts, and the p-value of a"
        " paired randomisation test."
    )
    return Table(("", "difference [95%]", "p-value"), rows, caption)


def controls(found: Row) -> list[Block]:
    """The controls' table, and a note if one of them failed."""
    rows = [_control(name, one) for name, one in found["controls"].items()]
    caption = (
        f"{whole(found['posts'])} posts, both orders; a post that has no such text is left out. The"
        " judge must prefer the reference to each of these (the whole interval below 50%); the"
        " reference against itself must be a tie, which our protocol says without asking the judge."
    )
    header = ("against the reference", "posts", "preferred to it [95%]", "verdict", "a pass shows")
    table = Table(header, rows, caption)
    if not found["failed"]:
        return [table]
    failed = ", ".join(found["controls"][name]["what"] for name in found["failed"])
    return [Note(f"The judge FAILED a control: {failed}. Its rates are no evidence."), table]


def _control(name: str, one: Row) -> list[str]:
    what = [one["what"], whole(one["judgements"] / len(VERDICTS))]
    if one["passed"] is None:
        return [*what, MISSING, f"not available: {one['why']}", CONTROLS[name].proves]
    cell = MISSING
    if one["preferred"] is not None:
        cell = f"{percent(one['preferred'])} {interval(one['low'], one['high'])}"
    return [*what, cell, "passed" if one["passed"] else "FAILED", CONTROLS[name].proves]


def _calibration(record: Record) -> list[Block]:
    if record.calibration is None:
        return [
            Text(
                "This judge was not compared with labelled comparisons: `make judge-calibration`"
                " (with the same PRESET, SET and so on) does that."
            )
        ]
    return calibration(record.calibration, corrected_rates(record), corrected_differences(record))


def corrected_rates(record: Record) -> dict[str, dict[str, Any] | None]:
    """For each policy the corrected win rate.

    None if it cannot be computed, or if too many posts have no verdict for any rate.
    """
    pairs = record.calibration_pairs
    given = _given_scores(record)
    return {
        policy: _plain(correct(list(scores.values()), pairs)) if scores else None
        for policy, scores in given.items()
    }


def corrected_differences(record: Record) -> Differences:
    """For each two policies the corrected difference on the same posts, or why there is none."""
    given = {policy: scores for policy, scores in _given_scores(record).items() if scores}
    return {
        (later, earlier): correct_difference(given[later], given[earlier], record.calibration_pairs)
        for earlier, later in combinations(given, 2)
    }


def _given_scores(record: Record) -> dict[str, dict[str, float]]:
    """For each policy its judged posts' scores; none where too much is unjudged for any rate."""
    scores: dict[str, dict[str, float]] = {}
    for row in record.rows("win_rate", "post_scores.jsonl"):
        if row["score"] is not None:
            scores.setdefault(row["policy"], {})[row["id"]] = row["score"]
    judged = record.results("win_rate")["policies"]
    return {
        policy: scores[policy] if judged[policy]["unjudged"] <= MOST_UNJUDGED else {}
        for policy in policies_of(record)
        if policy in scores
    }


def _plain(found: Any) -> dict[str, Any] | None:
    return None if found is None else vars(found)


def calibration(
    found: Row,
    corrected: dict[str, dict[str, Any] | None],
    differences: Differences,
) -> list[Block]:
    """What the comparison with labels found, and the corrected win rates and differences."""
    low, high = HUMAN_CEILING
    statistics = found["statistics"]
    longer = found["prefers_longer"] or {"judge": None, "labels": None}
    flagged = [Note(f"This judge is FLAGGED: {flag}.") for flag in found["flags"]]
    cells = [
        ["agreement with the labels, a tie counting half", estimate(found["agreement"])],
        ["agreement where it decides", estimate(found["agreement_decided"])],
        ["Cohen's kappa where it decides", kappa(found["kappa_interval"])],
        ["prefers the longer text", estimate(longer["judge"])],
        ["the labels prefer the longer text", estimate(longer["labels"])],
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
        *([_beside_simple(found)] if found["simple"] else []),
        *([by_strength] if groups else []),
        *_families(found.get("by_family", {})),
        *_corrected(found, corrected),
        *_corrected_differences(differences),
    ]


def _families(found: Row) -> list[Block]:
    """The judge's errors on each family of policies; nothing where there is one family."""
    rows = [
        [name, whole(one["pairs"]), estimate(one["sensitivity"]), estimate(one["specificity"])]
        for name, one in found.items()
    ]
    header = ("family of policies", "pairs", "agrees, label for it", "agrees, label against it")
    caption = "Errors by family: a judge may err differently on what another policy writes."
    return [Table(header, rows, caption)] if len(rows) > 1 else []


def _corrected_differences(found: Differences) -> list[Block]:
    if not found:
        return []
    rows = []
    for (later, earlier), one in found.items():
        given = (
            (MISSING, one)
            if isinstance(one, str)
            else (difference(vars(one) | {"headline": True}), "")
        )
        rows.append([f"{later.upper()} less {earlier.upper()}", *given])
    caption = (
        "Differences corrected for the judge's errors, on the same posts. None is given unless two"
        " families of policies were labelled and the judge errs alike on them as far as can be"
        " seen: errors that differ between policies can turn a difference's sign around. The"
        " interval allows for a gap as large as the largest seen between families."
    )
    return [Table(("", "corrected difference [95%]", "why there is none"), rows, caption)]


def _beside_simple(found: Row) -> Table:
    """The judge and three that need no judgement, on the same pairs."""
    low, high = HUMAN_CEILING
    rows = [["this judge", estimate(found["agreement"]), kappa(found["kappa_interval"]), MISSING]]
    for name, one in found["simple"].items():
        more = difference(one["difference"] | {"headline": True})
        rows.append([NAMES[name], estimate(one["agreement"]), kappa(one["kappa"]), more])
    people = f"{100 * low:.0f} to {100 * high:.0f}%"
    rows.append(["people with each other", people, MISSING, MISSING])
    header = (
        "on the same pairs",
        "agreement [95%]",
        "Cohen's kappa [95%]",
        "the judge has more by",
    )
    caption = (
        "Agreement counts a tie half; differences are paired. A judge that does not clearly agree"
        " more often than each of these is flagged: it may read length or topic alone."
    )
    return Table(header, rows, caption)


def _corrected(found: Row, corrected: dict[str, dict[str, Any] | None]) -> list[Block]:
    if not corrected:
        return []
    shift = max([SHIFT, *(one["shift"] for one in corrected.values() if one)])
    rows = [[policy.upper(), estimate(one), clipped(one)] for policy, one in corrected.items()]
    which = "pairs with a reference" if found["with_reference"] else "pairs, in the file's order,"
    caption = (
        "Win rate corrected for the judge's errors (Rogan and Gladen):"
        f" on {whole(found['error_pairs'])} labelled {which} it agrees with"
        f" {estimate(found['sensitivity'])} of the labels for the summary and with"
        f" {estimate(found['specificity'])} of those against it. The interval is a bootstrap over"
        f" both samples, widened for a shift: on our summaries either share may differ from that"
        f" on the labelled ones by up to {100 * shift:.1f} points, and no further. A dash: that"
        " allowance would span every rate, the judge cannot tell, or too many posts have no"
        " verdict."
    )
    return [Table(("", "corrected win rate [95%]", ""), rows, caption)]
