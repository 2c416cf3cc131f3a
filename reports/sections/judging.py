"""The judge's part of a page: who judged, every rate beside the raw one, controls."""

from eval.control_texts import CONTROLS
from eval.judges.protocol import VERDICTS
from eval.win_rate import names_of_pair
from reports.parts.blocks import Block, Details, Heading, Note, Table, Text
from reports.parts.cells import MISSING
from reports.parts.collect import ENDS, Record
from reports.parts.words import (
    Row,
    at_equal_length,
    difference,
    estimate,
    judge,
    named,
    number,
    p_value,
    percent,
    plain,
    posts_of,
    share,
    whole,
)
from stages.config.judge import MOST_UNJUDGED

AT_LENGTH = "length_controlled"
RATES = {
    "raw": "raw [95%]",
    "order_balanced": "order-balanced",
    AT_LENGTH: "at equal length",
    "shown_first": "shown first",
    "shown_second": "shown second",
}
RATES_CAPTION = (
    "Win rates; a tie counts half. Raw: share of all judgements, interval over posts (Wilson's if"
    " every post is won or lost, else Bonett and Price's). Order-balanced: mean of the rates when"
    " shown first and second, bootstrap over posts; the result table shows this interval. At equal"
    " length: the same mean at a ratio of 1, by a logistic model of order and a bounded term of the"
    " log word ratio, standard errors clustered by post. It takes off what is gained by saying"
    " more, too, so it stands beside the raw rate and not in its place."
)


def short_rows(numbers: Row) -> tuple[list[str], list[list[object]]]:
    """Header and rows of the terminal's second table."""
    header = ["", "at equal length [95%]", "picks first", "same if swapped"]
    rows: list[list[object]] = []
    for name, policy in _names(numbers).items():
        statistics = numbers[f"{policy}/statistics"]
        leanings = [statistics[key] for key in ("share_first", "swap_consistency")]
        shares = [percent(leaning["estimate"]) if leaning else MISSING for leaning in leanings]
        rows.append([name, at_equal_length(_given(numbers, policy).get(AT_LENGTH)), *shares])
    return header, rows


def _names(numbers: Row) -> dict[str, str]:
    """What a page calls each policy -> its name."""
    return {named(policy, numbers["policies"]): policy for policy in numbers["policies"]}


def _given(numbers: Row, policy: str) -> Row:
    """A policy's statistics; none if too much is unjudged for any rate."""
    has_rate = numbers[f"{policy}/win_rate"] is not None
    return numbers[f"{policy}/statistics"] if has_rate else {}


def blocks(record: Record, numbers: Row) -> list[Block]:
    """The section of a run's page."""
    return [
        Heading("The judge"),
        Text(_who(numbers)),
        _rates(numbers),
        _at_equal_length(numbers),
        Details("Win rate by length", [_by_length(numbers)]),
        _leanings(numbers),
        *([_differences(numbers)] if numbers["differences"] else []),
        Heading("Controls of the judge"),
        *controls(record.results("controls")),
    ]


def _who(numbers: Row) -> str:
    judged = (
        f"Judge: {judge(numbers)}, {whole(numbers['judgements'])} judgements, both orders of each"
        " pair. A verdict that turns round with the order is a tie. A win in one order and a tie in"
        " the other score 3/4 and count as won."
    )
    if numbers["judge_models"]:
        judged += f" The server said it was {', '.join(numbers['judge_models'])}."
    if numbers["judge_note"] and numbers["is_llm"]:  # of another judge the page's caveats say it
        judged += f" Its description: {numbers['judge_note']}."
    return judged


def _rates(numbers: Row) -> Table:
    """Every rate side by side; a dash where too much is unjudged for any."""
    cells = {key: at_equal_length if key == AT_LENGTH else estimate for key in RATES}
    rows = [
        [name, *(cell(_given(numbers, policy).get(key)) for key, cell in cells.items())]
        for name, policy in _names(numbers).items()
    ]
    return Table(["", *RATES.values()], rows, RATES_CAPTION, name="rates")


