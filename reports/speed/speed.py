"""Measures ours and its peers in turn on the same work, for `make bench`.

Each measurement is a process of its own, so that its peak memory is its own. A shape is measured
several times, ours and every peer by turns, so that a machine that slows down slows all of them.
Then ours alone: SFT, reward model and DPO, and how an update grows. It does not load torch.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reports.needs.rehearse import run_part
from reports.speed.peers import PEERS, interpreter_of, run_peer
from stages.running.files import read_json
from stages.running.machine import code_version, cpu_model, library_versions
from stages.settings.command_line import Request, config_of
from stages.settings.config import UserError

NAME = "bench"
OURS = "ours"
STAGES = {"sft": "sft step", "rm": "rm step", "dpo": "dpo step"}
# Larger models of a preset's family, as settings.
LARGER = {
    "pythia-14m": (
        "base.checkpoint=EleutherAI/pythia-31m-deduped",
        "base.checkpoint=EleutherAI/pythia-70m-deduped",
    ),
    "tiny-s": ("base.hidden_size=128", "base.hidden_size=256"),
}
# What a growing update is measured by, as the page names it.
BATCH, QUERY, RESPONSE, MODEL = "episodes", "longest query", "sampled tokens", "parameters"


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update at one shape."""

    preset: str
    batch: int
    microbatch: int
    changes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As the command line takes it."""
        return f"{self.preset}:{self.batch}:{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be measured."""

    shapes: tuple[Case, ...]
    runs: int
    data: str = ""
    """Folder of posts; empty: token ids with the lengths of real posts."""
    tokenizer: str = ""
    overrides: tuple[str, ...] = ()
    growth: bool = True

    def asked(self, case: Case) -> Request:
        """The settings of a case."""
        fixed = (
            f"ppo.batch_size={case.batch}",
            f"memory.microbatch_size={case.microbatch}",
            f"memory.forward_batch_size={case.batch}",
            "memory.mixed_precision=no",
        )
        return Request(
            preset=case.preset,
            name=NAME,
            data=self.data,
            tokenizer=self.tokenizer,
            overrides=(*fixed, *self.overrides, *case.changes),
        )


def case_of(text: str) -> Case:
    """A case as it is typed: `pythia-14m:32:8`. Raises UserError for anything else."""
    preset, *numbers = text.split(":")
    if len(numbers) != 2 or not all(one.isdigit() and int(one) for one in numbers):
        raise UserError(f"SHAPES takes preset:batch:microbatch, as in pythia-14m:32:8, not {text}")
    batch, microbatch = map(int, numbers)
    if batch % microbatch:
        raise UserError(f"SHAPES={text}: the batch must divide by the microbatch")
    return Case(preset=preset, batch=batch, microbatch=microbatch)


def measure(order: Order, work: Path) -> dict[str, Any]:
    """Everything that was found. Raises UserError if ours fails; a peer that fails says so."""
    for case in order.shapes:
        config_of(order.asked(case))  # refuses a bad setting before anything is measured
    peers, left_out = _peers()
    shapes = {case.text: _measure_shape(order, case, work, peers) for case in order.shapes}
    first = order.shapes[0]
    stages = {first.text: _measure_stages(order, first, work)}
    growth = _measure_growth(order, first, work) if order.growth else []
    updates = [one for shape in shapes.values() for one in shape["measured"][OURS]]
    updates += [one["update"] for one in growth]
    return {
        "about": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "code_version": code_version(),
            "machine": cpu_model(),
            "device": updates[0]["device"],
            "threads": updates[0]["threads"],
            "versions": library_versions(),
            "peers": {name: PEERS[name].label for name in peers},
            "left_out": left_out,
            "runs": order.runs,
            "overrides": list(order.overrides),
            "texts": shapes[first.text]["texts"],
            "matrix_rate": max(one["matrix_rate"] for one in updates),
        },
        "shapes": shapes,
        "stages": stages,
        "growth": growth,
    }


def _peers() -> tuple[dict[str, Path], list[str]]:
    """The interpreter of each peer that can be installed, and why others cannot."""
    ready, left_out = {}, []
    for name, peer in PEERS.items():
        try:
            ready[name] = interpreter_of(peer)
        except UserError as error:
            left_out.append(str(error))
    return ready, left_out


