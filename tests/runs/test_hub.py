"""The hub, walked with the unmodified clients against a local one (`tests/lib/hub_server.py`)."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load

from stages import rm
from stages.config.errors import UserError
from stages.runs import hub as hub_client
from stages.runs.hub import fetch_model, model_source
from tests.lib import hub_repositories as layouts
from tests.lib.hub_client import (
    HELD_OUT,
    HELD_OUT_PAIRS,
    PAIRS,
    TRAIN,
    Client,
    commit_of,
    fetched,
    small_hub,
    small_model,
    small_tokenizer,
)
from tests.lib.make_stages import run_module

pytestmark = pytest.mark.walk

NAMED = "--preset pythia-14m --name walk --set".split()
SETTINGS = """
    data.max_query_tokens=160 data.max_summary_tokens=60 data.max_query_summary_tokens=220
    data.max_comparison_tokens=120 data.max_query_comparison_tokens=250
    sft.batch_size=8 rm.batch_size=8 ppo.batch_size=8 ppo.total_episodes=16 eval.posts=4
    judge.kind=reward_model checks.control_posts=2 memory.mixed_precision=no memory.cpu_threads=1
    memory.microbatch_size=8 memory.forward_batch_size=8
""".split()


@pytest.fixture
def hub():
    with small_hub() as hub:
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    return Client(hub, tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder in which `make data` ran from an empty cache; with what it printed, as `printed`."""
    with small_hub() as hub:
        client = Client(hub, tmp_path_factory.mktemp("made"))
        done = run_base(client)
        assert done.code == 0, done.errors
        yield SimpleNamespace(hub=hub, client=client, folder=client.folder, printed=done.out)


def run_base(client, *variables: str, **environment: str) -> SimpleNamespace:
    """`make data` as Make calls it."""
    run = ["PRESET=pythia-14m", "NAME=walk", f"SET={' '.join(SETTINGS)}"]
    words = ["stages", "data", *run, *variables]
    return client(words, **environment)


def manifest(tmp_path: Path, seed: int = 44413) -> dict:
    path = tmp_path / f"runs/walk/seed{seed}/base/manifest.json"
    return dict(json.loads(path.read_text()))


# -- loading goes as said --------------------------------------------------------------------------

READ = """
import json
from stages.data.readers import read_source
from stages.config.sections import Data
print(json.dumps(dict(read_source(Data(), "hub"))))
"""


def test_the_presets_data_sets_load_with_every_row(client):
    found = client(READ)
    assert found.code == 0, found.errors
    splits = json.loads(found.out)
    expected = {
        "sft_train": TRAIN,
        "sft_validation": HELD_OUT,
        "comparisons_train": PAIRS,
        "comparisons_validation": HELD_OUT_PAIRS,
    }
    assert {name: [row for _, row in rows] for name, rows in splits.items()} == expected
    where = f"{layouts.COMPARISONS}:comparisons@refs/convert/parquet[validation]:1"
    assert splits["comparisons_validation"][0][0] == where


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_old_buffers_are_no_weights_and_float16_is_read_as_float32(hub, client, kind):
    other = {"model.safetensors", "pytorch_model.bin"} - {kind}
    files = {name: content for name, content in small_model().items() if name not in other}
    layouts.add_pythia(hub, small_tokenizer(), files)
    folder = Path(fetched(client))
    assert {path.name for path in folder.iterdir()} == {"config.json", kind, *small_tokenizer()}

    from stages.models.loading import load_policy
    from stages.models.tokenizers import load_tokenizer

    published = load(small_model()["model.safetensors"])
    assert any(name.endswith("rotary_emb.inv_freq") for name in published)
    for name, weight in load_policy(folder).state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, published[name].float()), name
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_tokens_to_ids("<|padding|>") == 1
    assert tokenizer.pad_token_id == len(tokenizer) - 1


def test_weights_are_fetched_once_and_in_one_format(hub, client):
    files = hub.repository("models", layouts.PYTHIA).resolve("main")[1]
    files |= {"onnx/model.safetensors": b"other", "rust_model.ot": b"other"}
    hub.repository("models", layouts.PYTHIA).commit(files)
    folder = Path(fetched(client))
    assert not {path.name for path in folder.iterdir()} & {
        "pytorch_model.bin",
        "onnx",
        "rust_model.ot",
    }
    assert fetched(client) == str(folder)
    assert [request for request in hub.requests if "agent-harnesses" not in request] == []


# -- one commit ------------------------------------------------------------------------------------


def test_make_data_records_the_commits_and_says_them_on_the_page(made):
    commits = {
        "data.sft_dataset": commit_of(made.hub, f"datasets/{layouts.POSTS}"),
        "data.comparisons_dataset": commit_of(
            made.hub, f"datasets/{layouts.COMPARISONS}", layouts.CONVERTED
        ),
        "base.checkpoint": commit_of(made.hub, f"models/{layouts.PYTHIA}"),
    }
    results = manifest(made.folder)["results"]
    assert {source["setting"]: source["commit"] for source in results["hub"]} == commits
    assert results["tokens"]["comparisons_train"]["rows"] == len(PAIRS)
    assert all(
        setting in made.printed and commit in made.printed for setting, commit in commits.items()
    )


def test_after_make_data_another_seed_needs_no_network_and_begins_alike(made):
    offline = run_base(made.client, "SEED=7", HF_HUB_OFFLINE="1")
    assert offline.code == 0, offline.errors
    assert made.hub.requests == []
    for key in ("results", "content"):
        assert manifest(made.folder, 7)[key] == manifest(made.folder)[key]


