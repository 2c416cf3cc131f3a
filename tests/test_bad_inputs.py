"""A bad input of each kind through the real commands: one line, status 2, nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import outputs
from eval.judges.openai.cache import ReplyCache
from reports import run as run_page
from stages import base, ppo, sft
from stages.__main__ import main as make
from stages.config.command_line import make_config
from stages.config.error_messages import in_one_line
from stages.config.errors import HIDDEN
from stages.runs.files import hash_files
from tests.lib.chat_server import GOOD, ask, chat, serving
from tests.lib.fabricated_runs import fabricate
from tests.lib.make_stages import run_module
from tests.lib.rows import PAIR, POST, edited, write_folder

ROOT = Path(__file__).parents[1]
NAMED = ["--preset", "tiny", "--name", "x", "--data", "data"]
Change = Callable[[Path], object]


def named(rows: list) -> list:
    """The rows of a table, each called by its place and its line."""
    return [
        pytest.param(*row, id=f"{number} {row[-1]}".encode("ascii", "replace").decode())
        for number, row in enumerate(rows)
    ]


def files() -> dict[str, bytes]:
    """All that lies below the working directory; a folder has no bytes."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}


def one_line(capsys, command: Callable[[], object]) -> str:
    """The only line in which a command ends that must refuse, with status 2."""
    before = files()
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert not HIDDEN.search(printed)
    assert "usage:" not in printed
    (line,) = [line for line in printed.splitlines() if "error: " in line]
    assert printed.splitlines()[-1] == line
    assert files() == before
    return line


@pytest.fixture
def data(place):
    """A working directory with a small folder of good posts and comparisons."""
    return write_folder(place / "data")


# -- rows ------------------------------------------------------------------------------------------

TRAIN, PAIRS = "sft_train", "comparisons_train"
ROWS: list[tuple[str, Any, str]] = [  # file, its second row, the line
    (TRAIN, '{"id": "p1", ', "sft_train.jsonl:2: not JSON"),
    (TRAIN, '{"id": "p1", "post": "a", "post": "b"}', "jsonl:2: key 'post' occurs twice"),
    (TRAIN, {**POST, "title": "x " * 400}, "cannot be cut to fit"),
    (TRAIN, {**POST, "summary": "x " * 90}, "limit"),
    ("sft_validation", {**POST, "summary": 1.5}, "sft_validation.jsonl:2: field summary is of"),
    (PAIRS, edited(PAIR, "summaries.0.text", None), "summaries[0].text"),
    (
        PAIRS,
        {**edited(PAIR, "info.post", None), "batch": None, "choice": None},
        "no field choice, batch, info.post",
    ),
]


@pytest.mark.parametrize(("file", "row", "line"), named(ROWS))
def test_rows(data, capsys, file, row, line):
    good = json.dumps(POST if file.startswith("sft") else PAIR).encode()
    bad = row.encode() if isinstance(row, str) else row
    bad = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    (data / f"{file}.jsonl").write_bytes(b"\n".join([good, bad, good, b""]))
    assert line in one_line(capsys, lambda: run_module(base, NAMED))


def test_a_missing_file_is_named(data, capsys):
    (data / "comparisons_train.jsonl").unlink()
    assert "comparisons_train.jsonl is missing" in one_line(capsys, lambda: run_module(base, NAMED))


def test_a_missing_earlier_stage_names_the_make_command(data, capsys):
    line = one_line(capsys, lambda: run_module(ppo, NAMED))
    assert "make" in line
    assert "DATA=data" in line
    assert "make data" in one_line(capsys, lambda: run_module(sft, NAMED))


# -- settings; what a setting may be is in test_config.py ------------------------------------------

SETTINGS: list[tuple[str, str]] = [  # words of a command line, the line
    ("--preset tny", "unknown preset 'tny': did you mean tiny"),
    ("--preset posts", "preset posts needs posts: add DATA="),
    ("--preset outputs", "needs a file of summaries: add INPUT="),
    ("--name tiny-s", "NAME=tiny-s is the folder of preset tiny-s"),
    ("--name x --upstream gone", "upstream gone has no seed 44413"),
    ("--name x --data gone", "data.source: gone is not a file, folder or hub id"),
    ("--name x --data bad\x1bname", "contains a control character"),
    ("--set judge.model=gpt-6", "judge.model has no effect with judge.kind=facts"),
    ("--name x --set eval.posts=99999", "eval.posts must be at most 600"),
]


@pytest.mark.parametrize(("words", "line"), named(SETTINGS))
def test_settings(place, capsys, words, line):
    assert line in one_line(capsys, lambda: run_module(sft, words.split(" ")))
    assert not list(place.iterdir())


# -- models and tokenizers -------------------------------------------------------------------------


def config_with(**values: Any) -> Change:
    """A change of a model's config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def cut(name: str, size: int) -> Change:
    """A file of which only the first bytes are left."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def written(name: str, text: str) -> Change:
    """A file with another text."""
    return lambda folder: (folder / name).write_text(text)


