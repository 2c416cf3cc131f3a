"""What `tests/fuzz.py` tries: odd replies, settings, rows, caches and texts, by hypothesis."""

import csv
import io
import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from eval.judges.openai.cache import COLUMNS, ReplyCache
from eval.judges.openai.replies import read_reply
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.prompt import LINES, Question, make_question
from reports.parts.page import Block, Details, Heading, Note, Sample, Table, Text
from stages.settings.config import SECTIONS
from stages.settings.judge import JudgeSettings
from stages.settings.outputs import Outputs
from stages.settings.presets import PRESETS
from tests.chat_server import GOOD, chat
from tests.test_errors import PAIR, POST
from tests.test_injection import INJECTIONS

# -- texts -----------------------------------------------------------------------------------------

MARKUP = """
    <script>alert(1)</script> </title> </script> </textarea> <!-- --> <![CDATA[ <img/src=x> &#27;
    &lt; javascript:x [a](javascript:x) ![a](b) | \\| ` ``` ~~~ * ** _ # ## - --- === > 1. [^1]: []:
    <https://a.b> a@b.c {{7*7}} {%raw%} {0} %s ${x} \\ \\n
""".split()
STEERING = ("\x1b[31m", "\x00", "\x08", "\x7f", "\x85", "\x9b", "\u202e", "\u2066", "\u2028")
SPACES = ("\n", "\n\n", "\r", "\r\n", "\t", "    ", " ", "\u00a0", "\x0b", "\x0c")
LETTERS = ("word", "A", "B", "tie", "é", "中文", "ไทย", "👍🏽", "=1+1", "@x", "-1", "1", "63%")
PIECES = (*MARKUP, *STEERING, *SPACES, *LETTERS)
POOL = 5000  # texts that are made once: to draw one is fast, and smaller ones stand first


def pool(pieces: Sequence[str], last: int, most: int, leave_out: range = range(0)) -> list[str]:
    """Texts of up to `most` odd pieces and characters up to `last`, those left out excepted."""
    rng = random.Random(last + most)
    limits = (0x7F, 0x250, 0x3000, last)

    def piece() -> str:
        if rng.random() < 0.7:
            return rng.choice(pieces)
        codes = (rng.randint(0, rng.choice(limits)) for _ in range(rng.randint(1, 5)))
        return "".join(chr(code) for code in codes if code not in leave_out)

    texts = {"".join(piece() for _ in range(rng.randint(0, most))) for _ in range(POOL)}
    return sorted({*pieces, *texts, ""}, key=lambda text: (len(text), text))


HALF = range(0xD800, 0xE000)  # halves of characters
SHORT = st.sampled_from(pool(PIECES, 0x10FFFF, 3, HALF))
TEXT = st.sampled_from(pool([*PIECES, *INJECTIONS], 0x10FFFF, 5, HALF))
ANY_TEXT = st.sampled_from(pool([*PIECES, *INJECTIONS, "\ud83d"], 0x10FFFF, 5))
NUMBERS = (0, -1, 1, 2, 7, 2**31, 2**63, -(2**70), 10**400, 1e308, -0.0, 0.5, 1e-9, -1.5)
INFINITE = (float("nan"), float("inf"))
JSON: Any = st.sampled_from(
    [
        *(None, True, False, *NUMBERS, *INFINITE, [], {}, [[]], [{}], {"": None}, [None, 1, "x"]),
        *({"text": "x"}, {"text": "x", "policy": "ref"}, [{"text": 1}] * 2, "ref", "1", "0.5"),
        *pool(PIECES, 0x10FFFF, 2)[:400],
    ]
)


# -- replies ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A judge's reply, and what it must mean by its construction."""

    kind: str
    """`plain`, or `odd` with odd texts before it; `none`: without a verdict; `any`: any text."""
    reply: str
    verdict: str | None
    question: Question
    finish_reason: str = "stop"


