"""A judge's calibration on a page: its agreement with labels, and the rates that they correct."""

from dataclasses import replace

from eval.calibration import HUMAN_CEILING, NAMES, correct
from eval.stats.correction import SHIFT
from reports.parts.blocks import Block, Caveats, Heading, Table, Text
from reports.parts.cells import MISSING
from reports.parts.collect import Record, policies_of
from reports.parts.paired import posts_frame
from reports.parts.words import Row, estimate, in_points, named, percent, plain, whole
from stages.config.judge import MOST_UNJUDGED

CEILING = "{:.0f} to {:.0f}%".format(*(100 * share for share in HUMAN_CEILING))


def blocks(record: Record) -> list[Block]:
    """The section of a run's page."""
    title = Heading("Calibration of the judge")
    if record.calibration is not None:
        return [title, *calibration(record.calibration, corrected_rates(record))]
    advice = (
        "This judge was not compared with labelled comparisons: make judge-calibration (with the"
        " same PRESET, SET and so on) does that."
    )
    return [title, Text(advice)]


def corrected_rates(record: Record) -> dict[str, Row | None]:
    """For each policy the corrected win rate.

    None if it cannot be computed, or if too many posts have no verdict for any rate.
    """
    judged, rates = record.results("win_rate")["policies"], {}
    for policy in policies_of(record):
        posts = posts_frame(record, policy).dropna(subset=["score"])
        scores = [*zip(posts["text"], posts["score"], strict=True)]
        is_known = scores and judged[policy]["unjudged"] <= MOST_UNJUDGED
        rate = correct(scores, record.calibration_pairs) if is_known else None
        rates[policy] = vars(rate) if rate else None
    return rates


def calibration(results: Row, corrected: dict[str, Row | None]) -> list[Block]:
    """What the comparison with labels found, and the corrected win rates."""
    statistics = results["statistics"]
    longer = results["prefers_longer"] or {"judge": None, "labels": None}
    flagged = [f"This judge is FLAGGED: {flag}." for flag in results["flags"]]
    if results.get("undecided"):
        flagged.append(f"Neither passed nor failed: {results['undecided']}.")
    cells = [
        ["Cohen's kappa where it decides", plain(results["kappa_interval"])],
        ["agreement with the labels, a tie counting half", estimate(results["agreement"])],
        ["agreement where it decides", estimate(results["agreement_decided"])],
        ["prefers the longer text", estimate(longer["judge"])],
        ["the labels prefer the longer text", estimate(longer["labels"])],
        ["picks the first shown", estimate(statistics["share_first"])],
        ["same verdict after a swap", estimate(statistics["swap_consistency"])],
        ["unjudged", percent(statistics["unjudged"])],
    ]
    caption = (
        f"{whole(results['pairs'])} of {whole(results['of_pairs'])} labelled pairs"
        f" ({results['source']}), {whole(results['ties'])} ties. People agree with each other on"
        f" {CEILING} of real pairs (Stiennon et al. 2020): with"
        " labels by people, that is the ceiling for any judge."
    )
    if results["source"] == "built-in world":
        caption += " The built-in world's labels come from its own noisy labeller, not from people."
    return [
        *([Caveats(flagged)] if flagged else []),
        Table(("", "of this judge"), cells, caption),
        *([_beside_simple(results)] if results["simple"] else []),
        *_families(results["by_family"]),
        *_corrected(results, corrected),
    ]


def _families(families: Row) -> list[Block]:
    """The judge's errors on each family of policies; nothing where there is one family."""
    errors = ("sensitivity", "specificity")
    rows = [
        [name, whole(family["pairs"]), *(estimate(family[share]) for share in errors)]
        for name, family in families.items()
    ]
    header = ("family of policies", "pairs", "agrees, label for it", "agrees, label against it")
    caption = "Errors by family: a judge may err differently on what another policy writes."
    return [Table(header, rows, caption)] if len(rows) > 1 else []


def _beside_simple(results: Row) -> Table:
    """The judge, three that need no judgement, and others of this run, on the same pairs."""
    own = plain(results["kappa_interval"]), estimate(results["agreement"])
    rows = [["this judge", *own, MISSING, MISSING, MISSING]]
    for name, other in results["simple"].items():
        cells = plain(other["kappa"]), estimate(other["agreement"]), in_points(other["difference"])
        shares = (estimate(other.get(share)) for share in ("same", "right"))
        rows.append([NAMES.get(name, name), *cells, *shares])
    rows.append(["people with each other", MISSING, CEILING, *[MISSING] * 3])
    header = "on the same pairs|Cohen's kappa [95%]|agreement [95%]|difference|same|then right"
    caption = (
        "A tie agrees half. Difference: by how much this judge agrees more often, paired. Same: the"
        " same verdict, of the pairs that both decide. A judge that does not clearly agree more"
        " often than the first three is flagged: it may read length or topic alone."
    )
    return Table(header.split("|"), rows, caption)


def _corrected(results: Row, corrected: dict[str, Row | None]) -> list[Block]:
    if not corrected:
        return []
    shift = max([SHIFT, *(rate["shift"] for rate in corrected.values() if rate)])
    rows = [
        [named(policy, corrected), replace(shown, note="CLIPPED" * (shown.value in (0.0, 100.0)))]
        for policy, rate in corrected.items()
        for shown in [estimate(rate)]
    ]
    which = "pairs with a reference" if results["with_reference"] else "pairs, in the file's order,"
    caption = (
        "Win rate corrected for the judge's errors (Rogan and Gladen):"
        f" on {whole(results['error_pairs'])} labelled {which} it agrees with"
        f" {estimate(results['sensitivity'])} of the labels for the summary and with"
        f" {estimate(results['specificity'])} of those against it. The interval is a bootstrap over"
        f" both samples, widened for a shift: on our summaries either share may differ from that"
        f" on the labelled ones by up to {100 * shift:.1f} points, and no further. A dash: that"
        " allowance would span every rate, the judge cannot tell, or too many posts have no"
        " verdict. CLIPPED: the correction goes beyond what a share can be."
    )
    return [Table(("", "corrected win rate [95%]"), rows, caption)]
