"""The other seeds of a run: what they logged, where their settings are the same."""

from typing import Any

from reports.collect import Record
from stages.finished import read_manifest
from stages.system.files import read_lines


def rows_of_seeds(record: Record, stage: str) -> dict[int, list[dict[str, Any]]]:
    """Seed -> the rows that a stage logged, of the run's other finished seeds, in their order.

    A seed with other settings of this stage is left out, and so is one that did not log.
    """
    own = record.folders[stage]
    found: dict[int, list[dict[str, Any]]] = {}
    seeds = own.parent.parent.glob(f"seed*/{stage}")
    for folder in sorted(seeds, key=lambda one: (len(one.parent.name), one.parent.name)):
        manifest = read_manifest(folder)
        metrics = folder / "metrics.jsonl"
        if folder == own or manifest is None or not metrics.exists():
            continue
        if _but_the_seed(manifest) == _but_the_seed(record.manifests[stage]):
            found[int(folder.parent.name.removeprefix("seed"))] = read_lines(metrics)
    return found


def _but_the_seed(manifest: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = manifest.get("settings", {})
    return {name: value for name, value in settings.items() if name != "seed"}
