"""What a page was made from: the manifests behind it, and the note that lies beside it."""

from collections.abc import Sequence
from pathlib import Path

from reports.collect import Record
from reports.page import files_of
from stages.settings import config as settings
from stages.system.files import file_hash, write_json
from stages.system.machine import code_version


def hashes(record: Record) -> dict[str, str]:
    """Twelve digits that name each stage's manifest, and so everything that it lists."""
    return {
        stage: file_hash(folder / "manifest.json")[:12] for stage, folder in record.folders.items()
    }


def sources(records: Sequence[Record]) -> dict[str, str]:
    """What some runs were made of: each stage's folder below runs/ -> SHA-256 of its manifest."""
    return {
        str(folder.relative_to(settings.RUNS)): file_hash(folder / "manifest.json")
        for record in records
        for folder in record.folders.values()
    }


def note_sources(path: Path, kind: str, names: Sequence[str], records: Sequence[Record]) -> None:
    """Write beside a page about several runs, as `<page>.json`, what it was made from.

    `names` are the runs that were asked for.
    """
    written = files_of(path.parent, path.stem)
    note = {
        "kind": kind,
        "names": list(names),
        "judges": sorted({record.folders["judge"].name for record in records}),
        "code_version": code_version(),
        "sources": sources(records),
        "files": {str(one.relative_to(path.parent)): file_hash(one) for one in written},
    }
    write_json(path.with_suffix(".json"), note)
