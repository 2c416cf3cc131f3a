"""The page on which people judge pairs of summaries: one HTML file, by keyboard, nothing sent.

    python -m reports.annotate_page --a tiny:ppo
    python -m reports.annotate_page --a tiny:ppo --b tiny:sft
    python -m reports.annotate_page --comparisons FOLDER --pairs 50

writes runs/annotate/<what>/annotate.html. People are shown a post and two summaries, not who wrote
them; the order of the pairs and of the two is drawn by the person's name. Verdicts are kept in the
browser and saved as `annotations_<name>.jsonl`, which `eval.annotations` reads.

Posts are anybody's text. They stand in the page as data, in JSON without `<`, and are only ever set
as text. Beside that, the page's own policy lets no script run but its own, and opens no connection.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.annotations import SPLIT, pairs_of_folder, pairs_of_sides
from reports.parts.page import STYLE, as_data, digest
from stages.running.files import write_text
from stages.settings import config as settings
from stages.settings.checks import Parser, UserError, in_one_line
from stages.settings.config import hash_of

FILE = "annotate.html"
HTML = Path(__file__).with_name(FILE)
SCRIPT = Path(__file__).with_name("annotate.js")
OWN_STYLE = Path(__file__).with_name("annotate.css")


def to_html(pairs: Sequence[dict[str, Any]]) -> str:
    """The whole page; `pairs` have `info` and `summaries` in the schema of `comparisons`."""
    script = SCRIPT.read_text(encoding="utf-8")
    style = STYLE.read_text(encoding="utf-8") + OWN_STYLE.read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}';"
        " base-uri 'none'; form-action 'none'"
    )
    data = {"key": hash_of(pairs), "split": SPLIT, "pairs": [_needed(pair) for pair in pairs]}
    shown = {"policy": policy, "style": style, "script": script, "pairs": as_data(data)}
    return HTML.read_text(encoding="utf-8").format(**shown)


def _needed(pair: dict[str, Any]) -> dict[str, Any]:
    info = {name: pair["info"][name] for name in ("id", "subreddit", "title", "post")}
    summaries = [
        {"text": summary["text"], "policy": summary["policy"], "note": None}
        for summary in pair["summaries"]
    ]
    return {"info": {**info, "site": None, "article": None}, "summaries": summaries}


def write_page(a: str, b: str, comparisons: str, count: int, seed: int) -> tuple[Path, int]:
    """Write the page; its path and the number of pairs. Raises UserError if nothing is named."""
    if bool(a) == bool(comparisons):
        raise UserError("name what people shall judge: A=tiny:ppo (B=tiny:sft), or DATA=folder")
    if comparisons:
        pairs = pairs_of_folder(comparisons, count, seed)
        stem = Path(comparisons).resolve().name
    else:
        pairs = pairs_of_sides(a, b, count, seed)
        stem = "-".join(part.replace("/", "-").replace(":", "-") for part in (a, b) if part)
    folder = settings.RUNS / "annotate" / stem
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, to_html(pairs))
    return folder / FILE, len(pairs)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the page and print its path."""
    parser = Parser(description="a page on which people judge summaries")
    parser.add_argument("--a", default="", help="name[/seed][:policy], such as tiny:ppo")
    parser.add_argument("--b", default="", help="the other side; left out: the references")
    parser.add_argument("--comparisons", default="", help="or a folder (make: DATA=)")
    parser.add_argument("--pairs", type=int, default=100, help="how many, drawn by seed")
    parser.add_argument("--seed", type=int, default=44413)
    args = parser.parse_args(argv)
    if args.pairs < 1:
        raise UserError(f"--pairs must be at least 1, not {args.pairs} (make: PAIRS=)")
    path, count = write_page(args.a, args.b, args.comparisons, args.pairs, args.seed)
    print(f"{count} pairs: open this in a browser, and put what it saves beside it\n{path}")
    print(f"then: make annotated DATA={path.parent}")


if __name__ == "__main__":
    main()
