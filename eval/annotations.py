"""People as judges: the pairs that they see, the verdicts that they save, how far they agree.

    python -m eval.annotations --folder runs/annotate/tiny-44413-ppo

reads what the page of `reports.annotate_page` has saved in people's browsers, files
`annotations_<worker>.jsonl` with rows in the schema of `comparisons`. It says how far all pairs of
people agree and writes all verdicts to `comparisons_validation.jsonl` beside them. That folder is
then labelled data like any other, for the calibration of a judge.
"""

import json
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from eval.calibration import LABELS
from eval.output_rows import REFERENCE
from eval.rates.formulas import as_plain, clustered_share
from eval.rates.length_control import word_count
from eval.rates.simple_judges import kappa_interval
from eval.versus import Side, check_posts, read_side
from stages.posts.bad_rows import BadRowError
from stages.posts.readers import Located, check_comparison, is_cnndm, read_split
from stages.posts.tables import parsed_rows
from stages.running.files import write_whole
from stages.settings.checks import Parser, UserError, in_one_line
from stages.settings.command_line import recorded_config
from stages.settings.config import Data
from stages.settings.prompt import PROMPT, parse_post

SAVED = "annotations_*.jsonl"
SPLIT = "annotated"  # of the rows that people made
Row = dict[str, Any]
Pair = tuple[str, tuple[tuple[str, str], ...]]
"""A post's id, and policy and text of its two summaries, sorted: the same in every order shown."""


# -- what people are asked -------------------------------------------------------------------------


def pairs_of_folder(folder: str, count: int, seed: int) -> list[Row]:
    """`count` pairs of a folder's `comparisons_validation`, drawn by seed, without their labels.

    Each has `info` and `summaries` in the schema of `comparisons`. Raises UserError as the readers
    do.
    """
    located = read_split(Data(source=folder), folder, LABELS)
    rows = [
        {"info": row["info"], "summaries": row["summaries"]}
        for _, row in located
        if not is_cnndm(row)
    ]
    return drawn(rows, count, seed)


def pairs_of_sides(a: str, b: str, count: int, seed: int) -> list[Row]:
    """`count` pairs of side `a` with side `b`, or with the references if `b` is empty.

    A side is `name[/seed][:policy]`. A query that is no filled template is shown whole, without a
    title. Raises UserError where a side has no summaries, or the posts of two sides differ.
    """
    left = read_side(a)
    right = read_side(b) if b else None
    if right is not None:
        check_posts(left, right)
    recorded = recorded_config(left.folder)
    prompt = recorded.data.prompt if recorded else PROMPT
    rows = []
    for post_id, row in left.rows.items():
        unfilled = {"subreddit": "", "title": "", "post": row["query"]}
        post = parse_post(row["query"], prompt) or unfilled
        other = row["reference"] if right is None else right.rows[post_id]["summary"]
        summaries = [_summary(row["summary"], _name(left, right))]
        summaries.append(_summary(other, _name(right, left) if right else REFERENCE))
        rows.append({"info": post | {"id": post_id}, "summaries": summaries})
    return drawn(rows, count, seed)


def _name(side: Side, other: Side | None) -> str:
    """The policy's name, or the whole side's where both policies have the same."""
    return side.label if other and other.policy == side.policy else side.policy


def _summary(text: str, policy: str) -> Row:
    return {"text": text, "policy": policy, "note": None}


