"""Copy finished pages to reports/generated without other people's texts, and rewrite the index.

    python -m reports.publish --pages scaling-tiny tiny-seed44413

The Markdown, the figures and the JSON of a page are published. The index is written from the JSON
files, which say what a page was made from, so no run has to be there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports import about_runs, render
from stages.config import paths
from stages.config.error_messages import Parser, in_one_line, show
from stages.config.errors import UserError, unknown
from stages.runs.files import file_hash, write_text

GENERATED = Path("reports/generated")
# Question -> the kinds of pages that answer it, in the order of the index.
QUESTIONS = {
    "Does PPO work?": ("seeds", "run"),
    "Does size matter?": ("scaling",),
    "Which details matter?": ("ablations",),
    "Is PPO better than other algorithms?": ("algorithms", "rivals", "compare"),
    "What does the judge know?": ("calibration",),
    "How fast is it?": ("bench",),
}
OTHER = "Other pages"


def find_page(stem: str, judge: str) -> Path:
    """Return the Markdown of a finished page; of real texts, the version without them.

    Raises UserError for an unknown page, and if several judges have a page of this name.
    """
    folders = [about_runs.folder(), paths.RUNS / "bench"]
    folders += paths.RUNS.glob("*/seed*/*report/*")
    pages = [path for folder in sorted(folders) for path in folder.glob("*.md")]
    named = [path for path in pages if path.stem == stem]
    if not named:
        raise unknown("page", stem, sorted({path.stem for path in pages}))
    chosen = [path for path in named if judge in ("", path.parent.name)]
    if len(chosen) != 1:
        judges = ", ".join(path.parent.name for path in named)
        raise UserError(f"{stem} was written for the judges {judges}: choose one with JUDGE=")
    public = chosen[0].parent / render.PUBLIC / chosen[0].name
    return public if public.exists() else chosen[0]


def check_page(path: Path) -> None:
    """Raise UserError if a page or its stages have changed, or if its code is in no commit."""
    record = render.read_page_record(path.parent, path.stem)
    for version in record["made_from"]["code_versions"]:
        if version.endswith("-dirty"):
            raise UserError(f"{path.stem} was made with code that was not committed ({version})")
    hashes = {path.parent / name: hash_ for name, hash_ in record["files"].items()}
    for stage, hash_ in record["made_from"]["stages"].items():
        hashes[paths.RUNS / stage / "manifest.json"] = hash_
    for file, hash_ in hashes.items():
        if not file.exists() or file_hash(file) != hash_:
            raise UserError(f"{path.stem} is outdated: {file} has changed; write the page again")


def publish(pages: Sequence[Path]) -> None:
    """Copy pages, replacing their earlier versions, and rewrite the index."""
    GENERATED.mkdir(parents=True, exist_ok=True)
    for path in pages:
        for old in render.files_of(GENERATED, path.stem):
            old.unlink()
        for file in render.files_of(path.parent, path.stem):
            write_text(GENERATED / file.name, file.read_text(encoding="utf-8"))
    write_text(GENERATED / "index.md", index(GENERATED))


def index(folder: Path) -> str:
    """Return the list of a folder's pages: answers by question, then their provenance."""
    questions: dict[str, list[dict[str, Any]]] = {question: [] for question in QUESTIONS}
    questions[OTHER] = []
    for path in sorted(folder.glob("*.json")):
        record = {"stem": path.stem, **render.read_page_record(folder, path.stem)}
        questions[question_of(record["made_from"])].append(record)
    return render.fill("index.md", "index", questions=questions).markdown


def question_of(origin: Mapping[str, Any]) -> str:
    """Return the question that a page answers, from what it was made from."""
    kind = origin["kind"]
    if kind == "scaling" and len(origin["names"]) == 1:
        kind = "seeds"  # a page about sizes that has only one size is about its seeds
    for question, kinds in QUESTIONS.items():
        if kind in kinds:
            return question
    return OTHER


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Publish pages, and print their names."""
    parser = Parser(description="copy finished pages to reports/generated")
    parser.add_argument("--pages", nargs="*", default=[], help="their names, without an ending")
    parser.add_argument("--judge", default="", help="where a run was judged by several")
    arguments = parser.parse_args(argv)
    if not arguments.pages:
        raise UserError("name the pages, as PAGES='scaling-tiny tiny-seed44413'")
    pages = [find_page(stem, arguments.judge) for stem in arguments.pages]
    for path in pages:
        check_page(path)
    publish(pages)
    show([f"published in {GENERATED}:", *(f"  {path.stem}" for path in pages)])


if __name__ == "__main__":
    main()
