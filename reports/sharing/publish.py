"""Copy finished pages to reports/generated, as Markdown, plots and one JSON each, and list them.

    python -m reports.sharing.publish --pages scaling-tiny tiny-seed44413

A page's JSON says which stages it was made from, by which code and where (`made_from`). A page is
refused if one of these stages, or a file of the page itself, has changed since, or if code was not
committed. `index.md` is made from these JSONs alone: no run need be there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.about_runs import folder as folder_about_runs
from reports.parts.blocks import escape, link
from reports.render import PUBLIC, files_of, read_page_record
from stages.config import config as settings
from stages.config.checks import unknown
from stages.config.config import UserError
from stages.config.faults import Parser, in_one_line, show
from stages.runs.files import file_hash, write_text

GENERATED = Path("reports/generated")
INDEX = "index.md"
DIRTY = "-dirty"
LEAD = "What was measured and published, by question: each page's answer leads to it."
SEEDS = "seeds"  # the kind of a page about all seeds of one run
# Question -> the kinds of pages that answer it, in the order of the index.
QUESTIONS = {
    "Does PPO work?": (SEEDS, "run"),
    "Does size matter?": ("scaling",),
    "Which switch matters?": ("ablations",),
    "Is PPO better than its rivals?": ("algorithms", "rivals", "compare"),
    "What does the judge know?": ("calibration",),
    "How fast is it?": ("bench",),
}


def find_page(stem: str, judge: str) -> Path:
    """The Markdown of a finished page, as it may be published.

    Raises UserError for an unknown page, and where several judges have one of this name.
    """
    folders = [folder_about_runs(), settings.RUNS / "bench"]
    folders += settings.RUNS.glob("*/seed*/*report/*")
    there = [path for folder in sorted(folders) for path in folder.glob("*.md")]
    named = [path for path in there if path.stem == stem]
    if not named:
        raise unknown("page", stem, sorted({path.stem for path in there}))
    chosen = [path for path in named if judge in ("", path.parent.name)]
    if len(chosen) != 1:
        names = ", ".join(path.parent.name for path in named)
        raise UserError(f"{stem} is there by {names}: choose one with JUDGE=")
    public = chosen[0].parent / PUBLIC / chosen[0].name
    return public if public.exists() else chosen[0]


def check_page(path: Path, allow_dirty: bool) -> None:
    """Raise UserError where files or stages have changed, or code was not committed."""
    record, again = read_page_record(path.parent, path.stem), "make the page again"
    for name, hash_ in record["files"].items():
        file = path.parent / name
        if not file.exists() or file_hash(file) != hash_:
            raise UserError(f"{path.stem} has changed on disk ({name}): {again}")
    origin = record["made_from"]
    for name, hash_ in origin["stages"].items():
        manifest = settings.RUNS / name / "manifest.json"
        if not manifest.exists() or file_hash(manifest) != hash_:
            raise UserError(f"{path.stem} was made from an earlier {name}: {again}")
    dirty = [version for version in origin["code_versions"] if version.endswith(DIRTY)]
    if dirty and not allow_dirty:
        reason = f"was made with code that was not committed ({', '.join(dirty)})"
        raise UserError(f"{path.stem} {reason}: make it from a commit, or add --allow-dirty")


def publish(stems: Sequence[str], judge: str, allow_dirty: bool) -> None:
    """Copy the pages in place of their earlier versions, and write the index.

    Raises UserError, before anything is written, if a page may not be published.
    """
    pages = [find_page(stem, judge) for stem in stems]
    for path in pages:
        check_page(path, allow_dirty)
    GENERATED.mkdir(parents=True, exist_ok=True)
    for path in pages:
        for old in files_of(GENERATED, path.stem):
            old.unlink()
        for file in files_of(path.parent, path.stem):
            write_text(GENERATED / file.name, file.read_text(encoding="utf-8"))
    write_text(GENERATED / INDEX, index(GENERATED))


def index(folder: Path) -> str:
    """The list of a folder's pages by question: the answer as a link, and what it is made from."""
    records = {
        path.stem: read_page_record(folder, path.stem) for path in sorted(folder.glob("*.json"))
    }
    parts = [f"# Published pages\n\n{LEAD}"]
    for question, kinds in QUESTIONS.items():
        about = [(stem, x) for kind in kinds for stem, x in records.items() if _kind(x) == kind]
        items = [
            f"- {link(record['title'], f'{stem}.md')}\n  *Made from {escape(in_words(record))}.*"
            for stem, record in about
        ]
        parts += [f"## {question}", "\n".join(items)] if items else []
    return "\n\n".join(parts) + "\n"


def _kind(record: Mapping[str, Any]) -> str:
    """The kind of a page; one of sizes that has one size alone is about its seeds."""
    kind, names = record["made_from"]["kind"], record["made_from"]["names"]
    return SEEDS if kind == "scaling" and len(names) == 1 else str(kind)


def in_words(record: Mapping[str, Any]) -> str:
    """What a page was made from: runs, seeds, judges, machines, date."""
    origin = record["made_from"]
    stages = [Path(name).parts for name in origin["stages"]]
    seeds = sorted({int(seed.removeprefix("seed")) for _, seed, *_ in stages})
    ids = f"{len(seeds)} seeds" if len(seeds) > 6 else f"seed {', '.join(map(str, seeds))}"
    parts = [
        ", ".join(origin["names"]),
        ids if seeds else "",
        f"judge {', '.join(origin['judges'])}" if origin["judges"] else "",
        " / ".join(origin["devices"]),
        origin["finished"][:10],
    ]
    return "; ".join(filter(None, parts))


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Publish some pages and name them."""
    parser = Parser(description="copy finished pages to reports/generated")
    parser.add_argument("--pages", nargs="*", default=[], help="their names, without an ending")
    parser.add_argument("--judge", default="", help="where a run was judged by several")
    parser.add_argument("--allow-dirty", action="store_true", help="code that is not committed too")
    args = parser.parse_args(argv)
    stems = list(dict.fromkeys(args.pages))
    if not stems:
        raise UserError("name the pages, as PAGES='scaling-tiny tiny-seed44413'")
    publish(stems, args.judge, args.allow_dirty)
    show([f"published in {GENERATED}:", *(f"  {stem}" for stem in stems)])


if __name__ == "__main__":
    main()
