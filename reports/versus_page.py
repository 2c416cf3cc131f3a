"""The page of two policies against each other on the same posts.

    python -m reports.versus_page --a tiny:ppo --b tiny:sft

writes versus-<a>-<b>.md and .html to runs/versus-<a>-<b>/seed<k>/report/<judge>/. It reads what
`eval.versus` left on disk.
"""

from collections.abc import Sequence
from typing import Any

from eval.rates.table import MOST_UNJUDGED
from eval.versus import arguments, read_side, versus_config
from reports import page
from reports.collect import flags_of_versus
from reports.page import Block, Heading, Note, Table, Text
from reports.sections.judge import controls, rates
from reports.verdict import estimate, interval, judge, judge_flags, p_value, percent, whole
from stages.finished import read_manifest, stage_folder
from stages.runs import open_stage
from stages.settings.config import UserError, fail
from stages.system.files import file_hash


def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdict and its path."""
    args = arguments(argv)
    try:
        sides = [read_side(one) for one in (args.a, args.b)]
        config = versus_config(sides[0], sides[1], args.overrides)
        folder = stage_folder(config, "versus")
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"nobody compared them yet: run `make versus A={args.a} B={args.b}`")
    except UserError as error:
        fail(error)
    found = manifest["results"]
    flags = flags_of_versus(found, [side.folder.parent for side in sides], config.judge)
    title = f"{found['a']} against {found['b']}"
    with open_stage(config, "report") as run:
        run.inputs = {"versus": file_hash(folder / "manifest.json")}
        path = page.write(run.partial, config.name, title, blocks(found, flags))
        run.finish({})
    said = [verdict(found), judge_flags({"judge_flags": flags}) or ""]
    print(page.for_terminal(said, run.folder / path.name))


def verdict(found: dict[str, Any]) -> str:
    """Who is preferred, as far as the posts tell."""
    if found["unjudged"] > MOST_UNJUDGED:
        low, high = found["statistics"]["worst_case"]
        return (
            f"{percent(found['unjudged'])} of the posts have no verdict, more than"
            f" {percent(MOST_UNJUDGED)}, so no rate is given; it lies within {interval(low, high)}"
        )
    if found["low"] <= 0.5 <= found["high"]:
        said = f"{found['a']} and {found['b']} cannot be told apart"
    else:
        winner, loser = ("a", "b") if found["low"] > 0.5 else ("b", "a")
        said = f"{found[winner]} is preferred to {found[loser]}"
    return (
        f"{said}: {found['a']} wins {estimate(found)} of {whole(found['posts'])} posts,"
        f" {p_value(found['p_value'])}."
    )


def blocks(found: dict[str, Any], flags: Sequence[str] = ()) -> list[Block]:
    """The page: verdict, counts, every rate beside the raw one; `flags` are the judge's."""
    statistics = found["statistics"]
    about = found["judge"] | {"judge": found["judge"]["name"]}
    given = {} if found["unjudged"] > MOST_UNJUDGED else statistics
    notes = [] if about["is_llm"] else [f"The judge is NOT an LLM: {about['note']}."]
    warning = judge_flags({"judge_flags": flags})
    notes = [*([warning] if warning else []), *notes]
    counts = [whole(found[key]) for key in ("wins", "ties", "losses")]
    cells = [
        *counts,
        percent(found["unjudged"]),
        interval(*statistics["worst_case"]),
        estimate(statistics["share_first"]),
        estimate(statistics["swap_consistency"]),
    ]
    header = "wins|ties|losses|unjudged|worst case|picks the first shown|same after a swap"
    caption = (
        f"Posts, {found['a']} over {found['b']}, both orders of each. The p-value is that of a"
        " paired randomisation test of no difference."
    )
    return [
        Text(verdict(found), lead=True),
        *(Note(note) for note in notes),
        Heading("The judge"),
        Text(f"Judge: {judge(about)}, {whole(statistics['judgements'])} judgements."),
        Table(header.split("|"), [cells], caption),
        Heading("Every rate"),
        *rates({found["a"]: given}),
        Heading("Controls of the judge"),
        *controls(found["controls"]),
    ]


if __name__ == "__main__":
    main()
