"""The judges that are no LLM and say so in every row that they write."""

from collections.abc import Iterable, Mapping, Sequence

from eval.judges.protocol import About, Choice, Comparison, Judge, Reply, Row, scored_rows
from stages.config.checks import UserError
from stages.config.judge import JudgeSettings
from stages.data.builtin import EVENT, OPTIONAL, Facts, facts_of, read_summary, score_summary


class FactsJudge(Judge):
    """The built-in world's judge: it knows what each post states and counts. Not an LLM."""

    about = About(
        kind="facts",
        name="facts (offline rule, not an LLM)",
        is_llm=False,
        note="offline rule of the built-in world, not an LLM: a right fact that the post's "
        "subreddit wants gains 1, a right one that it does not want costs 0.5, a wrong one costs "
        "1, each word beyond a complete summary costs 0.25",
    )
    label = "the rule of the built-in world"

    def reply(self, comparison: Comparison) -> Reply:
        """The higher score wins, equal scores tie. Raises UserError for a foreign post."""
        texts = (comparison.first, comparison.second)
        try:
            facts = facts_of(comparison.post_id)
        except ValueError as error:
            raise UserError(f"judge.kind=facts knows only the built-in world: {error}") from None
        scores = [score_summary(text, facts) for text in texts]
        text = f"[facts judge, not an LLM] A {scores[0]}, B {scores[1]}"
        return Reply(choice=higher(*scores), text=text)

    def scores_of(self, policies: Mapping[str, Sequence[Row]]) -> list[Row]:
        """The rule's score of each policy's summary and of the reference, one row a summary."""
        return scored_rows(policies, lambda row, text: score_summary(text, facts_of(row["id"])))


def facts_told(post_id: str, texts: Sequence[str]) -> tuple[Facts, list[list[str]]]:
    """A post's facts; a row for each that its readers want: its name, its word, and what each text
    says of it. The last row counts what is right.
    """
    facts = facts_of(post_id)
    wanted = [*EVENT, *(slot for slot in OPTIONAL if slot in facts.wanted)]
    read = [read_summary(text, facts) for text in texts]

    def told(slot: str, right: set[str], wrong: set[tuple[str, str]]) -> str:
        others = sorted(word for name, word in wrong if name == slot)
        untrue = f"{', '.join(others)} (wrong)" if others else "not told"
        return facts.words[slot] if slot in right else untrue

    rows = [[slot, facts.words[slot], *(told(slot, *pair) for pair in read)] for slot in wanted]
    counts = [f"{len(right & {*wanted})} of {len(wanted)}" for right, _ in read]
    return facts, [*rows, ["right", "", *counts]]


def knows_own_texts_only(judge: JudgeSettings) -> bool:
    """Whether a judge has recorded scores alone and can judge no other text."""
    return judge.kind == "reward_model" and not judge.gold


class RewardModelJudge(Judge):
    """The run's own reward model: it prefers what it gave the higher score. Not an LLM."""

    about = About(
        kind="reward_model",
        name="reward model of this run, not an LLM",
        is_llm=False,
        note="reward model of this run, not an LLM: an optimistic proxy, for PPO was trained to "
        "raise this very number",
    )

    def __init__(self, rows: Iterable[Row]) -> None:
        """A text keeps its first score, so that equal texts of a post are judged alike."""
        self.scores: dict[tuple[str, str], float] = {}
        for row in rows:
            self.scores.setdefault((row["id"], row["summary"]), row["score"])
            self.scores.setdefault((row["id"], row["reference"]), row["reference_score"])

    def reply(self, comparison: Comparison) -> Reply:
        """The higher score wins, equal scores tie; a score that is not a number judges nothing."""
        texts = (comparison.first, comparison.second)
        scores = [self.scores[comparison.post_id, text] for text in texts]
        text = f"[reward model of this run, not an LLM] A {scores[0]:.4f}, B {scores[1]:.4f}"
        return Reply(choice=higher(*scores), text=text)


def higher(first: float, second: float) -> Choice | None:
    """A or B by the higher number; None where one is not a number."""
    if first == second:
        return "tie"
    return "A" if first > second else "B" if first < second else None
