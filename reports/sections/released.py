"""What a page says of a policy that others trained: nothing was learned here, only judged."""

from typing import Any

from reports.collect import RELEASED, Record
from reports.page import Block, Text
from reports.verdict import judge, rate, shown, too_many_unjudged, whole

Row = dict[str, Any]


def summary(record: Record, numbers: Row) -> list[Block]:
    """What was judged, by whom, and how it ended, in one paragraph; what scored it, in another."""
    asked = (
        f"We judged {policy_of(record)} as it is: others trained it, and nothing was trained here."
        f" The judge, {judge(numbers)}, compared its summaries of {whole(numbers['posts'])}"
        " held-out posts with the references, in both orders."
    )
    ended = f"They are preferred to the reference on {rate(numbers, RELEASED)} of the posts."
    if too_many_unjudged(numbers):
        ended = "Too many comparisons had no verdict for a conclusion; see below."
    return [Text(f"{asked} {ended}", lead=True), Text(_scored_by(record))]


def policy_of(record: Record) -> str:
    """The released policy as a page may name it."""
    return shown("released.policy", record.settings[RELEASED]["policy"])


def _scored_by(record: Record) -> str:
    found = record.results(RELEASED)["reward_model"]
    if found is None:
        return "No reward model was given (REWARD_MODEL=), so there are no scores."
    name = shown("released.reward_model", record.settings[RELEASED]["reward_model"])
    if not found["converted"]:
        return f"Its reward model is {name}, as it is: no run here checked where its scores are 0."
    return (
        f"Its reward model is {name}. The mean {found['mean_in_config']:.4f}, which its"
        " configuration holds, is part of the head's bias here, so every score is what it was."
    )