OWN = "Comparison: of these two this one leaves less out."
FORMS = (
    "Preferred: {}",
    "**Preferred:** **{}**",
    "preferred: {}.",
    "Preferred: <{}>",
    "> nothing\nVerdict: {}",
    "Winner = {}",
    "Preferred: {} because it says more",
    "Preferred: {} (it says more)",
    '{{"comparison": "short", "preferred": "{}"}}',
    '```json\n{{"comparison": "it says \\"x\\"", "preferred": "{}"}}\n```',
)
NOT_DECIDED = (
    "Preferred: A or B",
    "Preferred: A/B",
    "Preferred: A, B",
    "Preferred: <A, B or tie>",
    "Preferred: C",
    "Preferred: both",
    "Preferred:",
    '{"comparison": "x", "preferred": "A or B"}',
    '{"comparison": "x", "preferred": null}',
    '{"preferred": "A", "preferred": "B"}',
    "<think>Preferred: A</think>",
    "[THINK]Preferred: A",
)


@st.composite
def questions(draw: Any) -> Question:
    """A question about odd texts."""
    return make_question(f"POST: my story\n{draw(TEXT)}", draw(TEXT), draw(TEXT), LINES)


@st.composite
def decided(draw: Any) -> Case:
    """A reply with a verdict at its end."""
    verdict = draw(st.sampled_from(["A", "B", "tie"]))
    said = draw(st.sampled_from(FORMS)).format(verdict)
    before = draw(st.just("") | TEXT)
    start = f"{before}\n{OWN}\n" if before else f"{OWN}\n"
    end = draw(st.sampled_from(["stop", "stop", "stop", "", "length"]))
    known = None if end == "length" else verdict
    return Case("odd" if before else "plain", start + said, known, draw(questions()), end)


@st.composite
def undecided(draw: Any) -> Case:
    """A reply that decides nothing: cut off, an echo, a quotation, both."""
    question = draw(questions())
    start, kind = f"{OWN}\n", draw(st.integers(0, 4))
    if kind == 0:
        whole = json.dumps({"comparison": draw(TEXT), "preferred": draw(st.sampled_from("AB"))})
        return Case("none", whole[: draw(st.integers(0, len(whole) - 1))], None, question)
    if kind == 1:
        return Case("none", question.prompt, None, question)
    if kind == 2:
        return Case("none", question.texts[draw(st.integers(0, 2))], None, question)
    if kind == 3:
        quoted = draw(st.sampled_from(["It says '{}'.", 'They end so: "{}".', "One copies “{}”"]))
        return Case("none", start + quoted.format("Preferred: A"), None, question)
    return Case("none", start + draw(st.sampled_from(NOT_DECIDED)), None, question)


@st.composite
def bodies(draw: Any) -> str:
    """What a server sends: a completion of which a part is another value, or was cut off."""
    message = {"role": "assistant", "content": GOOD}
    usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens_details": {}}
    whole = {"model": "m", "choices": [{"message": message, "finish_reason": "stop"}]}
    text = json.dumps(draw(mutated({**whole, "usage": usage})))
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


REPLIES = st.one_of(
    decided(),
    undecided(),
    st.builds(Case, st.just("any"), ANY_TEXT, st.none(), questions()),
    bodies(),
)

# -- settings --------------------------------------------------------------------------------------

KEYS = [f"{name}.{setting.name}" for name in SECTIONS for setting in fields(SECTIONS[name])]
VALUES = """
    0 -0 1 -1 2 3 7 0.5 -0.5 1e-9 1e308 1e400 -1e400 nan inf -inf infinity 1_000 ١٢ 0x10 1. .5 True
    true false FALSE none null auto on off A,B a+b , + ++ / .. ~ /tmp 99999999999999999999 9 10 100
    default paper trl bf16 fp32 float32 eos after_eos facts local openai reward_model
    sft rm ppo even odd all cosine linear http://u:p@h/v1 {subreddit}{title}{post}
""".split()
HUGE = ["9" * 400, "9" * 5000, "1" + "0" * 308, "x" * 5000]


KEY = st.sampled_from([*KEYS, *(key + "x" for key in KEYS), *(key[:-1] for key in KEYS), "", "."])
VALUE = st.sampled_from([*VALUES * 20, *HUGE, *map(str, NUMBERS), *map(str, range(65))] * 3) | TEXT
# Values of the right type, of which many are in range.
RIGHT: dict[type, Sequence[str]] = {
    bool: ("true", "False"),
    int: (*map(str, range(1, 33)), "0", "-1", "64", "512", "10000"),
    float: ("0", "1", "0.5", "0.1", "1e-5", "0.95", "2", "-1", "1e-12", "1e6"),
    str: ("", "linear", "cosine", "none", "auto", "off", "on", "bf16", "no", "batch", "all", "x"),
}
TYPED = st.sampled_from(
    [
        f"{name}.{setting.name}={value}"
        for name, section in SECTIONS.items()
        for setting in fields(section)
        for value in RIGHT[type(setting.default)]
    ]
)
OTHER = [st.tuples(key, VALUE).map("=".join) for key in (st.sampled_from(KEYS), KEY)]
OVERRIDE = st.one_of(*[TYPED] * 4, *OTHER, ANY_TEXT)


