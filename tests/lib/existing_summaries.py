"""Files of existing summaries, and the runs that judge them."""

import csv
import json

import pyarrow
import pyarrow.parquet

from eval.outputs import read_systems, read_table
from stages.config.command_line import make_config
from tests.lib.built_in_summaries import summary_with

POST = {"subreddit": "x", "title": "My lamp", "post": "It is gone. I miss it."}


def rows_of_world(count=40):
    """Rows of two systems about posts of the built-in world; people prefer the longer summary."""
    rows = []
    for number in range(count):
        post_id = f"toy1-validation-{number}"
        row = {
            "id": post_id,
            "subreddit": POST["subreddit"],
            "title": POST["title"],
            "post": f"{POST['post']} It was number {number}.",
            "reference": summary_with(post_id, "event", "second"),
        }
        short_summary = summary_with(post_id, "event")
        long_summary = summary_with(post_id, "event", "first")
        rows.append(row | {"system": "lead-3", "summary": short_summary, "people": 0})
        rows.append(row | {"system": "all-of-it", "summary": long_summary, "people": 1})
    return rows


def systems_of(settings):
    """The rows of each system, in the files' order, as the stage `summaries` reads them."""
    return read_systems(read_table(settings), settings, count=0)


def config_of_file(path, *overrides):
    """The config of a run that judges a file by the built-in world's rule."""
    settings = (f"outputs.file={path}", "judge.kind=facts", "checks.control_posts=8", *overrides)
    return make_config("outputs", overrides=settings)


def write_jsonl(path, rows):
    """Write a JSON Lines file; returns its path, as the other writers do."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path, rows):
    """Write a JSON list."""
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_csv(path, rows):
    """Write a CSV file with a byte order mark, as spreadsheets do."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def write_parquet(path, rows):
    """Write a Parquet file."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


WRITERS = {"jsonl": write_jsonl, "json": write_json, "csv": write_csv, "parquet": write_parquet}
