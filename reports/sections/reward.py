"""The reward model on a page: accuracy beside length and by group, calibration, normalization.

DPO's implicit reward is a reward model too, ranked on the same held-out pairs.
"""

from math import exp

from reports.parts import paper
from reports.parts.blocks import Block, Heading, Table, Text
from reports.parts.cells import MISSING
from reports.parts.collect import Record
from reports.parts.words import STRENGTH, Row, accuracy, estimate, in_points, number, percent, whole

SCORERS = {"rm": "the reward model", "dpo": "DPO's implicit reward"}
GROUPS = {
    "by_split": "split",
    "by_strength": STRENGTH,
    "by_batch": "batch",
    "by_policies": "pair of policies",
}
MOST_GROUPS = 12
NORMALIZED = ("mean_before", "std", "minimum", "maximum", "standard_error")


def blocks(record: Record) -> list[Block]:
    """The section of a run's page."""
    own = record.results("rm").get("function")  # in the place of a reward model
    titles = SCORERS | ({"rm": f"the function {own}"} if own else {})
    scorers = {
        title: record.results(stage)
        for stage, title in titles.items()
        if stage in record.manifests and "pairs" in record.results(stage)
    }
    tables: list[Block] = [Text(f"The reward is {titles['rm']}; there are no pairs to rank.")]
    if scorers:
        tables = [
            accuracies(scorers),
            groups(scorers, paper.size_of(record.preset)),
            calibration(record.results("rm")),
        ]
    return [Heading("Reward model"), *tables, normalization(record.results("normalize"))]


def accuracies(scorers: dict[str, Row]) -> Table:
    """Accuracy on held-out pairs beside that of taking the longer summary.

    `scorers`: title -> results of the stage.
    """
    rows = []
    for title, results in scorers.items():
        of_length = results["length"]
        at_length = of_length["at_equal_length"]
        rows.append(
            [
                title,
                accuracy(results),
                number(results["loss"], 3),
                estimate(of_length["near_equal"]),
                f"none: {at_length['why']}" if "why" in at_length else estimate(at_length),
                in_points(of_length["above_longer"]),
            ]
        )
    results = next(iter(scorers.values()))
    longer = [estimate(results["length"][key]) for key in ("longer", "longer_near_equal")]
    rows.append(["the longer one", longer[0], MISSING, longer[1], percent(0.5), MISSING])
    near = results["length"]["near_equal"]
    caption = (
        f"{whole(results['pairs'])} held-out pairs ranked as the labellers did, with 95% intervals"
        " over posts; equal scores count as wrong of all pairs, as in the paper's code, and half"
        " elsewhere. The longer one: how often the summary with more tokens is the preferred one."
        f" Nearly equal: the {whole(near['pairs'] if near else 0)} pairs whose lengths differ by at"
        " most 10% of the longer. At equal length: a logistic model with bounded terms of the"
        " length ratio, at a ratio of 1, standard errors clustered by post. Where the last interval"
        " holds 0, the scorer is not reliably better than taking the longer summary."
    )
    header = ["", "all pairs [95%]", "loss", "nearly equal length", "at equal length"]
    return Table([*header, "above the longer one"], rows, caption, name="reward-model")


def groups(scorers: dict[str, Row], size: str | None) -> Table:
    """Accuracy by group of pairs, beside the paper's by strength where it has this size."""
    results, *others = scorers.values()
    of_paper = paper.load()["rm_accuracy_by_confidence"]["mean"] if size else {}
    rows = []
    for key, what in GROUPS.items():
        most = sorted(results[key], key=lambda name: (-results[key][name]["pairs"], name))
        for name in sorted(most[:MOST_GROUPS], key=lambda name: (len(name), name)):
            group = results[key][name]
            of_others = [accuracy(x[key][name]) if name in x[key] else MISSING for x in others]
            point = of_paper.get(str(5 + int(name)), {}) if key == "by_strength" and size else {}
            cells = [accuracy(group), *of_others, whole(group["pairs"])]
            rows.append([what, name, *cells, *([percent(point.get(size))] if size else [])])
    header = ["pairs by", "", "accuracy [95%]", *(["DPO [95%]"] if others else []), "pairs"]
    caption = f"Strength: 1 slightly better, 4 far better. At most {MOST_GROUPS} groups of a kind."
    if size:
        header.append(f"paper {size.upper()}")
        caption += " The paper's: where the second summary was chosen (its confidence 6 to 9)."
    return Table(header, rows, caption, name="reward-model-groups")


def calibration(results: Row) -> Table:
    """The share of pairs ranked right by the gap between their scores."""
    rows = [
        [number(gap), percent(right), percent(1 / (1 + exp(-gap))), whole(pairs)]
        for gap, right, pairs in results["calibration"]
    ]
    header = ("gap between scores", "ranked right", "promised", "pairs")
    caption = "Promised: the sigmoid of the gap, which the loss fits."
    return Table(header, rows, caption, name="reward-model-calibration")


def normalization(results: Row) -> Table:
    """What was subtracted from every score, and how far padding moves one."""
    cells = [
        whole(results["references"]),
        *(number(results[key], 3) for key in NORMALIZED),
        f"{results['mean_after']:.1e}",
        percent(results["padding_difference_over_0.01"]),
    ]
    caption = (
        "Normalization subtracts the mean score of the training posts' references: a summary as"
        " good as a person's scores about 0. Padding on the other side changes a score by rounding"
        " alone, which is coarse in bf16."
    )
    header = "references|mean before|spread|lowest|highest|standard error|mean after"
    header += "|moved by padding by over 0.01"
    return Table(header.split("|"), [cells], caption, name="normalization")
