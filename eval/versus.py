"""Two policies against each other, on the same posts: of two runs, or two of one run.

    python -m eval.versus --a tiny:ppo --b tiny:sft

A side is `name[/seed][:policy]` (44413 and ppo where left out). The judge is the one that run A's
settings name (`--judge` names its folder, of several), changed by `--set judge.*`; another kind or
model inherits no server. It sees both orders of each pair, as with references, and the controls on
A's posts (from the cache, where run A was evaluated with it).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eval.controls import outcome
from eval.judge import capped, judge_both_orders, make_judge
from eval.judges.protocol import Row
from eval.questions import OWN_TEXTS_ONLY, knows_own_texts_only, rows_for
from eval.win_rate import describe as describe_scores
from eval.win_rate import has_verdict, post_scores, statistics_of
from stages.driving.start import ended_by_signal
from stages.finished import check_run, is_gold_of, read_manifest, stage_folder
from stages.running.files import file_hash, read_lines, read_record, write_json
from stages.running.progress import folded
from stages.runs import Run, open_stage
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import add_overrides, assigned, make_config, recorded_config
from stages.settings.config import Checks, Config, JudgeSettings, UserError, override_of
from stages.settings.judge import at_server

DEFAULT_SEED = "44413"
DEFAULT_POLICY = "ppo"
NEEDED = ("id", "query", "summary", "reference", "score")  # of a row of summaries
SIDES = "sides.json"  # of the summaries that are being judged
OWN_FILES = "judge files of your own by `make judge INPUT=...`"
# What belongs to the server of one model, and not to another model.
OF_THE_SERVER = ("base_url", "accept_model", "input_price", "output_price")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One policy of one run, and its summaries by post id."""

    name: str
    seed: int
    policy: str
    folder: Path
    rows: Mapping[str, Row]

    @property
    def label(self) -> str:
        """How pages and folders name it."""
        return f"{self.name}-{self.seed}-{self.policy}"


def judge_sides(
    a: str,
    b: str,
    overrides: Sequence[str] = (),
    max_cost: float | None = None,
    judge_folder: str = "",
) -> tuple[Config, dict[str, Any]]:
    """Judge side `a` against side `b`, both `name[/seed][:policy]`; the config and the results.

    `judge_folder` names one of the judges that judged run A, where these are several.

    Raises UserError where a side has no summaries, the posts differ, the judge is a reward model
    that cannot compare the sides, or no post is judged.
    """
    left, right = read_side(a), read_side(b)
    check_posts(left, right)
    config = versus_config(left, right, overrides, judge_folder)
    config = replace(config, judge=capped(config.judge, max_cost))
    if knows_own_texts_only(config.judge):
        check_scores(left, right)
    check_gold(config, left, right)
    rows = pair_rows(left, right)
    with open_stage(config, "versus") as run:
        for side in dict.fromkeys((left.folder, right.folder)):
            run.inputs[str(side.relative_to(settings.RUNS))] = file_hash(side / "manifest.json")
        forget_other_sides(run)
        judge = make_judge(config, {"versus": rows})
        controls = rows_for(config, list(left.rows.values()))
        judgements = judge_both_orders(run, judge, {"versus": rows, **controls}, "versus")
        results = describe(rows, [row for row in judgements if row["policy"] == "versus"]) | {
            "judge": asdict(judge.about),
            "controls": outcome(judgements, controls),
            "a": left.label,
            "b": right.label,
        }
        (run.partial / SIDES).unlink()  # the manifest has them
        run.finish(results)
    return config, results


def forget_other_sides(run: Run) -> None:
    """Drop what an interrupted try has judged if the summaries of a side were made anew since."""
    judged = run.partial / SIDES
    if read_record(judged) != run.inputs:
        (run.partial / "judgements.jsonl").unlink(missing_ok=True)
        write_json(judged, run.inputs)


def read_side(text: str) -> Side:
    """The side that `name[/seed][:policy]` names. Raises UserError where it is not there."""
    name, seed, policy = parts_of(text)
    check_run(name)
    folder = settings.RUNS / name / f"seed{seed or DEFAULT_SEED}" / "summaries"
    if read_manifest(folder) is None:
        raise UserError(f"{text}: {folder} is missing: run `make eval` for that run first")
    path = folder / f"{policy}.jsonl"
    if not path.exists():
        there = ", ".join(sorted(file.stem for file in folder.glob("*.jsonl")))
        raise UserError(f"{text}: run {name} has no policy {policy}: it has {there}")
    rows = {row["id"]: row for row in rows_of(path)}
    return Side(name=name, seed=int(seed or DEFAULT_SEED), policy=policy, folder=folder, rows=rows)


