"""The page of two policies against each other on the same posts.

    python -m reports.versus_page --a tiny:ppo --b tiny:sft

writes versus-<a>-<b>.md and .html to runs/versus-<a>-<b>/seed<k>/report/<judge>/. It reads what
`eval.versus` left on disk.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from eval.versus import Side, arguments, read_side, versus_config
from eval.win_rate import post_scores
from reports.parts import page, plots
from reports.parts.collect import SIDE, explained_by_critic, flags_of, results_of
from reports.parts.page import Block, Heading, Table, Text
from reports.parts.run_report import prompts
from reports.parts.sample_views import SampleBrowser, fitting, reference_of, sentences, side_of
from reports.parts.sentences import against, critic_notes, distrust, judge_flags, lead
from reports.parts.words import (
    MISSING,
    Row,
    at_equal_length,
    briefly,
    estimate,
    interval,
    p_value,
    percent,
    whole,
)
from reports.sections.judging import controls, rates
from reports.sections.samples import SAMPLES, sample
from reports.sections.systems import LEVEL
from stages.finished import read_manifest, stage_folder
from stages.running.files import file_hash, read_lines, read_record
from stages.runs import open_stage
from stages.settings.checks import UserError, in_one_line
from stages.settings.config import RANDOM, TOY
from stages.settings.judge import MOST_UNJUDGED

OTHER = "the other"


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdict and its path."""
    args = arguments(argv)
    print(write_page(args))


def write_page(args: Namespace) -> str:
    """Write the page of the two sides that the arguments name; its verdict and path."""
    sides = [read_side(side) for side in (args.a, args.b)]
    config = versus_config(sides[0], sides[1], args.overrides, args.judge)
    folder = stage_folder(config, "versus")
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"they have not been compared yet: run `make versus A={args.a} B={args.b}`")
    results: Row = manifest["results"] | posts_and_models(sides)
    folders = [side.folder.parent / SIDE / config.judge.folder for side in sides]
    flags = [*dict.fromkeys(flags_of(results["controls"], *map(results_of, folders)))]
    title = f"{results['a']} against {results['b']}"
    rows = posts(sides, read_lines(folder / "judgements.jsonl"))
    made = blocks(results, flags, rows, critic_notes([critic_of(side) for side in sides]))
    made += prompts([vars(config.judge)])
    with open_stage(config, "report") as run:
        run.inputs = {"versus": file_hash(folder / "manifest.json")}
        path = page.write(run.partial, config.name, title, made)
        if any(map(is_real, sides)):
            page.write_public(run.partial, config.name, title, made)
        run.finish({})
    lines = [verdict(results), judge_flags({"judge_flags": flags}) or ""]
    return page.for_terminal(lines, run.folder / path.name)


def is_real(side: Side) -> bool:
    """Whether posts and references are others' words, or nobody says that they are not."""
    saved = read_record(side.folder / "config.json") or {}
    given = saved.get("outputs", {}).get("file")
    return bool(given) or saved.get("data", {}).get("source") != TOY


def posts_and_models(sides: Sequence[Side]) -> Row:
    """Whether posts are real and all models were pretrained, as `distrust` reads them."""
    bases = [(read_record(side.folder / "config.json") or {}).get("base", {}) for side in sides]
    pretrained = all(base.get("checkpoint") != RANDOM for base in bases)
    return {"real_posts": any(map(is_real, sides)), "pretrained": pretrained}


def critic_of(side: Side) -> Row:
    """What a note on a side's critic is made from; nothing of a policy that is not PPO's."""
    ppo = side.folder.parent / "ppo" if side.policy == "ppo" else None
    return {"name": side.label, "explained_by_critic": explained_by_critic(ppo)}


def posts(sides: Sequence[Side], judgements: Sequence[Row]) -> list[Row]:
    """The posts with both sides' summaries and what was said of each."""
    direct = [row for row in judgements if row["policy"] == "versus"]
    points, words_of = post_scores(direct)["versus"], sentences(direct)
    a, b = sides
    rows = []
    for post, row in a.rows.items():
        words, score = words_of["versus", post], points[post]
        theirs = None if score is None else 1 - score
        both = [
            side_of(row, score, words),
            side_of(b.rows[post], theirs, [mirrored(sentence) for sentence in words]),
        ]
        reference = reference_of(row)
        rows.append({"id": post, "post": row["query"], "reference": reference, "sides": both})
    return rows


def mirrored(sentence: Row) -> Row:
    """What a judge said, seen from the other side."""
    places = {"A": "B", "B": "A"}
    preferred = {"policy": "reference", "reference": "policy"}.get(
        sentence["prefers"], sentence["prefers"]
    )
    return sentence | {"shown": places[sentence["shown"]], "prefers": preferred}


def winner_first(results: Row) -> Row:
    """The results with the side of the higher win rate as `a`."""
    if results["estimate"] is None or results["estimate"] >= 0.5:
        return results
    statistics = results["statistics"]
    length = mirrored_rate(statistics["length_controlled"])
    low, high = statistics["worst_case"]
    statistics = statistics | {"length_controlled": length, "worst_case": (1 - high, 1 - low)}
    sides = {"a": results["b"], "b": results["a"], "statistics": statistics}
    return mirrored_rate(results) | sides | {"wins": results["losses"], "losses": results["wins"]}


