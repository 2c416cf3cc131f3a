"""What a page says of a run: a verdict to open with, and what to hold against its numbers.

They are made from a row of `reports.parts.collect` and nothing else. They say bad news as plainly
as good news. `row["policy"]` is the policy that learned by policy gradient.
"""

from collections.abc import Iterable, Mapping, Sequence

from eval.scores import START
from eval.stats.table import leaning
from reports.parts import doubts, paper
from reports.parts.blocks import Block, Caveats, Heading, Text
from reports.parts.words import (
    Row,
    above_sft,
    accuracy,
    at_equal_length,
    briefly,
    direction,
    estimate,
    named,
    percent,
    rate,
    side,
    whole,
)
from stages.config.judge import MOST_UNJUDGED
from stages.config.judge_models import family_of_model
from stages.config.ppo import MANY_BELOW

FEW_END = 0.9  # of a policy's summaries
MANY_SPECIAL = 0.05  # of a policy's summaries
NO_GUESS = 0.5  # what a coin would get
MOST_REASONS = 4  # of a first screen; the others stand below it


def lead(*sentences: str) -> Text:
    """The paragraph that answers the page's question."""
    return Text(" ".join(filter(None, sentences)), lead=True)


def against(notes: Iterable[str]) -> list[Block]:
    """The section of what to hold against a page's numbers; none without any."""
    texts = [*dict.fromkeys(notes)]
    return [Heading("What to hold against it"), Caveats(texts)] if texts else []


def distrust(rows: Sequence[Row], *reasons: str) -> str:
    """What to distrust, in a few words: who judged some runs, then the page's own reasons."""
    first = ["the judge FAILED ITS CHECKS"] if any(row.get("judge_flags") for row in rows) else []
    for is_llm in (False, True):
        judges = {briefly(row["judge"]): None for row in rows if row["is_llm"] is is_llm}
        names = ", ".join(judges)
        first += [f"judge {names}" if is_llm else f"Not an LLM judged ({names})"] if judges else []
    counted = [row["data"] for row in rows if row.get("data")]
    for what in ("posts", "pairs"):
        most = max((data[what] / max(1, data[f"of_{what}"]) for data in counted), default=0.0)
        learned = f"{percent(most)} of the held-out {what} were LEARNED"
        first += [learned] if most > doubts.SMALL else []
    first += filter(None, reasons)
    first += ["toy world"] if any(not row.get("real_posts", True) for row in rows) else []
    first += ["no pretraining"] if any(not row.get("pretrained", True) for row in rows) else []
    return f"Caveats: {'; '.join(first[:MOST_REASONS])}." if first else ""


def opening(row: Row) -> Text:
    """What a run's page begins with: how the policy stands to the references and to SFT."""
    policy = row["policy"]
    by_chance = row["pairs"] and row["accuracy_low"] <= NO_GUESS
    guess = f"reward model not shown to beat chance ({percent(row['accuracy'])})"
    caveat = distrust([row], guess if by_chance else "", "one seed")
    if any(row[f"{name}/unjudged"] > MOST_UNJUDGED for name in row["policies"]):
        return lead("Too many comparisons had no verdict for a conclusion; see below.", caveat)
    stands = {1: "BEATS", -1: "does NOT reach", 0: "is INCONCLUSIVE against"}
    place = side(row[f"{policy}/low"], row[f"{policy}/high"], NO_GUESS)
    verdict = f"{named(policy)} {stands[place]} the references: {rate(row, policy)}."
    return lead(verdict, f"{beats_sft(row)}.", caveat)


def wins_of(row: Row) -> str:
    """How often the policy that learned, and SFT, win against the references; of a page about
    others' policies how often each of them does. What a run's page is called.
    """
    policies = [row["policy"], START] if row["policy"] else row["policies"]
    rated = [policy for policy in policies if row.get(f"{policy}/win_rate") is not None]
    if not rated:
        return "too many comparisons had no verdict"
    names = [named(policy, row["policies"]) for policy in rated]
    rates = [str(percent(row[f"{policy}/win_rate"])) for policy in rated]
    others = (f"{name} {rate_}" for name, rate_ in zip(names[1:], rates[1:], strict=True))
    return ", ".join([f"{names[0]} wins {rates[0]} against the references", *others])


def beats_sft(row: Row) -> str:
    """Whether the policy improved on SFT, as far as the posts tell."""
    name = named(row["policy"])
    if row["difference"] is None:
        return f"{name} and SFT cannot be compared: too many comparisons had no verdict"
    stands = {1: "beats", -1: "is WORSE than", 0: "did not significantly beat"}
    place = side(row["difference_low"], row["difference_high"])
    return f"{name} {stands[place]} SFT: {above_sft(row)}"


def what_was_trained(row: Row) -> str:
    """Model, data and episodes, in one sentence."""
    model = row["checkpoint"] if row["pretrained"] else "a GPT-NeoX that was never pretrained"
    data = "real posts" if row["real_posts"] else "the built-in toy world"
    reward = f"trained a reward model on {whole(row['comparisons'])} comparisons"
    if row["taken"]:
        reward = f"took {row['taken']} for the reward"
    return (
        f"We fine-tuned {model} ({row['parameters'] / 1e6:,.1f} million parameters) on"
        f" {whole(row['sft_rows'])} reference summaries of {data}, {reward}, and optimised the"
        f" summariser against it with {named(row['policy'])} for {whole(row['episodes'])} episodes."
    )


# -- what to hold against the numbers --------------------------------------------------------------


