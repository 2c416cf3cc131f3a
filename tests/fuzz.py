"""A hundred thousand odd inputs for each place that reads texts of others: `make fuzz`.

    python -m tests.fuzz                                        all groups
    python -m tests.fuzz --examples 1000 --seed 2 replies rows  some of them, and fewer

Each group draws inputs (hypothesis, from a seed) and counts what becomes of them. An exception that
is no error of one line, or a promise that does not hold, ends it with the smallest input that shows
it. What is drawn is in `fuzzed.py`; `replies` are built so that their verdict is known.
"""

import argparse
import dataclasses
import io
import json
import math
import re
import shlex
import sqlite3
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache as remembered
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hypothesis
from markdown_it import MarkdownIt

from eval.calibration import labelled_rows
from eval.judges.openai.cache import ReplyCache
from eval.judges.openai.replies import PassingError, read_reply
from eval.judges.openai.server_judge import choice_of
from eval.judges.protocol import Comparison
from eval.outputs import describe
from reports.parts import page
from stages.finished import stage_folder
from stages.posts.bad_rows import BadRows
from stages.posts.readers import kept_odd_rows, read_split
from stages.settings.checks import HIDDEN, UserError, visible
from stages.settings.command_line import config_from_arguments, make_command, section_from
from stages.settings.config import SECTIONS, Config, settings_hash
from stages.settings.outputs import Outputs
from stages.settings.sections import Data
from stages.settings.stages import STAGES
from tests import fuzzed
from tests.given_outputs import systems_of

CHUNK = 2000  # examples of one search: it remembers all of them
Group = tuple[Any, Callable[[Any], str]]
"""What is drawn, and what is asked of it; that returns what became of an input."""


def says(error: Exception, *parts: str) -> None:
    """An error is one line, with one of these parts."""
    text = str(error)
    assert "\n" not in text, error
    assert any(part in text for part in parts), error


# -- replies ---------------------------------------------------------------------------------------


def check_reply(case: fuzzed.Case | str) -> str:
    """No reply means another verdict than it was built to mean; where none is right, none is."""
    if isinstance(case, str):
        return check_body(case)
    verdict = choice_of({"text": case.reply, "finish_reason": case.finish_reason}, case.question)
    if case.kind == "any":  # of which only this is known: a verdict's word stands in the reply
        shown = re.sub(r"[*_]", " ", unicodedata.normalize("NFKC", case.reply).lower())
        words = {"A": r"\ba\b", "B": r"\bb\b", "tie": r"\b(tie|neither)\b", None: ""}
        assert re.search(words[verdict], shown)
    else:
        assert verdict in (case.verdict, None), (case, verdict)
    assert verdict == case.verdict or case.kind != "plain", (case, verdict)
    return f"{case.kind}: {verdict or 'unjudged'}"


def check_body(raw: str) -> str:
    try:  # a row of texts and numbers, or a failed try
        row = read_reply(raw)
    except PassingError as error:
        says(error, "no chat completion came back")
        return "body: no reply"
    for name, value in row.items():
        assert type(value) is (
            int if name.endswith("tokens") else bool if name == "thought" else str
        )
        assert not isinstance(value, str) or name == "raw" or value.encode().decode() == value
    return "body: a reply"


# -- settings --------------------------------------------------------------------------------------


def check_settings(words: list[str]) -> str:
    """Overrides are refused in one line, or make a config that is frozen, whole and repeatable."""
    try:
        with redirect_stderr(io.StringIO()):
            config = config_from_arguments(words, "fuzz")
    except UserError as error:
        says(error, "")
        return "refused"
    except SystemExit:  # argparse: a word that looks like an option
        return "no words of ours"
    _check_whole(config)
    return "valid"


def _check_whole(config: Config) -> None:
    saved = json.loads(json.dumps(dataclasses.asdict(config), allow_nan=False))
    for name in SECTIONS:
        section = getattr(config, name)
        assert section_from(name, saved[name]) == section
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            assert type(value) in (field.type, int), (name, field)
            assert not isinstance(value, float) or math.isfinite(value)
        try:
            setattr(section, dataclasses.fields(section)[0].name, 1)
        except dataclasses.FrozenInstanceError:
            continue
        raise AssertionError(f"{name} can be changed")
    for stage in STAGES:
        assert len(settings_hash(config, stage)) == 16
        assert len(shlex.split(make_command(config, stage))) > 3
        assert str(stage_folder(config, stage)).isprintable()


# -- rows and outputs ------------------------------------------------------------------------------


