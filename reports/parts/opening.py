"""What a reader of a run's page sees first: four sentences with the numbers.

Who judged, who won, whether by length, and what to hold against it. They are made from a row of
`reports.parts.collect`, as the sentences of `reports.parts.verdict` are.
"""

from typing import Any

from reports.parts.verdict import (
    NO_GUESS,
    at_equal_length,
    beats_sft,
    judge,
    number,
    percent,
    rate,
    too_many_unjudged,
    whole,
)

Row = dict[str, Any]


def sentences(row: Row) -> list[str]:
    """The four sentences: judge, win, length, caveat."""
    return [_judged(row), _won(row), _length(row), _caveat(row)]


def _judged(row: Row) -> str:
    return (
        f"The judge, {judge(row)}, compared the summaries of {whole(row['posts'])} held-out posts"
        f" with the references, in both orders."
    )


def _won(row: Row) -> str:
    if too_many_unjudged(row):
        return "Too many comparisons had no verdict for a conclusion; see below."
    rates = f"preferred on {rate(row, 'ppo')} of the posts, SFT on {rate(row, 'sft')}"
    return f"{stands(row)}: {rates}; {beats_sft(row)}."


def stands(row: Row) -> str:
    """How PPO stands against the references, as far as the posts tell."""
    if row["ppo/low"] > NO_GUESS:
        return "PPO BEATS the references"
    if row["ppo/high"] < NO_GUESS:
        return "PPO does NOT reach the references"
    return "PPO CANNOT be told from the references"


def _length(row: Row) -> str:
    tokens, theirs = row["ppo/tokens"], row["reference/tokens"]
    lengths = f"PPO writes {number(tokens, 1)} tokens where the references have {number(theirs, 1)}"
    at_length = row["ppo/statistics"]["length_controlled"]
    if too_many_unjudged(row) or at_length["estimate"] is None:
        return f"{lengths}; no rate at equal length can be given."
    return f"{lengths}; at equal length it would be preferred on {at_equal_length(at_length)}."


def _caveat(row: Row) -> str:
    reasons = [
        (bool(row["judge_flags"]), "the judge failed its checks"),
        (not row["is_llm"], "the judge is not an LLM"),
        (not row["pretrained"], "the model was never pretrained"),
        (not row["real_posts"], "the posts are those of the built-in toy world"),
        (
            row["accuracy_low"] <= NO_GUESS,
            f"the reward model is no better than chance ({percent(row['accuracy'])})",
        ),
    ]
    applying = [text for applies, text in reasons if applies]
    applying.append("this is one seed, and another can differ by more than the intervals")
    return f"Mind that {'; '.join(applying)}."
