"""Bad input of each kind, through the real commands.

Each command ends in one line with status 2 and leaves no file behind.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
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
from tests.lib.rows import PAIR, POST, edited, good_row, write_folder, write_rows

ROOT = Path(__file__).parents[1]
RUN_OPTIONS = ["--preset", "tiny", "--name", "x", "--data", "data"]
Change = Callable[[Path], object]


def files_here() -> dict[str, bytes]:
    """Everything below the working directory; a folder has no bytes."""
    contents = {}
    for path in Path().rglob("*"):
        contents[str(path)] = path.read_bytes() if path.is_file() else b""
    return contents


def refused_line(capsys, command: Callable[[], object]) -> str:
    """The one line with which a command ends that must be refused, with status 2."""
    before = files_here()
    with pytest.raises(SystemExit) as ended:
        command()

    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert not HIDDEN.search(printed)
    assert "usage:" not in printed
    (line,) = [line for line in printed.splitlines() if "error: " in line]
    assert printed.splitlines()[-1] == line
    assert files_here() == before
    return line


@pytest.fixture
def data(place):
    """A working directory with a small folder of good posts and comparisons."""
    return write_folder(place / "data")


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """The second of three rows of a file: a text as it is written, or a row."""

    file: str
    row: str | dict[str, Any]
    line: str


BAD_ROWS = {
    "half a JSON object": BadRow(
        file="sft_train",
        row='{"id": "p1", ',
        line="sft_train.jsonl:2: not JSON",
    ),
    "a key twice": BadRow(
        file="sft_train",
        row='{"id": "p1", "post": "a", "post": "b"}',
        line="jsonl:2: key 'post' occurs twice",
    ),
    "a title that fills the query": BadRow(
        file="sft_train",
        row=POST | {"title": "x " * 400},
        line="cannot be cut to fit",
    ),
    "a long summary": BadRow(
        file="sft_train",
        row=POST | {"summary": "x " * 90},
        line="limit",
    ),
    "a number as summary": BadRow(
        file="sft_validation",
        row=POST | {"summary": 1.5},
        line="sft_validation.jsonl:2: field summary is of",
    ),
    "a comparison without a text": BadRow(
        file="comparisons_train",
        row=edited(PAIR, "summaries.0.text", None),
        line="summaries[0].text",
    ),
    "a comparison without three fields": BadRow(
        file="comparisons_train",
        row=edited(PAIR, "info.post", None) | {"batch": None, "choice": None},
        line="no field choice, batch, info.post",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused(data, capsys, case):
    good = good_row(case.file)
    write_rows(data / f"{case.file}.jsonl", [good, case.row, good])
    assert case.line in refused_line(capsys, lambda: run_module(base, RUN_OPTIONS))


def test_a_missing_file_is_named(data, capsys):
    (data / "comparisons_train.jsonl").unlink()
    line = refused_line(capsys, lambda: run_module(base, RUN_OPTIONS))
    assert "comparisons_train.jsonl is missing" in line


def test_a_missing_earlier_stage_names_the_make_command(data, capsys):
    line = refused_line(capsys, lambda: run_module(ppo, RUN_OPTIONS))
    assert "make" in line
    assert "DATA=data" in line
    assert "make data" in refused_line(capsys, lambda: run_module(sft, RUN_OPTIONS))


# -- settings; tests/config has what a setting may be ----------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--preset", "tny"], "unknown preset 'tny': did you mean tiny"),
        (["--preset", "posts"], "preset posts needs posts: add DATA="),
        (["--preset", "outputs"], "needs a file of summaries: add INPUT="),
        (["--name", "tiny-s"], "NAME=tiny-s is the folder of preset tiny-s"),
        (["--name", "x", "--upstream", "gone"], "upstream gone has no seed 44413"),
        (["--name", "x", "--data", "gone"], "data.source: gone is not a file, folder or hub id"),
        (["--name", "x", "--data", "bad\x1bname"], "contains a control character"),
        (["--set", "judge.model=gpt-6"], "judge.model has no effect with judge.kind=facts"),
        (["--name", "x", "--set", "eval.posts=99999"], "eval.posts must be at most 600"),
    ],
    ids=[
        "unknown preset",
        "no posts",
        "no file of summaries",
        "name of another preset",
        "unknown upstream",
        "missing data",
        "control character",
        "setting without effect",
        "too many posts",
    ],
)
def test_bad_settings_are_refused(place, capsys, options, line):
    assert line in refused_line(capsys, lambda: run_module(sft, options))
    assert not list(place.iterdir())


# -- models and tokenizers -------------------------------------------------------------------------


def set_fields(name: str, **values: Any) -> Change:
    """Changes values of a JSON file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def cut_file(name: str, size: int) -> Change:
    """Leaves only the first bytes of a file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return change


def write_file(name: str, text: str) -> Change:
    """Replaces the text of a file."""

    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def delete_file(name: str) -> Change:
    """Deletes a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def replace_by_folder(name: str) -> Change:
    """Puts a folder where a file belongs."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def replace_weights_by_pickle(content: bytes) -> Change:
    """Puts a file of weights in the old format in place of the safetensors."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


