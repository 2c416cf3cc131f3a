"""Copy the finished pages of runs to reports/generated, with a record of what each was made from.

    python -m reports.sharing.publish --names tiny

takes every finished seed's page, the judge's calibration, comparisons of two policies, and pages
about several runs, if all runs of such a page are named. For each page, published.json holds runs,
judge, code, device, versions, the SHA-256 of its files and of the manifests behind it, and a run's
row of numbers. The README's table of numbers and the index of all published pages are written from
it. A page is refused if its run is stale or was made with code that was not committed.
"""

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reports.parts.collect import judged, load_run
from reports.parts.page import PUBLIC, beside_the_runs, files_of, wrapped
from reports.parts.run_report import hashes_of
from reports.parts.words import device_of
from reports.sharing.index import in_readme, read_published, write_index
from stages.finished import check_run, check_stage, damage, read_manifest, stage_folder
from stages.running.files import file_hash, read_record, write_json, write_text
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line, unknown
from stages.settings.config import Config, UserError
from stages.settings.stages import STAGES

GENERATED = Path("reports/generated")
RECORD = "published.json"
README = Path("README.md")
DIRTY = "-dirty"
# A page's folder below a seed -> what the page is.
KINDS = {"report": "run", "calibration_report": "calibration"}


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page to be published, and what it was made from."""

    kind: str
    names: tuple[str, ...]
    """The runs that it is about."""
    folder: Path
    stem: str
    judge: str
    sources: dict[str, str]
    """Stage folder below runs/ -> SHA-256 of its manifest."""
    refusals: dict[str, str] = field(default_factory=dict)
    """File below runs/ with the words of a check that stopped a run -> its SHA-256."""
    code: frozenset[str] = frozenset()
    """The code that made the page itself, if no manifest says so."""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def manifests(self) -> list[dict[str, Any]]:
        """The manifests behind it."""
        return [read_manifest(settings.RUNS / source) or {} for source in self.sources]

    @property
    def code_versions(self) -> list[str]:
        """The versions of the code that made the page and its sources."""
        return sorted(self.code | {manifest["code_version"] for manifest in self.manifests})


# -- which pages -----------------------------------------------------------------------------------


def find_pages(
    names: Sequence[str], judge: str, kinds: Sequence[str]
) -> tuple[list[Page], list[str]]:
    """The pages of the named runs, and a line on each seed without one.

    Where kinds are named, the others are not looked at, but for runs where the page about sizes is
    meant: it must have all their seeds.

    Raises UserError for an unknown run, a run without any page, and a page that is stale.
    """
    every_page: list[Page] = []
    left_out: list[str] = []
    needed = {*kinds, *(("run",) if "scaling" in kinds else ())} or set(KINDS.values())
    stages = [stage for stage, kind in KINDS.items() if kind in needed]
    for name in names:
        check_run(name)
        pages = []
        seeds = (settings.RUNS / name).glob("seed*")
        for seed in sorted(seeds, key=lambda folder: (len(folder.name), folder.name)):
            of_seed = [page for stage in stages for page in pages_of_seed(seed, stage, judge)]
            pages += of_seed
            if "run" in needed and not any(page.kind == "run" for page in of_seed):
                left_out.append(f"{name} {seed.name} has no page: stage report is missing.")
        if stages and not pages:
            raise UserError(f"run {name} has no page: run `make eval` for it first")
        every_page += pages
    return [*every_page, *versus_pages(names, judge), *several_pages(names, judge)], left_out


def pages_of_seed(seed: Path, stage: str, judge: str) -> Iterator[Page]:
    """A seed's page of the run, or of its judge's calibration, if there is one.

    Raises UserError, with the command that mends it, if the page is stale.
    """
    for folder, config in judged(seed, stage, judge):
        inputs = (read_manifest(folder) or {"inputs": {}})["inputs"]
        if stage == "report":
            load_run(config)  # refuses a stale stage
        for name in [*({"calibration"} & inputs.keys()), stage]:
            check_holds(config, name)
        yield Page(
            kind=KINDS[stage],
            names=(config.name,),
            folder=public_of(folder),
            stem=next(folder.glob("*.md")).stem,
            judge=folder.name,
            sources=hashes_of([folder, *(stage_folder(config, name) for name in inputs)]),
            numbers=read_record(folder / "numbers.json") or {},
        )


def public_of(folder: Path) -> Path:
    """Where a page's variant without the texts of others lies; else where the page lies."""
    return folder / PUBLIC if (folder / PUBLIC).is_dir() else folder


def check_holds(config: Config, stage: str) -> None:
    """Raise UserError unless a stage is what its own settings and inputs would give now."""
    try:
        check_stage(config, stage)
    except UserError as error:
        raise UserError(f"{config.name} seed{config.seed}: {error}") from None


