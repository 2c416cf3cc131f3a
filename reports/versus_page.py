"""The page of two policies against each other on the same posts.

    python -m reports.versus_page --a tiny:ppo --b tiny:sft

writes versus-<a>-<b>.md and .html to runs/versus-<a>-<b>/seed<k>/report/<judge>/. It reads what
`eval.versus` left on disk.
"""

from collections.abc import Sequence
from typing import Any

from eval.rates.table import MOST_UNJUDGED
from eval.versus import Side, arguments, read_side, versus_config
from eval.win_rate import post_scores
from reports.parts import page
from reports.parts.collect import flags_of_versus
from reports.parts.page import PUBLIC, Block, Heading, Note, Table, Text
from reports.parts.sample_browser import SampleBrowser, fitting
from reports.parts.sample_rows import Row, reference_of, sentences, side_of
from reports.parts.verdict import estimate, interval, judge, judge_flags, p_value, percent, whole
from reports.sections.judge import controls, rates
from reports.sections.samples import SAMPLES, sample, without_the_data
from stages.finished import read_manifest, stage_folder
from stages.running.files import file_hash, read_json, read_lines
from stages.runs import open_stage
from stages.settings.config import TOY, UserError, fail

OTHER = "the other"
LEVEL = 0.05  # a p-value above it tells nothing apart


def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdict and its path."""
    args = arguments(argv)
    try:
        sides = [read_side(one) for one in (args.a, args.b)]
        config = versus_config(sides[0], sides[1], args.overrides, args.judge)
        folder = stage_folder(config, "versus")
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"nobody compared them yet: run `make versus A={args.a} B={args.b}`")
    except UserError as error:
        fail(error)
    found = manifest["results"]
    flags = flags_of_versus(found, [side.folder.parent for side in sides], config.judge)
    title = f"{found['a']} against {found['b']}"
    made = blocks(found, flags, posts(sides, read_lines(folder / "judgements.jsonl")))
    with open_stage(config, "report") as run:
        run.inputs = {"versus": file_hash(folder / "manifest.json")}
        path = page.write(run.partial, config.name, title, made)
        if any(map(is_real, sides)):
            public = run.partial / PUBLIC
            public.mkdir(exist_ok=True)
            page.write(public, config.name, title, without_the_data(made))
        run.finish({})
    said = [verdict(found), judge_flags({"judge_flags": flags}) or ""]
    print(page.for_terminal(said, run.folder / path.name))


def is_real(side: Side) -> bool:
    """Whether posts and references are others' words, or nobody says that they are not."""
    saved = read_json(side.folder / "config.json") or {}
    given = saved.get("outputs", {}).get("file")
    return bool(given) or saved.get("data", {}).get("source") != TOY


def posts(sides: Sequence[Side], judgements: Sequence[Row]) -> list[Row]:
    """The posts with both sides' summaries and what was said of each."""
    points = post_scores([row for row in judgements if row["policy"] == "versus"])["versus"]
    said = sentences(row for row in judgements if row["policy"] == "versus")
    a, b = sides
    rows = []
    for post, mine in a.rows.items():
        words, score = said["versus", post], points[post]
        theirs = None if score is None else 1 - score
        both = [
            side_of(mine, score, words),
            side_of(b.rows[post], theirs, [mirrored(one) for one in words]),
        ]
        reference = reference_of(mine)
        rows.append({"id": post, "post": mine["query"], "reference": reference, "sides": both})
    return rows


def mirrored(said: Row) -> Row:
    """What a judge said, seen from the other side."""
    places = {"A": "B", "B": "A"}
    preferred = {"policy": "reference", "reference": "policy"}.get(said["prefers"], said["prefers"])
    return said | {"shown": places[said["shown"]], "prefers": preferred}


def verdict(found: dict[str, Any]) -> str:
    """Who is preferred, if both the interval and the test say so."""
    if found["unjudged"] > MOST_UNJUDGED:
        low, high = found["statistics"]["worst_case"]
        return (
            f"{percent(found['unjudged'])} of the posts have no verdict, more than"
            f" {percent(MOST_UNJUDGED)}, so no rate is given; it lies within {interval(low, high)}"
        )
    if found["low"] <= 0.5 <= found["high"] or found["p_value"] > LEVEL:
        said = f"{found['a']} and {found['b']} cannot be told apart"
    else:
        winner, loser = ("a", "b") if found["low"] > 0.5 else ("b", "a")
        said = f"{found[winner]} is preferred to {found[loser]}"
    return (
        f"{said}: {found['a']} wins {estimate(found)} of {whole(found['posts'])} posts,"
        f" {p_value(found['p_value'])}."
    )


def blocks(
    found: dict[str, Any], flags: Sequence[str] = (), rows: Sequence[Row] = ()
) -> list[Block]:
    """The page: verdict, result, posts, every rate beside the raw one, the judge.

    `flags` are the judge's, `rows` the posts as `posts` gives them.
    """
    statistics = found["statistics"]
    about = found["judge"] | {"judge": found["judge"]["name"]}
    given = {} if found["unjudged"] > MOST_UNJUDGED else statistics
    notes = [] if about["is_llm"] else [f"The judge is NOT an LLM: {about['note']}."]
    warning = judge_flags({"judge_flags": flags})
    return [
        Text(verdict(found), lead=True),
        *(Note(note) for note in ([warning] if warning else [])),
        *(Note(note) for note in notes),
        Heading("Result"),
        result(found),
        *samples(found, rows),
        Heading("Every rate"),
        *rates({found["a"]: given}),
        Heading("The judge"),
        Text(f"Judge: {judge(about)}, {whole(statistics['judgements'])} judgements."),
        leanings(statistics),
        Heading("Controls of the judge"),
        *controls(found["controls"]),
    ]


def result(found: dict[str, Any]) -> Table:
    """The one row of the result, what is asked for first."""
    statistics = found["statistics"]
    given = found["unjudged"] <= MOST_UNJUDGED
    cells = [
        estimate(found if given else None),
        p_value(found["p_value"] if given else None),
        *(whole(found[key]) for key in ("wins", "ties", "losses")),
        percent(found["unjudged"]),
        interval(*statistics["worst_case"]),
    ]
    header = "|win rate [95%]|p-value|wins|ties|losses|unjudged|worst case"
    caption = (
        f"Posts, {found['a']} over {found['b']}, both orders of each. The p-value is that of a"
        " paired randomisation test of no difference."
    )
    return Table(header.split("|"), [[found["a"], *cells]], caption, strong=True, name="result")


def leanings(statistics: dict[str, Any]) -> Table:
    """What the judge leans to."""
    cells = [estimate(statistics[key]) for key in ("share_first", "swap_consistency")]
    header = ("", "picks the first shown", "same verdict after a swap")
    return Table(header, [["the judge", *cells]], name="judge")


def samples(found: dict[str, Any], rows: Sequence[Row]) -> list[Block]:
    """The posts, to search and sort; none without rows."""
    if not rows:
        return []
    shown, names = fitting(rows), [found["a"], found["b"]]
    few = [sample(at, row, names, OTHER) for at, row in enumerate(shown[:SAMPLES], start=1)]
    text = (
        f"The first {whole(len(shown))} of {whole(len(rows))} posts, in the order of the data:"
        " nobody chose them. The verdict is on the two summaries; the reference was not shown."
    )
    browser = SampleBrowser("posts", names, shown, few, against=OTHER, shown=0)
    return [Heading("Posts"), Text(text), browser]


if __name__ == "__main__":
    main()