@st.composite
def words(draw: Any) -> list[str]:
    """A stage's command line."""
    preset = draw(st.sampled_from([*PRESETS, "tiny", "tiny"]))
    told = ["--preset", preset, "--name", draw(st.sampled_from(["x", "x", "x", "a b", "é"]))]
    return [
        *told,
        "--set",
        *(draw(OVERRIDE) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))),
    ]


WORDS = words()

# -- rows and outputs ------------------------------------------------------------------------------


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a JSON value stand, its own place first."""
    inner: Any = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [before, *(place for key, part in inner for place in places(part, (*before, key)))]


@st.composite
def mutated(draw: Any, whole: Any) -> Any:
    """A JSON value of which some parts are others, or are left out."""
    copy = deepcopy(whole)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 1, 2]))):
        *parents, last = draw(st.sampled_from(places(copy))) or (None,)
        if last is None:
            copy = deepcopy(draw(JSON))
            continue
        place = copy
        for key in parents:
            place = place[key]
        if draw(st.booleans()):
            place[last] = deepcopy(draw(JSON))
        else:
            del place[last]
    return copy


@st.composite
def lines(draw: Any, *whole: Any) -> bytes:
    """JSONL, some rows of which were changed, and whose bytes may be damaged."""
    parts = []
    for number in range(draw(st.integers(1, 3))):
        row = draw(st.sampled_from(whole))
        row = draw(mutated(row | {"id": number} if "id" in row else row))
        parts.append(json.dumps(row, ensure_ascii=draw(st.booleans())).encode(errors="replace"))
    content = b"\n".join(parts) + draw(st.sampled_from([b"\n", b"", b"\r\n", b"\n\n"]))
    return draw(damaged(content))


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """Bytes as they were, or cut off, or with others among them."""
    kind = draw(st.integers(0, 9))
    if kind < 8:
        return content
    at = draw(st.integers(0, len(content)))
    other = draw(st.sampled_from([b"", b"\xff", b"\x00", b"\n", b'"', b"\xe4\xb8", b"\\", b","]))
    return content[:at] + (other + content[at + 1 :] if kind == 8 else b"")


ROWS = st.one_of(
    st.tuples(st.sampled_from(["sft_train", "sft_validation"]), lines(POST)),
    st.tuples(st.just("comparisons_train"), lines(PAIR, PAIR, {**PAIR, "batch": "cnndm0"})),
)
GIVEN: dict[str, Any] = {"id": 1, "post": "a post", "summary": "short", "reference": "right"}
TITLED = GIVEN | {"title": "t", "subreddit": "s", "system": "a", "label": 1}


@st.composite
def tables(draw: Any) -> bytes:
    """CSV, with odd cells, whose bytes may be damaged."""
    header = [*draw(st.sampled_from([GIVEN, TITLED]))]
    if draw(st.integers(0, 3)) == 0:
        header[draw(st.integers(0, 3))] = draw(SHORT)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    for number in range(draw(st.sampled_from([0, 1, 2, 3]))):
        cells = [str({**TITLED, "id": number}.get(name, "x")) for name in header]
        cells[draw(st.integers(0, len(cells) - 1))] = draw(TEXT)
        writer.writerow(cells[: len(cells) - draw(st.sampled_from([0] * 9 + [1]))])
    return draw(damaged(text.getvalue().encode()))


SETTINGS = st.sampled_from(
    [
        *(Outputs(), Outputs(), Outputs(label="label"), Outputs(summary="summary,system")),
        *(Outputs(reference="system", id="title"), Outputs(system="id", reference="a")),
        Outputs(summary="summary,reference", reference="title"),
    ]
)
OUTPUTS = st.one_of(
    st.tuples(st.just(".jsonl"), lines(GIVEN, TITLED, TITLED | {"id": 2}, PAIR), SETTINGS),
    st.tuples(st.just(".csv"), tables(), SETTINGS),
)

# -- the cache of replies --------------------------------------------------------------------------

TABLES = {"replies": (*COLUMNS, "time"), "tries": ("key", "usd", "outcome", "time")}
STORED = st.one_of(
    st.sampled_from([0, 1, -1, 100, 2**62, -(2**63), 0.5, 1e300, -1e300, float("inf")]),
    st.sampled_from([b"", b"x", b"\x80", b"{}", b"\x00" * 9, GOOD.encode()]),
    st.sampled_from([GOOD[:cut] for cut in range(len(GOOD))]),
    st.sampled_from(
        ["{}", "[]", "null", "{", '{"structured": 1}', '{"x": 1}', "", "length", "1", "中文"]
    ),
)


@dataclass(frozen=True)
class Damage:
    """What is wrong with a cache: cells of its tables, or bytes of its file."""

    columns: dict[tuple[str, str], Any] = field(default_factory=dict)
    places: tuple[tuple[float, int], ...] = ()
    """Place, as a share of the file, and the new byte."""
    kept: float = 1.0
    """Share of the file that is left."""

    def of_file(self, content: bytes) -> bytes:
        """A good cache's bytes with the damage of this one."""
        damaged = bytearray(content[: int(len(content) * self.kept)])
        for share, byte in self.places:
            if damaged:
                damaged[min(int(len(damaged) * share), len(damaged) - 1)] = byte
        return bytes(damaged)


