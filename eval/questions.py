"""What a run asks its judge: about summaries and controls, under one cap.

A row names its post, with a `summary` and the `reference` that it is compared with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eval.control_texts import CONTROLS, SELF, control_texts
from eval.judges.protocol import VERDICTS, Comparison, Row
from stages.settings.config import Config
from stages.settings.judge import JudgeSettings
from stages.settings.prompt import PROMPT

# This judge knows only the texts that the run scored, unless `judge.model` names a gold one.
OWN_TEXTS_ONLY = "reward_model"


def comparison_of(row: Row, order: str) -> Comparison:
    """The question that a summary and its reference make, shown in one order."""
    first, second = row["summary"], row["reference"]
    if order == "reference_first":
        first, second = second, first
    return Comparison(row["id"], row["query"], first, second)


@dataclass(frozen=True)
class RunQuestions:
    """All that a run may ask its judge about some policies: what counts towards its cap.

    Whether a stage has asked its part yet makes no difference: what was not asked cost nothing.
    Each question is made when its turn comes, every time anew.
    """

    config: Config
    policies: Mapping[str, Sequence[Row]]

    def __iter__(self) -> Iterator[Comparison]:
        controls = rows_for(self.config, next(iter(self.policies.values())))
        for rows_of in (self.policies, controls):
            for rows in rows_of.values():
                for row in rows:
                    yield from (comparison_of(row, order) for order in VERDICTS)


# -- controls --------------------------------------------------------------------------------------


def rows_for(config: Config, posts: Sequence[Row]) -> dict[str, list[Row]]:
    """The controls that the judge of a config can be asked about, of as many posts as it says."""
    rows = control_rows(list(posts[: config.checks.control_posts]), config.data.prompt)
    return {SELF: rows[SELF]} if knows_own_texts_only(config.judge) else rows


def knows_own_texts_only(judge: JudgeSettings) -> bool:
    """Whether a judge has recorded scores alone and can judge no other text."""
    return judge.kind == OWN_TEXTS_ONLY and not judge.gold


def control_rows(posts: list[Row], prompt: str = PROMPT) -> dict[str, list[Row]]:
    """For each control one row a post, with the control's text as `summary`.

    A post without such a text has no row: no title, no number or name to swap, or a title that is
    the reference itself, which need not lose.
    """
    rows: dict[str, list[Row]] = {name: [] for name in CONTROLS}
    for index, post in enumerate(posts):
        others = posts[index + 1 :] + posts[:index]
        for name, text in control_texts(post, others, prompt).items():
            is_reference = text.split() == post["reference"].split()
            if text.strip() and (name == SELF or not is_reference):
                kept = {key: post[key] for key in ("id", "query", "reference")}
                rows[name].append({**kept, "summary": text.strip()})
    return rows