def a_folder(name: str) -> Change:
    """A folder where a file belongs."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def only_bin(content: bytes) -> Change:
    """Weights in the old format."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


NEW, OLD = (f"model/{name} does not load" for name in ("model.safetensors", "pytorch_model.bin"))
MODELS: list[tuple[str, Change, str]] = [
    ("half of the weights", cut("model.safetensors", 500), NEW),
    ("weights are text", written("model.safetensors", "hello"), NEW),
    ("old weights are a program", only_bin(b"cos\nsystem\n(S'touch hacked'\ntR."), OLD),
    ("another width", config_with(hidden_size=64), "differ from those in its config.json"),
    ("a layer too many", config_with(num_hidden_layers=3), "model model lacks"),
    ("a layer too few", config_with(num_hidden_layers=1), "has unexpected"),
    ("code of its own", config_with(model_type="x", auto_map={"AutoConfig": "x.Y"}), "not load: "),
    ("gptq", config_with(quantization_config={"quant_method": "gptq"}), "is quantized (gptq)"),
    ("an encoder", config_with(model_type="bert"), "model model lacks"),
    ("config is a folder", a_folder("config.json"), "does not load"),
]
TOKENIZERS: list[tuple[str, Change, str]] = [
    ("cut", cut("tokenizer.json", 200), "tokenizer tokenizer does not load"),
    ("a list", written("tokenizer_config.json", "[]"), "tokenizer tokenizer does not load"),
    ("no EOS", written("tokenizer_config.json", "{}"), "has no EOS token"),
    ("none", lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer tokenizer "),
]


@pytest.mark.parametrize(("what", "change", "line"), named(MODELS))
def test_models(data, policy_folder, capsys, what, change, line):
    shutil.copytree(policy_folder, "model")
    change(Path("model"))
    own = ["--set", "base.checkpoint=model", "base.tokenizer="]
    assert line in one_line(capsys, lambda: run_module(base, [*NAMED, *own])), what


@pytest.mark.parametrize(("what", "change", "line"), named(TOKENIZERS))
def test_tokenizers(data, tokenizer_folder, capsys, what, change, line):
    shutil.copytree(tokenizer_folder, "tokenizer")
    change(Path("tokenizer"))
    words = [*NAMED, "--tokenizer", "tokenizer"]
    assert line in one_line(capsys, lambda: run_module(base, words)), what


# -- state on disk ---------------------------------------------------------------------------------


def without(name: str, key: str) -> Change:
    """A JSON file of which a person has taken a key out."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        del values[key]
        (folder / name).write_text(json.dumps(values))

    return change


def with_value(name: str, path: str, value: Any) -> Change:
    """A JSON or JSONL file in which a person has changed a value, of the first row."""

    def change(folder: Path) -> None:
        first, *rest = (folder / name).read_text().split("\n" if name.endswith("l") else "\0")
        text = json.dumps(edited(json.loads(first), path, value))
        (folder / name).write_text("\n".join([text, *rest]))

    return change


STATE: list[tuple[Change, str, str]] = [  # a change of a finished run, a command, the line
    (written("sft/manifest.json", "{"), "look", "sft/manifest.json is not JSON"),
    (
        written("sft/manifest.json", "{}"),
        "look",
        "sft/manifest.json is not a manifest of this project",
    ),
    (
        without("sft/manifest.json", "sizes"),
        "look",
        "sft/manifest.json is not a manifest of this project",
    ),
    (a_folder("sft/manifest.json"), "look", "there is a folder in place of this file"),
    (
        with_value("ppo/metrics.jsonl", "objective/kl", "low"),
        "page",
        "stage ppo has changed on disk (metrics.jsonl)",
    ),
    (
        with_value("judge/facts/judgements.jsonl", "verdict", "nobody"),
        "page",
        "stage judge has changed on disk (",
    ),
    *(
        (with_value("sft/config.json", key, value), "named", f"sft/config.json: {line}")
        for key, value, line in (
            ("ppo.kl_coef", "high", "ppo.kl_coef must be a number, not 'high': restore it"),
            ("ppo.batch_size", -8, "ppo.batch_size must be above 0"),
            ("seed", "one", "seed must be a whole number"),
            ("overrides", [1], "overrides.0 must be text, not 1"),
        )
    ),
    (
        with_value("rm/config.json", "rm", [8]),
        "upstream",
        "rm/config.json: rm must contain settings",
    ),
    (written("../../hub.json", "[]"), "hub", "hub.json is not a JSON object"),
    (written("judge_cache", "garbage"), "cache", "judge_cache: the cache of replies fails"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a fabricated run, whose manifests name all files as those of stages do."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        fabricate(make_config("tiny"))
        row: dict[str, Any] = {
            "policy": "ppo",
            "id": "p",
            "order": "policy_first",
            "verdict": "tie",
        }
        Path("runs/tiny/seed44413/judge/facts/judgements.jsonl").write_text(json.dumps(row) + "\n")
        row = {"step": 1, "query": "q", "response": "r"}
        Path("runs/tiny/seed44413/ppo/samples.jsonl").write_text(json.dumps(row) + "\n")
        for path in Path("runs").rglob("manifest.json"):
            made = json.loads(path.read_text())
            made["outputs"] = hash_files(path.parent, ["manifest.json"])
            made["sizes"] = {name: (path.parent / name).stat().st_size for name in made["outputs"]}
            path.write_text(json.dumps(made))
    return root


@in_one_line()
def open_cache() -> None:
    ReplyCache(Path("runs/tiny/seed44413/judge_cache"))


COMMANDS: dict[str, Callable[[], object]] = {
    "look": lambda: make(["ppo", "PRESET=tiny", "DRY=1"]),
    "page": lambda: run_module(run_page, ["--preset", "tiny"]),
    "replace": lambda: make(["ppo", "PRESET=tiny", "DRY=1", "REPLACE=1"]),
    "hub": lambda: run_module(base, ["--preset", "pythia-70m"]),
    "cache": open_cache,
    "named": lambda: make(["ppo", "NAME=tiny", "DRY=1"]),
    "upstream": lambda: run_module(ppo, ["--preset", "tiny", "--name", "x", "--upstream", "tiny"]),
}


@pytest.mark.parametrize(("change", "command", "line"), named(STATE))
def test_state_on_disk(finished, place, capsys, change, command, line):
    shutil.copytree(finished, place, dirs_exist_ok=True)
    change(place / "runs/tiny/seed44413")
    assert line in one_line(capsys, COMMANDS[command])


# -- summaries of others, and a server ------------------------------------------------------------

GIVEN: dict[str, Any] = {"id": 1, "post": "p", "summary": "s", "reference": "r"}


def lines(*rows: dict[str, Any]) -> bytes:
    """A JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


OUTPUTS: list[tuple[str, bytes, str]] = [  # a file's name, its content, the line
    ("x.jsonl", b"", "contains no summaries"),
    ("x.jsonl", b"{\n", "x.jsonl:1: not JSON"),
    (
        "x.jsonl",
        lines({"id": 1, "text": "p", "summary": "s"}),
        "no column post, reference: name it",
    ),
    ("x.jsonl", lines(GIVEN | {"summary": 3}), "has type int: write it as text"),
    ("x.jsonl", lines(GIVEN, GIVEN | {"summary": "t"}), "x.jsonl:2: post 1 of system x is also at"),
    ("x.jsonl", lines(GIVEN, GIVEN | {"system": "b", "post": "q"}), "the post of id 1 differs"),
    ("x.csv", b"id,post\n1\n", "has 1 cells, but the header has 2"),
    ("x.parquet", b"x", "not a Parquet file"),
    (
        "x.csv",
        b"id,post,summary,reference\n1,p,NaN,r\n",
        "x.csv:2: column summary is null (a cell such as NaN or None)",
    ),
    ("x.json", b'[{"id": 1, "id": 2}]', "x.json:1: key 'id' occurs twice"),
    (
        "x.jsonl",
        lines(GIVEN | {"query": "q"}),
        "x.jsonl:1: columns post and query may both be the post: drop one, or name",
    ),
    (
        "x.csv",
        b"id,post,summary,reference\n1,\"[{'role': 'user', 'content': 'p'}]\",s,r\n",
        "x.csv:2: column post is a printed list of messages",
    ),
    ("x.jsonl", lines(GIVEN | {"summary": "x " * 6000}), "x.jsonl:1: column summary has 12,000 ch"),
    ("x.xlsx", b"x", "a file of an unknown type"),
]


@pytest.mark.parametrize(("name", "content", "line"), named(OUTPUTS))
def test_outputs(place, capsys, name, content, line):
    Path(name).write_bytes(content)
    words = ["--preset", "outputs", "--set", f"outputs.file={name}", "judge.kind=openai"]
    assert line in one_line(capsys, lambda: run_module(outputs, words))


def refusal(status: int, text: str = "no way", **more: str) -> tuple[int, Any]:
    """A refusal as the protocol spells it."""
    return status, {"error": {"message": text, **more}}


SERVER: list[tuple[Any, str]] = [  # what it answers, the line
    (refusal(401, "line\nbreak"), "401"),
    (refusal(401, "\x1b[31mred"), "\\u001b[31mred"),
    (refusal(429, code="insufficient_quota"), "quota"),
    (refusal(500), "run the same command again"),
    ((200, "<html>a page</html>"), "base_url"),
    ((200, {"choices": []}), "run the same command again"),
    (chat(GOOD, model="another"), "another"),
]


@pytest.mark.parametrize(("answer", "line"), named(SERVER))
def test_server(judge_environment, place, capsys, answer, line):
    @in_one_line()
    def question(server) -> None:
        ask(server, max_retries=1)

    with serving(lambda number, body: answer) as server, pytest.raises(SystemExit) as ended:
        question(server)
    assert ended.value.code == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert line in printed
    assert not HIDDEN.search(printed)


def test_an_unknown_option_of_a_page_is_one_line(place, capsys):
    line = one_line(capsys, lambda: run_module(run_page, ["--no-such-option", "x"]))
    assert "--no-such-option" in line
