"""What a page says of a run: a few sentences to open with, and what to hold against its numbers.

They are made from a row of `reports.parts.collect` and nothing else. They say bad news as plainly
as good news. `row["policy"]` is the policy that learned by policy gradient.
"""

from collections.abc import Iterable, Mapping, Sequence

from eval.rates.table import leaning
from reports.parts import doubts, paper
from reports.parts.blocks import Block, Heading, Note, Text
from reports.parts.words import (
    Row,
    above_sft,
    at_equal_length,
    briefly,
    direction,
    estimate,
    named,
    percent,
    whole,
)
from stages.settings.judge import MOST_UNJUDGED
from stages.settings.judge_models import family_of_model
from stages.settings.ppo import MANY_BELOW

FEW_END = 0.9  # of a policy's summaries
MANY_SPECIAL = 0.05  # of a policy's summaries
NO_GUESS = 0.5  # what a coin would get
NO_LLM = "Not an LLM"  # in bold, once a page
COUNTS = ("wins", "ties", "losses")
MOST_REASONS = 4  # of a first screen; the others stand below it


def lead(*sentences: str) -> Text:
    """The paragraph that answers the page's question."""
    text = " ".join(filter(None, sentences))
    return Text(text, lead=True, bold=NO_LLM if NO_LLM in text else "")


def against(notes: Iterable[str]) -> list[Block]:
    """The section of what to hold against a page's numbers; none without any."""
    blocks = [Note(note) for note in dict.fromkeys(notes)]
    return [Heading("What to hold against it"), *blocks] if blocks else []


def distrust(rows: Sequence[Row], *reasons: str) -> str:
    """What to distrust, in a few words: who judged some runs, then the page's own reasons."""
    first = [*_of_judges(rows), *doubts.briefly(rows), *filter(None, reasons)]
    if any(not row.get("real_posts", True) for row in rows):
        first.append("toy world")
    if any(not row.get("pretrained", True) for row in rows):
        first.append("no pretraining")
    return f"Caveats: {'; '.join(first[:MOST_REASONS])}." if first else ""


def _of_judges(rows: Sequence[Row]) -> list[str]:
    """That a judge failed its checks, and who judged."""
    judges = {
        kind: ", ".join(
            dict.fromkeys(briefly(row["judge"]) for row in rows if row["is_llm"] is kind)
        )
        for kind in (False, True)
    }
    reasons = ["the judge FAILED ITS CHECKS"] if any(row.get("judge_flags") for row in rows) else []
    reasons += [f"{NO_LLM} judged ({judges[False]})"] if judges[False] else []
    return reasons + ([f"judge {judges[True]}"] if judges[True] else [])


def opening(row: Row) -> list[str]:
    """The sentences that a page begins with: who won, beside SFT, at equal length, and caveats."""
    policy = row["policy"]
    if too_many_unjudged(row):
        return ["Too many comparisons had no verdict for a conclusion; see below.", _caveat(row)]
    won, tied, lost = (whole(row[f"{policy}/{key}"]) for key in COUNTS)
    of_sft = ", ".join(str(whole(row[f"sft/{key}"])) for key in COUNTS)
    counts = (
        f"Of {whole(row['posts'])} held-out posts {named(policy)}'s summary won {won}, tied {tied},"
        f" lost {lost} against the reference, SFT's {of_sft}."
    )
    rates = ", ".join(f"{named(name)} {_at_length(row, name)}" for name in (policy, "sft"))
    stands = f"{_stands(row)}; {beats_sft(row)}."
    return [counts, stands, f"At equal length: {rates}.", _caveat(row)]


def _stands(row: Row) -> str:
    """How the policy stands against the references, as far as the posts tell."""
    policy = row["policy"]
    if row[f"{policy}/low"] > NO_GUESS:
        return "It BEATS the references"
    if row[f"{policy}/high"] < NO_GUESS:
        return "It does NOT reach the references"
    return "Against the references it is INCONCLUSIVE"


def _at_length(row: Row, policy: str) -> str:
    """A policy's win rate at equal length."""
    rate = row[f"{policy}/statistics"]["length_controlled"]
    return str(at_equal_length(rate)) if rate["estimate"] is not None else "not known"


def _caveat(row: Row) -> str:
    right, chance = percent(row["accuracy"]), "not shown to be better than"
    chance = "WORSE than" if row["accuracy_high"] < NO_GUESS else chance
    guess = f"reward model {chance} chance ({right})" if row["accuracy_low"] <= NO_GUESS else ""
    return distrust([row], guess, "one seed")


def beats_sft(row: Row) -> str:
    """Whether the policy improved on SFT, as far as the posts tell."""
    name = named(row["policy"])
    if row["difference"] is None:
        return f"{name} and SFT cannot be compared: too many comparisons had no verdict"
    if row["difference_low"] > 0:
        return f"{name} beats SFT: {above_sft(row)}"
    if row["difference_high"] < 0:
        return f"{name} is WORSE than SFT: {above_sft(row)}"
    return f"{name} did not significantly beat SFT: {above_sft(row)}"