def caveats(row: Row) -> list[str]:
    """What to hold against the numbers, most important first.

    Where nothing was trained, what is known of the judge and the texts.
    """
    trained, names = "accuracy" in row, row["policies"]
    ended = {named(policy, names): row.get(f"{policy}/eos_rate") for policy in names}
    notes = [judge_flags(row), *doubts.notes(row), judge_note(row)]
    notes += [_pretraining_note(row) if trained else None]
    notes += [*unjudged(row), *unshown(row), *cut_off(ended), *_length_and_place(row)]
    notes += [*critic_notes([row]), *_signs(row)] if trained else []
    return [note for note in notes if note]


def judge_flags(row: Row) -> str | None:
    """The warning about a judge that failed its checks, for every page that uses it."""
    flags, undecided = row["judge_flags"], row.get("judge_undecided") or []
    return checks_of_judge("THE JUDGE", flags, undecided) or None


def checks_of_judge(who: str, flags: Sequence[str], undecided: Sequence[str]) -> str:
    """What a judge's checks say against it, and what they cannot say; empty without either."""
    failed = [f"{who} FAILED ITS CHECKS: {'; '.join(flags)}."] if flags else []
    unsure = f"{who} has neither passed nor failed {'; '.join(undecided)}."
    return " ".join([*failed, *([unsure] if undecided else [])])


def judge_note(row: Row) -> str | None:
    """The caveat of a judge that is no language model, or of the policy's own family."""
    if row["is_llm"]:
        return _of_one_maker(row)
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


def _of_one_maker(row: Row) -> str | None:
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
    """Warnings and notes about the judges of several runs, each once, none part of another."""
    notes = dict.fromkeys(note(row) or "" for note in (judge_flags, judge_note) for row in rows)
    return [note for note in notes if note and sum(x.startswith(note[:-1]) for x in notes) == 1]


def notes_of_runs(rows: list[Row]) -> list[str]:
    """What to hold against a comparison of runs: their judges, their data, and PPO's critic."""
    unlike = ["The runs were not judged alike: judge or number of posts differ."]
    alike = len({(row["judge"], row["posts"]) for row in rows}) < 2
    data = dict.fromkeys(note for row in rows for note in doubts.notes(row))
    return [*notes_of_judges(rows), *data, *([] if alike else unlike), *critic_notes(rows)]


def critic_notes(rows: Sequence[Row]) -> list[str]:
    """A note where PPO's critic explained less of the returns than a constant would."""
    updates: dict[str, list[int]] = {}
    for row in rows:
        if critic := row["explained_by_critic"]:
            sums = updates.get(row["name"], [0, 0, 0])
            seed = [critic[key] for key in ("below", "updates", "used")]
            updates[row["name"]] = [sum(pair) for pair in zip(sums, seed, strict=True)]
    parts = [
        f"{whole(below)} of {whole(count)} updates of {name}"
        + (f", which used it in {whole(used)}" if used < count else "")
        for name, (below, count, used) in updates.items()
        if below
    ]
    return [f"The critic explained less than a constant in {'; '.join(parts)}."] if parts else []


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


def _length_and_place(row: Row) -> list[str]:
    """A line for each policy whose lead over the references is gone at equal length, and one if the
    judge's choices depend on which text is shown first.
    """
    notes, shares = [], {}
    for policy in row["policies"]:
        name, statistics = named(policy, row["policies"]), row[f"{policy}/statistics"]
        shares[name], at_length = statistics["share_first"], statistics["length_controlled"]
        leads = row[f"{policy}/low"] is not None and row[f"{policy}/low"] > NO_GUESS
        if leads and at_length["estimate"] is not None and at_length["low"] <= NO_GUESS:
            notes.append(
                f"{name}'s lead over the references is not shown at equal"
                f" length: {at_equal_length(at_length)}."
            )
    if leaned := leaning(shares):
        most = max(leaned, key=lambda name: abs(shares[name]["estimate"] - NO_GUESS))
        notes.append(
            f"The judge's choices depend on the place: of those about {most} it picks the text"
            f" shown first in {estimate(shares[most])}. Both orders are asked, so this blurs the"
            " rates more than it moves them."
        )
    return notes


def _pretraining_note(row: Row) -> str | None:
    """What keeps a run's numbers from those of the paper."""
    if row["pretrained"] and paper.is_comparable(row["preset"]):
        return None
    if row["pretrained"]:
        why = "neither its model nor its judge is the paper's"
    elif row["real_posts"]:
        why = "the model was NEVER PRETRAINED, so its summaries are poor"
    else:
        why = "the posts come from the built-in toy world, made for a model without pretraining"
    return f"The paper's numbers are not comparable with this run: {why}."


def _signs(row: Row) -> list[str]:
    """Known signs of trouble, if the numbers show them."""
    policy, signs = row["policy"], []
    if row["pairs"] and row["accuracy_high"] < NO_GUESS:
        signs.append(
            f"The reward model ranks held-out pairs WORSE than chance ({accuracy(row)}): the labels"
            " of one of the two splits may be turned round."
        )
    elif row["pairs"] and row["accuracy_low"] <= NO_GUESS:
        signs.append(
            f"The reward model is not shown to be better than chance ({accuracy(row)}):"
            f" {named(policy)} may have had nothing to learn."
        )
    fell = row["difference"] is not None and row["difference_high"] < 0
    if fell and direction(row["score_gain"]) == "rose":
        signs.append(
            f"The reward model's score rose while the win rate fell: {named(policy)} over-optimised"
            " its reward."
        )
    below = row.get(f"{policy}/below_penalty")
    if row[f"{policy}/eos_rate"] < FEW_END and below is not None and below > MANY_BELOW:
        signs.append(
            f"{percent(below)} of SFT's samples end and score below what a missing EOS is given:"
            " for such posts the EOS trick rewards not to end."
        )
    return signs