def parts_of(text: str) -> tuple[str, str, str]:
    """Name, seed and policy that `name[/seed][:policy]` names; no seed is empty, `/seed1` is 1.

    Raises UserError for what cannot be read so.
    """
    run, _, policy = text.partition(":")
    name, slash, seed = run.partition("/")
    seed = seed.removeprefix("seed")
    if not name or (slash and not seed.isdigit()):
        raise UserError(f"{text!r} names no side: write name[/seed][:policy], such as tiny:ppo")
    return name, seed, policy or DEFAULT_POLICY


def rows_of(path: Path) -> list[Row]:
    """The rows of a policy's summaries. Raises UserError for a file that no run wrote."""
    rows = read_lines(path, OWN_FILES)
    for number, row in enumerate(rows, start=1):
        lacking = [name for name in NEEDED if name not in row]
        if lacking:
            raise UserError(f"{path}:{number}: field {lacking[0]} is missing: {OWN_FILES}")
    return rows


def check_posts(a: Side, b: Side) -> None:
    """Raise UserError unless both sides summarise the same posts and are two."""
    if (a.folder, a.policy) == (b.folder, b.policy):
        raise UserError(f"A and B are both {a.label}: name two different policies or runs")
    if a.rows.keys() != b.rows.keys():
        both = len(a.rows.keys() & b.rows.keys())
        raise UserError(
            f"the posts differ: {a.label} has {len(a.rows)}, {b.label} has {len(b.rows)}, and"
            f" {both} are in both: evaluate them with the same data and eval.posts"
        )
    other = [post for post, row in a.rows.items() if row["query"] != b.rows[post]["query"]]
    if other:
        raise UserError(f"the posts differ: {other[0]} has another text in {b.label}")


def check_scores(a: Side, b: Side) -> None:
    """Raise UserError unless one reward model scored both sides, every summary."""
    for side in (a, b):
        if any(row["score"] is None for row in side.rows.values()):
            raise UserError(
                f"judge.kind={OWN_TEXTS_ONLY}: no reward model scored the summaries of"
                f" {side.label}: choose another judge with --set judge.kind=... (make: SET=)"
            )
    read = [(read_manifest(side.folder) or {}).get("inputs", {}) for side in (a, b)]
    scored_by = [inputs.get("normalize", inputs.get("released")) for inputs in read]
    if scored_by[0] != scored_by[1]:
        raise UserError(
            f"judge.kind={OWN_TEXTS_ONLY}: {a.label} and {b.label} were scored by two reward"
            " models: choose another judge with --set judge.kind=... (make: SET=)"
        )


def check_gold(config: Config, a: Side, b: Side) -> None:
    """Raise UserError where the gold reward model is the own one of a side's run."""
    for side in (a, b) if config.judge.gold else ():
        recorded = recorded_config(side.folder)
        if recorded is not None and is_gold_of(config, recorded):
            raise UserError(
                f"judge.model={config.judge.gold} is the reward model of {side.label} itself: name"
                " another run's, or leave judge.model out"
            )


def versus_config(a: Side, b: Side, overrides: Sequence[str], judge_folder: str = "") -> Config:
    """A config that names the comparison's folder and holds the judge of run A and its checks.

    Posts are read and batched as run A does (`data`, `memory`): a gold model cuts them and controls
    parse them. The hash of the settings has neither, because the summaries of both sides, which are
    inputs, follow from the data.
    """
    changes = judge_changes(overrides, "versus")
    folders = judged_folders(a, judge_folder)
    saved = [saved_settings(folder, "kind" in changes) for folder in folders]
    judge, *others = (changed_judge(of_judge["judge"], changes) for of_judge in saved)
    if any(other != judge for other in others):
        names = ", ".join(folder.name for folder in folders)
        raise UserError(f"{a.label} was judged by {names}: choose one with JUDGE= (its folder)")
    config = make_config("tiny", seed=a.seed)
    recorded = recorded_config(a.folder)
    if recorded is not None:
        config = replace(config, data=recorded.data, memory=recorded.memory)
    name = f"versus-{a.label}-{b.label}"
    checks = Checks(**saved[0]["checks"]) if "checks" in saved[0] else config.checks
    return replace(config, name=name, judge=judge, checks=checks, overrides=tuple(overrides))


def judge_changes(overrides: Sequence[str], command: str) -> dict[str, Any]:
    """The judge's settings in a command's overrides. Raises UserError for any other setting."""
    changes = {}
    for override in overrides:
        section, field, value = override_of(override)
        if section != "judge":
            raise UserError(f"{override} has no effect: {command} takes judge.* alone")
        changes[field] = value
    return changes