def versus_pages(names: Sequence[str], judge: str) -> Iterator[Page]:
    """The comparisons of two policies of the named runs.

    Raises UserError if summaries or verdicts have changed since.
    """
    for seed in sorted(settings.RUNS.glob("versus-*/seed*")):
        for folder, config in judged(seed, "report", judge):
            verdicts = stage_folder(config, "versus")
            manifest = read_manifest(verdicts) or {"inputs": {}, "results": {}}
            recorded: dict[str, str] = manifest["inputs"]
            about = {source.split("/")[0] for source in recorded}
            if not about or not about <= set(names):
                continue
            check_holds(config, "versus")
            own = hashes_of([verdicts])
            made_from = (read_manifest(folder) or {})["inputs"]["versus"]
            a, b = (as_typed(manifest["results"][side]) for side in ("a", "b"))
            command = f"make versus A={a} B={b}"
            check_sources(config.name, recorded | dict.fromkeys(own, made_from), command)
            problem = damage(config, "report")
            if problem:
                raise UserError(f"{config.name}: its page {problem}: run `{command}`")
            yield Page(
                kind="versus",
                names=tuple(sorted(about)),
                folder=public_of(folder),
                stem=config.name,
                judge=folder.name,
                sources=recorded | own | hashes_of([folder]),
            )


def as_typed(label: str) -> str:
    """A side as `make versus` takes it: `tiny-44413-ppo` is tiny/44413:ppo."""
    return re.sub(r"(.+)-(\d+)-(best-of-\d+|[^-]+)", r"\1/\2:\3", label)


def several_pages(names: Sequence[str], judge: str) -> Iterator[Page]:
    """The pages about several runs whose runs are all named.

    Raises UserError if a run has changed since, or if a seed has finished that the page lacks.
    """
    for path in sorted(beside_the_runs().glob("*.json")):
        note = read_record(path)
        if not set(note["names"]) <= set(names) or judge not in ("", *note["judges"]):
            continue
        listed, refusals = " ".join(note["names"]), note.get("refusals", {})
        command = f'make scaling NAMES="{listed}"'
        if note["kind"] != "scaling":
            command = f"make {note['kind']} {shlex.quote(f'NAME={listed}')}"
        command, public = note.get("command", command), path.parent / PUBLIC
        check_sources(path.stem, note["sources"] | refusals, command)
        for name, hash_ in note["files"].items():
            if not (path.parent / name).exists() or file_hash(path.parent / name) != hash_:
                raise UserError(f"{path.stem} has changed on disk ({name}): run `{command}`")
        yield Page(
            kind=note["kind"],
            names=tuple(note["names"]),
            folder=public if (public / f"{path.stem}.md").exists() else path.parent,
            stem=path.stem,
            judge=", ".join(note["judges"]),
            sources=note["sources"],
            refusals=refusals,
            code=frozenset({note["code_version"]}),
        )


def check_sources(page: str, recorded: dict[str, str], command: str) -> None:
    """Raise UserError if a stage that a page was made from, or a refusal, has changed since."""
    for name, hash_ in recorded.items():
        source = settings.RUNS / name
        file = source if source.suffix == ".json" else source / "manifest.json"
        if not file.exists() or file_hash(file) != hash_:
            raise UserError(f"{page} was made from an earlier {name}: run `{command}`")


def check_seeds(pages: Sequence[Page]) -> None:
    """Raise UserError if a page about sizes lacks a seed that is published beside it."""
    seeds: dict[str, set[int]] = {}
    for page in (page for page in pages if page.kind == "run"):
        seeds.setdefault(page.numbers["name"], set()).add(page.numbers["seed"])
    for page in (page for page in pages if page.kind == "scaling"):
        for name in page.names:
            lacking = sorted(seeds.get(name, set()) - set(runs_of(page).get(name, [])))
            if lacking:
                listed = ", ".join(map(str, lacking))
                raise UserError(f"{page.stem} lacks seed {listed} of {name}: run `make scaling`")


def check_pages(pages: Sequence[Page], published: dict[str, Any], allow_dirty: bool) -> None:
    """Raise UserError if a page was made with code that was not committed, or if a published page
    of the same name is about other runs.
    """
    for page in pages:
        dirty = [version for version in page.code_versions if version.endswith(DIRTY)]
        if dirty and not allow_dirty:
            raise UserError(
                f"{page.stem} was made with code that was not committed ({', '.join(dirty)}):"
                " make it from a commit, or add --allow-dirty"
            )
        about = published["pages"].get(page.stem, {"about": page.names})["about"]
        # The page of all judges is called after no run.
        if page.stem != page.kind and set(about) != set(page.names):
            raise UserError(
                f"page {page.stem} in {GENERATED} is about {', '.join(about)}, not"
                f" {', '.join(page.names)}: remove it from {RECORD} first"
            )


# -- what is written -------------------------------------------------------------------------------