def test_the_first_commit_stays_and_a_commit_in_the_setting_is_taken_as_it_is(hub, client):
    first = commit_of(hub, f"models/{layouts.PYTHIA}")
    assert Path(fetched(client)).name == first
    second = layouts.add_pythia(hub, small_tokenizer(), small_model(seed=2)).branches["main"]
    assert Path(fetched(client)).name == first
    assert Path(fetched(client, f"{layouts.PYTHIA}@{second}")).name == second


# -- the whole way ---------------------------------------------------------------------------------


def test_after_make_data_every_stage_to_the_page_runs_offline(made, monkeypatch):
    # In this process HF_HUB_OFFLINE is set.
    from eval import controls, judge, summaries, win_rate
    from reports import run as run_page
    from stages import normalize, ppo, sft

    made.hub.requests.clear()
    monkeypatch.chdir(made.folder)
    stages = (sft, rm, normalize, ppo, summaries, judge, controls, win_rate, run_page)
    for module in stages:
        run_module(module, [*NAMED, *SETTINGS])
    assert made.hub.requests == []
    pages = (made.folder / "runs/walk/seed44413").glob("report/*/walk-seed44413.md")
    text = next(pages).read_text(encoding="utf-8")
    for source in manifest(made.folder)["results"]["hub"]:
        assert source["commit"] in text


def test_pairs_of_a_hub_id_alone_give_the_posts_too(hub, client):
    rows = [{"prompt": f"Why {n}?", "chosen": "So it is.", "rejected": "No."} for n in range(80)]
    files = {"data/train-00000-of-00001.parquet": layouts.parquet(rows)}
    hub.add("datasets", "me/pairs").commit(files)
    words = ["PRESET=pythia-14m", "NAME=walk", "DATA=me/pairs", f"SET={' '.join(SETTINGS)}"]
    done = client(["stages", "data", *words])
    assert done.code == 0, done.errors
    assert "data.comparisons_dataset: dataset me/pairs" in done.out
    assert "each with a whole prompt" in done.out


# -- what goes wrong is one line that names the setting and the mend -------------------------------


def test_a_repository_or_revision_that_is_not_there_is_one_line(client):
    nowhere = fetched(client, "EleutherAI/pythia-15m")
    assert nowhere.startswith(
        "error: base.checkpoint: model EleutherAI/pythia-15m is neither a folder"
    )
    assert "correct the id" in nowhere
    unknown = fetched(client, f"{layouts.PYTHIA}@step7")
    assert unknown.startswith(
        f"error: base.checkpoint: model {layouts.PYTHIA} has no revision step7"
    )
    assert unknown.endswith("correct the part after @")
    gone = "0" * 40
    assert f"has no revision {gone}" in fetched(client, f"{layouts.PYTHIA}@{gone}")
    assert "nor a hub id: correct it" in fetched(client, "/no/such/folder")


def test_without_network_or_cache_the_line_says_where_to_run_what(hub, client):
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        said = fetched(client, **environment)
        assert said.startswith(
            f"error: base.checkpoint: model {layouts.PYTHIA} is not in the hub's"
        )
        assert said.endswith("run `make data PRESET=...` on a machine with network access")
    hub.broken = True
    said = fetched(client)
    assert "503" in said
    assert said.endswith("run `make data PRESET=...` on a machine with network access")


HF_DOWNLOAD = f"import huggingface_hub; huggingface_hub.snapshot_download({layouts.PYTHIA!r})"


def test_without_network_what_is_in_the_cache_is_used(hub, client, tmp_path):
    folder = fetched(client)
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        assert fetched(client, **environment) == folder
    # So is what another program has put there, of which nothing is recorded.
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        (tmp_path / "runs/hub.json").unlink()
        assert client(HF_DOWNLOAD).code == 0
        assert fetched(client, **environment) == folder


GATED = errors.GatedRepoError("no", response=mock.Mock(headers={}, status_code=403))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GATED, "x/y is gated: accept its terms at"),
        (
            ConnectionResetError("gone"),
            "the download was interrupted (ConnectionResetError: gone): run the same command",
        ),
    ],
)
def test_what_the_client_raises_is_one_line(monkeypatch, error, said):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    monkeypatch.setattr(hub_client, "_snapshot", mock.Mock(side_effect=error))
    source = model_source("base.checkpoint", f"x/y@{'0' * 40}")
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        fetch_model(source)
    assert "\n" not in str(refused.value)


READ_PAIRS = """
from stages.data.readers import read_split
from stages.config.errors import UserError
from stages.config.sections import Data
for name in {names!r}:
    try:
        read_split(Data(comparisons_dataset=name), "hub", "comparisons_train")
    except UserError as error:
        print(error)
"""


def test_a_data_set_without_the_configuration_or_rows_is_one_line(client):
    no_such = f"{layouts.COMPARISONS}:pairs@{layouts.CONVERTED}"
    found = client(READ_PAIRS.format(names=[no_such, layouts.COMPARISONS, "openai/nothing"]))
    assert found.code == 0, found.errors
    configuration, script, nothing = found.out.splitlines()
    label = "data.comparisons_dataset: dataset"
    assert configuration.startswith(f"{label} {layouts.COMPARISONS}, split train, does not load: ")
    assert "pairs" in configuration
    assert script.startswith(f"{label} {layouts.COMPARISONS}, split train, does not load: ")
    assert nothing.startswith(f"{label} openai/nothing is neither a folder nor on the hub")