@dataclass(frozen=True, kw_only=True)
class BadFolder:
    """A change that spoils the folder of a model or tokenizer."""

    change: Change
    line: str


BAD_MODELS = {
    "half of the weights": BadFolder(
        change=cut_file("model.safetensors", 500),
        line="model/model.safetensors does not load",
    ),
    "weights are text": BadFolder(
        change=write_file("model.safetensors", "hello"),
        line="model/model.safetensors does not load",
    ),
    "old weights are a program": BadFolder(
        change=replace_weights_by_pickle(b"cos\nsystem\n(S'touch hacked'\ntR."),
        line="model/pytorch_model.bin does not load",
    ),
    "another width": BadFolder(
        change=set_fields("config.json", hidden_size=64),
        line="differ from those in its config.json",
    ),
    "a layer too many": BadFolder(
        change=set_fields("config.json", num_hidden_layers=3),
        line="model model lacks",
    ),
    "a layer too few": BadFolder(
        change=set_fields("config.json", num_hidden_layers=1),
        line="has unexpected",
    ),
    "code of its own": BadFolder(
        change=set_fields("config.json", model_type="x", auto_map={"AutoConfig": "x.Y"}),
        line="not load: ",
    ),
    "gptq": BadFolder(
        change=set_fields("config.json", quantization_config={"quant_method": "gptq"}),
        line="is quantized (gptq)",
    ),
    "an encoder": BadFolder(
        change=set_fields("config.json", model_type="bert"),
        line="model model lacks",
    ),
    "config is a folder": BadFolder(
        change=replace_by_folder("config.json"),
        line="does not load",
    ),
}
BAD_TOKENIZERS = {
    "cut": BadFolder(
        change=cut_file("tokenizer.json", 200),
        line="tokenizer tokenizer does not load",
    ),
    "a list": BadFolder(
        change=write_file("tokenizer_config.json", "[]"),
        line="tokenizer tokenizer does not load",
    ),
    "no EOS": BadFolder(
        change=write_file("tokenizer_config.json", "{}"),
        line="has no EOS token",
    ),
    "missing": BadFolder(
        change=delete_file("tokenizer.json"),
        line="tokenizer tokenizer ",
    ),
}


@pytest.mark.parametrize("case", BAD_MODELS.values(), ids=BAD_MODELS)
def test_a_bad_model_is_refused(data, policy_folder, capsys, case):
    shutil.copytree(policy_folder, "model")
    case.change(Path("model"))
    options = [*RUN_OPTIONS, "--set", "base.checkpoint=model", "base.tokenizer="]
    assert case.line in refused_line(capsys, lambda: run_module(base, options))


@pytest.mark.parametrize("case", BAD_TOKENIZERS.values(), ids=BAD_TOKENIZERS)
def test_a_bad_tokenizer_is_refused(data, tokenizer_folder, capsys, case):
    shutil.copytree(tokenizer_folder, "tokenizer")
    case.change(Path("tokenizer"))
    options = [*RUN_OPTIONS, "--tokenizer", "tokenizer"]
    assert case.line in refused_line(capsys, lambda: run_module(base, options))


# -- state on disk ---------------------------------------------------------------------------------


def delete_key(name: str, key: str) -> Change:
    """Deletes a key of a JSON file, as a person could."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        del values[key]
        (folder / name).write_text(json.dumps(values))

    return change


def edit_json(name: str, path: str, value: Any) -> Change:
    """Changes a value of a JSON file, as a person could; the path is that of `edited`."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(edited(values, path, value)))

    return change


def edit_first_row(name: str, field: str, value: Any) -> Change:
    """Changes a value in the first row of a JSONL file, as a person could."""

    def change(folder: Path) -> None:
        first_row, *others = (folder / name).read_text().split("\n")
        row = json.loads(first_row) | {field: value}
        (folder / name).write_text("\n".join([json.dumps(row), *others]))

    return change


@in_one_line()
def open_cache() -> None:
    ReplyCache(Path("runs/tiny/seed44413/judge_cache"))


def plan_ppo() -> None:
    make(["ppo", "PRESET=tiny", "DRY=1"])


def plan_ppo_by_name() -> None:
    make(["ppo", "NAME=tiny", "DRY=1"])


