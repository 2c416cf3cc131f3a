"""Data and models from the hub: which commit is used, what is cached, and what errors say.

The unmodified clients ask a local hub (`tests/lib/hub_server.py`).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load

from stages import rm
from stages.config.errors import UserError
from stages.runs import hub as hub_module
from stages.runs.hub import fetch_model, model_source
from tests.lib import hub_repositories as layouts
from tests.lib.hub_client import (
    HELD_OUT,
    HELD_OUT_PAIRS,
    PAIRS,
    TRAIN,
    Client,
    Finished,
    commit_of,
    fetch,
    small_hub,
    small_model,
    small_tokenizer,
)
from tests.lib.hub_server import Hub
from tests.lib.make_stages import run_module

pytestmark = pytest.mark.walk

SETTINGS = [
    "data.max_query_tokens=160",
    "data.max_summary_tokens=60",
    "data.max_query_summary_tokens=220",
    "data.max_comparison_tokens=120",
    "data.max_query_comparison_tokens=250",
    "sft.batch_size=8",
    "rm.batch_size=8",
    "ppo.batch_size=8",
    "ppo.total_episodes=16",
    "eval.posts=4",
    "judge.kind=reward_model",
    "checks.control_posts=2",
    "memory.mixed_precision=no",
    "memory.cpu_threads=1",
    "memory.microbatch_size=8",
    "memory.forward_batch_size=8",
]
# Two ways in which the hub cannot be reached.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
WITHOUT_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture
def hub():
    with small_hub() as hub:
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    """A client with an empty cache."""
    return Client(hub, tmp_path)


def make_data(client: Client, *variables: str, **environment: str) -> Finished:
    """Run `make data`, as Make calls it."""
    words = ["stages", "data", "PRESET=pythia-14m", "NAME=walk", f"SET={' '.join(SETTINGS)}"]
    finished = client.run_module([*words, *variables], **environment)
    assert finished.status == 0, finished.errors
    return finished


def base_manifest(folder: Path, seed: int = 44413) -> dict:
    """The manifest that `make data` wrote."""
    path = folder / f"runs/walk/seed{seed}/base/manifest.json"
    return dict(json.loads(path.read_text()))


# -- what is loaded --------------------------------------------------------------------------------

READ_SPLITS = """
import json
from stages.data.readers import read_source
from stages.config.sections import Data
print(json.dumps(dict(read_source(Data(), "hub"))))
"""


def test_the_default_data_sets_load_with_every_row_and_its_place(client):
    finished = client.run_code(READ_SPLITS)

    assert finished.status == 0, finished.errors
    splits = json.loads(finished.output)
    rows = {split: [row for _, row in located_rows] for split, located_rows in splits.items()}
    assert rows == {
        "sft_train": TRAIN,
        "sft_validation": HELD_OUT,
        "comparisons_train": PAIRS,
        "comparisons_validation": HELD_OUT_PAIRS,
    }
    where, _ = splits["comparisons_validation"][0]
    assert where == f"{layouts.COMPARISONS}:comparisons@refs/convert/parquet[validation]:1"


def add_model_with(hub: Hub, weights: str) -> None:
    """Add a model whose weights are only in this file."""
    files = small_model()
    config = files["config.json"]
    layouts.add_pythia(hub, small_tokenizer(), {"config.json": config, weights: files[weights]})


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_either_format_of_weights_is_read_as_float32_without_old_buffers(hub, client, weights):
    from stages.models.loading import load_policy

    add_model_with(hub, weights)

    folder = Path(fetch(client))
    loaded = load_policy(folder).state_dict()

    assert {path.name for path in folder.iterdir()} == {"config.json", weights, *small_tokenizer()}
    published = load(small_model()["model.safetensors"])
    assert any(name.endswith("rotary_emb.inv_freq") for name in published)
    for name, weight in loaded.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, published[name].float()), name


def test_a_fetched_tokenizer_has_its_padding_token_and_ours(client):
    from stages.models.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(Path(fetch(client)))

    assert tokenizer.convert_tokens_to_ids("<|padding|>") == 1
    assert tokenizer.pad_token_id == len(tokenizer) - 1


def test_weights_are_fetched_in_one_format(hub, client):
    repository = hub.repository("models", layouts.PYTHIA)
    _, files = repository.resolve("main")
    repository.commit({**files, "onnx/model.safetensors": b"other", "rust_model.ot": b"other"})

    folder = Path(fetch(client))

    fetched_files = {path.name for path in folder.iterdir()}
    assert not fetched_files & {"pytorch_model.bin", "onnx", "rust_model.ot"}


def test_weights_are_fetched_once(hub, client):
    folder = fetch(client)
    assert fetch(client) == folder
    assert [request for request in hub.requests if "agent-harnesses" not in request] == []


# -- which commit is used --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataRun:
    """A folder in which `make data` ran from an empty cache."""

    client: Client
    output: str

    @property
    def hub(self) -> Hub:
        return self.client.hub

    @property
    def folder(self) -> Path:
        return self.client.folder


@pytest.fixture(scope="module")
def data_run(tmp_path_factory):
    with small_hub() as hub:
        client = Client(hub, tmp_path_factory.mktemp("data"))
        finished = make_data(client)
        yield DataRun(client=client, output=finished.output)


def test_make_data_records_and_prints_the_commits(data_run):
    comparisons = f"datasets/{layouts.COMPARISONS}"
    commits = {
        "data.sft_dataset": commit_of(data_run.hub, f"datasets/{layouts.POSTS}"),
        "data.comparisons_dataset": commit_of(data_run.hub, comparisons, layouts.CONVERTED),
        "base.checkpoint": commit_of(data_run.hub, f"models/{layouts.PYTHIA}"),
    }

    sources = base_manifest(data_run.folder)["results"]["hub"]

    assert {source["setting"]: source["commit"] for source in sources} == commits
    for setting, commit in commits.items():
        assert setting in data_run.output
        assert commit in data_run.output


def test_make_data_tokenizes_every_pair(data_run):
    tokens = base_manifest(data_run.folder)["results"]["tokens"]
    assert tokens["comparisons_train"]["rows"] == len(PAIRS)


def test_after_make_data_another_seed_needs_no_network_and_begins_alike(data_run):
    make_data(data_run.client, "SEED=7", **OFFLINE)

    assert data_run.hub.requests == []
    manifest = base_manifest(data_run.folder)
    manifest_of_seed_7 = base_manifest(data_run.folder, seed=7)
    assert manifest_of_seed_7["results"] == manifest["results"]
    assert manifest_of_seed_7["content"] == manifest["content"]


def test_the_first_commit_stays_in_use_until_a_setting_names_another(hub, client):
    first = commit_of(hub, f"models/{layouts.PYTHIA}")
    assert Path(fetch(client)).name == first

    layouts.add_pythia(hub, small_tokenizer(), small_model(seed=2))
    second = commit_of(hub, f"models/{layouts.PYTHIA}")
    assert second != first
    assert Path(fetch(client)).name == first
    assert Path(fetch(client, f"{layouts.PYTHIA}@{second}")).name == second


# -- runs ------------------------------------------------------------------------------------------


def test_after_make_data_every_stage_runs_offline_and_the_page_names_the_commits(
    data_run, monkeypatch
):
    # In this process HF_HUB_OFFLINE is set.
    from eval import controls, judge, summaries, win_rate
    from reports import run as run_page
    from stages import normalize, ppo, sft

    data_run.hub.requests.clear()
    monkeypatch.chdir(data_run.folder)
    arguments = ["--preset", "pythia-14m", "--name", "walk", "--set", *SETTINGS]
    for module in (sft, rm, normalize, ppo, summaries, judge, controls, win_rate, run_page):
        run_module(module, arguments)

    assert data_run.hub.requests == []
    pages = (data_run.folder / "runs/walk/seed44413").glob("report/*/walk-seed44413.md")
    page = next(pages).read_text(encoding="utf-8")
    for source in base_manifest(data_run.folder)["results"]["hub"]:
        assert source["commit"] in page


def test_a_data_set_of_pairs_gives_the_posts_too(hub, client):
    rows = [
        {"prompt": f"Why {number}?", "chosen": "So it is.", "rejected": "No."}
        for number in range(80)
    ]
    files = {"data/train-00000-of-00001.parquet": layouts.parquet(rows)}
    hub.add("datasets", "me/pairs").commit(files)

    finished = make_data(client, "DATA=me/pairs")

    assert "data.comparisons_dataset: dataset me/pairs" in finished.output
    assert "each with a whole prompt" in finished.output


# -- errors in one line ----------------------------------------------------------------------------


def test_an_unknown_model_is_refused(client):
    line = fetch(client, "EleutherAI/pythia-15m")
    assert line.startswith(
        "error: base.checkpoint: model EleutherAI/pythia-15m is neither a folder"
    )
    assert "correct the id" in line


def test_an_unknown_revision_is_refused(client):
    line = fetch(client, f"{layouts.PYTHIA}@step7")
    assert line.startswith(f"error: base.checkpoint: model {layouts.PYTHIA} has no revision step7")
    assert line.endswith("correct the part after @")


def test_an_unknown_commit_is_refused(client):
    commit = "0" * 40
    assert f"has no revision {commit}" in fetch(client, f"{layouts.PYTHIA}@{commit}")


def test_an_unknown_folder_is_refused(client):
    assert "nor a hub id: correct it" in fetch(client, "/no/such/folder")


@pytest.mark.parametrize("environment", [OFFLINE, WITHOUT_NETWORK], ids=["offline", "no network"])
def test_without_network_and_cache_the_line_says_where_to_run_what(client, environment):
    line = fetch(client, **environment)
    assert line.startswith(f"error: base.checkpoint: model {layouts.PYTHIA} is not in the hub's")
    assert line.endswith("run `make data PRESET=...` on a machine with network access")


def test_a_broken_hub_is_named_by_its_status(hub, client):
    hub.broken = True
    line = fetch(client)
    assert "503" in line
    assert line.endswith("run `make data PRESET=...` on a machine with network access")


@pytest.mark.parametrize("environment", [OFFLINE, WITHOUT_NETWORK], ids=["offline", "no network"])
def test_without_network_the_cache_is_used(client, environment):
    folder = fetch(client)
    assert fetch(client, **environment) == folder


HF_DOWNLOAD = f"import huggingface_hub; huggingface_hub.snapshot_download({layouts.PYTHIA!r})"


@pytest.mark.parametrize("environment", [OFFLINE, WITHOUT_NETWORK], ids=["offline", "no network"])
def test_without_network_what_another_program_put_into_the_cache_is_used(hub, client, environment):
    commit = commit_of(hub, f"models/{layouts.PYTHIA}")
    assert client.run_code(HF_DOWNLOAD).status == 0
    assert Path(fetch(client, **environment)).name == commit


GATED = errors.GatedRepoError("no", response=mock.Mock(headers={}, status_code=403))
INTERRUPTED = ConnectionResetError("gone")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GATED, "x/y is gated: accept its terms at"),
        (
            INTERRUPTED,
            "the download was interrupted (ConnectionResetError: gone): run the same command",
        ),
    ],
    ids=["gated", "interrupted"],
)
def test_what_the_client_raises_is_one_line(monkeypatch, error, message):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr(hub_module, "_snapshot", mock.Mock(side_effect=error))
    source = model_source("base.checkpoint", f"x/y@{'0' * 40}")

    with pytest.raises(UserError, match=re.escape(message)) as refused:
        fetch_model(source)

    assert "\n" not in str(refused.value)


READ_PAIRS = """
from stages.data.readers import read_split
from stages.config.errors import UserError
from stages.config.sections import Data
try:
    read_split(Data(comparisons_dataset={name!r}), "hub", "comparisons_train")
except UserError as error:
    print(error)
"""


def refusal_of_pairs(client: Client, name: str) -> str:
    """The line with which a data set of comparisons is refused."""
    finished = client.run_code(READ_PAIRS.format(name=name))
    assert finished.status == 0, finished.errors
    [line] = finished.output.splitlines()
    prefix = "data.comparisons_dataset: dataset "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)


def test_an_unknown_configuration_of_a_data_set_is_refused(client):
    line = refusal_of_pairs(client, f"{layouts.COMPARISONS}:pairs@{layouts.CONVERTED}")
    assert line.startswith(f"{layouts.COMPARISONS}, split train, does not load: ")
    assert "pairs" in line


def test_a_data_set_that_is_only_a_loading_script_is_refused(client):
    line = refusal_of_pairs(client, layouts.COMPARISONS)
    assert line.startswith(f"{layouts.COMPARISONS}, split train, does not load: ")


def test_an_unknown_data_set_is_refused(client):
    line = refusal_of_pairs(client, "openai/nothing")
    assert line.startswith("openai/nothing is neither a folder nor on the hub")