def _measure_shape(order: Order, case: Case, work: Path, peers: dict[str, Path]) -> dict[str, Any]:
    folder, asked = _prepared(order, case, work)
    config = config_of(asked)
    measured: dict[str, list[dict[str, Any]]] = {one: [] for one in (OURS, *peers)}
    for run in range(1, order.runs + 1):
        _say(case, OURS, run, order.runs)
        measured[OURS].append(_run("update", asked, folder)["update"])
        for name, python in peers.items():
            _say(case, PEERS[name].label, run, order.runs)
            measured[name].append(run_peer(PEERS[name], python, folder, config))
    prepared = read_json(folder / "prepare.json")
    about = {
        "preset": case.preset,
        "batch": case.batch,
        "microbatch": case.microbatch,
        "response": config.data.max_summary_tokens,
        "epochs": config.ppo.num_ppo_epochs,
    }
    return about | prepared | {"measured": measured}


def _measure_stages(order: Order, case: Case, work: Path) -> dict[str, list[dict[str, Any]]]:
    """Optimizer steps of the other stages, each several times."""
    folder, asked = _folder(case, work), order.asked(case)
    found: dict[str, list[dict[str, Any]]] = {step: [] for step in STAGES.values()}
    for run in range(1, order.runs + 1):
        for part, step in STAGES.items():
            _say(case, step, run, order.runs)
            found[step].append(_run(part, asked, folder)[step])
    return found


def _measure_growth(order: Order, case: Case, work: Path) -> list[dict[str, Any]]:
    """Updates that differ from a small one in one thing each, every one once."""
    small = replace(case, batch=max(case.microbatch, case.batch // 4))
    found = []
    for axis, value, changed in [("", 0, small), *growing(order, case, small)]:
        print(f"{case.preset}: growth, {axis or 'start'} {value or ''}".rstrip(), flush=True)
        folder, asked = _folder(case, work), order.asked(changed)
        if axis == MODEL:
            folder, asked = _prepared(order, changed, work)
        update = _run("update", asked, folder)["update"]
        parameters = read_json(folder / "prepare.json")["parameters"]
        found.append({"axis": axis, "value": value or parameters, "update": update})
    return found


def growing(order: Order, case: Case, small: Case) -> list[tuple[str, int, Case]]:
    """What grows from a small update, to which value (0: the model says), and the case."""
    data = config_of(order.asked(case)).data
    query, response = data.max_query_tokens, data.max_summary_tokens
    batches = [one for one in (2 * small.batch, 4 * small.batch) if one <= case.batch]
    return [
        *((BATCH, one, replace(small, batch=one)) for one in batches),
        *(
            (QUERY, one, replace(small, changes=(f"data.max_query_tokens={one}",)))
            for one in (query // 4, query // 2)
        ),
        *(
            (RESPONSE, one, replace(small, changes=(f"data.max_summary_tokens={one}",)))
            for one in (response // 4, 2 * response)
        ),
        *((MODEL, 0, replace(small, changes=(one,))) for one in LARGER.get(case.preset, ())),
    ]


def _prepared(order: Order, case: Case, work: Path) -> tuple[Path, Request]:
    """A folder with weights, texts and queries of a case, and its settings."""
    folder, asked = _folder(case, work), order.asked(case)
    folder.mkdir(parents=True)
    _run("prepare-update", asked, folder)
    return folder, asked


def _folder(case: Case, work: Path) -> Path:
    """Where a case works; what its changes name may hold slashes."""
    return work / "-".join([*case.text.split(":"), *case.changes]).replace("/", "-")


def _run(part: str, asked: Request, folder: Path) -> dict[str, Any]:
    """What a part of ours found. Raises UserError with what went wrong."""
    said = run_part(part, asked, folder)
    if said:
        raise UserError(f"bench: {part} of {asked.preset}: {said}")
    found: dict[str, Any] = read_json(folder / f"{part}.json") or {}
    return found


def _say(case: Case, what: str, run: int, runs: int) -> None:
    print(f"{case.preset}: {what}, run {run} of {runs}", flush=True)


def measure_in(order: Order, folder: Path) -> dict[str, Any]:
    """The same, with its working files in a folder that is removed whenever this ends."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)  # of a call that was killed
    work.mkdir(parents=True)
    try:
        return measure(order, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def cases_of(texts: Sequence[str]) -> tuple[Case, ...]:
    """The cases of a command line. Raises UserError for a bad one."""
    return tuple(case_of(text) for text in dict.fromkeys(texts))
