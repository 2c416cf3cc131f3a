"""What goes wrong with the hub: one line that names the setting and the mend."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import hub_repositories as layouts
from tests.hub_client import Client, fetched, small_hub

pytestmark = pytest.mark.walk


@pytest.fixture
def hub():
    with small_hub() as hub:
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    return Client(hub, tmp_path)


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


def test_without_network_or_cache_the_line_says_where_to_run_what(hub, client):
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        said = fetched(client, **environment)
        assert said.startswith(
            f"error: base.checkpoint: model {layouts.PYTHIA} is not in the hub's"
        )
        assert said.endswith("run `make data PRESET=...` where there is a network")
    hub.broken = True
    said = fetched(client)
    assert "503" in said
    assert said.endswith("run `make data PRESET=...` where there is a network")


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


def test_a_download_cut_off_is_gone_on_with(hub, client):
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


READ_PAIRS = """
from stages.posts.readers import read_split
from stages.settings.checks import UserError
from stages.settings.config import Data
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
    assert nothing.startswith(f"{label} openai/nothing is neither a folder here nor on the hub")
