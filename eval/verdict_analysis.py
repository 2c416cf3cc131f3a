"""Published verdicts, analysed as our own are: rates by order, at equal length, with intervals.

    python -m eval.verdict_analysis --comparisons FOLDER --policy ppo_1.3b

reads `comparisons_*.jsonl` (the schema of the real data) and takes each `choice` as the verdict of
a judge who was shown the two summaries in the order of the file. It does not know whether a model
or a person chose.
"""

import argparse
import json
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from eval.rates.length_control import VerdictTable, length_controlled, word_count
from eval.rates.table import analyse
from stages.posts.readers import check_comparison
from stages.running.files import read_lines
from stages.settings.checks import UserError, fail

Length = Callable[[str], int]


def read_verdicts(folder: Path) -> list[dict[str, Any]]:
    """The rows of every `comparisons_*.jsonl` of a folder, checked.

    Raises UserError where there is no such file or a row is not in the schema.
    """
    paths = sorted(folder.glob("comparisons_*.jsonl"))
    if not paths:
        raise UserError(
            f"{folder} holds no comparisons_*.jsonl: correct --comparisons (make: DATA=)"
        )
    rows = []
    for path in paths:
        try:
            found = read_lines(path)
        except ValueError as error:
            raise UserError(f"{path}: not JSON lines ({error})") from None
        for number, row in enumerate(found, start=1):
            check_comparison(f"{path}:{number}", row)
        rows += found
    return rows


def table_of(
    rows: list[dict[str, Any]], policy: str, reference: str, length: Length = word_count
) -> VerdictTable:
    """The verdicts on `policy` against `reference`, which are names in `summaries[].policy`.

    Raises UserError where no row compares the two.
    """
    pairs = [row for row in rows if {policy, reference} == {one["policy"] for one in _pair(row)}]
    if not pairs:
        names = sorted({one["policy"] for row in rows for one in _pair(row)})
        raise UserError(
            f"no row compares {policy} with {reference}: policies there are"
            f" {', '.join(names[:9])}: name two of them, --policy and --reference"
            " (make: JUDGED= and AGAINST=)"
        )
    first = [_pair(row)[0]["policy"] == policy for row in pairs]
    won = [_pair(row)[row["choice"]]["policy"] == policy for row in pairs]
    ids = [row["info"]["id"] for row in pairs]
    numbers = {one: number for number, one in enumerate(dict.fromkeys(ids))}
    texts = [
        _pair(row) if here else _pair(row)[::-1] for row, here in zip(pairs, first, strict=True)
    ]
    return VerdictTable(
        posts=np.array([numbers[one] for one in ids], dtype=np.int64),
        outcomes=np.array(won, dtype=float),
        shown_first=np.array(first, dtype=bool),
        log_ratios=np.array([log(length(a["text"]) / length(b["text"])) for a, b in texts]),
        asked=np.ones(len(pairs), dtype=bool),
    )


def _pair(row: dict[str, Any]) -> list[dict[str, Any]]:
    pair: list[dict[str, Any]] = row["summaries"]
    return pair


def characters(text: str) -> int:
    """Characters of a summary without outer spaces, at least 1."""
    return max(1, len(text.strip()))


def token_counter(folder: str) -> Length:
    """Counts the tokens of a text with the tokenizer in a folder."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path} is missing: correct --tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: max(1, len(tokenizer.encode(text, add_special_tokens=False).ids))


def units(tokenizer: str) -> dict[str, Length]:
    """The ways to count length: words and characters, and tokens where there is a tokenizer."""
    found: dict[str, Length] = {"words": word_count, "characters": characters}
    return found | ({"tokens": token_counter(tokenizer)} if tokenizer else {})


def analyse_folder(
    folder: Path, policy: str, reference: str = "ref", tokenizer: str = ""
) -> dict[str, Any]:
    """What `analyse` finds in a folder's verdicts, with the controlled rate in every unit."""
    rows = read_verdicts(folder)
    found = analyse(table_of(rows, policy, reference))
    controlled = {
        unit: length_controlled(table_of(rows, policy, reference, length))
        for unit, length in units(tokenizer).items()
    }
    return {"policy": policy, "reference": reference, **found, "length_units": controlled}


def lines_of(found: dict[str, Any]) -> list[str]:
    """The analysis for a terminal of 80 columns."""
    said = [
        f"{found['policy']} against {found['reference']}: {found['judgements']:,} verdicts"
        f" on {found['posts']:,} posts",
        _line("raw rate", found["raw"]),
        _line("  shown first", found["shown_first"]),
        _line("  shown second", found["shown_second"]),
        _line("order-balanced rate", found["order_balanced"]),
        _line("share choosing the first", found["share_first"]),
    ]
    for unit, one in found["length_units"].items():
        extrapolated = " EXTRAPOLATED" if one["extrapolated"] else ""
        said.append((_line(f"at equal length ({unit})", one) + extrapolated)[:80])
    words = found["length_controlled"]
    if words.get("order_logits"):
        for key, what in (("order_logits", "order"), ("doubled_length_logits", "doubled length")):
            b, low, high = words[key]
            said.append(f"  {what + ', logits':36} {b:+.2f} [{low:+.2f}, {high:+.2f}]")
    said.append("rate by words, policy over reference:")
    for one in found["length_bins"]:
        bounds = f"{one['from']:.2f} to {one['to']:.2f} (n = {one['judgements']})"
        said.append(_line(f"  {bounds}", one | {"estimate": one["rate"]}))
    return said


def _line(what: str, one: dict[str, Any] | None) -> str:
    if one is None or one["estimate"] is None:
        return f"{what:38} none{': ' + one['why'] if one else ''}"[:80]
    rate, low, high = (100 * one[key] for key in ("estimate", "low", "high"))
    return f"{what:38}{rate:5.1f}% [{low:.1f}, {high:.1f}]"


def main(argv: list[str] | None = None) -> None:
    """Print the analysis of a folder's verdicts, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description="analyse published verdicts")
    parser.add_argument("--comparisons", required=True, help="folder of comparisons_*.jsonl")
    parser.add_argument("--policy", required=True, help="whose rate; a name in summaries[].policy")
    parser.add_argument("--reference", default="ref", help="against whom")
    parser.add_argument("--tokenizer", default="", help="folder: counts length in tokens too")
    parser.add_argument("--out", default="", help="file for all numbers, as JSON")
    args = parser.parse_args(argv)
    try:
        folder = Path(args.comparisons)
        found = analyse_folder(folder, args.policy, args.reference, args.tokenizer)
    except UserError as error:
        fail(error)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines_of(found)))


if __name__ == "__main__":
    main()
