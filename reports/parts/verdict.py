"""Numbers in plain words: how a report writes a rate, and what it says of a run.

The sentences are made from a row of `reports.parts.collect` and nothing else. They say bad news as
plainly as good news.
"""

import json
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any

from eval.rates.formulas import wilson
from eval.rates.table import MOST_UNJUDGED, leans
from stages.settings.config import public_value
from stages.settings.judge import READ_BY, Judge

Row = dict[str, Any]
MISSING = "–"
STRENGTH = "strength of the label"  # 1 slightly better, 4 far better
NO_GUESS = 0.5  # what a coin would get
OURS = ("sft", "ppo", "dpo", "released")  # written in capitals; others' systems as they are


def percent(share: float | None) -> str:
    """A fraction as a percentage with one digit."""
    return MISSING if share is None or isnan(share) else f"{100 * share:.1f}%"


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point."""
    if value is None or isnan(value):
        return MISSING
    return f"{round(value, digits) + 0.0:,.{digits}f}"  # never -0.0


def whole(value: float | None) -> str:
    """A count."""
    return number(value, 0)


def named(policy: str, others: Iterable[str] = ()) -> str:
    """A policy as a page writes it: ours in capitals, unless one of the others is called so."""
    capitals = policy.upper()
    return capitals if policy in OURS and capitals not in others else policy


def posts_of(count: float) -> str:
    """A count of posts."""
    return f"{whole(count)} post{'' if count == 1 else 's'}"


def interval(low: float, high: float) -> str:
    """A 95% interval of fractions, in percent."""
    return f"[{100 * low:.1f}, {100 * high:.1f}]"


def counted(results: dict[str, Any]) -> str:
    """The `accuracy` of some `pairs`, with Wilson's 95% interval."""
    inside = interval(*wilson(results["accuracy"] * results["pairs"], results["pairs"]))
    return f"{percent(results['accuracy'])} {inside}"


def estimate(rate: dict[str, Any] | None) -> str:
    """A rate with its interval, from an `estimate`, a `low` and a `high`; a dash for None."""
    if rate is None or rate["estimate"] is None:
        return MISSING
    return f"{percent(rate['estimate'])} {interval(rate['low'], rate['high'])}"


def at_equal_length(rate: dict[str, Any] | None) -> str:
    """`estimate` of a rate at equal length, marked where the model answers and not the data."""
    text = estimate(rate)
    marked = rate is not None and text != MISSING and rate.get("extrapolated", False)
    return f"{text} EXTRAPOLATED" if marked else text


def clipped(rate: dict[str, Any] | None) -> str:
    """A mark on a corrected rate that lies at the edge of what a share can be."""
    if rate is None or rate["estimate"] not in (0.0, 1.0):
        return ""
    return f"CLIPPED at {percent(rate['estimate'])}: the correction goes beyond it"


def turned_by_length(statistics: dict[str, Any]) -> str:
    """Why the rate at equal length lies on the other side of even than the raw one, if it does."""
    raw, equal = (statistics[key]["estimate"] for key in ("raw", "length_controlled"))
    if equal is None or (raw - NO_GUESS) * (equal - NO_GUESS) >= 0:
        return ""
    ratio = statistics.get("median_other_ratio")  # none in an older run
    words = f" (these have a median of {number(ratio)} times the words)" if ratio else ""
    return (
        f" It lies on the other side of 50% than the raw rate, {percent(raw)}: the model puts the"
        f" {'lead' if raw > NO_GUESS else 'deficit'} down to posts whose two texts differ in"
        f" length{words}. A summary that leaves out what matters is shorter, too, so this does not"
        " make it the better one."
    )


def kappa(rate: dict[str, Any] | None) -> str:
    """A kappa with its interval; a dash for None.

    Where all answers of one are alike it is 0 by construction, and has no interval.
    """
    if rate is None:
        return MISSING
    if rate["low"] == rate["high"]:
        return number(rate["estimate"])
    return "{} [{}, {}]".format(*(number(rate[key]) for key in ("estimate", "low", "high")))


def rate(row: Row, policy: str) -> str:
    """A policy's win rate with its interval; a dash if too many posts are unjudged."""
    share, low, high = (row[f"{policy}/{key}"] for key in ("win_rate", "low", "high"))
    if share is None or isnan(share):  # nan: from a table of runs
        return f"{MISSING} ({percent(row[f'{policy}/unjudged'])} unjudged)"
    return f"{percent(share)} {interval(low, high)}"


