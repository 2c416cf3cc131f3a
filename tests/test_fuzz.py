"""Odd input, wherever texts of others are read: refused in one line, or read as promised.

EXAMPLES=100000 in the environment tries more of each.
"""

import csv
import dataclasses
import io
import json
import os
from copy import deepcopy
from html.parser import HTMLParser
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from eval.judges.openai.replies import find_error, read_completion
from eval.judges.prompt import END_OF_THOUGHT, START_OF_THOUGHT, make_question, parse_choice
from reports import render
from stages.config.config import SECTIONS
from stages.config.errors import HIDDEN, UserError
from stages.config.identity import settings_hash
from stages.config.judge import Outputs
from stages.config.judge_prompt import read_prompt
from stages.config.options import config_from_arguments
from stages.config.recorded import section_from
from stages.config.sections import Data
from stages.config.stages import STAGES
from stages.config.values import TYPES
from stages.data.bad_rows import BadRows
from stages.data.readers import read_split
from stages.data.row_counts import count_odd_comparisons
from tests.lib.chat_server import GOOD, chat
from tests.lib.existing_summaries import systems_of
from tests.lib.injections import INJECTIONS
from tests.lib.rows import PAIR, POST

tries = hypothesis.settings(
    max_examples=int(os.environ.get("EXAMPLES", "60")),
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
# What would become markup, a template, or part of the judge's question.
MARKUP = [
    "<script>alert(1)</script>",
    "</title>",
    "</textarea>",
    "<!--",
    "-->",
    "<![CDATA[",
    "<img/src=x>",
    "&#27;",
    "&lt;",
    "[a](javascript:x)",
    "![a](b)",
    "|",
    "\\|",
    "`",
    "```",
    "~~~",
    "*",
    "**",
    "_",
    "#",
    "-",
    "---",
    "===",
    ">",
    "1.",
    "[^1]:",
    "[]:",
    "<https://a.b>",
    "{{7*7}}",
    "{%raw%}",
    "{0}",
    "%s",
    "${x}",
    "\\",
    "\\n",
    "word",
    "A",
    "B",
    "tie",
    "é",
    "中文",
    "👍🏽",
    "=1+1",
    "-1",
    "63%",
]
# What would steer a terminal, or break a line.
CONTROL_CHARACTERS = [
    "\x1b[31m",
    "\x00",
    "\x7f",
    "\x9b",
    "\u202e",
    "\u2066",
    "\u2028",
    "\n\n",
    "\r",
    "\t",
]
PIECE = st.sampled_from([*MARKUP, *CONTROL_CHARACTERS, " "]) | st.text(max_size=5)
TEXT = st.lists(PIECE, max_size=5).map("".join) | st.sampled_from(INJECTIONS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just("\ud83d"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)

JsonPath = tuple[Any, ...]
"""The keys and indices that lead to a value inside a JSON value."""


def paths_in(value: Any) -> list[JsonPath]:
    """The paths to all values inside a JSON value."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))

    paths: list[JsonPath] = []
    for key, part in parts:
        paths.append((key,))
        for path in paths_in(part):
            paths.append((key, *path))
    return paths


@st.composite
def mutated(draw: Any, original: Any) -> Any:
    """A JSON value in which at most one part is replaced or left out."""
    value = deepcopy(original)
    *parents, last = draw(st.sampled_from(paths_in(value)))
    part = value
    for key in parents:
        part = part[key]
    change = draw(st.sampled_from(["none", "replace", "remove"]))
    if change == "replace":
        part[last] = draw(JSON)
    elif change == "remove":
        del part[last]
    return value


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """Bytes as they were, or cut off, or with others among them."""
    place = draw(st.integers(0, len(content)))
    inserted = draw(st.sampled_from([b"", b"\xff", b"\x00", b"\n", b'"', b"\xe4\xb8", b"\\"]))
    changed = content[:place] + inserted + content[place:]
    return draw(st.sampled_from([content, content, changed]))


@st.composite
def jsonl(draw: Any, row: dict[str, Any]) -> bytes:
    """JSONL of two rows, of which parts were changed."""
    text = ""
    for number in range(2):
        original = dict(row)
        if "id" in row:
            original["id"] = number
        changed = draw(mutated(original))
        text += json.dumps(changed, ensure_ascii=draw(st.booleans())) + "\n"
    return draw(damaged(text.encode(errors="replace")))


def assert_one_line(error: Exception, *parts: str) -> None:
    """Fail unless an error is one line that contains one of the parts."""
    assert "\n" not in str(error)
    assert any(part in str(error) for part in parts), error


# -- replies of a judge ----------------------------------------------------------------------------

TEMPLATE = read_prompt("", "overall")
COMPARISON = "Comparison: of these two this one leaves less out."
DECIDED = (
    "Preferred: {}",
    "**Preferred:** **{}**",
    "_Preferred: {}_",
)
NOT_DECIDED = (
    "Preferred: A or B",
    "Preferred: A/B",
    "Preferred: <A, B or tie>",
    "Preferred: C",
    "Preferred:",
    "It says 'Preferred: A'.",
    "Winner: A",
    '{"comparison": "x", "preferred": "A or B"}',
    '{"comparison": "x", "preferred": "A", "preferred": "B"}',
    "<think>Preferred: A</think>",
)


@tries
@hypothesis.given(st.sampled_from(DECIDED), st.sampled_from(["A", "B", "tie"]), TEXT)
def test_a_reply_means_the_verdict_at_its_end_or_none(form, verdict, text):
    reply = f"{COMPARISON}\n{form.format(verdict)}"
    assert parse_choice(reply) == verdict
    assert parse_choice(f"{text}\n{reply}") in (verdict, None)
    assert parse_choice(f"{reply}\nOr not: {text}") is None


@tries
@hypothesis.given(TEXT, st.sampled_from(["A", "B", "tie"]))
def test_an_object_means_its_verdict_whatever_its_comparison_says(comparison, verdict):
    reply = json.dumps({"comparison": comparison, "preferred": verdict})
    if START_OF_THOUGHT.search(reply) or END_OF_THOUGHT.search(reply):
        assert parse_choice(reply) is None
    else:
        assert parse_choice(reply) == verdict


@tries
@hypothesis.given(st.sampled_from(NOT_DECIDED))
def test_a_reply_that_decides_nothing_has_no_verdict(ending):
    assert parse_choice(f"{COMPARISON}\n{ending}") is None


@tries
@hypothesis.given(TEXT, st.integers(1, 10))
def test_an_object_that_is_cut_off_has_no_verdict(text, missing):
    reply = json.dumps({"comparison": text, "preferred": "A"})
    assert parse_choice(reply[:-missing]) is None


@tries
@hypothesis.given(TEXT.map("POST: {}".format), TEXT, TEXT, st.booleans())
def test_a_repeated_question_or_text_is_no_verdict(query, first, second, as_json):
    question = make_question(TEMPLATE, query=query, first=first, second=second, as_json=as_json)
    assert parse_choice(question.prompt) is None
    for text in question.texts:
        assert question.is_echo(text)


@tries
@hypothesis.given(mutated(chat(GOOD)[1]), st.integers(0, 99))
def test_the_body_of_a_reply_is_texts_and_numbers_an_error_or_nothing(body, cut):
    text = json.dumps(body)
    for raw in (text, text[:cut]):
        try:
            received = json.loads(raw)
        except ValueError:
            continue
        error = find_error(200, raw, received)
        assert error is None or error.status >= 400
        completion = read_completion(received)
        if completion is not None:
            assert json.loads(json.dumps(dataclasses.asdict(completion)))
            assert type(completion.text) is str
            assert type(completion.model) is str
            completion.text.encode()  # fails for half of a surrogate pair


# -- settings --------------------------------------------------------------------------------------

VALUES: dict[type, Any] = {
    bool: st.sampled_from(["true", "False"]),
    int: st.integers(-1, 64).map(str),
    float: st.sampled_from(
        ["0", "1", "0.5", "0.1", "1e-5", "0.95", "2", "-1", "1e-12", "1e6"],
    ),
    str: st.sampled_from(["", "linear", "none", "auto", "off", "on", "bf16", "no", "all", "x"]),
}
ODD_VALUES = [
    "-0",
    "1e400",
    "nan",
    "-inf",
    "1_000",
    "١٢",
    "0x10",
    ".5",
    "True",
    "null",
    "A,B",
    ",",
    "++",
    "/",
    "..",
    "~",
    "http://u:p@h/v1",
    "9" * 400,
]
SETTINGS = list(TYPES.items())


@st.composite
def overrides(draw: Any) -> str:
    """`section.key=value`, mostly with a known key and of the right type."""
    key, kind = draw(st.sampled_from(SETTINGS))
    suffix = draw(st.sampled_from(["", "", "", "x"]))
    value = draw(VALUES[kind] | st.sampled_from(ODD_VALUES) | TEXT)
    return f"{key}{suffix}={value}"


@tries
@hypothesis.given(st.lists(overrides() | TEXT, min_size=1, max_size=3))
def test_overrides_are_refused_in_one_line_or_give_a_config_that_can_be_saved(words):
    try:
        config = config_from_arguments(["--name", "x", "--set", *words], "")
    except UserError as error:
        assert_one_line(error, "")
        return

    saved = json.loads(json.dumps(config.model_dump(), allow_nan=False))
    for name in SECTIONS:
        assert section_from(name, saved[name]) == getattr(config, name)
    for stage in STAGES:
        assert len(settings_hash(config, stage)) == 16


# -- rows and existing summaries -------------------------------------------------------------------


def assert_post(row: dict[str, Any]) -> None:
    """Fail unless a row that was read is a post with its summary."""
    for field in ("id", "subreddit", "title", "post"):
        assert type(row[field]) is str
    assert row["summary"].strip()


def assert_comparison(row: dict[str, Any]) -> None:
    """Fail unless a row that was read is a comparison of two texts."""
    assert row["choice"] in (0, 1)
    assert len(row["summaries"]) == 2
    for summary in row["summaries"]:
        assert type(summary["text"]) is str
    count_odd_comparisons([row])


@tries
@hypothesis.given(st.data())
@pytest.mark.parametrize(
    ("split", "good_row", "assert_row"),
    [
        ("sft_train", POST, assert_post),
        ("comparisons_train", PAIR, assert_comparison),
    ],
    ids=["posts", "comparisons"],
)
def test_bad_rows_are_refused_or_skipped_and_none_is_lost(
    tmp_path_factory, split, good_row, assert_row, data
):
    content = data.draw(jsonl(good_row))
    folder = tmp_path_factory.mktemp("rows")
    (folder / f"{split}.jsonl").write_bytes(content)
    bad_rows = BadRows("skip")

    try:
        located_rows = read_split(Data(on_bad_row="skip"), str(folder), split, bad_rows)
    except UserError as error:
        assert_one_line(error, str(folder), "is empty")
        return

    rows = [row for _, row in located_rows]
    lines = [line for line in io.BytesIO(content) if line.strip()]
    assert len(rows) + len(bad_rows.skipped) == len(lines)
    json.dumps(rows, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    for row in rows:
        assert_row(row)
    if bad_rows.skipped:
        with pytest.raises(UserError, match=f"{split}.jsonl:"):
            read_split(Data(), str(folder), split, BadRows("stop"))


SUMMARY: dict[str, Any] = {"id": 1, "post": "a post", "summary": "short", "reference": "right"}


@st.composite
def csv_files(draw: Any) -> bytes:
    """CSV of two rows, with odd cells."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(SUMMARY.keys())
    for number in range(2):
        writer.writerow([number, draw(TEXT), draw(TEXT), draw(TEXT)])
    return draw(damaged(file.getvalue().encode(errors="replace")))


@tries
@hypothesis.given(st.data(), st.sampled_from([{}, {"summary": "summary,post"}, {"system": "id"}]))
@pytest.mark.parametrize(
    ("suffix", "files"),
    [(".jsonl", jsonl(SUMMARY)), (".csv", csv_files())],
    ids=["jsonl", "csv"],
)
def test_existing_summaries_are_refused_with_their_file_or_complete(
    tmp_path_factory, suffix, files, data, columns
):
    path = tmp_path_factory.mktemp("summaries") / f"x{suffix}"
    path.write_bytes(data.draw(files))

    try:
        systems = systems_of(Outputs(file=str(path), **columns))
    except UserError as error:
        assert_one_line(error, str(path))
        return

    for rows in systems.values():
        for row in rows:
            text = row["id"] + row["query"] + row["reference"] + row["summary"]
            assert text.encode()  # fails for half of a surrogate pair
            assert row["reference"]


# -- pages -----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The elements of a page, each with the names of its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        names = [name for name, _ in attrs if name != "class"]
        self.tags.append((tag, *names))


def elements_of(html: str) -> list[tuple[str, ...]]:
    """The elements of a page, without paragraphs and line breaks: a quotation keeps the text's."""
    return [tag for tag in Tags(html).tags if tag not in (("p",), ("br",))]


# Prints a text at each kind of place.
TEMPLATE_OF_ALL_PLACES = """
{% from "macros.md" import fold %}
# {{ a }}

{{ b }}

## {{ c }}

- {{ d }}

| {{ a | cell }} | n |
|---|---:|
| {{ b | cell }} | {{ c | cell }} |

{{ d | quote }}

{% call fold(a) %}
*{{ b }}*
{% endcall %}
"""


@pytest.fixture(scope="module")
def fill_page(tmp_path_factory):
    """Fills in the template with four texts."""
    folder = tmp_path_factory.mktemp("templates")
    for name in ("macros.md", "page.html", "style.css"):
        (folder / name).write_text((render.TEMPLATES / name).read_text("utf-8"), "utf-8")
    (folder / "places.md").write_text(TEMPLATE_OF_ALL_PLACES, "utf-8")

    def fill(a: str, b: str, c: str, d: str) -> render.Page:
        return render.fill("places.md", "p", a=a, b=b, c=c, d=d)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "TEMPLATES", folder)
        yield fill


def plain(text: str) -> str:
    """A harmless text, or none: an empty text leaves out elements."""
    return "x" if text.strip() else ""


@tries
@hypothesis.given(TEXT, TEXT, TEXT, TEXT)
def test_no_text_changes_the_elements_of_a_page(fill_page, a, b, c, d):
    page = fill_page(a, b, c, d)
    harmless = fill_page(plain(a), plain(b), plain(c), plain(d))
    assert elements_of(page.html) == elements_of(harmless.html)
    assert not HIDDEN.search(page.html + page.markdown)