def publish(
    names: Sequence[str], judge: str, kinds: Sequence[str], allow_dirty: bool
) -> tuple[list[Page], list[str]]:
    """Copy the pages, record them, write the README's blocks; the pages and what is left out.

    `kinds` are the kinds of page that are meant; all where none is named. Raises UserError, before
    anything is written, if a page may not be published.
    """
    published = read_published(GENERATED / RECORD)
    pages, left_out = find_pages(names, judge, kinds)
    check_seeds(pages)
    there = sorted({page.kind for page in pages})
    for kind in kinds:
        if kind not in there:
            raise unknown("kind of page", kind, there)
    pages = [page for page in pages if page.kind in (kinds or there)]
    check_pages(pages, published, allow_dirty)
    GENERATED.mkdir(parents=True, exist_ok=True)
    for page in pages:
        published["pages"][page.stem] = replace_page(page)
    write_record(published)
    if README.exists():
        before = README.read_text(encoding="utf-8")
        after = in_readme(before, published)
        if after != before:
            write_text(README, after)
    return pages, left_out


def write_record(published: dict[str, Any]) -> None:
    """Write the record of all published pages, and the index that lists them."""
    pages = dict(sorted(published["pages"].items()))
    record = published | {"pages": pages, "index": write_index(GENERATED, pages)}
    write_json(GENERATED / RECORD, record)


def copy_files(folder: Path, files: Sequence[Path]) -> dict[str, str]:
    """Copy a folder's files to the published ones; the SHA-256 of each by its name there."""
    hashes = {}
    for path in files:
        target = GENERATED / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{path.name}.partial")
        shutil.copyfile(path, partial)
        partial.rename(target)
        hashes[str(path.relative_to(folder))] = file_hash(target)
    return hashes


def replace_page(page: Page) -> dict[str, Any]:
    """Replace all files of a page's earlier version; returns the page's record."""
    for old in files_of(GENERATED, page.stem):
        old.unlink()
    files = copy_files(page.folder, files_of(page.folder, page.stem))
    manifests = page.manifests
    hashes = {f"{source}/manifest.json": hash_ for source, hash_ in page.sources.items()}
    # Of the stages that run models; of all stages, if a page has no such stage.
    computing = [manifest for manifest in manifests if STAGES[manifest["stage"]].computes]
    versions: dict[str, set[str]] = {}
    for manifest in manifests:
        for library, version in manifest["versions"].items():
            versions.setdefault(library, set()).add(version)
    return {
        "kind": page.kind,
        "about": list(page.names),
        "runs": runs_of(page),
        "judge": page.judge,
        "code_versions": page.code_versions,
        "finished": max(manifest["finished"] for manifest in manifests),
        "devices": sorted({device_of(manifest) for manifest in computing or manifests}),
        "versions": {
            name: ", ".join(sorted(numbers)) for name, numbers in sorted(versions.items())
        },
        "files": files,
        "manifests": hashes | page.refusals,
        "numbers": page.numbers,
    }


def runs_of(page: Page) -> dict[str, list[int]]:
    """Run -> its seeds, of every run that a page was made from."""
    seeds_of: dict[str, set[int]] = {}
    for folder in (*page.sources, *page.refusals):
        name, seed = Path(folder).parts[:2]
        seeds_of.setdefault(name, set()).add(int(seed.removeprefix("seed")))
    seeds_of.pop(page.stem, None)  # a comparison of two policies has a folder of its own
    return {name: sorted(seeds) for name, seeds in sorted(seeds_of.items())}


def not_recorded() -> list[str]:
    """Files among the published ones that no page of the record owns."""
    record = read_published(GENERATED / RECORD)
    owned = (name for page in record["pages"].values() for name in page["files"])
    known = {RECORD, *record["index"], *owned}
    there = (str(path.relative_to(GENERATED)) for path in GENERATED.rglob("*") if path.is_file())
    return sorted(name for name in there if name not in known)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Publish the pages of some runs and name them."""
    parser = Parser(description="copy finished pages to reports/generated")
    parser.add_argument("--names", nargs="+", default=["tiny"], help="runs")
    parser.add_argument("--judge", default="", help="where runs were judged by several")
    parser.add_argument("--kinds", nargs="+", default=[], help="run, scaling, ...; else all")
    parser.add_argument("--allow-dirty", action="store_true", help="code that is not committed too")
    args = parser.parse_args(argv)
    names = list(dict.fromkeys(args.names))
    pages, left_out = publish(names, args.judge, args.kinds, args.allow_dirty)
    lines = [f"published in {GENERATED}:", *(f"  {page.stem}" for page in pages), *left_out]
    orphans = not_recorded()
    if orphans:
        lines.append(f"no page of {RECORD} owns these: {', '.join(orphans)}")
    print("\n".join(part for line in lines for part in wrapped(line)))


if __name__ == "__main__":
    main()
