"""Models, cards and pages at the hub: sent by the unmodified client to the hub of the tests."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from reports import run_page
from reports.sharing import publish, push
from stages.finished import stage_folder
from stages.settings import config as settings
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from tests import fabricated_runs
from tests.fabricated_runs import fabricate, write_manifest
from tests.hub_client import Client
from tests.hub_uploads import TOKEN, UploadHub, taking_uploads

TINY = make_config("tiny", seed=1)
MINE = ("--hub", "anna", "--seed", "1")
NAMES = {f"anna/tiny-seed1-{one}" for one in ("sft", "reward", "ppo")}


@pytest.fixture
def place(tmp_path, monkeypatch, no_drawing, policy_folder):
    """A folder with one finished run whose models are real; its plots are empty."""
    monkeypatch.chdir(tmp_path)
    finished(TINY, policy_folder)
    return tmp_path


def finished(config, policy_folder, **changes):
    """A fabricated run with a small model in every stage that makes one."""
    fabricate(config, **changes)
    for stage in ("sft", "normalize", "ppo"):
        shutil.copytree(policy_folder, stage_folder(config, stage) / "model")
    run_page.write_report(config)


@pytest.fixture
def hub():
    with taking_uploads() as hub:
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    """Runs the real client in a process: large files go the way of LFS, and Anna is logged in."""

    def run(*words, **environment):
        own = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        return Client(hub, tmp_path)(["reports.sharing.push", *words], **own | environment)

    return run


# -- the whole way ---------------------------------------------------------------------------------

LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
name, folder = {name!r}, {folder!r}
tokens = torch.tensor([[5, 6, 7, 8]])
found, here = (AutoModelForCausalLM.from_pretrained(one)(tokens).logits for one in (name, folder))
print(torch.equal(found, here), len(AutoTokenizer.from_pretrained(name)))
"""


