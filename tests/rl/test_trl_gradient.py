"""RLOO's gradient beside that of TRL's RLOOTrainer, in the environment that `make bench` makes."""

import copy
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stages.rl.grouped import credit
from transformers import AutoModelForCausalLM

from reports.parts.words import PEER
from reports.speed import measure, speed
from reports.speed.speed import task_of
from stages.data.ragged import pad_left
from stages.functional import leave_one_out
from stages.rl.advantages import shape
from stages.rl.episodes import Episodes, Sampled
from stages.rl.networks import Networks
from stages.rl.rollout import measure as measured_by
from stages.rl.update import optimize
from stages.settings.command_line import config_of, make_config
from stages.settings.ppo import Rloo
from tests.lib.learners import learner_of

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "runs" / "peers" / PEER
OVERRIDES = ("memory.cpu_threads=1", "data.max_summary_tokens=6")
REQUEST = speed.case_of("tiny-s:8:4", OVERRIDES).request


@pytest.fixture(scope="module")
def trl_step(tmp_path_factory):
    """What TRL learned from in one step, the policy before it, and its gradient."""
    if not (ENVIRONMENT / "bin" / "python").is_file():
        pytest.skip("TRL has no environment here: `make bench` makes it")
    folder = tmp_path_factory.mktemp("step")
    measure.main(["prepare", str(folder / "prepare.json"), *REQUEST.arguments])
    task = task_of(folder, config_of(REQUEST))
    task |= {"queries": task["queries"][:2], "kl_coef": 0.3}
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    words = [ENVIRONMENT / "bin" / "python", "-m", "tests.lib.trl_gradient"]
    done = subprocess.run(
        [*map(str, words), str(folder / "task.json"), str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert not done.returncode, done.stderr
    return task, folder


def episodes_of(task, seen, learner, settings):
    """TRL's own samples and rewards as episodes of ours."""
    pad_id = task["pad_id"]
    prompts = [torch.tensor(prompt) for prompt in seen["prompts"]]
    width = max(map(len, seen["responses"]))
    rows = [response + [pad_id] * (width - len(response)) for response in seen["responses"]]
    responses = torch.tensor(rows)
    sampled = Sampled(
        queries=pad_left(prompts, pad_id),
        responses=responses,
        sampled_logprobs=torch.zeros(responses.shape, dtype=torch.float64),
    )
    measured = measured_by(learner, sampled, settings)
    assert {tuple(prompt) for prompt in seen["prompts"]} == {*map(tuple, task["queries"])}
    rewards = torch.tensor(seen["rewards"]).float().double()  # TRL holds rewards in float32
    return Episodes(**vars(measured), scores=rewards)


def test_one_step_of_trl_is_one_step_of_ours(trl_step):
    task, folder = trl_step
    seen = json.loads((folder / "seen.json").read_text("utf-8"))
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
        for place in (folder / "policy", task["weights"])
    )
    settings = Rloo(
        batch_size=8,
        total_episodes=8,
        kl_coef=task["kl_coef"],
        eos_trick="off",
        logprob_dtype="float32",
    )
    networks = Networks(
        policy=policy,
        critic=None,
        ref_policy=reference,
        reward_model=reference,
        eos_id=task["eos_id"],
        pad_id=task["pad_id"],
    )
    learner = learner_of(networks, make_config("tiny"))
    shaped = shape(episodes_of(task, seen, learner, settings), settings, task["pad_id"])
    rollout = credit(shaped, settings, leave_one_out)
    assert float(shaped.rewards.abs().max()) > 0.01  # rewards and a KL that is not 0
    before = copy.deepcopy(policy.state_dict())
    learner.optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    optimize(learner, rollout, replace(settings, max_grad_norm=0.0), 1, settings.kl_coef)
    steps_of_trl = load_file(folder / "step.safetensors")
    size = max(float(step.abs().max()) for step in steps_of_trl.values())
    assert size > 1e-3
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(
            before[name] - weight.detach(), steps_of_trl[name], atol=1e-6 * size, rtol=0
        )