def p_value(value: float | None) -> str:
    """A p-value as papers write it."""
    if value is None:
        return MISSING
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def points(row: Row) -> str:
    """By how many points PPO's win rate lies above SFT's, with the interval."""
    return difference(row["differences"]["ppo-sft"])


def difference(gap: dict[str, Any]) -> str:
    """A paired difference of two win rates, in points; a dash if too much is unjudged."""
    if not gap["headline"]:
        return f"{MISSING} (too many unjudged)"
    middle, low, high = (100 * gap[key] for key in ("estimate", "low", "high"))
    return f"{middle:+.1f} points [{low:+.1f}, {high:+.1f}]"


def shown(name: str, value: Any) -> str:
    """A setting as a page may show it: folders by their last name, servers not at all."""
    value = public_value(name, value)
    return value or "(empty)" if isinstance(value, str) else json.dumps(value)


def judge(row: Row) -> str:
    """Who judged; says so if that is not a language model."""
    name: str = row["judge"]
    return name if row["is_llm"] or "not an llm" in name.lower() else f"{name} (not an LLM)"


def briefly(name: str) -> str:
    """A judge's name for a sentence that says itself whether it is an LLM."""
    return name.removesuffix(", not an LLM").removesuffix(" (offline rule, not an LLM)")


def told_apart(names: Sequence[str], judges: Sequence[Judge]) -> list[str]:
    """The names of some judges; where two share one, with the settings in which they differ.

    Where these are not shown, as of two servers, the name of the judge's folder takes their place.
    """
    labels = []
    for name, judge in zip(names, judges, strict=True):
        own = _read(judge)
        others = [_read(j) for its, j in zip(names, judges, strict=True) if its == name]
        differ = [key for key in own if any(o.get(key, own[key]) != own[key] for o in others)]
        settings = [f"{key}={shown(f'judge.{key}', own[key])}" for key in differ]
        labels.append(f"{name} ({', '.join(settings)})" if settings else name)
    return [
        label if labels.count(label) == 1 else judge.folder
        for label, judge in zip(labels, judges, strict=True)
    ]


def _read(judge: Judge) -> dict[str, Any]:
    """The settings that a judge's verdicts depend on."""
    return {key: getattr(judge, key) for key in ("kind", *READ_BY[judge.kind], "axis")}


def judge_note(row: Row) -> str | None:
    """The caveat of a judge that is not a language model."""
    if row["is_llm"]:
        return None
    note = "The judge is NOT an LLM, so its win rates do not compare with those of one."
    if row["judge_note"]:
        note += f" It is: {row['judge_note']}."
    if row["judge_kind"] == "reward_model":
        note += " If PPO wins, it optimised its reward; whether people would agree, nobody asked."
    if row["judge_kind"] == "gold_reward_model":
        note += (
            " It learned from labels, so it can share mistakes with every policy that learned from"
            " such labels."
        )
    return note


def beats_sft(row: Row) -> str:
    """Whether PPO improved on SFT, as far as the posts tell."""
    if row["difference"] is None:
        return "PPO and SFT cannot be compared: too many comparisons had no verdict"
    if row["difference_low"] > 0:
        return f"PPO beats SFT: {points(row)}"
    if row["difference_high"] < 0:
        return f"PPO is WORSE than SFT: {points(row)}"
    return f"PPO did not significantly beat SFT: {points(row)}, which includes no change"


def what_was_trained(row: Row) -> str:
    """Model, data and episodes, in one sentence."""
    model = row["checkpoint"] if row["pretrained"] else "a GPT-NeoX that was never pretrained"
    count = row["parameters"] / 1e6
    size = f"{count:.1f} million" if count < 1000 else f"{count / 1000:.2f} billion"
    data = "real Reddit posts" if row["real_posts"] else "the built-in toy world"
    return (
        f"We fine-tuned {model} ({size} parameters) on {whole(row['sft_rows'])} reference summaries"
        f" of {data}, trained a reward model on {whole(row['comparisons'])} comparisons"
        f" (it gets {percent(row['accuracy'])} of {whole(row['pairs'])} held-out pairs right), and"
        f" optimised the summariser against it with PPO for {whole(row['episodes'])} episodes."
    )


def too_many_unjudged(row: Row) -> bool:
    """Whether the posts without a verdict forbid a conclusion."""
    return any(row[f"{policy}/unjudged"] > MOST_UNJUDGED for policy in row["policies"])