@pytest.mark.walk
def test_what_was_pushed_loads_back_with_equal_logits_and_a_card(place, hub, client, tokenizer):
    done = client(*MINE)
    assert done.code == 0, done.errors
    assert {key.removeprefix("models/") for key in hub.repositories} == NAMES
    assert all(one.private for one in hub.repositories.values())
    folder = str(stage_folder(TINY, "ppo").resolve() / "model")
    code = LOAD.format(name="anna/tiny-seed1-ppo", folder=folder)
    loaded = Client(hub, place)(code, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0")
    assert loaded.out.split() == ["True", str(len(tokenizer))], loaded.errors

    files = hub.files("models", "anna/tiny-seed1-ppo")
    card = files["README.md"].decode()
    assert "license: mit\n" in card
    assert "| win rate against the references of 600 held-out posts, judged by facts rule" in card
    assert "63.0%" in card
    assert "(report/tiny-seed1.md)" in card
    assert b"<h1>Run tiny, seed 1</h1>" in files["report/tiny-seed1.html"]
    assert not {"report/config.json", "report/manifest.json"} & files.keys()
    reward = hub.files("models", "anna/tiny-seed1-reward")["README.md"].decode()
    assert "ranked as by the labellers" in reward
    assert not any(
        name.startswith("report/") for name in hub.files("models", "anna/tiny-seed1-sft")
    )

    # A stranger sees nothing; a second push sends nothing.
    stranger = Client(hub, place)(code, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0", HF_HOME="none")
    assert stranger.code != 0
    again = client(*MINE)
    assert again.code == 0, again.errors
    assert again.out.count("as it was") == len(NAMES)
    assert not [one for one in hub.requests if one.startswith("PUT") or "/commit/" in one]


# Hub and client in one process: what a push of two small models says in each state of the hub.
STATES = """
import json, os, sys
from pathlib import Path
from tests.hub_uploads import TOKEN, UploadHub, taking_uploads
with taking_uploads() as hub:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": "home", "HF_TOKEN": TOKEN}
    os.environ.update(own, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0")
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session
    from reports.sharing import push
    weights = Path("model.safetensors")
    weights.write_bytes(b"weights")
    card = b"---\\nlicense: mit\\ntags:\\n- a\\n---\\n# x\\n"
    files = {"README.md": card, "model.safetensors": weights, "config.json": b"{}"}
    names = {one: f"anna/x-{one}" for one in ("sft", "ppo")}
    both = [push.Upload(repository=k, stage=v, files=files) for v, k in names.items()]
    said = {}

    def state(label, public=False):
        hub.requests.clear()
        try:
            lines = list(push.send(both, public))
        except push.UserError as error:
            lines = [str(error)]
        sent = [one for one in hub.requests if one.startswith("PUT") or "/commit/" in one]
        said[label] = [lines, sent]

    hub.refused = {"x-ppo/commit": 500}
    state("cut off")
    hub.refused = {}
    state("again")
    state("nothing new")
    for status in (403, 409):
        hub.refused = {"preupload": status}
        state(str(status))
    hub.refused = {}
    hub.users = {}
    state("nobody")
    hub.users = {TOKEN: "bob"}
    state("bob")
    hub.users = {TOKEN: "anna"}
    hub.repositories["models/anna/x-sft"].private = False
    state("public")
    state("meant to be", public=True)
    assert not any(one.private for one in hub.repositories.values())
    constants.HF_HUB_OFFLINE = True
    state("offline")
    constants.HF_HUB_OFFLINE = False
close_session()  # a connection that is open outlives the server's end
state("away")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """State of the hub -> what a push says, and what it sends."""
    client = Client(UploadHub(), tmp_path_factory.mktemp("states"))
    done = client(STATES)
    assert done.code == 0, done.errors
    return json.loads(done.out)


@pytest.mark.walk
def test_an_upload_that_was_cut_off_goes_on_where_it_was(states):
    lines, sent = states["cut off"]
    assert lines == [
        "anna/x-ppo: the hub answers 500 (refused: x-ppo/commit): the same command goes on from"
        " there"
    ]
    assert [one.split("/")[0] for one in sent] == ["PUT ", "POST "]  # equal weights go once
    lines, sent = states["again"]
    assert [line.split(":")[0] for line in lines] == ["as it was", "uploaded"]
    assert sent == ["POST /api/models/anna/x-ppo/commit/main"]
    assert states["nothing new"][1] == []


@pytest.mark.walk
@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("403", "this login may not write there: correct HUB=anna"),
        ("409", "somebody else changed it at the same time"),
        ("nobody", "the hub does not know you: correct the id, or log in with `hf auth login`"),
        ("bob", "this login may not write there"),
        ("public", "anna/x-sft is public already: add PUBLIC=1"),
        ("offline", "HF_HUB_OFFLINE is set: unset it where there is a network"),
        ("away", " fails ("),
    ],
)
def test_what_the_hub_refuses_is_one_line(states, state, said):
    ((line,), sent) = states[state]
    assert line.startswith("anna/x-sft")
    assert said in line
    assert "\n" not in line
    assert sent == []
    assert len(states["meant to be"][0]) == 2


# -- what is sent ----------------------------------------------------------------------------------


def asked(capsys, *words):
    """What a dry run prints, or the one line with which it is refused."""
    try:
        push.main([*words, "--dry-run"])
    except SystemExit:
        (line,) = capsys.readouterr().err.splitlines()
        return line
    return capsys.readouterr().out


def test_a_dry_run_says_what_goes_where_and_asks_nobody(place, capsys):
    said = asked(capsys, *MINE)
    lines = said.splitlines()
    assert lines[:2] == ["would upload:", "3 repositories, private; PUBLIC=1 makes them public"]
    assert {line.split(":")[0] for line in lines if line.startswith("anna/")} == NAMES
    assert lines.count("  model.safetensors") == 3
    assert lines.count("  README.md") == 3
    assert lines.count("  report/tiny-seed1.html") == 1
    assert lines.count("  report/tiny-seed1-numbers/page.json") == 1
    page = stage_folder(TINY, "report") / "tiny-seed1.md"
    links = re.findall(r"\]\(([^):]+\.csv)\)", page.read_text(encoding="utf-8"))
    assert links
    assert {f"  report/{link}" for link in links} <= set(lines)
    assert "public: everybody can read them" in asked(capsys, *MINE, "--public")
    assert "anna/tldr-seed1-ppo:" in asked(capsys, "--hub", "anna/tldr", "--seed", "1")


def test_make_passes_it_on_and_make_n_only_looks(place):
    makefile = push.__file__.replace("reports/sharing/push.py", "Makefile")
    # A make above this one would have it name the folder that it enters.
    words = ["make", "--no-print-directory", "-n", "-f", makefile, "push"]
    words += ["HUB=anna", "SEED=1", "VENV=", "PYTHON=echo"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    last = found.splitlines()[-1]  # before it stands the command, as `make -n` prints it
    assert (
        last.split() == "-m reports.sharing.push --hub=anna --name=tiny --seed=1 --dry-run".split()
    )


@pytest.mark.parametrize("stage", ["base", "rm"])
def test_stale_models_are_refused(place, capsys, stage):
    write_manifest(TINY, stage, {"updates": 61})
    line = asked(capsys, *MINE)
    assert f"was made from an earlier {stage}: run `make" in line


def test_a_stale_page_is_refused(place, capsys):
    write_manifest(TINY, "judge", {"updates": 61})
    assert "was made from an earlier judge: run `make eval PRESET=tiny SEED=1`" in asked(
        capsys, *MINE
    )


def test_names_that_are_none_and_runs_without_a_model_are_refused(place, capsys):
    assert "HUB= is no name of the hub: give yours, as in `make push HUB=me`" in asked(
        capsys, "--seed", "1"
    )
    assert "HUB=a b is no name of the hub" in asked(capsys, "--hub", "a b", "--seed", "1")
    assert "unknown run 'tiyn'" in asked(capsys, "--hub", "anna", "--name", "tiyn")
    assert "holds no finished model: run `make ppo`" in asked(capsys, "--hub", "anna")


def test_of_a_page_about_real_data_the_variant_without_texts_is_sent(place, capsys, policy_folder):
    config = make_config("pythia-1b", seed=1)
    finished(config, policy_folder, judge=fabricated_runs.ONLINE)
    (upload,) = [
        one for one in push.uploads_of("anna", "pythia-1b", 1) if one.stage == push.WITH_PAGES
    ]
    page = upload.files["report/pythia-1b-seed1.md"]
    assert not isinstance(page, bytes)
    assert page.parent.name == "public"
    sent = b"".join(
        one if isinstance(one, bytes) else one.read_bytes()
        for name, one in upload.files.items()
        if name.startswith("report/")
    )
    for theirs in (b"SUBREDDIT: r/x", b"the aunt"):
        assert theirs not in sent
    (found,) = publish.pages_of_seed(settings.RUNS / "pythia-1b/seed1", "report", "")
    whole = replace(found, folder=page.parents[1])
    with pytest.raises(UserError, match="pythia-1b-seed1 holds posts that others wrote"):
        push.refuse_texts_of_others([whole], config)


def test_a_run_that_was_not_judged_is_pushed_without_a_page(place):
    shutil.rmtree(stage_folder(TINY, "report"))
    uploads = push.uploads_of("anna", "tiny", 1)
    assert not [name for one in uploads for name in one.files if name.startswith("report/")]
    (card,) = [one.files["README.md"] for one in uploads if one.stage == "ppo"]
    assert isinstance(card, bytes)
    assert b"Win rates are known only after the evaluation" in card
