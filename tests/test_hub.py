"""The hub, walked with the unmodified clients against a local one (`tests/hub_server.py`).

The clients read HF_ENDPOINT when they are imported, so what asks the hub is a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file

from reports.sections import made_with
from stages.posts import toy
from stages.settings.presets import PRESETS
from tests import hub_repositories as layouts
from tests.hub_server import Hub, serving

ROOT = Path(__file__).parents[1]
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
TRAIN = [toy.make_post(f"toy1-train-{n}") for n in range(24)]
HELD_OUT = [toy.make_post(f"toy1-validation-{n}") for n in range(6)]
PAIRS = [toy.make_comparison(row, "1", "train") for row in TRAIN]
HELD_OUT_PAIRS = [toy.make_comparison(row, "1", "valid1") for row in HELD_OUT]
NAMED = "--preset pythia-14m --name walk --set".split()
SETTINGS = """
    data.max_query_tokens=160 data.max_summary_tokens=60 data.max_query_summary_tokens=220
    data.max_comparison_tokens=120 data.max_query_comparison_tokens=250
    sft.batch_size=8 rm.batch_size=8 ppo.batch_size=8 ppo.total_episodes=16 eval.posts=4
    judge.kind=reward_model checks.control_posts=2 memory.mixed_precision=no memory.cpu_threads=1
    memory.microbatch_size=8 memory.forward_batch_size=8
""".split()


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory):
    return layouts.small_tokenizer(TRAIN, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model_files():
    return layouts.pythia_files(**SHAPE)


@pytest.fixture
def hub(tokenizer_files, model_files):
    """A hub with small repositories of the real layouts."""
    with serving() as hub:
        layouts.add_posts(hub, TRAIN, HELD_OUT, HELD_OUT[:2])
        layouts.add_comparisons(hub, PAIRS, HELD_OUT_PAIRS)
        layouts.add_pythia(hub, tokenizer_files, model_files)
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    """Runs Python code, or a module if it is given as words, with an empty cache at first."""

    def run(code: str | list[str], **environment: str) -> SimpleNamespace:
        words = ["-c", code] if isinstance(code, str) else ["-m", *code]
        inherited = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        hub.requests.clear()
        done = subprocess.run(
            [sys.executable, *words],
            env=inherited | own | environment,
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=False,
        )
        return SimpleNamespace(
            code=done.returncode, out=done.stdout, errors=done.stderr.splitlines(), all=done.stderr
        )

    return run


def commit_of(hub: Hub, name: str, branch: str = "main") -> str:
    return hub.repositories[name].branches[branch]


def run_base(client, *more: str, **environment: str) -> SimpleNamespace:
    """`make data` as Make calls it."""
    words = ["stages.pipeline", "data", *NAMED, *SETTINGS, *more]
    return client(words, **environment)


def manifest(tmp_path: Path, seed: int = 44413) -> dict:
    path = tmp_path / f"runs/walk/seed{seed}/base/manifest.json"
    return dict(json.loads(path.read_text()))


FETCH = """
import sys
from stages.settings.checks import UserError
from stages.system.hub import fetch_model, model_source
try:
    print(fetch_model(model_source("base.checkpoint", {source!r})).folder)
except UserError as error:
    print("error:", error)