def drawn(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` of the pairs whose texts differ, each once, drawn by seed (all if there are fewer).

    Raises UserError where there is none.
    """
    unlike = {pair_of(row): row for row in rows if _differ(row)}
    if not unlike:
        raise UserError("there is no pair of two different texts to show: give other summaries")
    chosen = random.Random(f"annotate {seed}").sample(sorted(unlike), min(count, len(unlike)))
    return [unlike[pair] for pair in chosen]


def _differ(row: Row) -> bool:
    first, second = (summary["text"].split() for summary in row["summaries"])
    return first != second


def pair_of(row: Row) -> Pair:
    """What names a pair, whichever summary is shown first."""
    texts = ((summary["policy"], summary["text"].strip()) for summary in row["summaries"])
    return row["info"]["id"], tuple(sorted(texts))


# -- what people have answered ---------------------------------------------------------------------


def read_annotations(folder: Path) -> list[Row]:
    """The verdicts in a folder; of two by one person on one pair, the later one.

    Raises UserError where there is none, and where a row is not in the schema.
    """
    verdicts: dict[tuple[str, Pair], Row] = {}
    for path in sorted(folder.glob(SAVED)):
        for where, row in _rows_of(path, "save it again"):
            check_comparison(where, row)
            if not isinstance(row.get("worker"), str) or not row["worker"]:
                raise UserError(f"{where}: field worker is missing: say who judged")
            key = row["worker"], pair_of(row)
            if key not in verdicts or _time(row) >= _time(verdicts[key]):
                verdicts[key] = row
    if not verdicts:
        raise UserError(f"{folder} holds no {SAVED}: put the files there that browsers have saved")
    return list(verdicts.values())


def _rows_of(path: Path, mend: str) -> list[Located]:
    try:
        return list(parsed_rows(path))
    except BadRowError as error:
        raise UserError(f"{error}: {mend}") from None


def _time(row: Row) -> str:
    return str((row.get("extra") or {}).get("time", ""))


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Each person's counts and leanings, and the agreement of every two who judged the same pairs.

    Shares lie in [0, 1], with 95% intervals over posts. `agreements`: the pairs that both judged,
    the share with the same choice, and Cohen's kappa.
    """
    workers: dict[str, dict[Pair, Row]] = {}
    for row in rows:
        workers.setdefault(row["worker"], {})[pair_of(row)] = row
    return {
        "workers": {name: _leanings(list(of.values())) for name, of in sorted(workers.items())},
        "agreements": [
            {"workers": [a, b], **agreement(workers[a], workers[b])}
            for a, b in combinations(sorted(workers), 2)
            if workers[a].keys() & workers[b].keys()
        ],
    }


def _leanings(rows: Sequence[Row]) -> dict[str, Any]:
    lengths = [[word_count(text["text"]) for text in row["summaries"]] for row in rows]
    choices = [row["choice"] for row in rows]
    longer = [
        (posts, float(words[choice] == max(words)))
        for posts, words, choice in zip(_posts(rows), lengths, choices, strict=True)
        if words[0] != words[1]
    ]
    first = [(post, float(choice == 0)) for post, choice in zip(_posts(rows), choices, strict=True)]
    return {"verdicts": len(rows), "share_first": _share(first), "prefers_longer": _share(longer)}


def agreement(a: dict[Pair, Row], b: dict[Pair, Row]) -> dict[str, Any]:
    """How far two people agree on the pairs that both judged, whatever order each was shown."""
    both = sorted(a.keys() & b.keys())
    first, second = ([_chosen(of[pair]) for pair in both] for of in (a, b))
    posts = np.unique([post for post, _ in both], return_inverse=True)[1]
    same = [(post, float(x == y)) for (post, _), x, y in zip(both, first, second, strict=True)]
    kappa = kappa_interval(np.array(first, dtype=bool), np.array(second, dtype=float), posts)
    return {"pairs": len(both), "agreement": _share(same), "kappa": as_plain(kappa)}


def _chosen(row: Row) -> bool:
    """Whether the chosen summary is the first of `pair_of`."""
    chosen = row["summaries"][row["choice"]]
    return (chosen["policy"], chosen["text"].strip()) == pair_of(row)[1][0]


def _posts(rows: Sequence[Row]) -> list[str]:
    return [row["info"]["id"] for row in rows]


def _share(values: Sequence[tuple[str, float]]) -> dict[str, Any] | None:
    """The mean of values in [0, 1], each with its post."""
    posts = np.unique([post for post, _ in values], return_inverse=True)[1]
    return as_plain(clustered_share(np.array([value for _, value in values], dtype=float), posts))


def write_comparisons(folder: Path, rows: Sequence[Row]) -> Path:
    """Write all verdicts as one file of labelled comparisons beside those of the browsers.

    Raises UserError where another such file, which people here did not make, lies there, or one
    that cannot be read.
    """
    path = folder / f"{LABELS}.jsonl"
    there = _rows_of(path, "move that file away") if path.exists() else []
    if any(row.get("split") != SPLIT for _, row in there):
        raise UserError(
            f"{path} holds other comparisons: put the saved files into their own folder"
        )
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def lines_of(results: dict[str, Any]) -> list[str]:
    """The result for a terminal of 80 columns."""
    lines = []
    for name, leanings in results["workers"].items():
        lines.append(f"{name[:40]}: {leanings['verdicts']} verdicts")
        lines.append(_line("  picks the first shown", leanings["share_first"]))
        lines.append(_line("  prefers the longer text", leanings["prefers_longer"]))
    for pair in results["agreements"]:
        lines.append(
            f"{' and '.join(name[:25] for name in pair['workers'])}: {pair['pairs']} pairs"
        )
        lines.append(_line("  same choice", pair["agreement"]))
        if pair["kappa"]:
            estimate, low, high = (pair["kappa"][key] for key in ("estimate", "low", "high"))
            lines.append(f"  {'Cohen kappa':28} {estimate:6.2f} [{low:.2f}, {high:.2f}]")
    return lines


def _line(what: str, share: dict[str, Any] | None) -> str:
    if share is None:
        return f"{what:30} none"
    rate, low, high = (100 * share[key] for key in ("estimate", "low", "high"))
    return f"{what:30} {rate:5.1f}% [{low:.1f}, {high:.1f}]"


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Say how far people agree, and write their verdicts as labelled comparisons."""
    parser = Parser(description="verdicts that people saved from the page")
    parser.add_argument("--folder", required=True, help="of annotations_*.jsonl (make: DATA=)")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    rows = read_annotations(folder)
    path = write_comparisons(folder, rows)
    print("\n".join(lines_of(describe(rows))))
    print(f"labelled comparisons:\n{path}")


if __name__ == "__main__":
    main()
