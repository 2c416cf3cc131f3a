"""The stage `report` of a run: its page, headline.txt for the terminal, numbers.json for programs.

Which page it is, the page's own module says: a run, a released policy, or given summaries.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.parts import page
from reports.parts.blocks import Block, Heading, Quoted, Text
from reports.parts.collect import Record, load_run
from reports.parts.words import Row, device_of, shown
from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.config import Config, hash_of
from stages.config.judge_prompt import OVERALL, REPLY_AS_JSON, REPLY_AS_LINES, read_prompt
from stages.config.stages import STAGES
from stages.runs.code import code_version
from stages.runs.files import file_hash, write_json, write_text
from stages.runs.inputs import inputs_now
from stages.runs.manifest import read_manifest
from stages.runs.run import open_stage

JUDGING = ("judge", "calibration")  # stages that have a folder for each judge
SPELLED_OUT = 40  # characters of the names after which a page is called as they are


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page's module makes of a finished run."""

    title: str
    blocks: Sequence[Block]
    numbers: dict[str, Any]
    """The run's row, as numbers.json holds it."""
    headline: str
    """The result for a terminal of 80 columns; ends with the page's path."""
    without_the_data: bool = False
    """Whether the page is written once more without the texts of real data, to be published."""


def write_report(config: Config, make: Callable[[Record, Path], Report]) -> str:
    """Write the page, its numbers and the headline of one finished run; returns the headline.

    `make` is given the run and the path that its page will have. Raises UserError, with the make
    command to run, if a stage is missing or stale.
    """
    record = load_run(config)
    with open_stage(config, "report") as run:
        run.inputs = inputs_now(config, "report")
        stem = f"{record.name}-seed{record.seed}"
        report = make(record, run.folder / f"{stem}.html")
        origin = made_from("run", [record.name], record.folders.values())
        write_both(run.partial, stem, report.title, report.blocks, origin, report.without_the_data)
        write_text(run.partial / "headline.txt", report.headline)
        write_json(run.partial / "numbers.json", report.numbers)
        run.finish({})
    return report.headline


def headline(
    title: str, tables: Sequence[Sequence[str]], sentence: str, caveats: Sequence[str], path: Path
) -> str:
    """The result for a terminal of 80 columns; its last line is the page's path."""
    lines = [*page.wrapped(title), ""]
    for table in tables:
        lines += [*table, ""]
    lines += page.wrapped(sentence)
    lines += [line for text in caveats for line in page.wrapped(text, "- ")]
    return "\n".join([*lines, "", "report:", f"{path}\n"])


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table in a terminal: the first column flush left, the others right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    return [
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in lines
    ]


def stem_about(kind: str, names: Sequence[str]) -> str:
    """A page's file name without its ending: the kind of page, then what it is about.

    A long list of names is given by its ends and four digits of a hash of all of them.
    """
    listed = "-".join(names)
    if len(names) > 1 and len(listed) > SPELLED_OUT:
        listed = f"{names[0]}-to-{names[-1]}-{hash_of(list(names))[:4]}"
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{kind}-{listed}")


def write_about_runs(
    stem: str, title: str, blocks: Sequence[Block], names: Sequence[str], records: Sequence[Record]
) -> Path:
    """Write a page about several runs beside the runs; its HTML's path.

    A stem begins with the kind of page. `names` are the runs that the page was made for. The
    judges' prompts and what computed the runs stand at the page's end. Of real data it is written
    once more, without the texts of others. Raises UserError where a page about other runs has this
    name.
    """
    folder = page.beside_the_runs()
    there = (folder / f"{stem}.json").exists()
    before = page.record_of(folder, stem)["made_from"]["names"] if there else names
    if set(before) != set(names):
        raise UserError(
            f"page {stem} in {folder} is about {', '.join(before)}, not"
            f" {', '.join(names)}: move it away first"
        )
    blocks = [*blocks, *prompts([record.settings["judge"] for record in records])]
    if records:
        blocks += [Heading("Code and processors"), Text(code_line(records)), Text(where(records))]
    folders = [folder for record in records for folder in record.folders.values()]
    origin = made_from(stem.partition("-")[0], names, folders)
    has_real_texts = any(record.has_real_texts for record in records)
    return write_both(folder, stem, title, blocks, origin, has_real_texts)


