"""What goes wrong with the hub: one line that names the setting and the mend."""

import re
from unittest import mock

import pytest
from huggingface_hub import errors

from stages.running import hub as hub_client
from stages.running.hub import fetch_model
from stages.running.inputs import model_source
from stages.settings.checks import UserError
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


GATED = errors.GatedRepoError("no", response=mock.Mock(headers={}, status_code=403))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GATED, "x/y is gated: accept its terms at"),
        (ConnectionResetError("gone"), "the download was cut off (gone): the same command"),
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
