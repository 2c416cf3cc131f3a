"""Fixtures of all tests: golden numbers, a tiny tokenizer, tiny models, a runs folder.

Nothing here touches the network, and nothing is written outside pytest's own temporary folders.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from stages.driving.start import run_module
from stages.settings import config as settings
from stages.settings.checks import UserError
from tests.lib.browser import Browser, find_chromium
from tests.lib.paper_numbers import NUMBERS

# Also where there is a card the tests run on the CPU; `make card` runs those that need one.
# CUDA reads it when it is first used, after this.
if "card" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported, which is later
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for name in ("OPENAI_BASE_URL", "WANDB_PROJECT"):
    os.environ.pop(name, None)
# Two workers share two cores; OMP_NUM_THREADS asks for other sums.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("steady")

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
EOS = "<|endoftext|>"


def close(found: torch.Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    """Assert equal shapes and every element within the tolerance; NaN equals nothing."""
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def refused_by(capsys: Any, command: Callable[..., Any], *words: str) -> str:
    """The one line in which a command with these words ends, with status 2."""
    with pytest.raises(SystemExit) as ended:
        command([*words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def refusal_of(call: Callable[..., Any], *values: Any, **named: Any) -> str:
    """The one line of the UserError in which a call ends."""
    with pytest.raises(UserError) as refused:
        call(*values, **named)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def make_stages(root: Path, stages: Iterable[Any], arguments: list[str]) -> None:
    """Make some stages in a working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage in stages:
            run_module(stage, arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A test that uses a browser walks; other walks are marked by hand."""
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
    """Whose numbers: our transcription's (paper_numbers.py), or those of the paper's code."""
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
    monkeypatch.setattr(settings, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_drawing(monkeypatch):
    """Empty plots: what is drawn is test_reports' to look at."""
    monkeypatch.setattr("reports.parts.plots.drawn", lambda *_, **__: "<svg></svg>")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of 200 kB with the given options; skips where that is not allowed."""
    disk = tmp_path / "disk"
    mounted = []

    def mount(options: str = "size=200k") -> Path:
        disk.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("a small file system cannot be mounted here")
        mounted.append(disk)
        return disk

    yield mount
    for one in mounted:
        subprocess.run(["umount", "--lazy", str(one)], check=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser with a profile of its own; skips where none is installed."""
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium is installed: apt install chromium")
    one = Browser(program, tmp_path_factory.mktemp("browser"))
    yield one
    one.close()


@pytest.fixture
def judge_environment(runs, monkeypatch):
    """A runs folder, a key for a server, short waits, and no server of the developer's own."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr("eval.judges.openai.replies.FIRST_WAIT", 0.02)
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

    return load_tokenizer(SHARED / "tokenizer" if source == "shared" else tokenizer_folder)


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


def learner_of(networks: Any, config: Any, optimizer: Any = None, **others: Any) -> Any:
    """A learner of a policy's networks in one process; `trained` is their module, not wrapped."""
    from accelerate import Accelerator

    from stages.rl.networks import PolicyAndCritic, PolicyLearner
    from stages.training.memory import MemoryBudget

    given = {
        "stage": "ppo",
        "accelerator": Accelerator(cpu=True),
        "networks": networks,
        "optimizer": optimizer,
        "budget": MemoryBudget.from_settings(config.memory),
    }
    if "trained" not in others:
        given["trained"] = PolicyAndCritic(networks.policy, networks.critic)
    return PolicyLearner(**given | others)


def state_of(config: Any, network: Any, optimizer: Any = None, **others: Any) -> Any:
    """A training loop's state about networks of a test, in one process, with no run on disk."""
    from types import SimpleNamespace

    from accelerate import Accelerator

    from stages.training.memory import MemoryBudget
    from stages.training.state import Order, State
    from stages.training.step import Learner

    learner = Learner(
        stage="test",
        accelerator=others.pop("accelerator", None) or Accelerator(cpu=True),
        trained=network,
        optimizer=optimizer,
        budget=MemoryBudget.from_settings(config.memory),
        update=others.pop("update", 0),
    )
    given: dict[str, Any] = {
        "run": SimpleNamespace(config=config),
        "learner": learner,
        "updates": 10,
        "order": Order(rows=1, batch_size=1, seed=config.seed, purpose="test"),
    }
    return State(**given | others)


def flat(network: Any) -> torch.Tensor:
    """A copy of all weights of a network, in one row."""
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


def rolled_out(
    config: Any, learner: Any, queries: Any, update: int = 0
) -> tuple[Any, dict[str, float]]:
    """Steps 1 to 5 of an update of PPO: the rollout, and what is reported of it."""
    from stages.models.sampling import Noise
    from stages.rl.advantages import compute_advantages, shape_rewards
    from stages.rl.algorithms import ALGORITHMS
    from stages.rl.metrics import describe
    from stages.rl.rollout import measure, sample_responses, score
    from stages.training.state import Order

    ppo, size = config.ppo, config.ppo.batch_size
    order = Order(rows=len(queries), batch_size=size, seed=config.seed, purpose="ppo")
    length = config.data.max_summary_tokens
    noise = Noise(seed=config.seed, purpose="ppo", step=update, length=length)
    batch = [queries[row] for row in order.batch(update)]
    episodes = sample_responses(learner, batch, noise, ppo)
    episodes = score(learner, measure(learner, episodes, ppo), ppo)
    shaped = shape_rewards(episodes, ppo, learner.networks.pad_id, ppo.kl_coef)
    rollout = compute_advantages(learner.accelerator, shaped, ALGORITHMS["ppo"], ppo)
    return rollout, describe(learner, rollout, ppo, ppo.kl_coef)


def ppo_learner(study: Path, config: Any) -> Any:
    """The learner with which PPO begins from a finished run's models."""
    from accelerate import Accelerator

    from stages.models.tokenizers import load_tokenizer
    from stages.rl.networks import load_networks, make_learner, origins_of
    from stages.runs import Run

    ppo, origins = config.ppo, origins_of(Run(config, "ppo"), config.ppo)
    tokenizer = load_tokenizer(study / "sft" / "model")
    networks = load_networks(origins, tokenizer, ppo, config.memory.frozen_dtype)
    return make_learner(Accelerator(cpu=True), networks, ppo, config.optimizer, config.memory)


def two_updates_of_ppo(study: Path, config: Any) -> tuple[Any, Any]:
    """The learner and the second rollout after two updates from a finished run's models."""
    from stages.data.ragged import load_split
    from stages.rl.update import optimize

    learner = ppo_learner(study, config)
    queries = load_split(study / "base" / "data", "sft_train").columns["queries"]
    for update in range(2):
        rollout, _ = rolled_out(config, learner, queries, update)
        optimize(learner, rollout, config.ppo, update, config.ppo.kl_coef)
    return learner, rollout


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
