"""Manifests, metrics and win rates of finished runs -> one row of numbers a run.

Everything a report says is read here, from what the stages left on disk; nothing is computed twice.
A row is a flat dict, so that many of them are a table: keys of one policy start with its name
(`ppo/win_rate`), shares are fractions, a number that a run does not have is None.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from eval.analysis import MOST_UNJUDGED
from reports.verdict import shown
from stages import config as settings
from stages.config import (
    OPTIONAL_STAGES,
    RANDOM,
    STAGE_SECTIONS,
    TOY,
    UPSTREAM_STAGES,
    Config,
    UserError,
)
from stages.judge_settings import HOW_ONLY
from stages.runs import file_hash, make_command, read_lines, read_manifest, stage_folder

STAGES = tuple(STAGE_SECTIONS)
SIDE = "calibration"  # beside the run: shown where it is there
RATES = ("/win_rate", "/low", "/high", "/controlled")


@dataclass(frozen=True)
class Record:
    """One finished run: where its stages lie and what they wrote about themselves."""

    name: str
    preset: str
    seed: int
    folders: dict[str, Path]
    manifests: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    """Section -> field -> value, each section as the stage that it governs last recorded it."""
    calibration: dict[str, Any] | None = None
    """What the calibration of this very judge found; None where there was none."""
    calibration_pairs: list[dict[str, Any]] = field(default_factory=list)
    """The labelled pairs with the judge's answers, where it was calibrated."""

    def results(self, stage: str) -> dict[str, Any]:
        """What a stage found."""
        results: dict[str, Any] = self.manifests[stage]["results"]
        return results

    def rows(self, stage: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The rows of a JSONL file of a stage; none where it wrote none."""
        path = self.folders[stage] / file
        return read_lines(path) if path.exists() else []


def policies_of(record: Record) -> list[str]:
    """The policies that were judged, in the order of the training stages."""
    judged = record.results("win_rate")["policies"]
    return sorted(judged, key=lambda name: (name not in STAGES, STAGES.index(name)))


def load_run(config: Config) -> Record:
    """The run that a config names.

    Raises UserError, with the make command to run, where a stage is missing or was made from
    another version of an earlier stage than the one that lies there now.
    """
    folders = _part_of_the_run({stage: stage_folder(config, stage) for stage in STAGES})
    for stage, folder in folders.items():
        if read_manifest(folder) is None:
            raise UserError(f"stage {stage} is missing: run `{make_command(config, stage)}`")
    stale = _stale(folders)
    if stale:
        stage, source = stale
        command = make_command(config, stage)
        raise UserError(f"stage {stage} was made from an earlier {source}: run `{command}`")
    return _read(folders)


def find_runs(name: str) -> tuple[list[Record], list[str]]:
    """The finished seeds of a run, in the order of the seeds, and a line on each other seed.

    Raises UserError where none has finished.
    """
    found, left_out = [], []
    for folder in sorted((settings.RUNS / name).glob("seed*"), key=lambda one: _seed(one.name)):
        folders = _part_of_the_run(_folders(folder))
        missing = [stage for stage in folders if read_manifest(folders[stage]) is None]
        stale = None if missing else _stale(folders)
        if missing:
            left_out.append(f"{name} {folder.name} is left out: stage {missing[0]} is missing.")
        elif stale:
            why = f"stage {stale[0]} was made from an earlier {stale[1]}"
            left_out.append(f"{name} {folder.name} is left out: {why}.")
        else:
            found.append(_read(folders))
    if not found:
        where = settings.RUNS / name
        raise UserError(f"no finished run in {where}: run `make eval PRESET=<preset> NAME={name}`")
    return found, left_out


def table(records: list[Record]) -> pd.DataFrame:
    """One row a run; a rate that may not be given is nan."""
    rows = [row(record) for record in records]
    return pd.DataFrame([{**one, **_as_numbers(one)} for one in rows])


def _as_numbers(values: dict[str, Any]) -> dict[str, float]:
    return {key: math.nan for key, value in values.items() if value is None and _is_rate(key)}


def _is_rate(key: str) -> bool:
    return key.endswith(RATES) or key.startswith("difference")


def row(record: Record) -> dict[str, Any]:
    """The numbers of one run that a report shows or compares."""
    base, reward, ppo = (record.results(stage) for stage in ("base", "rm", "ppo"))
    tokens = base.get("tokens", {})
    return {
        "name": record.name,
        "preset": record.preset,
        "seed": record.seed,
        "checkpoint": record.settings["base"]["checkpoint"],
        "pretrained": record.settings["base"]["checkpoint"] != RANDOM,
        "real_posts": record.settings["data"]["source"] != TOY,
        "parameters": base["parameters"],
        "sft_rows": tokens.get("sft_train", {}).get("rows"),
        "comparisons": tokens.get("comparisons_train", {}).get("rows"),
        "accuracy": reward["accuracy"],
        "accuracy_low": reward["accuracy_low"],
        "accuracy_high": reward["accuracy_high"],
        "pairs": reward["pairs"],
        "episodes": ppo["episodes"],
        "kl": ppo["objective/kl"],
        "scores": ppo["objective/scores"],
        "max_tokens": record.settings["data"]["max_summary_tokens"],
        **_judge_row(record),
        **{
            f"{policy}/{key}": value
            for policy in policies_of(record)
            for key, value in _policy_row(record, policy).items()
        },
    }


def _judge_row(record: Record) -> dict[str, Any]:
    wins, judge, summaries = (record.results(one) for one in ("win_rate", "judge", "summaries"))
    differences = {
        pair: found | {"headline": all(_is_headline(wins, one) for one in pair.split("-"))}
        for pair, found in wins["differences"].items()
    }
    main = differences["ppo-sft"]
    return {
        "policies": policies_of(record),
        "judge": wins["judge"]["name"],
        "judge_kind": wins["judge"]["kind"],
        "is_llm": wins["judge"]["is_llm"],
        "judge_note": wins["judge"].get("note") or "",
        "judge_flags": judge_flags(record),
        "calibrated": record.calibration is not None,
        "posts": wins["posts"],
        "judgements": judge["judgements"],
        "judge_models": judge.get("models") or [],
        "share_first": judge["share_first"],
        "differences": differences,
        "difference": main["estimate"] if main["headline"] else None,
        "difference_low": main["low"] if main["headline"] else None,
        "difference_high": main["high"] if main["headline"] else None,
        "difference_p_value": main["p_value"] if main["headline"] else None,
        "reference/tokens": summaries["reference_tokens"],
        "reference/score": summaries["policies"]["ppo"]["reference_score"],
    }


def _is_headline(wins: dict[str, Any], policy: str) -> bool:
    """Whether so few of a policy's posts are unjudged that its rate may be given at all."""
    return bool(wins["policies"][policy]["unjudged"] <= MOST_UNJUDGED)


def judge_flags(record: Record) -> list[str]:
    """What forbids to take the judge's word: failed controls and a poor calibration."""
    return _flags(record.results("controls"), record.calibration)


def flags_beside(run: Path, judge: dict[str, Any]) -> list[str]:
    """The same for a judge with these settings, from what lies in a run's folder."""
    return _flags(_results_of(run / "controls", judge), _results_of(run / SIDE, judge))


def flags_of_versus(
    found: dict[str, Any], runs: Sequence[Path], judge: dict[str, Any]
) -> list[str]:
    """The same for a comparison of two policies: its controls, its runs' calibrations."""
    calibrations = [_results_of(run / SIDE, judge) for run in runs]
    return list(dict.fromkeys(_flags(found["controls"], *calibrations)))


def _flags(controls: dict[str, Any] | None, *calibrations: dict[str, Any] | None) -> list[str]:
    tried = controls["controls"].values() if controls else []
    failed = [one["what"] for one in tried if one["passed"] is False]
    said = f"it does not surely prefer the reference to {', to '.join(failed)}"
    flags = [flag for one in calibrations if one for flag in one["flags"]]
    return [*([said] if failed else []), *flags]


def _policy_row(record: Record, policy: str) -> dict[str, Any]:
    wins = record.results("win_rate")["policies"][policy]
    written = record.results("summaries")["policies"][policy]
    worst_low, worst_high = wins["worst_case"]
    given = _is_headline(record.results("win_rate"), policy)
    return {
        **{key: wins[key] if given else None for key in ("win_rate", "low", "high")},
        **{key: wins[key] for key in ("wins", "ties", "losses", "statistics")},
        "controlled": wins["statistics"]["length_controlled"]["estimate"] if given else None,
        "unjudged": wins["unjudged"],
        "worst_low": worst_low,
        "worst_high": worst_high,
        **{key: written[key] for key in ("rouge1", "rouge2", "rougeL", "tokens", "eos_rate")},
        "score": written["score"],
    }


def differing_settings(records: list[Record], free: tuple[str, ...]) -> dict[str, list[str]]:
    """The settings that are not alike in all runs -> their values, but for the `free` ones.

    A free one is a section (`memory`) or a field (`base.hidden_size`).
    """
    different = {}
    for section, values in records[0].settings.items():
        for key in values:
            name = f"{section}.{key}"
            if section in free or name in free:
                continue
            found = [shown(name, record.settings[section].get(key)) for record in records]
            if len(set(found)) > 1:
                different[name] = sorted(set(found))
    return different


def hashes(record: Record) -> dict[str, str]:
    """Twelve digits that name each stage's manifest, and so everything that it lists."""
    return {
        stage: file_hash(folder / "manifest.json")[:12] for stage, folder in record.folders.items()
    }


def _read(folders: dict[str, Path]) -> Record:
    manifests = {stage: read_manifest(folder) or {} for stage, folder in folders.items()}
    last = manifests["win_rate"]
    found = _settings(folders)
    side = folders["win_rate"].with_name(SIDE)
    calibration = _results_of(side, found["judge"])
    return Record(
        name=last["name"],
        preset=last["preset"],
        seed=last["seed"],
        folders=folders,
        manifests=manifests,
        settings=found,
        calibration=calibration,
        calibration_pairs=read_lines(side / "pairs.jsonl") if calibration else [],
    )


def find_calibration(config: Config) -> dict[str, Any]:
    """What the calibration of a config's judge found.

    Raises UserError, with the make command to run, where there is none of this judge.
    """
    folder = stage_folder(config, SIDE)
    found = _results_of(folder, vars(config.judge))
    if found is None:
        command = make_command(config, SIDE)
        raise UserError(f"this judge was not calibrated for {config.name}: run `{command}`")
    return found


def _results_of(folder: Path, judge: dict[str, Any]) -> dict[str, Any] | None:
    """What a check in a folder found, if it was one of the judge with these settings."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    same = all(saved["judge"].get(key) == judge[key] for key in judge.keys() - set(HOW_ONLY))
    return manifest["results"] if same else None


def _settings(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for stage in folders:
        saved = json.loads((folders[stage] / "config.json").read_text(encoding="utf-8"))
        for section in STAGE_SECTIONS[stage]:
            if section in saved:  # not in what an earlier version wrote
                found[section] = saved[section]
        if stage == "ppo":
            found["memory"] = saved["memory"]
    return found


def _folders(seed_folder: Path) -> dict[str, Path]:
    """Where the stages of a seed lie; its last stage knows the upstream run."""
    own = {stage: seed_folder / stage for stage in STAGES}
    upstream = (read_manifest(own["win_rate"]) or {}).get("upstream")
    if not upstream:
        return own
    elsewhere = settings.RUNS / upstream / seed_folder.name
    return own | {stage: elsewhere / stage for stage in UPSTREAM_STAGES}


def _part_of_the_run(folders: dict[str, Path]) -> dict[str, Path]:
    """Without the optional stages whose policies were not summarised."""
    summarised = (read_manifest(folders["summaries"]) or {}).get("inputs", {})
    left_out = {stage for stage in OPTIONAL_STAGES if stage not in summarised}
    return {stage: folder for stage, folder in folders.items() if stage not in left_out}


def _stale(folders: dict[str, Path]) -> tuple[str, str] | None:
    """A stage that was made from another version of an earlier one, and that one."""
    for stage, folder in folders.items():
        for source, recorded in (read_manifest(folder) or {})["inputs"].items():
            if recorded != file_hash(folders[source] / "manifest.json"):
                return stage, source
    return None


def _seed(name: str) -> int:
    digits = name.removeprefix("seed")
    return int(digits) if digits.isdigit() else -1