def _at_equal_length(numbers: Row) -> Table:
    """What the model of the rate at equal length rests on."""
    rows = []
    for name, policy in _names(numbers).items():
        model = _given(numbers, policy).get(AT_LENGTH, {})
        effects = [model.get(key) for key in ("order_logits", "doubled_length_logits")]
        ends = ("estimate", "low", "high")
        logits = [plain(dict(zip(ends, x, strict=True)) if x else None) for x in effects]
        note = f"no rate: {model['why']}" if model.get("why") else ""
        if "equal_posts" in model:
            note = f"no finite fit: read off {posts_of(model['equal_posts'])} of equal length"
        rows.append([name, *logits, whole(model.get("near_equal")), note or MISSING])
    header = ("", "shown first, logits", "doubled length, logits", "nearly equal posts", "note")
    caption = (
        "The model of the rate at equal length. No logits: the two orders of each post were"
        " averaged first, because order decides nearly all, or there is no fit. EXTRAPOLATED"
        " above: few posts of nearly equal length, or a ratio of 1 outside the middle 90% of those"
        " seen; the model answers, not the data."
    )
    return Table(header, rows, caption, name="length-model")


def _by_length(numbers: Row) -> Table:
    rows = [
        [
            name,
            f"{part['from']:.2f} to {part['to']:.2f}",
            whole(part["judgements"]),
            share(part["rate"], part["low"], part["high"]),
        ]
        for name, policy in _names(numbers).items()
        for part in _given(numbers, policy).get("length_bins", [])
    ]
    columns = ("", "words, summary over other", "judgements", "win rate")
    caption = "Win rate by length ratio, bins of about equal size where ratios differ enough."
    return Table(columns, rows, caption)


def _leanings(numbers: Row) -> Table:
    rows = []
    for name, policy in _names(numbers).items():
        statistics = numbers[f"{policy}/statistics"]
        agrees = {key: numbers[f"{policy}/rm_agrees{end}"] for end, key in ENDS.items()}
        rows.append(
            [
                name,
                percent(numbers[f"{policy}/unjudged"]),
                share(None, numbers[f"{policy}/worst_low"], numbers[f"{policy}/worst_high"]),
                *(estimate(statistics[key]) for key in ("share_first", "swap_consistency")),
                number(statistics["median_length_ratio"]),
                estimate(agrees),
            ]
        )
    header = ["", "unjudged", "worst case", "picks the first shown", "same after a swap"]
    caption = (
        "The worst case is the win rate if every post without a verdict had been lost, or won. RM"
        " agrees: of the posts that the judge decided, those on which the reward model's higher"
        " score is on its choice (Huang et al. 2024, detail 17)."
    )
    return Table([*header, "median length ratio", "RM agrees"], rows, caption, name="leanings")


def _differences(numbers: Row) -> Table:
    rows = []
    places = {policy: place for place, policy in enumerate(numbers["policies"])}

    def order(pair: str) -> list[int]:
        """First those against the first policy; each group in the order of the result table."""
        return [places.get(name, len(places)) for name in reversed(names_of_pair(pair))]

    for pair in sorted(numbers["differences"], key=order):
        gap = numbers["differences"][pair]
        p = p_value(gap["p_value"] if gap["headline"] else None)
        names = " - ".join(named(name, places) for name in names_of_pair(pair))
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
    failed = ", ".join(results["controls"][name]["what"] for name in results["failed"])
    notes = [f"The judge FAILED a control: {failed}. Its rates are no evidence."] if failed else []
    if results.get("undecided"):
        notes.append(f"The judge has neither passed nor failed {results['undecided']}.")
    return [*map(Note, notes), table]


def _control(name: str, control: Row) -> list[str]:
    what = [control["what"], whole(control["judgements"] / len(VERDICTS))]
    proves = CONTROLS[name].proves
    if not control["judgements"]:
        return [*what, MISSING, MISSING, f"not available: {control['why']}", proves]
    unjudged, cell = control["unjudged"], MISSING
    if control["preferred"] is not None and unjudged <= MOST_UNJUDGED:
        cell = share(control["preferred"], control["low"], control["high"])
    verdict = control.get("why") or ("passed" if control["passed"] else "FAILED")
    return [*what, cell, percent(unjudged), verdict, proves]
