"""A reward model's accuracy beside length: what "the longer summary" gets on the same pairs."""

from typing import Any

from reports.page import Block, Note, Table
from reports.verdict import estimate, number, percent, whole

RULE = ("longer", "longer_near_equal")
CAPTION = (
    "Pairs ranked as the labellers did, with 95% intervals. The longer one: how often the summary"
    " with more tokens is the preferred one, an equal length counting half. Two texts"
    " alike have equal scores, which counts as wrong of all pairs, as in the paper's code, and"
    " half elsewhere. Nearly equal: pairs"
    " whose lengths differ by at most 10% of the longer. At equal length: what a logistic model"
    " with bounded terms of the length ratio gives at a ratio of 1, standard errors clustered by"
    " post."
)


def blocks(scorers: dict[str, dict[str, Any]]) -> list[Block]:
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
    rows.append(["the longer one", *(estimate(length[key]) for key in RULE), percent(0.5)])
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