def mirrored_rate(rate: Row) -> Row:
    """A win rate, seen from the other side."""
    if rate["estimate"] is None:
        return rate
    ends = {"estimate": "estimate", "low": "high", "high": "low"}
    return rate | {key: 1 - rate[other] for key, other in ends.items()}


def verdict(results: Row) -> str:
    """Who is preferred, if both the interval and the test say so; the winner stands first."""
    if results["unjudged"] > MOST_UNJUDGED:
        low, high = results["statistics"]["worst_case"]
        return (
            f"{percent(results['unjudged'])} of the posts have no verdict, more than"
            f" {percent(MOST_UNJUDGED)}, so no rate is given; it lies within {interval(low, high)}."
        )
    seen = winner_first(results)
    outcome = f"{seen['a']} is preferred to {seen['b']}"
    if seen["low"] <= 0.5 <= seen["high"] or seen["p_value"] > LEVEL:
        outcome = f"{seen['a']} against {seen['b']} is inconclusive"
    length = at_equal_length(seen["statistics"]["length_controlled"]).replace(MISSING, "not known")
    return (
        f"{outcome}: of {whole(seen['posts'])} posts it won {whole(seen['wins'])}, tied"
        f" {whole(seen['ties'])}, lost {whole(seen['losses'])}: {estimate(seen)},"
        f" {p_value(seen['p_value'])}; at equal length {length}."
    )


def blocks(
    results: Row, flags: Sequence[str] = (), rows: Sequence[Row] = (), critic: Sequence[str] = ()
) -> list[Block]:
    """The page: verdict, result, posts, every rate beside the raw one, the judge.

    `flags` are the judge's, `rows` the posts as `posts` gives them, `critic` the notes on PPO's.
    """
    statistics = results["statistics"]
    about = results | results["judge"] | {"judge": results["judge"]["name"], "judge_flags": flags}
    given = {} if results["unjudged"] > MOST_UNJUDGED else statistics
    note = "" if about["is_llm"] else f"The judge: {about['note'].replace(', not an LLM', '', 1)}."
    return [
        lead(verdict(results), distrust([about], "one pair of policies")),
        result(results),
        *picture(results),
        *against(filter(None, (judge_flags(about), note, *critic))),
        *samples(results, rows),
        Heading("Every rate"),
        *rates({results["a"]: given}),
        Heading("The judge"),
        Text(f"Judge: {briefly(about['judge'])}, {whole(statistics['judgements'])} judgements."),
        leanings(statistics),
        Heading("Controls of the judge"),
        *controls(results["controls"]),
    ]


def result(results: Row) -> Table:
    """The one row of the result, the winner's."""
    given, seen = results["unjudged"] <= MOST_UNJUDGED, winner_first(results)
    length = seen["statistics"]["length_controlled"]
    cells = [
        *(whole(seen[key]) for key in ("wins", "ties", "losses")),
        *((estimate(seen), at_equal_length(length)) if given else [MISSING] * 2),
        p_value(results["p_value"] if given else None),
        percent(results["unjudged"]),
    ]
    header = "|won|tied|lost|win rate [95%]|at equal length [95%]|p-value|unjudged"
    caption = (
        f"Posts, {seen['a']} over {seen['b']}, both orders of each. The p-value is that of a paired"
        " randomisation test."
    )
    if results["unjudged"]:
        worst = interval(*seen["statistics"]["worst_case"])
        caption += f" Had all unjudged posts gone one way, the win rate would lie within {worst}."
    return Table(header.split("|"), [[seen["a"], *cells]], caption, strong=True, name="result")


def picture(results: Row) -> list[Block]:
    """The winner's rate, and that at equal length; none where no rate may be given."""
    seen = winner_first(results)
    rates = {"win rate": seen, "at equal length": seen["statistics"]["length_controlled"]}
    drawn = [
        (what, plots.PPO, rate["estimate"], rate["low"], rate["high"])
        for what, rate in rates.items()
        if rate["estimate"] is not None
    ]
    if results["unjudged"] > MOST_UNJUDGED:
        return []
    panel = replace(plots.win_rates(drawn), title=f"{seen['a']} over {seen['b']}")
    caption = "Bars are 95% intervals over the posts; the dashed line is even."
    return [plots.figure("win-rate", caption, [panel], 1.75, 0.8)]


def leanings(statistics: Row) -> Table:
    """What the judge leans to."""
    cells = [estimate(statistics[key]) for key in ("share_first", "swap_consistency")]
    header = ("", "picks the first shown", "same verdict after a swap")
    return Table(header, [["the judge", *cells]], name="judge")


def samples(results: Row, rows: Sequence[Row]) -> list[Block]:
    """The posts, to search and sort; none without rows."""
    if not rows:
        return []
    shown, names = fitting(rows), [results["a"], results["b"]]
    few = [sample(at, row, names, OTHER) for at, row in enumerate(shown[:SAMPLES], start=1)]
    text = (
        f"The first {whole(len(shown))} of {whole(len(rows))} posts, in the order of the data:"
        " nobody chose them. The verdict is on the two summaries; the reference was not shown."
    )
    browser = SampleBrowser("posts", names, shown, few, against=OTHER, shown=0)
    return [Heading("Posts"), Text(text), browser]


if __name__ == "__main__":
    main()