def what_was_trained(row: Row) -> str:
    """Model, data and episodes, in one sentence."""
    model = row["checkpoint"] if row["pretrained"] else "a GPT-NeoX that was never pretrained"
    count = row["parameters"] / 1e6
    size = f"{count:.1f} million" if count < 1000 else f"{count / 1000:.2f} billion"
    data = "real posts" if row["real_posts"] else "the built-in toy world"
    return (
        f"We fine-tuned {model} ({size} parameters) on {whole(row['sft_rows'])} reference summaries"
        f" of {data}, trained a reward model on {whole(row['comparisons'])} comparisons"
        f" (it gets {percent(row['accuracy'])} of {whole(row['pairs'])} held-out pairs right), and"
        f" optimised the summariser against it with {named(row['policy'])} for"
        f" {whole(row['episodes'])} episodes."
    )


# -- what to hold against the numbers --------------------------------------------------------------


def caveats(row: Row) -> list[str]:
    """What to hold against the numbers, most important first."""
    notes = [judge_flags(row), *doubts.notes(row), judge_note(row), _pretraining_note(row)]
    ended = {
        named(policy, row["policies"]): row.get(f"{policy}/eos_rate") for policy in row["policies"]
    }
    notes += [*unjudged(row), *unshown(row), *cut_off(ended)]
    notes += [*notes_of_systems(_systems(row)), *critic_notes([row])]
    notes += _signs(row)
    return [note for note in notes if note]


def judged_caveats(row: Row) -> list[str]:
    """Those of them that are about the judge and its verdicts, not about training."""
    notes = [judge_flags(row), *doubts.notes(row), judge_note(row), *unjudged(row), *unshown(row)]
    return [note for note in [*notes, *notes_of_systems(_systems(row))] if note]


def judge_flags(row: Row) -> str | None:
    """The warning about a judge that failed its checks, for every page that uses it."""
    return (
        checks_of_judge("THE JUDGE", row["judge_flags"], row.get("judge_undecided") or []) or None
    )


def checks_of_judge(who: str, flags: Sequence[str], undecided: Sequence[str]) -> str:
    """What a judge's checks say against it, and what they cannot say; empty without either."""
    failed = f"{who} FAILED ITS CHECKS: {'; '.join(flags)}." if flags else ""
    open_checks = (
        f"{who} has neither passed nor failed {'; '.join(undecided)}." if undecided else ""
    )
    return " ".join(filter(None, (failed, open_checks)))


def judge_note(row: Row) -> str | None:
    """The caveat of a judge that is no language model, or of the policy's own family."""
    if row["is_llm"]:
        return of_one_maker(row)
    note = "Win rates by this judge do not compare with those of an LLM."
    if row["judge_note"]:
        note += f" It is: {row['judge_note'].replace(', not an LLM', '', 1)}."
    if row["judge_kind"] == "reward_model":
        name = named(row["policy"]) or "PPO"
        note += f" If {name} wins, it optimised its reward. No person was asked."
    if row["judge_kind"] == "gold_reward_model":
        note += (
            " It learned from labels, so it can share mistakes with every policy that learned from"
            " such labels."
        )
    return note


def of_one_maker(row: Row) -> str | None:
    """The caveat of an LLM judge whose maker made a policy's model, too."""
    maker = family_of_model(row["judge"])
    models = [row.get("checkpoint"), row.get("released_policy"), *row["policies"]]
    if not maker or maker not in {family_of_model(name) for name in models if name}:
        return None
    return (
        f"The judge and a policy's model are both by {maker}: judges lean to texts of their own"
        " family (Panickssery et al. 2024). Ask a judge of another maker, too."
    )


def notes_of_judges(rows: list[Row]) -> list[str]:
    """The warnings and notes about the judges of several runs, each once."""
    notes = [note(row) for note in (judge_flags, judge_note) for row in rows]
    return list(dict.fromkeys(note for note in notes if note))


def notes_of_runs(rows: list[Row], critics: Sequence[Row] | None = None) -> list[str]:
    """What to hold against a comparison of runs: their judges, and PPO's critic.

    `critics`: the rows whose critics count; all where None.
    """
    unlike = ["The runs were not judged alike: judge or number of posts differ."]
    alike = len({(row["judge"], row["posts"]) for row in rows}) < 2
    critic = critic_notes(rows if critics is None else critics)
    data = dict.fromkeys(note for row in rows for note in doubts.notes(row))
    return [*notes_of_judges(rows), *data, *([] if alike else unlike), *critic]


def critic_notes(rows: Sequence[Row]) -> list[str]:
    """A note where PPO's critic explained less of the returns than a constant would.

    `name` and `explained_by_critic` of each row are read; several names are told apart.
    """
    names = dict.fromkeys(row["name"] for row in rows)
    parts = []
    for name in names:
        seeds = [row["explained_by_critic"] for row in rows if row["name"] == name]
        below = [seed for seed in seeds if seed and seed["below"]]
        if below:
            updates = sum(seed["updates"] for seed in seeds if seed)
            low, high = min(seed["low"] for seed in below), max(seed["high"] for seed in below)
            whose = f" of {name}" if len(names) > 1 else ""
            ends = " to ".join(dict.fromkeys(f"{value:.2g}" for value in (low, high)))
            parts.append(
                f"{whole(sum(seed['below'] for seed in below))} of {whole(updates)} updates{whose}"
                f" (explained variance {ends})"
            )
    return [f"The critic explained less than a constant in {'; '.join(parts)}."] if parts else []


