"""Judges that are not LLMs, and say so in every row that they write."""

from collections.abc import Iterable, Mapping, Sequence

from eval.judges.protocol import About, Choice, Comparison, Judge, Reply, Row, scored_rows
from stages.config.errors import UserError
from stages.config.judge import JudgeSettings
from stages.data.builtin import (
    COMPLETE_WORDS,
    LONG_COST,
    UNWANTED_COST,
    WRONG_COST,
    facts_of,
    score_summary,
)


class FactsJudge(Judge):
    """The built-in world's judge: it knows what each post states, and counts. Not an LLM."""

    about = About(
        kind="facts",
        name="facts (offline rule, not an LLM)",
        is_llm=False,
        note="a fixed rule that counts facts, not an LLM; a summary gains 1 point for each correct "
        "fact that readers of the post's subreddit want, and loses "
        f"{WRONG_COST:g} for each wrong fact, {UNWANTED_COST:g} for each correct fact that they do "
        f"not want, and {LONG_COST:g} for each word beyond {COMPLETE_WORDS}; the summary with more "
        "points wins",
    )
    label = "the rule of the built-in world"

    def reply(self, comparison: Comparison) -> Reply:
        """The higher score wins; equal scores tie. Raises UserError for a post of other data."""
        try:
            facts = facts_of(comparison.post_id)
        except ValueError as error:
            raise UserError(f"judge.kind=facts knows only the built-in posts: {error}") from None
        first = score_summary(comparison.first, facts)
        second = score_summary(comparison.second, facts)
        text = f"[facts judge, not an LLM] A {first}, B {second}"
        return Reply(choice=higher(first, second), text=text)

    def scores_of(self, policies: Mapping[str, Sequence[Row]]) -> list[Row]:
        """The rule's scores of each policy's summary and of the reference, one row per summary."""
        return scored_rows(policies, lambda row, text: score_summary(text, facts_of(row["id"])))


def knows_own_texts_only(judge: JudgeSettings) -> bool:
    """Whether a judge only looks up recorded scores, so that it can judge no other text."""
    return judge.kind == "reward_model" and not judge.gold


class RewardModelJudge(Judge):
    """The run's own reward: it prefers the text with the higher score. Not an LLM."""

    def __init__(self, rows: Iterable[Row], reward: str = "reward model") -> None:
        """`rows` have the recorded scores of all texts; `reward` is what gave these scores."""
        self.name = f"{reward} of this run, not an LLM"
        # A text keeps its first score, so that equal texts of a post are judged alike.
        self.scores: dict[tuple[str, str], float] = {}
        for row in rows:
            self.scores.setdefault((row["id"], row["summary"]), row["score"])
            self.scores.setdefault((row["id"], row["reference"]), row["reference_score"])

    @property
    def about(self) -> About:
        """Who judges."""
        return About(
            kind="reward_model",
            name=self.name,
            is_llm=False,
            note=f"{self.name}: an optimistic proxy, for PPO was trained to raise this very number",
        )

    def reply(self, comparison: Comparison) -> Reply:
        """The higher score wins; equal scores tie. A score of NaN judges nothing."""
        first = self.scores[comparison.post_id, comparison.first]
        second = self.scores[comparison.post_id, comparison.second]
        text = f"[{self.name}] A {first:.4f}, B {second:.4f}"
        return Reply(choice=higher(first, second), text=text)


def higher(first: float, second: float) -> Choice | None:
    """A or B by the higher number, or a tie; None if one is NaN."""
    if first == second:
        return "tie"
    if first > second:
        return "A"
    if first < second:
        return "B"
    return None