def write_both(
    folder: Path, stem: str, title: str, blocks: Sequence[Block], origin: Row, has_real_texts: bool
) -> Path:
    """Write a page, and of real texts once more below `public/`, without those of others."""
    public = [block.without_the_data() for block in blocks]
    if has_real_texts and public != blocks:
        page.write(folder / page.PUBLIC, stem, title, public, origin)
    return page.write(folder, stem, title, blocks, origin)


def made_from(kind: str, names: Iterable[str], folders: Iterable[Path]) -> Row:
    """What a page was made from, as its JSON says it.

    `names` are the runs that it is about, `folders` those of the stages that it shows.
    """
    manifests = {folder: read_manifest(folder) or {} for folder in folders}
    computing = [manifest for manifest in manifests.values() if STAGES[manifest["stage"]].computes]
    versions: dict[str, set[str]] = {}
    for manifest in manifests.values():
        for library, version in manifest["versions"].items():
            versions.setdefault(library, set()).add(version)
    return {
        "kind": kind,
        "names": list(names),
        "judges": sorted({folder.name for folder in folders if folder.parent.name in JUDGING}),
        "code_versions": sorted(
            {code_version(), *(manifest["code_version"] for manifest in manifests.values())}
        ),
        "finished": max(manifest["finished"] for manifest in manifests.values()),
        # Of the stages that run models; of all stages, if a page has no such stage.
        "devices": sorted({device_of(manifest) for manifest in computing or manifests.values()}),
        "versions": {name: ", ".join(sorted(used)) for name, used in sorted(versions.items())},
        "stages": {
            str(folder.relative_to(settings.RUNS)): file_hash(folder / "manifest.json")
            for folder in manifests
        },
    }


def prompts(judges: Iterable[Row]) -> list[Block]:
    """What the LLMs among some judges were sent (their settings are given); none for others."""
    forms = f"{REPLY_AS_JSON}\n\n(to a server without JSON schemas:)\n\n{REPLY_AS_LINES}"
    sent: dict[str, None] = {}
    for judge in judges:
        if judge["kind"] == "openai":
            template = read_prompt(judge.get("prompt", ""), judge.get("axis", OVERALL))
            sent[f"{template.text}\n\n{forms}"] = None
    title = "The judge's prompt"
    return [Heading(title), *(Quoted(title, question) for question in sent)] if sent else []


def code_line(records: Sequence[Record]) -> str:
    """One line on the versions of the code behind a page: a warning if they are mixed or dirty."""
    by_version: dict[str, dict[str, None]] = {}
    for record in records:
        for stage, manifest in record.manifests.items():
            by_version.setdefault(manifest["code_version"], {})[stage] = None
    dirty = sum(version.endswith("-dirty") for version in by_version)
    if len(by_version) == 1 and not dirty:
        return f"All stages were made with one version of the code: {next(iter(by_version))}."
    unclean = f"; {dirty} held changes that were not committed" if dirty else ""
    stages = "; ".join(f"{name}: {', '.join(by_version[name])}" for name in sorted(by_version))
    return f"Caveat: the code behind this page is not one committed version ({stages}){unclean}."


def where(records: Sequence[Record]) -> str:
    """The devices, processors, threads and precision that runs were computed with."""
    used: dict[str, set[str]] = {}
    for record in records:
        computing = [x for stage, x in record.manifests.items() if STAGES[stage].computes]
        used.setdefault("Computed on", set()).update(map(device_of, computing))
        memory = record.settings.get("memory", {})  # without any where nothing was trained
        for key in ("memory.cpu_threads", "memory.mixed_precision"):
            if (field := key.partition(".")[2]) in memory:
                used.setdefault(key, set()).add(shown(key, memory[field]))
    values = "; ".join(f"{name}: {' / '.join(sorted(each))}" for name, each in used.items())
    return (
        f"{values}. Device, instructions, number of threads (0: all cores) and precision change"
        " rounding, and PPO amplifies it: treat another one like another seed."
    )