@dataclasses.dataclass
class Files:
    folder: Path

    def rows(self, drawn: tuple[str, bytes]) -> str:
        """Bad rows are refused or skipped; what is read has the schema, and no row is lost."""
        split, content = drawn
        path = self.folder / f"{split}.jsonl"
        path.write_bytes(content)
        outcomes = {}
        for what in ("stop", "skip"):
            bad = BadRows(what)
            try:
                located = read_split(Data(on_bad_row=what), str(self.folder), split, bad)
            except UserError as error:
                says(error, str(path), "is empty")
                outcomes[what] = "refused"
                continue
            lines = sum(1 for line in io.BytesIO(content) if line.strip())
            assert len(located) + len(bad.skipped) == lines
            rows = [row for _, row in located]
            json.dumps(rows, ensure_ascii=False).encode()
            check_rows(split, rows)
            outcomes[what] = "skipped" if bad.skipped else "read"
        assert {*outcomes.values()} in ({"read"}, {"refused", "skipped"}, {"refused"}), outcomes
        return " or ".join(sorted({*outcomes.values()}))

    def outputs(self, drawn: tuple[str, bytes, Outputs]) -> str:
        """Files of summaries are refused with their name, or are whole rows of every system."""
        suffix, content, columns = drawn
        path = self.folder / f"outputs{suffix}"
        path.write_bytes(content)
        settings = dataclasses.replace(columns, file=str(path))
        try:
            systems = systems_of(settings)
        except UserError as error:
            says(error, str(path))
            return f"refused {suffix}"
        for name, rows in systems.items():
            assert re.fullmatch(r"[A-Za-z0-9._+-]{1,107}", name), name
            texts = [row[key] for row in rows for key in ("id", "query", "reference", "summary")]
            assert "".join(texts).encode()
            assert all(row["reference"] for row in rows)
            values = [value for value in describe(rows).values() if value is not None]
            assert all(math.isfinite(value) for value in values)
        json.dumps(labelled_rows(systems), allow_nan=False)
        return f"read {suffix}"


def check_rows(split: str, rows: list[dict[str, Any]]) -> None:
    """The schemas, said once more."""
    for row in rows if split.startswith("sft") else ():
        assert all(type(row[name]) is str for name in ("id", "subreddit", "title", "post"))
        assert row["summary"].strip()
    for row in () if split.startswith("sft") else rows:
        assert type(row["choice"]) is int
        assert row["choice"] in (0, 1)
        assert [type(summary["text"]) for summary in row["summaries"]] == [str, str]
        kept_odd_rows([row])


# -- the cache of replies --------------------------------------------------------------------------


class AskedError(Exception):
    """The judge would ask its server: nothing that it kept is of use."""


def _would_ask(*_: Any) -> None:
    raise AskedError


