"""Odd inputs for each place that reads texts of others: refused in one line, or read as promised.

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
from stages.config.command_line import config_from_arguments
from stages.config.config import SECTIONS, TYPES, settings_hash
from stages.config.errors import HIDDEN, UserError
from stages.config.judge import Outputs
from stages.config.judge_prompt import read_prompt
from stages.config.recorded import section_from
from stages.config.sections import Data
from stages.config.stages import STAGES
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
MARKUP = """
    <script>alert(1)</script> </title> </textarea> <!-- --> <![CDATA[ <img/src=x> &#27; &lt;
    [a](javascript:x) ![a](b) | \\| ` ``` ~~~ * ** _ # - --- === > 1. [^1]: []: <https://a.b>
    {{7*7}} {%raw%} {0} %s ${x} \\ \\n word A B tie é 中文 👍🏽 =1+1 -1 63%
""".split()
STEERING = ("\x1b[31m", "\x00", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\n\n", "\r", "\t")
PIECE = st.sampled_from([*MARKUP, *STEERING, " "]) | st.text(max_size=5)
TEXT = st.lists(PIECE, max_size=5).map("".join) | st.sampled_from(INJECTIONS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just("\ud83d"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values inside a JSON value stand."""
    inner: Any = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [
        place for key, part in inner for place in ((*before, key), *places(part, (*before, key)))
    ]


@st.composite
def mutated(draw: Any, whole: Any) -> Any:
    """A JSON value of which one part may be another, or left out."""
    value = deepcopy(whole)
    *parents, last = draw(st.sampled_from(places(value)))
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
    at = draw(st.integers(0, len(content)))
    other = draw(st.sampled_from([b"", b"\xff", b"\x00", b"\n", b'"', b"\xe4\xb8", b"\\"]))
    return draw(st.sampled_from([content, content, content[:at] + other + content[at:]]))


@st.composite
def lines(draw: Any, row: dict[str, Any]) -> bytes:
    """JSONL of two rows, of which parts were changed."""
    rows = [draw(mutated(row | {"id": number} if "id" in row else row)) for number in range(2)]
    texts = [json.dumps(each, ensure_ascii=draw(st.booleans())) for each in rows]
    return draw(damaged("\n".join([*texts, ""]).encode(errors="replace")))


def is_one_line(error: Exception, *parts: str) -> None:
    """Fails unless an error is one line with one of these parts."""
    assert "\n" not in str(error)
    assert any(part in str(error) for part in parts), error


# -- replies of a judge ----------------------------------------------------------------------------

TEMPLATE = read_prompt("", "overall")
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
def test_a_reply_means_the_verdict_at_its_end_or_none(form, verdict, before):
    reply = f"Comparison: of these two this one leaves less out.\n{form.format(verdict)}"
    assert parse_choice(reply) == verdict
    assert parse_choice(f"{before}\n{reply}") in (verdict, None)
    assert parse_choice(f"{reply}\nOr not: {before}") is None


@tries
@hypothesis.given(TEXT, st.sampled_from(["A", "B", "tie"]))
def test_an_object_means_its_verdict_whatever_its_comparison_says(comparison, verdict):
    reply = json.dumps({"comparison": comparison, "preferred": verdict})
    has_thought = START_OF_THOUGHT.search(reply) or END_OF_THOUGHT.search(reply)
    assert parse_choice(reply) == (None if has_thought else verdict)


@tries
@hypothesis.given(st.sampled_from(NOT_DECIDED), TEXT, st.integers(0, 9))
def test_a_reply_that_decides_nothing_has_no_verdict(ending, text, short):
    whole = json.dumps({"comparison": text, "preferred": "A"})
    start = "Comparison: of these two this one leaves less out.\n"
    assert parse_choice(start + ending) is None
    assert parse_choice(whole[: -1 - short]) is None


@tries
@hypothesis.given(TEXT.map("POST: {}".format), TEXT, TEXT, st.booleans())
def test_a_repeated_question_or_text_is_no_verdict(query, first, second, as_json):
    question = make_question(TEMPLATE, query=query, first=first, second=second, as_json=as_json)
    assert parse_choice(question.prompt) is None
    assert all(question.is_echo(text) for text in question.texts)


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
            assert {type(completion.text), type(completion.model)} == {str}
            completion.text.encode()


# -- settings --------------------------------------------------------------------------------------

VALUES: dict[type, Any] = {
    bool: st.sampled_from(["true", "False"]),
    int: st.integers(-1, 64).map(str),
    float: st.sampled_from("0 1 0.5 0.1 1e-5 0.95 2 -1 1e-12 1e6".split()),
    str: st.sampled_from(["", "linear", "none", "auto", "off", "on", "bf16", "no", "all", "x"]),
}
ODD = "-0 1e400 nan -inf 1_000 ١٢ 0x10 .5 True null A,B , ++ / .. ~ http://u:p@h/v1".split()
SETTINGS = list(TYPES.items())


@st.composite
def overrides(draw: Any) -> str:
    """`section.key=value`, mostly of the right type."""
    key, kind = draw(st.sampled_from(SETTINGS))
    odd = st.sampled_from([*ODD, "9" * 400]) | TEXT
    return f"{key}{draw(st.sampled_from(['', '', '', 'x']))}={draw(VALUES[kind] | odd)}"


@tries
@hypothesis.given(st.lists(overrides() | TEXT, min_size=1, max_size=3))
def test_overrides_are_refused_in_one_line_or_make_a_config_that_is_whole(words):
    try:
        config = config_from_arguments(["--name", "x", "--set", *words], "")
    except UserError as error:
        is_one_line(error, "")
        return
    saved = json.loads(json.dumps(config.model_dump(), allow_nan=False))
    for name in SECTIONS:
        assert section_from(name, saved[name]) == getattr(config, name)
    assert all(len(settings_hash(config, stage)) == 16 for stage in STAGES)


# -- rows and summaries of others ------------------------------------------------------------------


@tries
@hypothesis.given(st.data())
def test_bad_rows_are_refused_or_skipped_and_none_is_lost(tmp_path_factory, data):
    split, row = data.draw(st.sampled_from([("sft_train", POST), ("comparisons_train", PAIR)]))
    content = data.draw(lines(row))
    folder = tmp_path_factory.mktemp("rows")
    (folder / f"{split}.jsonl").write_bytes(content)
    bad = BadRows("skip")
    try:
        rows = [row for _, row in read_split(Data(on_bad_row="skip"), str(folder), split, bad)]
    except UserError as error:
        is_one_line(error, str(folder), "is empty")
        return
    assert len(rows) + len(bad.skipped) == sum(1 for line in io.BytesIO(content) if line.strip())
    json.dumps(rows, ensure_ascii=False).encode()
    for row in rows:
        if split == "sft_train":
            assert {type(row[name]) for name in ("id", "subreddit", "title", "post")} == {str}
            assert row["summary"].strip()
        else:
            assert row["choice"] in (0, 1)
            assert [type(summary["text"]) for summary in row["summaries"]] == [str, str]
            count_odd_comparisons([row])
    if bad.skipped:
        with pytest.raises(UserError, match=f"{split}.jsonl:"):
            read_split(Data(), str(folder), split, BadRows("stop"))


GIVEN: dict[str, Any] = {"id": 1, "post": "a post", "summary": "short", "reference": "right"}


@st.composite
def tables(draw: Any) -> bytes:
    """CSV of two rows, with odd cells."""
    text = io.StringIO()
    rows = [[str(number), *(draw(TEXT) for _ in range(3))] for number in range(2)]
    csv.writer(text).writerows([[*GIVEN], *rows])
    return draw(damaged(text.getvalue().encode(errors="replace")))


FILES = st.tuples(st.just(".jsonl"), lines(GIVEN)) | st.tuples(st.just(".csv"), tables())


@tries
@hypothesis.given(FILES, st.sampled_from([{}, {"summary": "summary,post"}, {"system": "id"}]))
def test_summaries_of_others_are_refused_with_their_file_or_are_whole(
    tmp_path_factory, file, columns
):
    path = tmp_path_factory.mktemp("given") / f"x{file[0]}"
    path.write_bytes(file[1])
    try:
        systems = systems_of(Outputs(file=str(path), **columns))
    except UserError as error:
        is_one_line(error, str(path))
        return
    for rows in systems.values():
        texts = [row[key] for row in rows for key in ("id", "query", "reference", "summary")]
        assert "".join(texts).encode()
        assert all(row["reference"] for row in rows)


# -- pages -----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, *(name for name, _ in attrs if name != "class")))


PAGE = """
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
    """Fills a template in that prints a text at each kind of place."""
    folder = tmp_path_factory.mktemp("templates")
    for name in ("macros.md", "page.html", "style.css"):
        (folder / name).write_text((render.TEMPLATES / name).read_text("utf-8"), "utf-8")
    (folder / "places.md").write_text(PAGE, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "TEMPLATES", folder)
        yield lambda *texts: render.fill("places.md", "p", **dict(zip("abcd", texts, strict=True)))


@tries
@hypothesis.given(TEXT, TEXT, TEXT, TEXT)
def test_no_text_changes_the_elements_of_a_page(fill_page, a, b, c, d):
    page = fill_page(a, b, c, d)
    # Empty texts leave elements out, and a quotation has a paragraph for each of the text's.
    plain = fill_page(*("x" if text.strip() else "" for text in (a, b, c, d)))
    own = [tag for tag in Tags(page.html).tags if tag not in (("p",), ("br",))]
    expected = [tag for tag in Tags(plain.html).tags if tag not in (("p",), ("br",))]
    assert own == expected
    assert not HIDDEN.search(page.html + page.markdown)
