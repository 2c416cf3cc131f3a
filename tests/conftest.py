"""Fixtures of all tests: golden numbers, a tiny tokenizer, tiny models, a runs folder.

Nothing here touches the network, and nothing is written outside pytest's own temporary folders.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from stages.config import paths
from tests.lib.browser import Browser, find_chromium
from tests.lib.make_stages import make_stages
from tests.lib.paper_numbers import NUMBERS
from tests.lib.places import SHARED

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported, which is later
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name in ("OPENAI_BASE_URL", "WANDB_PROJECT"):
    os.environ.pop(name, None)
# Two workers share two cores; OMP_NUM_THREADS asks for other sums.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("steady")

EOS = "<|endoftext|>"


def pytest_configure(config):
    """Run tests on the CPU even if there is a GPU, except for `pytest -m gpu`.

    CUDA reads the variable when it is first used, which is later.
    """
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests that use a browser as walks; other walks are marked by hand."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.walk)


@pytest.fixture(scope="session")
def shared():
    if not SHARED.is_dir():
        pytest.skip("../shared with the paper's golden numbers is not here")
    return SHARED


@pytest.fixture(scope="session", params=["own", "shared"] if SHARED.is_dir() else ["own"])
def source(request):
    """Whose golden numbers: our transcription's (paper_numbers.py), or the paper's code's."""
    return request.param


@pytest.fixture(scope="session")
def golden(source: str) -> Callable[[str], dict[str, torch.Tensor]]:
    """Opens one golden case by name, as tensors."""

    def load(name: str) -> dict[str, torch.Tensor]:
        if source == "own":
            case = json.loads(NUMBERS.read_text(encoding="utf-8"))[name]
        else:
            case = dict(np.load(SHARED / "golden" / f"{name}.npz"))
        return {key: torch.from_numpy(np.asarray(case[key])) for key in case}

    return load


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A runs folder of the test's own."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_drawing(monkeypatch):
    """Plots are empty: `reports/test_plots.py` tests the drawing."""
    monkeypatch.setattr("reports.plots.draw", lambda panel: "<svg></svg>")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of 200 kB with the given options; skips if that is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str = "size=200k") -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        is_mounted = (
            shutil.which("mount") is not None
            and subprocess.run(command, capture_output=True).returncode == 0
        )
        if not is_mounted:
            pytest.skip("a small file system cannot be mounted here")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser with a new profile; skips if none is installed."""
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium is installed: apt install chromium")
    browser = Browser(program, tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def judge_environment(runs, monkeypatch):
    """A runs folder, a key for a server, short waits, and no server of the developer's own."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.02)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.1)
    for name in ("OPENAI_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return runs


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A byte-level BPE with EOS as id 0 and no pad token, as Pythia's; in transformers' layout."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "SUBREDDIT: r/tifu\n\nTITLE: my bike\n\nPOST: My boss sold my bike.\n\nTL;DR: My boss"
    backend.train_from_iterator([text] * 2, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder):
    from stages.models.tokenizers import load_tokenizer

    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def source_tokenizer(source, tokenizer_folder):
    from stages.models.tokenizers import load_tokenizer

    if source == "shared":
        return load_tokenizer(SHARED / "tokenizer")
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory, tokenizer_folder):
    """A saved GPT-NeoX, 2 layers, 32 wide; dropout in its config, no embedding for [PAD]."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from stages.models.loading import save_model
    from stages.models.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=tokenizer.pad_token_id,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=256,
        initializer_range=0.3,  # large, so that tokens and positions make a difference
        hidden_dropout=0.1,
        attention_dropout=0.1,
        classifier_dropout=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("policy")
    save_model(GPTNeoXForCausalLM(config), tokenizer, folder)
    return folder


@pytest.fixture
def policy(policy_folder):
    from stages.models.loading import load_policy

    return load_policy(policy_folder).eval()


@pytest.fixture
def reward_model(policy_folder):
    from stages.models.loading import new_reward_model

    return new_reward_model(policy_folder, torch.Generator().manual_seed(2)).eval()


@pytest.fixture
def before_ppo(policy, reward_model, tokenizer):
    """The networks as PPO finds them; critic and reward model, policy and reference are one."""
    from stages.models.policy import PolicyModel
    from stages.rl.networks import Networks

    wrapped = PolicyModel(policy)
    return Networks(
        policy=wrapped,
        critic=reward_model,
        ref_policy=wrapped,
        reward_model=reward_model,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a small run that nothing interrupted."""
    from stages import base
    from tests.lib.resuming import ARGUMENTS, stage_modules

    root = tmp_path_factory.mktemp("whole")
    make_stages(root, (base, *stage_modules().values()), ARGUMENTS)
    return root / "runs/resumed/seed44413"


@pytest.fixture
def attempt(whole, tmp_path, monkeypatch):
    """Starts a folder in which everything before a stage is done; returns where it will be."""
    from tests.lib.resuming import stage_modules

    monkeypatch.chdir(tmp_path)
    modules = stage_modules()

    def start(stage: str) -> Path:
        run = tmp_path / "runs/resumed/seed44413"
        names = list(modules)
        for name in ("base", *names[: names.index(stage)]):
            shutil.copytree(whole / name, run / name, copy_function=os.link)
        return run / stage

    return start