class Cache:
    """A judge with one reply in its cache, which is damaged again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.comparison = Comparison("p", "the post", "one", "two")
        self.path = folder / "replies.sqlite"
        cache = ReplyCache(self.path)
        self.judge = judge = fuzzed.a_judge(cache)
        judge.chat.ask = _would_ask  # type: ignore[method-assign, assignment]
        self.key = judge.chat.request(self.comparison).key
        cache.settle(cache.begin(self.key, 1.0), 0.5, "reply", fuzzed.a_kept_reply(self.key))
        cache.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        cache.close()
        self.good = self.path.read_bytes()

    def check(self, drawn: fuzzed.Damage) -> str:
        """What is kept means what it said, or nothing: it is asked for again, or refused."""
        self.number += 1
        path = self.folder / f"{self.number}.sqlite"
        path.write_bytes(drawn.of_file(self.good))
        try:
            self._damage_columns(path, drawn)
            return self._outcome(path)
        finally:
            for left in self.folder.glob(f"{self.number}.sqlite*"):
                left.unlink()

    def _damage_columns(self, path: Path, drawn: fuzzed.Damage) -> None:
        if not drawn.columns:
            return
        with sqlite3.connect(path) as connection:
            for (table, column), value in drawn.columns.items():
                connection.execute(f"UPDATE OR REPLACE {table} SET {column} = ?", (value,))
        connection.close()

    def _outcome(self, path: Path) -> str:
        cache = None
        try:
            cache = ReplyCache(path)
            judge = fuzzed.with_cache(self.judge, cache)
            with redirect_stdout(io.StringIO()):
                judge.prepare([])
                judge.cache.spent([self.key])
                reply = judge.reply(self.comparison)
        except UserError as error:
            says(error, str(path))
            return "refused"
        except AskedError:
            return "asked again"
        finally:
            if cache is not None:
                cache.close()
        assert reply.choice in ("A", None), reply
        json.dumps(dataclasses.asdict(reply), allow_nan=False)
        return f"kept: {reply.choice or 'unjudged'}"


# -- pages -----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The elements of a page, and what its scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.code: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, *(name for name, _ in attrs if name != "class")))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.code.append(data)


MARKDOWN = MarkdownIt("commonmark").enable("table")
OURS = re.compile(r"</?(details( open)?|summary)>")


@remembered
def harmless_page(kind: str, texts: tuple[str, str, str, str]) -> tuple[Any, Any]:
    tags = Tags(page.to_html("x", fuzzed.blocks_of(kind, texts)))
    return tags.tags, tags.code


def check_page(drawn: tuple[str, tuple[str, str, str, str]]) -> str:
    """Whatever its texts are: the elements of a page, the cells of its tables; nothing steers."""
    kind, texts = drawn
    blocks = fuzzed.blocks_of(kind, texts)
    shown = visible(page.to_html(texts[0], blocks))
    a, b, c, d = ("x" if text else "" for text in texts)
    assert (Tags(shown).tags, Tags(shown).code) == harmless_page(kind, (a, b, c, d))
    written = visible(page.to_markdown("p", texts[0], blocks))
    assert not HIDDEN.search(shown + written)
    _check_markdown(written, fuzzed.KINDS[kind])
    json.dumps(page.tables_of(blocks), allow_nan=False)
    return f"{kind}, as it was built"


def _check_markdown(text: str, shape: tuple[int, int, int, int]) -> None:
    tokens = MARKDOWN.parse(text)
    inner = [child for token in tokens for child in token.children or ()]
    kinds = Counter(token.type for token in (*tokens, *inner))
    raw = [token.content for token in (*tokens, *inner) if token.type.startswith("html")]
    assert all(OURS.match(part) for part in raw), raw
    links = [str(token.attrs["href"]) for token in inner if token.type == "link_open"]
    assert all(target.startswith("#h") for target in links), links
    assert not kinds["image"] + kinds["fence"] + kinds["code_block"]
    assert tuple(kinds[f"{name}_open"] for name in ("table", "tr", "th", "td")) == shape


# -- running it ------------------------------------------------------------------------------------


@contextmanager
def groups() -> Iterator[dict[str, Group]]:
    """All groups, with a folder for their files."""
    memory = Path("/dev/shm")  # which waits for no disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        rows, given, cache = (Path(name, kind) for kind in ("rows", "given", "cache"))
        for folder in (rows, given, cache):
            folder.mkdir()
        yield {
            "replies": (fuzzed.REPLIES, check_reply),
            "settings": (fuzzed.WORDS, check_settings),
            "rows": (fuzzed.ROWS, Files(rows).rows),
            "outputs": (fuzzed.OUTPUTS, Files(given).outputs),
            "cache": (fuzzed.DAMAGE, Cache(cache).check),
            "pages": (fuzzed.TEXTS, check_page),
        }


def search(group: Group, examples: int, seed: int) -> Counter[str]:
    """Try so many inputs; how many of each outcome there were. Raises what the first failure is."""
    outcomes: Counter[str] = Counter()
    for chunk in range(math.ceil(examples / CHUNK)):
        steady = hypothesis.settings(
            max_examples=min(CHUNK, examples - chunk * CHUNK),
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )

        @hypothesis.seed(seed * 1_000_003 + chunk)
        @steady
        @hypothesis.given(group[0])
        def holds(drawn: Any) -> None:
            outcomes[group[1](drawn)] += 1

        holds()
    return outcomes


def main(argv: list[str] | None = None) -> None:
    """Try every group and print what became of its inputs."""
    parser = argparse.ArgumentParser(description="odd inputs for what reads texts of others")
    parser.add_argument("groups", nargs="*", help="all, unless some are named")
    parser.add_argument("--examples", type=int, default=100_000, help="of each group")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    with groups() as known:
        if unknown := {*args.groups} - known.keys():
            parser.error(f"no group {', '.join(unknown)}: choose of {', '.join(known)}")
        for name in args.groups or known:
            began = time.monotonic()
            outcomes = search(known[name], args.examples, args.seed)
            seconds = time.monotonic() - began
            print(f"{name}: {outcomes.total():,} inputs in {seconds:.0f} s")
            for outcome, count in outcomes.most_common():
                print(f"  {count:9,} {outcome}", flush=True)


if __name__ == "__main__":
    main()