def too_many_unjudged(row: Row) -> bool:
    """Whether the posts without a verdict forbid a conclusion."""
    return any(row[f"{policy}/unjudged"] > MOST_UNJUDGED for policy in row["policies"])


def unjudged(row: Row) -> list[str]:
    """A line for each policy that has posts without a verdict, with the worst-case bound."""
    no_rate = f" That is more than {percent(MOST_UNJUDGED)}, so no win rate is given."
    return [
        f"{named(policy, row['policies'])}: {percent(row[f'{policy}/unjudged'])} of the posts have"
        f" no verdict. Had they all gone one way, its win rate would lie between"
        f" {percent(row[f'{policy}/worst_low'])} and {percent(row[f'{policy}/worst_high'])}."
        f"{no_rate if row[f'{policy}/unjudged'] > MOST_UNJUDGED else ''}"
        for policy in row["policies"]
        if row[f"{policy}/unjudged"]
    ]


def unshown(row: Row) -> list[str]:
    """A line for each policy that writes special tokens beside the EOS."""
    shares = {policy: row.get(f"{policy}/special_tokens") or 0.0 for policy in row["policies"]}
    return [
        f"{percent(share)} of {named(policy, row['policies'])}'s summaries hold special tokens"
        " beside the EOS: the reward model scores them, and the judge does not see them."
        for policy, share in shares.items()
        if share > MANY_SPECIAL
    ]


def cut_off(shares: Mapping[str, float | None]) -> list[str]:
    """A line for each policy of whose summaries many do not end by themselves.

    `shares`: of those that do, by the policy's name on the page.
    """
    return [
        f"Only {percent(share)} of {policy}'s summaries end by themselves; the others are cut off."
        for policy, share in shares.items()
        if share is not None and share < FEW_END
    ]


def _systems(row: Row) -> dict[str, Row]:
    """Each policy's lower bound and statistics, by the name that pages write."""
    return {
        named(policy, row["policies"]): {
            key: row[f"{policy}/{key}"] for key in ("low", "statistics")
        }
        for policy in row["policies"]
    }


def notes_of_systems(systems: Mapping[str, Row]) -> list[str]:
    """What length and place have to do with some systems' rates; `low` is None without a rate.

    A line for each system whose lead over the references is gone at equal length, and one if the
    judge's choices depend on which text is shown first.
    """
    notes = []
    for name, system in systems.items():
        at_length = system["statistics"]["length_controlled"]
        leads = system["low"] is not None and system["low"] > NO_GUESS
        if leads and at_length["estimate"] is not None and at_length["low"] <= NO_GUESS:
            notes.append(
                f"{name}'s lead over the references is not shown at equal"
                f" length: {at_equal_length(at_length)}."
            )
    shares = {name: system["statistics"]["share_first"] for name, system in systems.items()}
    leaned = leaning(shares)
    if leaned:
        most = max(leaned, key=lambda name: abs(shares[name]["estimate"] - NO_GUESS))
        notes.append(
            f"The judge's choices depend on the place: of those about {most} it picks the text"
            f" shown first in {estimate(shares[most])}. Both orders are asked, so this blurs the"
            " rates more than it moves them."
        )
    return notes


def _pretraining_note(row: Row) -> str | None:
    apart = (
        "The paper's numbers are not comparable with this run: neither its model nor its judge is"
    )
    if row["pretrained"]:
        return None if paper.is_comparable(row["preset"]) else f"{apart} the paper's."
    if row["real_posts"]:
        return (
            "The model was NEVER PRETRAINED: it met English only in these few posts, and its"
            " summaries are poor. This run shows that every stage works on real posts with the"
            " real tokenizer; it says nothing about how good RLHF can be."
        )
    return (
        "The posts come from the built-in toy world, made so that a small model without"
        " pretraining can learn the whole pipeline in minutes. The paper's numbers are not"
        " comparable with this run."
    )


def _signs(row: Row) -> list[str]:
    """Known signs of trouble, if the numbers show them."""
    policy, signs = row["policy"], []
    if row["accuracy_low"] <= NO_GUESS:
        signs.append(doubts.chance(row))
    fell = row["difference"] is not None and row["difference_high"] < 0
    if fell and direction(row["score_gain"]) == "rose":
        signs.append(
            f"The reward model's score rose while the win rate fell: {named(policy)} over-optimised"
            " its reward."
        )
    if row[f"{policy}/eos_rate"] < FEW_END:
        below = row.get(f"{policy}/below_penalty")
        if below is not None and below > MANY_BELOW:
            signs.append(
                f"{percent(below)} of SFT's samples end and score below what a missing EOS is"
                " given: for such posts the EOS trick rewards not to end."
            )
    return signs
