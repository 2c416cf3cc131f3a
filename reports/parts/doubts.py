"""What in a run's data and texts could deceive: sentences from a row of `reports.parts.collect`.

`row["data"]` is what the base stage counted, by text; it is empty where nothing was trained.
"""

from eval.win_rate import names_of_pair
from reports.parts.words import Row, named, percent, whole

SMALL = 0.01  # a share of held-out rows that were learned, up to which nothing is said
NEARLY_ALL = 0.9  # of a policy's summaries
CONTRADICTED = 0.25  # of the labels; where people label a pair twice, so many may differ
FEWEST_LABELS = 10  # of which none differs from the others
PRETENDED = {"reference": "the reference", "post": "the post", "summary": "one and the same text"}


def notes(row: Row) -> list[str]:
    """What in a run's data and texts could deceive, the most important first."""
    lines = [*_learned(row["data"]), *_labels(row["data"])] if row["data"] else []
    if row["texts"] < (1 - SMALL) * row["posts"]:
        lines.append(
            f"The {whole(row['posts'])} posts have {whole(row['texts'])} different texts. Equal"
            " ones count as one post in every interval and p-value."
        )
    return lines + _identical(row)


def _learned(data: Row) -> list[str]:
    lines = []
    if data["posts"] > SMALL * data["of_posts"]:
        places = ", ".join(f"{whole(count)} in {at}" for at, count in data["in"].items() if count)
        lines.append(
            f"{percent(data['posts'] / data['of_posts'])} of the {whole(data['of_posts'])} held-out"
            f" posts stand in the training data too, by their text ({places}): what was LEARNED"
            " there is judged here."
        )
    if data["pairs"] > SMALL * data["of_pairs"]:
        lines.append(
            f"{percent(data['pairs'] / data['of_pairs'])} of the {whole(data['of_pairs'])} held-out"
            " pairs are training pairs, by their texts: on these the reward model's accuracy is"
            " memory."
        )
    return lines


def _labels(data: Row) -> list[str]:
    """Labels that say nothing, or the opposite of other labels."""
    lines = []
    if data["against"] > SMALL * data["of_pairs"]:
        lines.append(
            f"{whole(data['against'])} of {whole(data['of_pairs'])} held-out labels are the"
            " opposite of the label that the same pair has in training."
        )
    for split, counts in data["labels"].items():
        rows = counts["rows"]
        if counts["chose_first"] in (0, rows) and rows >= FEWEST_LABELS:
            side = "first" if counts["chose_first"] else "second"
            lines.append(f"All {whole(rows)} labels of {split} choose the {side} summary.")
        if counts["contradicted"] > CONTRADICTED * rows:
            lines.append(
                f"{percent(counts['contradicted'] / rows)} of the labels of {split} are"
                " contradicted: the same pair stands there with the other label."
            )
        if counts["against_choice"] > SMALL * rows:
            lines.append(
                f"{percent(counts['against_choice'] / rows)} of the labels of {split} have their"
                " confidence on the summary that was not chosen."
            )
    return lines


def _identical(row: Row) -> list[str]:
    """Policies that wrote nearly nothing of their own."""
    lines = [
        f"{percent(share)} of {named(policy, row['policies'])}'s summaries are {PRETENDED[key]},"
        " word for word."
        for policy in row["policies"]
        for key, share in row[f"{policy}/identical"].items()
        if share >= NEARLY_ALL
    ]
    for pair, gap in row["differences"].items():
        if gap.get("alike", 0.0) >= NEARLY_ALL:  # a pair without a verdict has no difference
            names = " and ".join(named(name, row["policies"]) for name in names_of_pair(pair))
            lines.append(
                f"{percent(gap['alike'])} of the summaries of {names} are alike, word for word."
            )
    return lines