def changed_judge(saved: Mapping[str, Any], changes: Mapping[str, Any]) -> JudgeSettings:
    """The judge of recorded settings with changes.

    Another kind takes nothing from the record, another model nothing that belongs to the recorded
    model's server: its texts would go there.
    """
    kept, recorded = dict(saved), JudgeSettings(**saved)
    if changes.get("kind", recorded.kind) != recorded.kind:
        kept = {}
    elif changes.get("model", recorded.model) != recorded.model:
        kept = {key: value for key, value in kept.items() if key not in OF_THE_SERVER}
    return at_server(JudgeSettings(**{**kept, **changes}))


def saved_settings(folder: Path, chosen: bool) -> dict[str, Any]:
    """The settings that a stage recorded.

    Raises UserError where no stage did and no kind of judge is chosen: such a folder was made by
    hand.
    """
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        saved = None
    if isinstance(saved, dict) and isinstance(saved.get("judge"), dict):
        return saved
    if not chosen:
        raise UserError(
            f"{folder} names no judge, because no run wrote it: choose one with"
            f" SET=judge.kind=..., or {OWN_FILES}"
        )
    return {"judge": {}}


def judged_folders(side: Side, name: str) -> list[Path]:
    """The folders whose settings name the judges of a side, or the one of that name.

    Where no judge has judged it, the folder of its summaries. Raises UserError for an unknown name.
    """
    root = side.folder.with_name("judge")
    folders = finished_in(root)
    if not name:
        return folders or [side.folder]
    names = [folder.name for folder in folders]
    if name not in names:
        there = ", ".join(names) or "none"
        raise UserError(f"JUDGE={name} has not judged {side.label}: choose of {there}")
    return [root / name]


def finished_in(root: Path, name: str = "") -> list[Path]:
    """The folders of the judges below a folder that have finished, or the one of that name."""
    return sorted(path for path in root.glob(name or "*") if read_manifest(path) is not None)


def pair_rows(a: Side, b: Side) -> list[Row]:
    """A's summaries with B's in the place of the reference."""
    return [
        {
            **{key: row[key] for key in ("id", "query", "summary", "score")},
            "reference": b.rows[post]["summary"],
            "reference_score": b.rows[post]["score"],
        }
        for post, row in a.rows.items()
    ]


def describe(rows: Sequence[Row], judgements: Sequence[Row]) -> dict[str, Any]:
    """A's rate over B in [0, 1] over posts, its p-value against 1/2, and what `analyse` finds.

    `worst_case` is the rate with every unjudged post lost and with every one won.
    Raises UserError where no post has a verdict in both orders.
    """
    scores = post_scores(judgements)["versus"]
    if not has_verdict(scores):
        raise UserError(
            "no post is judged, so there is no rate: see the replies in judgements.jsonl"
        )
    rates = describe_scores(scores)
    bounds = {"worst_case": rates.pop("worst_case")}
    texts = {row["id"]: (row["summary"], row["reference"]) for row in rows}
    statistics = statistics_of("versus", judgements, texts) | bounds
    return {"estimate": rates.pop("win_rate"), **rates, "statistics": statistics}


def summary_of(results: Mapping[str, Any]) -> list[str]:
    """Who was compared, and on how many posts, in lines of at most 80 columns."""
    return folded(
        f"{results['a']} over {results['b']}: {results['posts']} posts judged,"
        f" {results['unjudged']:.1%} of the posts unjudged"
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """What the command line asks for: `a`, `b`, `judge` and `overrides`."""
    parser = Parser(description="judge two policies against each other")
    parser.add_argument("--a", required=True, help="name[/seed][:policy]")
    parser.add_argument("--b", required=True, help="name[/seed][:policy]")
    parser.add_argument("--judge", default="", help="the folder of one judge of run A, of several")
    add_overrides(parser, "judge.KEY=VALUE")
    parser.add_argument("--max-cost", type=float, help="the most that the judge may cost, USD")
    return parser.parse_args(argv)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Judge two policies against each other."""
    args = arguments(argv)
    own = {"JUDGE": args.judge, "SET": " ".join(args.overrides), "MAX_COST": args.max_cost}
    with ended_by_signal(" ".join([f"make versus A={args.a} B={args.b}", *assigned(own)])):
        config, results = judge_sides(args.a, args.b, args.overrides, args.max_cost, args.judge)
    print("\n".join(summary_of(results)))
    print(f"verdicts:\n{stage_folder(config, 'versus')}")


if __name__ == "__main__":
    main()