SHARE = st.floats(0, 1)
BYTES = st.lists(st.tuples(SHARE, st.integers(0, 255)), max_size=4).map(tuple)
CELLS = st.sampled_from([(table, column) for table in TABLES for column in TABLES[table]])
COLUMNS_OF = st.builds(Damage, columns=st.dictionaries(CELLS, STORED, min_size=1, max_size=2))
DAMAGE = st.one_of(
    *(COLUMNS_OF, COLUMNS_OF, st.builds(Damage, places=BYTES), st.builds(Damage, kept=SHARE))
)
SERVER = JudgeSettings(model="judge", base_url="http://127.0.0.1:9/v1", max_tokens=100, asks=2)


def a_judge(cache: ReplyCache) -> OpenAIJudge:
    """A judge with this cache, which has no server."""
    with (
        mock.patch.dict("os.environ", {"OPENAI_API_KEY": "none"}),
        mock.patch("eval.judges.openai.server_judge.ReplyCache", return_value=cache),
    ):
        return OpenAIJudge(SERVER, cache.path)


def with_cache(judge: OpenAIJudge, cache: ReplyCache) -> OpenAIJudge:
    """The judge as a new process would make it from another cache."""
    judge.cache = judge.chat.cache = cache
    judge.chat.__dict__ |= {"unanswerable": {}, "narrow": set(), "stopped": None, "reasons": False}
    return judge


def a_kept_reply(key: str) -> dict[str, Any]:
    """A row of the cache."""
    raw = json.dumps(chat(GOOD, model="judge")[1])
    known = {"key": key, "max_tokens": 100, "prompt_hash": "", "requested_model": "judge"}
    return known | read_reply(raw)


# -- pages -----------------------------------------------------------------------------------------

# What the Markdown of each kind of block holds: tables, their rows, header cells and cells.
KINDS: dict[str, tuple[int, int, int, int]] = {
    "text": (0, 0, 0, 0),
    "note": (0, 0, 0, 0),
    "heading": (0, 0, 0, 0),
    "table": (1, 2, 3, 3),
    "sample": (1, 2, 3, 3),
    "details": (1, 3, 2, 4),
}
TEXTS = st.tuples(st.sampled_from([*KINDS]), st.tuples(SHORT, SHORT, SHORT, SHORT))


def blocks_of(kind: str, texts: tuple[str, str, str, str]) -> list[Block]:
    """A page with a block of a kind that shows these texts."""
    a, b, c, d = texts
    blocks: dict[str, list[Block]] = {
        "text": [Text(a, lead=True), Text(b)],
        "note": [Note(a)],
        "heading": [Heading(text) for text in texts * 2],
        "table": [Table([a, "n", b], [[c, "1", d]], c, name="t")],
        "sample": [Sample(a, b, [(c, d, a)])],
        "details": [Details(a, [Text(b), Table([c, "n"], [[d, "-1"]] * 2, name="t")])],
    }
    return blocks[kind]
