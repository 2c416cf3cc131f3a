"""The judge's part of a page: who judged, every rate beside the raw one, controls."""

from eval.control_texts import CONTROLS
from eval.judges.protocol import VERDICTS
from eval.win_rate import names_of_pair
from reports.parts.cells import MISSING, Number
from reports.parts.collect import RM_AGREES, Record
from reports.parts.page import Block, Details, Heading, Note, Table, Text
from reports.parts.sentences import NO_GUESS
from reports.parts.words import (
    Row,
    at_equal_length,
    difference,
    estimate,
    interval,
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
from stages.settings.judge import MOST_UNJUDGED

AT_LENGTH = "length_controlled"
RATES = (
    ("raw", "raw [95%]"),
    ("order_balanced", "order-balanced"),
    (AT_LENGTH, "at equal length"),
    ("shown_first", "shown first"),
    ("shown_second", "shown second"),
)
RATES_CAPTION = (
    "Win rates; a tie counts half. Raw: share of all judgements, interval over posts (Wilson's if"
    " every post is won or lost, else Bonett and Price's). Order-balanced: mean of the rates when"
    " shown first and second, bootstrap over posts. At equal length: the same mean at a ratio of 1,"
    " by a logistic model of order and a bounded term of the log word ratio, standard errors"
    " clustered by post. It takes off what is gained by saying more, too, so it stands beside the"
    " raw rate and not in its place. The first two are one rate where every post has both verdicts;"
    " only the way to its interval differs. The result table shows the second interval."
)


def short_rows(numbers: Row) -> tuple[list[str], list[list[object]]]:
    """Header and rows of the terminal's second table."""
    header = ["", "at equal length [95%]", "picks first", "same if swapped"]
    rows = []
    for policy in numbers["policies"]:
        statistics = _given(numbers, policy)
        rate = at_equal_length(statistics.get(AT_LENGTH))
        rows.append([named(policy, numbers["policies"]), rate, *_leanings(numbers, policy)])
    return header, rows


def _given(numbers: Row, policy: str) -> Row:
    """A policy's statistics; none if too much is unjudged for any rate."""
    has_rate = numbers[f"{policy}/win_rate"] is not None
    return numbers[f"{policy}/statistics"] if has_rate else {}


def _leanings(numbers: Row, policy: str) -> list[Number]:
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
            }
        ),
        _leanings_table(numbers),
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
    if numbers["share_first"] is not None:
        first = percent(numbers["share_first"])
        judged += f" It prefers the summary shown first in {first} of the decided judgements."
    if numbers["judge_models"]:
        judged += f" The server said it was {', '.join(numbers['judge_models'])}."
    if numbers["judge_note"] and numbers["is_llm"]:  # of another judge the page's caveats say it
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


def rates(statistics: dict[str, Row]) -> list[Block]:
    """Every rate side by side, what the model says, and the rates by length.

    `statistics`: by the policy's name.
    """
    rows = [
        [name, *(_rate(of_policy, key) for key, _ in RATES)]
        for name, of_policy in statistics.items()
    ]
    blocks: list[Block] = [Table(["", *(title for _, title in RATES)], rows, RATES_CAPTION)]
    for name, of_policy in statistics.items():
        if of_policy:
            note = _about_the_model(of_policy[AT_LENGTH])
            blocks.append(Text(f"{name} at equal length: {note}{turned_by_length(of_policy)}"))
    bins = [
        [
            name,
            f"{part['from']:.2f} to {part['to']:.2f}",
            whole(part["judgements"]),
            share(part["rate"], part["low"], part["high"]),
        ]
        for name, of_policy in statistics.items()
        for part in of_policy.get("length_bins", [])
    ]
    if not bins:
        return blocks
    columns = ("", "words, summary over other", "judgements", "win rate")
    caption = "Win rate by length ratio, bins of about equal size where ratios differ enough."
    return [*blocks, Details("Win rate by length", [Table(columns, bins, caption)])]


def _rate(statistics: Row, key: str) -> Number:
    """One of the rates; a dash where too much is unjudged for any."""
    return (at_equal_length if key == AT_LENGTH else estimate)(statistics.get(key))


def turned_by_length(statistics: Row) -> str:
    """Why the rate at equal length lies on the other side of even than the raw one, if it does."""
    raw, equal = (statistics[key]["estimate"] for key in ("raw", AT_LENGTH))
    if equal is None or (raw - NO_GUESS) * (equal - NO_GUESS) >= 0:
        return ""
    ratio = statistics["median_other_ratio"]
    words = f" (these have a median of {number(ratio)} times the words)" if ratio else ""
    return (
        f" It lies on the other side of 50% than the raw rate, {percent(raw)}: the model puts the"
        f" {'lead' if raw > NO_GUESS else 'deficit'} down to posts whose two texts differ in"
        f" length{words}. A summary that leaves out what matters is shorter, too, so this does not"
        " make it the better one."
    )


def _about_the_model(model: Row) -> str:
    if model["estimate"] is None:
        extrapolated = " Any rate would be EXTRAPOLATED." if model["extrapolated"] else ""
        return f"no rate, because {model['why']}.{extrapolated}"
    order, length = (model[key] for key in ("order_logits", "doubled_length_logits"))
    text = "the two orders of each post were averaged first, because order decides nearly all."
    if "equal_posts" in model:
        text = (
            f"read off the {posts_of(model['equal_posts'])} whose two texts differ and have equally"
            " many words. The model has no finite fit: length alone decides nearly every other"
            " verdict."
        )
    elif order is not None:
        text = (
            f"being shown first is worth {_logits(order)} logits, a doubled length"
            f" {_logits(length)}."
        )
    if model["extrapolated"]:
        text += (
            f" EXTRAPOLATED: only {posts_of(model['near_equal'])} of nearly equal length, or a"
            " ratio of 1 outside the middle 90% of those seen. The model answers, not the data."
        )
    return text


def _logits(triple: list[float]) -> Number:
    return plain(dict(zip(("estimate", "low", "high"), triple, strict=True)))


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