assert "torch" not in sys.modules
"""


def fetched(client, source: str = layouts.PYTHIA, **environment: str) -> str:
    """The folder of a fetched model, or the error; one line in any case."""
    found = client(FETCH.format(source=source), **environment)
    assert found.code == 0, found.all
    assert found.out.count("\n") == 1
    return found.out.strip()


# -- the stand-in is a hub, and loading goes as said -----------------------------------------------

PLAIN_CLIENTS = """
import json
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
pairs = load_dataset({pairs!r}, data_dir="comparisons", revision="refs/convert/parquet")
posts = load_dataset({posts!r})
tokenizer = AutoTokenizer.from_pretrained({model!r})
for safe in (True, False):
    model, info = AutoModelForCausalLM.from_pretrained(
        {model!r}, revision={commit!r}, use_safetensors=safe, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
sizes = {{name: len(rows) for name, rows in [*posts.items(), *pairs.items()]}}
choices = pairs["validation"]["choice"]
print(json.dumps([sizes, list(choices), tokenizer.convert_ids_to_tokens([0, 1])]))
"""


def test_the_plain_clients_take_the_stand_in_for_a_hub(hub, client):
    commit = commit_of(hub, f"models/{layouts.PYTHIA}")
    names = {"pairs": layouts.COMPARISONS, "posts": layouts.POSTS, "model": layouts.PYTHIA}
    found = client(PLAIN_CLIENTS.format(commit=commit, **names))
    assert found.code == 0, found.all
    sizes, choices, specials = json.loads(found.out)
    assert sizes == {"train": 24, "validation": 6, "test": 2}
    assert choices == [row["choice"] for row in HELD_OUT_PAIRS]
    assert specials == ["<|endoftext|>", "<|padding|>"]


READ = """
import json
from stages.posts.readers import read_source
from stages.settings.config import Data
print(json.dumps(dict(read_source(Data(), "hub"))))
"""


def test_the_presets_data_sets_load_with_every_row(client):
    found = client(READ)
    assert found.code == 0, found.all
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
def test_old_buffers_are_no_weights_and_float16_is_read_as_float32(
    hub, client, tmp_path, tokenizer_files, model_files, kind
):
    other = {"model.safetensors", "pytorch_model.bin"} - {kind}
    files = {name: one for name, one in model_files.items() if name not in other}
    layouts.add_pythia(hub, tokenizer_files, files)
    folder = Path(fetched(client))
    assert {one.name for one in folder.iterdir()} == {"config.json", kind, *tokenizer_files}

    from stages.learning.models import load_policy, load_tokenizer

    published = load(model_files["model.safetensors"])
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
    assert not {one.name for one in folder.iterdir()} & {
        "pytorch_model.bin",
        "onnx",
        "rust_model.ot",
    }
    assert fetched(client) == str(folder)
    assert [one for one in hub.requests if "agent-harnesses" not in one] == []


# -- one commit ------------------------------------------------------------------------------------


def test_make_data_records_commits_and_nothing_after_it_needs_the_hub(hub, client, tmp_path):
    done = run_base(client)
    assert done.code == 0, done.all
    commits = {
        "data.sft_dataset": commit_of(hub, f"datasets/{layouts.POSTS}"),
        "data.comparisons_dataset": commit_of(
            hub, f"datasets/{layouts.COMPARISONS}", layouts.CONVERTED
        ),
        "base.checkpoint": commit_of(hub, f"models/{layouts.PYTHIA}"),
    }
    results = manifest(tmp_path)["results"]
    assert {one["setting"]: one["commit"] for one in results["hub"]} == commits
    assert results["tokens"]["comparisons_train"]["rows"] == len(PAIRS)
    for setting, commit in commits.items():
        assert any(setting in line and commit[:10] in line for line in done.out.splitlines())
    page = str(made_with.from_hub(results))
    assert all(commit in page for commit in commits.values())

    # Another seed, with no network: the same commits, and nobody is asked.
    offline = run_base(client, "--seed", "7", HF_HUB_OFFLINE="1")
    assert offline.code == 0, offline.all
    assert hub.requests == []
    assert manifest(tmp_path, 7)["results"] == results
    assert manifest(tmp_path, 7)["content"] == manifest(tmp_path)["content"]


def test_a_revision_that_moved_is_said_and_the_first_commit_stays(
    hub, client, tmp_path, tokenizer_files
):
    first = commit_of(hub, f"models/{layouts.PYTHIA}")
    folder = fetched(client)
    assert Path(folder).name == first
    other = layouts.pythia_files(seed=2, **SHAPE)
    second = layouts.add_pythia(hub, tokenizer_files, other).branches["main"]
    assert fetched(client) == folder
    done = run_base(client)
    said = [line for line in done.out.splitlines() if "has moved" in line]
    assert len(said) == 1
    assert said[0].startswith(f"base.checkpoint: model {layouts.PYTHIA}: revision main has moved")
    assert second in said[0]
    assert first[:10] in said[0]
    base = tmp_path / "runs/walk/seed44413/base"
    used = load_file(base / "model/model.safetensors")["gpt_neox.embed_in.weight"]
    published = load(
        hub.repositories[f"models/{layouts.PYTHIA}"].commits[first]["model.safetensors"]
    )
    assert torch.equal(used, published["gpt_neox.embed_in.weight"].float())
    # A commit in the setting is taken as it is.
    assert Path(fetched(client, f"{layouts.PYTHIA}@{second}")).name == second


# -- what goes wrong: one line that names the setting and the mend ---------------------------------


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
    assert unknown.endswith("correct what stands after @")
    gone = "0" * 40
    assert f"has no revision {gone}" in fetched(client, f"{layouts.PYTHIA}@{gone}")
    assert "nor a hub id: correct it" in fetched(client, "/no/such/folder")


def test_a_gated_model_is_one_line_with_its_page(hub, client):
    hub.repositories[f"models/{layouts.PYTHIA}"].gated = True
    for environment in ({}, {"HF_TOKEN": "hf_of_a_stranger"}):
        said = fetched(client, **environment)
        assert said.startswith(f"error: base.checkpoint: model {layouts.PYTHIA} is gated")
        assert f"{hub.url}/{layouts.PYTHIA}" in said


def test_without_network_or_cache_the_line_says_where_to_run_what(client):
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        said = fetched(client, **environment)
        assert said.startswith(
            f"error: base.checkpoint: model {layouts.PYTHIA} is not in the hub's"
        )
        assert said.endswith("run `make data PRESET=...` where there is a network")


def test_without_network_what_is_in_the_cache_is_used(client):
    folder = fetched(client)
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        assert fetched(client, **environment) == folder


def test_a_download_cut_off_is_gone_on_with(hub, client, model_files):
    hub.cuts["model.safetensors"] = 1  # the client itself asks for the rest
    assert load_file(Path(fetched(client)) / "model.safetensors").keys()
    assert sum("/storage/" in one for one in hub.requests) == 2


def test_a_download_that_is_always_cut_off_is_one_line(hub, client):
    hub.cuts["model.safetensors"] = 100
    said = fetched(client)
    assert said.startswith(
        f"error: base.checkpoint: model {layouts.PYTHIA}: the download was cut off"
    )
    assert said.endswith("the same command goes on from there")
    hub.cuts.clear()
    assert (Path(fetched(client)) / "model.safetensors").exists()


def test_a_data_set_without_the_split_or_configuration_is_one_line(client):
    done = run_base(
        client, f"data.comparisons_dataset={layouts.COMPARISONS}:pairs@{layouts.CONVERTED}"
    )
    assert done.code == 2
    assert done.errors[-1].startswith(
        f"error: data.comparisons_dataset: dataset {layouts.COMPARISONS}, split train, does not"
    )
    script = run_base(client, f"data.comparisons_dataset={layouts.COMPARISONS}")
    assert script.code == 2
    assert script.errors[-1].startswith("error: data.comparisons_dataset: ")


# -- the whole way ---------------------------------------------------------------------------------


def test_pythia_14m_differs_from_the_papers_sizes_in_base_and_memory_alone():
    small, paper = PRESETS["pythia-14m"](), PRESETS["pythia-1b"]()
    assert small.base.checkpoint == layouts.PYTHIA
    assert (small.sft, small.rm, small.ppo, small.data) == (
        paper.sft,
        paper.rm,
        paper.ppo,
        paper.data,
    )


def test_the_published_shape_has_the_published_number_of_parameters():
    weights = load(layouts.pythia_files()["model.safetensors"])
    buffers = ("attention.bias", "masked_bias", "inv_freq")
    count = sum(one.numel() for name, one in weights.items() if not name.endswith(buffers))
    assert count == 14_067_712


def test_every_stage_to_the_page_runs_from_the_hubs_files(client, tmp_path, monkeypatch):
    done = run_base(client)
    assert done.code == 0, done.all
    # From here on in this process, where HF_HUB_OFFLINE is set.
    from eval import controls, judge, summaries, win_rate
    from reports import run_page
    from stages import normalize, ppo, reward, sft

    monkeypatch.chdir(tmp_path)
    stages = (sft, reward, normalize, ppo, summaries, judge, controls, win_rate, run_page)
    for module in stages:
        module.main([*NAMED, *SETTINGS])
    page = (tmp_path / "runs/walk/seed44413").glob("report/*/walk-seed44413.md")
    text = next(page).read_text(encoding="utf-8")
    for one in manifest(tmp_path)["results"]["hub"]:
        assert one["commit"] in text