def unjudged(row: Row) -> list[str]:
    """A line for each policy that has posts without a verdict, with the worst-case bound."""
    return [
        f"{named(policy, row['policies'])}: {percent(row[f'{policy}/unjudged'])} of the posts have"
        f" no verdict. Had they all gone one way, its win rate would lie between"
        f" {percent(row[f'{policy}/worst_low'])} and {percent(row[f'{policy}/worst_high'])}."
        f"{_no_headline(row[f'{policy}/unjudged'])}"
        for policy in row["policies"]
        if row[f"{policy}/unjudged"]
    ]


def _no_headline(share: float) -> str:
    more = f" That is more than {percent(MOST_UNJUDGED)}, so no win rate is given."
    return more if share > MOST_UNJUDGED else ""


def judge_flags(row: Row) -> str | None:
    """The warning about a judge that failed its checks, for every page that uses it."""
    if not row["judge_flags"]:
        return None
    return f"THE JUDGE FAILED ITS CHECKS: {'; '.join(row['judge_flags'])}."


def caveats(row: Row) -> list[str]:
    """What to hold against the numbers, most important first."""
    notes = [judge_flags(row), judge_note(row), _pretraining_note(row), *unjudged(row)]
    notes += [*_length_notes(row), _place_note(row)]
    return [note for note in [*notes, _sft_note(row), *_signs(row)] if note]


def judged_caveats(row: Row) -> list[str]:
    """Those of them that are about the judge and its verdicts, not about training."""
    notes = [judge_flags(row), judge_note(row), *unjudged(row), *_length_notes(row)]
    return [note for note in [*notes, _place_note(row)] if note]


def _length_notes(row: Row) -> list[str]:
    """A line for each policy whose lead over the references is gone at equal length."""
    notes = []
    for policy in row["policies"]:
        at_length = row[f"{policy}/statistics"]["length_controlled"]
        leads = row[f"{policy}/low"] is not None and row[f"{policy}/low"] > NO_GUESS
        if leads and at_length["estimate"] is not None and at_length["low"] <= NO_GUESS:
            notes.append(
                f"{named(policy, row['policies'])}'s lead over the references is not shown at equal"
                f" length: {at_equal_length(at_length)}."
            )
    return notes


def _place_note(row: Row) -> str | None:
    """A warning if the judge's choices depend on which text is shown first."""
    shares = [row[f"{policy}/statistics"]["share_first"] for policy in row["policies"]]
    leaning = [share for share in shares if share and leans(share)]
    if not leaning:
        return None
    most = max(leaning, key=lambda share: abs(share["estimate"] - NO_GUESS))
    return (
        f"The judge's choices depend on the place: it picks the text shown first in"
        f" {estimate(most)} of its choices. Both orders are asked, so this blurs the rates more"
        " than it moves them."
    )


def _pretraining_note(row: Row) -> str | None:
    if row["pretrained"]:
        return None
    if row["real_posts"]:
        return (
            "The model was NEVER PRETRAINED: it met English only in these few posts, and its"
            " summaries are poor. This run shows that every stage works on real posts with the"
            " real tokenizer; it says nothing about how good RLHF can be."
        )
    return (
        "The posts come from the built-in toy world, made so that a small model without"
        " pretraining can learn the whole pipeline in minutes. The numbers are not comparable"
        " with the paper's."
    )


def _sft_note(row: Row) -> str | None:
    if row["difference"] is None or row["difference_low"] > 0:
        return None
    if row["difference_high"] < 0:
        return "By this judge, PPO made the summaries WORSE than supervised fine-tuning did."
    return "By this judge, PPO bought nothing over supervised fine-tuning in this run."


def _signs(row: Row) -> list[str]:
    """Known signs of trouble, if the numbers show them."""
    signs = []
    if row["accuracy_low"] <= NO_GUESS:
        signs.append(
            f"The reward model is not better than chance ({percent(row['accuracy'])}"
            f" {interval(row['accuracy_low'], row['accuracy_high'])}): PPO had nothing to learn."
        )
    known = row["difference"] is not None
    if known and row["ppo/score"] > row["sft/score"] and row["difference_high"] < 0:
        signs.append(
            "The reward model's score rose while the win rate fell: PPO over-optimised its reward."
        )
    if row["ppo/eos_rate"] < 0.9:
        signs.append(
            f"Only {percent(row['ppo/eos_rate'])} of PPO's summaries end by themselves; the others"
            f" are cut at {row['max_tokens']} tokens."
        )
    return signs
