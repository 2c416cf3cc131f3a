"""One RLOO step matches one of TRL's RLOOTrainer, in the environment that `make bench` makes."""

import copy
import json
import subprocess
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.config.command_line import make_config
from stages.data.ragged import pad_left, pad_right
from stages.models.policy import PolicyModel
from stages.rl.algorithms import Rloo
from stages.rl.episodes import Episodes, Sampled
from stages.rl.networks import Networks
from stages.rl.rollout import measure
from stages.rl.update import optimize
from tests.bench.case import parse_case
from tests.bench.environment import trl_python
from tests.bench.ours import prepare, task_for_trl
from tests.lib.learners import learner_of, rollout_from
from tests.lib.places import ROOT

CASE = parse_case("tiny-s:8:4", ("memory.cpu_threads=1", "data.max_summary_tokens=6"))


@pytest.fixture(scope="module")
def trl_step(tmp_path_factory):
    """What TRL learned from in one step, the policy before it, and its gradient."""
    if not trl_python().is_file():
        pytest.skip("TRL is not installed: `make bench` installs it")
    folder = tmp_path_factory.mktemp("step")
    config = CASE.make_config()
    prepare(config, config.ppo, folder)
    task = task_for_trl(config, folder)
    task = replace(task, queries=task.queries[:2], kl_coef=0.3)
    (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
    done = subprocess.run(
        [trl_python(), "-m", "tests.lib.trl_gradient", folder / "task.json", folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert not done.returncode, done.stderr
    return task, folder


def episodes_of(task, seen, learner, settings):
    """TRL's own samples and rewards as our episodes."""
    assert {tuple(row) for row in seen["prompts"]} == {tuple(row) for row in task.queries}
    pad_id = task.pad_id
    prompts = [torch.tensor(prompt) for prompt in seen["prompts"]]
    responses = pad_right([torch.tensor(response) for response in seen["responses"]], pad_id)
    sampled = Sampled(
        queries=pad_left(prompts, pad_id),
        responses=responses,
        pad_id=pad_id,
        samples_per_query=settings.samples_per_query,
        sampled_logprobs=torch.zeros(responses.shape, dtype=torch.float64),
    )
    rewards = torch.tensor(seen["rewards"]).float().double()  # TRL holds rewards in float32
    return Episodes(**vars(measure(learner, sampled, settings)), scores=rewards)


def test_one_step_of_trl_is_one_step_of_ours(trl_step):
    task, folder = trl_step
    seen = json.loads((folder / "seen.json").read_text("utf-8"))
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(task.weights, dtype=torch.float64)
    settings = Rloo(
        batch_size=8,
        total_episodes=8,
        kl_coef=task.kl_coef,
        eos_trick="off",
        logprob_dtype="float32",
    )
    networks = Networks(
        policy=PolicyModel(policy),
        critic=None,
        ref_policy=PolicyModel(reference),
        reward_model=reference,
        eos_id=task.eos_id,
        pad_id=task.pad_id,
    )
    learner = learner_of(networks, make_config("tiny"))
    episodes = episodes_of(task, seen, learner, settings)
    rollout = rollout_from(episodes, settings, task.pad_id, "rloo")
    assert float(rollout.rewards.abs().max()) > 0.01  # rewards and a KL that is not 0

    before = copy.deepcopy(policy.state_dict())
    learner.optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    optimize(learner, rollout, settings, seed=1, kl_coef=settings.kl_coef)

    steps_of_trl = load_file(folder / "step.safetensors")
    size = max(float(step.abs().max()) for step in steps_of_trl.values())
    assert size > 1e-3
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(
            before[name] - weight.detach(), steps_of_trl[name], atol=1e-6 * size, rtol=0
        )