def write_run_page() -> None:
    run_module(run_page, ["--preset", "tiny"])


def train_from_upstream() -> None:
    run_module(ppo, ["--preset", "tiny", "--name", "x", "--upstream", "tiny"])


def fetch_from_hub() -> None:
    run_module(base, ["--preset", "pythia-70m"])


@dataclass(frozen=True, kw_only=True)
class BadState:
    """A change of a finished run, and a command that reads what was changed."""

    change: Change
    command: Callable[[], object]
    line: str


BAD_STATES = {
    "manifest is half a JSON object": BadState(
        change=write_file("sft/manifest.json", "{"),
        command=plan_ppo,
        line="sft/manifest.json is not JSON",
    ),
    "manifest is empty": BadState(
        change=write_file("sft/manifest.json", "{}"),
        command=plan_ppo,
        line="sft/manifest.json is not a manifest of this project",
    ),
    "manifest lacks a key": BadState(
        change=delete_key("sft/manifest.json", "sizes"),
        command=plan_ppo,
        line="sft/manifest.json is not a manifest of this project",
    ),
    "manifest is a folder": BadState(
        change=replace_by_folder("sft/manifest.json"),
        command=plan_ppo,
        line="there is a folder in place of this file",
    ),
    "edited metrics": BadState(
        change=edit_first_row("ppo/metrics.jsonl", "objective/kl", "low"),
        command=write_run_page,
        line="stage ppo has changed on disk (metrics.jsonl)",
    ),
    "edited verdicts": BadState(
        change=edit_first_row("judge/facts/judgements.jsonl", "verdict", "nobody"),
        command=write_run_page,
        line="stage judge has changed on disk (",
    ),
    "a text as number": BadState(
        change=edit_json("sft/config.json", "ppo.kl_coef", "high"),
        command=plan_ppo_by_name,
        line="sft/config.json: ppo.kl_coef must be a number, not 'high': restore it",
    ),
    "a negative batch": BadState(
        change=edit_json("sft/config.json", "ppo.batch_size", -8),
        command=plan_ppo_by_name,
        line="sft/config.json: ppo.batch_size must be above 0",
    ),
    "a text as seed": BadState(
        change=edit_json("sft/config.json", "seed", "one"),
        command=plan_ppo_by_name,
        line="sft/config.json: seed must be a whole number",
    ),
    "a number as override": BadState(
        change=edit_json("sft/config.json", "overrides", [1]),
        command=plan_ppo_by_name,
        line="sft/config.json: overrides.0 must be text, not 1",
    ),
    "a list as section": BadState(
        change=edit_json("rm/config.json", "rm", [8]),
        command=train_from_upstream,
        line="rm/config.json: rm must contain settings",
    ),
    "a list as hub.json": BadState(
        change=write_file("../../hub.json", "[]"),
        command=fetch_from_hub,
        line="hub.json is not a JSON object",
    ),
    "a damaged reply cache": BadState(
        change=write_file("judge_cache", "garbage"),
        command=open_cache,
        line="judge_cache: the cache of replies fails",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a fabricated run whose manifests list all files, as those of real stages do."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        fabricate(make_config("tiny"))
        run = Path("runs/tiny/seed44413")
        verdict = {"policy": "ppo", "id": "p", "order": "policy_first", "verdict": "tie"}
        write_rows(run / "judge/facts/judgements.jsonl", [verdict])
        sample = {"step": 1, "query": "q", "response": "r"}
        write_rows(run / "ppo/samples.jsonl", [sample])
        for path in Path("runs").rglob("manifest.json"):
            list_outputs(path)
    return root


def list_outputs(manifest_path: Path) -> None:
    """Add the hash and the size of every file of a stage to its manifest."""
    folder = manifest_path.parent
    manifest = json.loads(manifest_path.read_text())
    manifest["outputs"] = hash_files(folder, ["manifest.json"])
    manifest["sizes"] = {name: (folder / name).stat().st_size for name in manifest["outputs"]}
    manifest_path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("case", BAD_STATES.values(), ids=BAD_STATES)
def test_bad_state_on_disk_is_refused(finished, place, capsys, case):
    shutil.copytree(finished, place, dirs_exist_ok=True)
    case.change(place / "runs/tiny/seed44413")
    assert case.line in refused_line(capsys, case.command)


# -- existing summaries ----------------------------------------------------------------------------

SUMMARY: dict[str, Any] = {"id": 1, "post": "p", "summary": "s", "reference": "r"}


def jsonl(*rows: dict[str, Any]) -> bytes:
    """The content of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass(frozen=True, kw_only=True)
class BadFile:
    """A file of existing summaries."""

    name: str
    content: bytes
    line: str


BAD_FILES = {
    "empty": BadFile(
        name="x.jsonl",
        content=b"",
        line="contains no summaries",
    ),
    "half a JSON object": BadFile(
        name="x.jsonl",
        content=b"{\n",
        line="x.jsonl:1: not JSON",
    ),
    "two columns missing": BadFile(
        name="x.jsonl",
        content=jsonl({"id": 1, "text": "p", "summary": "s"}),
        line="no column post, reference: name it",
    ),
    "a number as summary": BadFile(
        name="x.jsonl",
        content=jsonl(SUMMARY | {"summary": 3}),
        line="has type int: write it as text",
    ),
    "a post twice": BadFile(
        name="x.jsonl",
        content=jsonl(SUMMARY, SUMMARY | {"summary": "t"}),
        line="x.jsonl:2: post 1 of system x is also at",
    ),
    "two posts with one id": BadFile(
        name="x.jsonl",
        content=jsonl(SUMMARY, SUMMARY | {"system": "b", "post": "q"}),
        line="the post of id 1 differs",
    ),
    "a missing cell": BadFile(
        name="x.csv",
        content=b"id,post\n1\n",
        line="has 1 cells, but the header has 2",
    ),
    "no Parquet": BadFile(
        name="x.parquet",
        content=b"x",
        line="not a Parquet file",
    ),
    "NaN as summary": BadFile(
        name="x.csv",
        content=b"id,post,summary,reference\n1,p,NaN,r\n",
        line="x.csv:2: column summary is null (a cell such as NaN or None)",
    ),
    "a key twice": BadFile(
        name="x.json",
        content=b'[{"id": 1, "id": 2}]',
        line="x.json:1: key 'id' occurs twice",
    ),
    "both a post and a query": BadFile(
        name="x.jsonl",
        content=jsonl(SUMMARY | {"query": "q"}),
        line="x.jsonl:1: columns post and query may both be the post: drop one, or name",
    ),
    "a printed list of messages": BadFile(
        name="x.csv",
        content=b"id,post,summary,reference\n1,\"[{'role': 'user', 'content': 'p'}]\",s,r\n",
        line="x.csv:2: column post is a printed list of messages",
    ),
    "a long summary": BadFile(
        name="x.jsonl",
        content=jsonl(SUMMARY | {"summary": "x " * 6000}),
        line="x.jsonl:1: column summary has 12,000 ch",
    ),
    "an unknown type": BadFile(
        name="x.xlsx",
        content=b"x",
        line="a file of an unknown type",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_of_summaries_is_refused(place, capsys, case):
    Path(case.name).write_bytes(case.content)
    overrides = [f"outputs.file={case.name}", "judge.kind=openai"]
    options = ["--preset", "outputs", "--set", *overrides]
    assert case.line in refused_line(capsys, lambda: run_module(outputs, options))


# -- a server --------------------------------------------------------------------------------------


def refusal(status: int, text: str = "no way", **fields: str) -> tuple[int, Any]:
    """A refusal as the protocol spells it."""
    return status, {"error": {"message": text, **fields}}


@dataclass(frozen=True, kw_only=True)
class BadAnswer:
    """What a server answers."""

    answer: tuple[int, Any]
    line: str


BAD_ANSWERS = {
    "a refused key": BadAnswer(
        answer=refusal(401, "line\nbreak"),
        line="401",
    ),
    "an escape sequence": BadAnswer(
        answer=refusal(401, "\x1b[31mred"),
        line="\\u001b[31mred",
    ),
    "no quota": BadAnswer(
        answer=refusal(429, code="insufficient_quota"),
        line="quota",
    ),
    "a server error": BadAnswer(
        answer=refusal(500),
        line="run the same command again",
    ),
    "a web page": BadAnswer(
        answer=(200, "<html>a page</html>"),
        line="base_url",
    ),
    "no choices": BadAnswer(
        answer=(200, {"choices": []}),
        line="run the same command again",
    ),
    "another model": BadAnswer(
        answer=chat(GOOD, model="another"),
        line="another",
    ),
}


@pytest.mark.parametrize("case", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_bad_answer_of_a_server_ends_the_command(judge_environment, place, capsys, case):
    @in_one_line()
    def ask_once(server) -> None:
        ask(server, max_retries=1)

    with serving(lambda number, body: case.answer) as server, pytest.raises(SystemExit) as ended:
        ask_once(server)

    assert ended.value.code == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert case.line in printed
    assert not HIDDEN.search(printed)


# -- options ---------------------------------------------------------------------------------------


def test_an_unknown_option_of_a_page_is_refused(place, capsys):
    options = ["--no-such-option", "x"]
    assert "--no-such-option" in refused_line(capsys, lambda: run_module(run_page, options))
