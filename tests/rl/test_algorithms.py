"""RLOO on the shared heart: its gradient by hand, its groups, and a run from SFT to the page."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from stages.rl.grouped import credit
from transformers import AutoModelForCausalLM as CausalLM
from transformers import AutoModelForTokenClassification as TokenClassification
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eval import controls, judge, summaries, win_rate
from reports import run_page
from stages import base, normalize, ppo, rloo, rm, sft
from stages.driving.start import run_module
from stages.functional import leave_one_out, minus_group_mean, token_logprobs
from stages.models import forward
from stages.models.loading import with_dropout
from stages.models.sampling import Noise, sample
from stages.rl.advantages import credit as by_gae
from stages.rl.advantages import shape
from stages.rl.episodes import Shaped
from stages.rl.rollout import measure, sample_responses, score, share_of_batch
from stages.rl.update import optimize
from stages.running.files import read_json, read_lines
from stages.settings.command_line import make_config
from stages.settings.ppo import Ppo, Rloo
from tests.lib.asserts import close
from tests.lib.families import CONFIGS
from tests.lib.learners import learner_of
from tests.training.test_loop import Process

SMALL = """
    base.hidden_size=32 base.num_layers=1 eval.posts=8 checks.control_posts=4
    world.train_posts=96 world.validation_posts=8 memory.cpu_threads=1
    world.train_comparisons=64 world.validation_comparisons=32
    rloo.total_episodes=64 rloo.batch_size=32 ppo.total_episodes=64 ppo.batch_size=32
    ppo.critic_updates=0 ppo.checkpoints=1
""".split()
QUERIES = [torch.tensor(tokens) for tokens in ([5, 6, 7], [8, 9], [3, 4, 5, 6])]
NOISE = Noise(seed=1, purpose="rloo", length=6)


def rolled_out(learner, settings):
    sampled = sample_responses(learner, QUERIES, NOISE, settings)
    episodes = score(learner, measure(learner, sampled, settings), settings)
    shaped = shape(episodes, settings, learner.networks.pad_id)
    return credit(shaped, settings, leave_one_out)


def test_one_step_is_the_gradient_of_reinforce_with_the_others_mean_as_baseline(before_ppo):
    settings = Rloo(batch_size=12, eos_trick="off")
    networks = without_critic(before_ppo, torch.float32)
    start = copy.deepcopy(networks.policy)
    learner = learner_of(networks, make_config("tiny"))
    learner.optimizer = torch.optim.SGD(networks.policy.parameters(), lr=0.1)
    rollout = rolled_out(learner, settings)
    assert rollout.values is None
    assert rollout.returns is None
    optimize(learner, rollout, settings, 1, settings.kl_coef)

    tokens = torch.cat([rollout.queries, rollout.responses], dim=1)
    real = tokens != networks.pad_id
    total = torch.zeros(())
    for row in range(len(tokens)):
        prompt = int((rollout.queries[row] != networks.pad_id).sum())
        text = tokens[row][real[row]].unsqueeze(0)
        logits = start(input_ids=text).logits[:, prompt - 1 : -1]
        group = rollout.scores[4 * (row // 4) : 4 * (row // 4) + 4]  # the KL is 0 before a step
        baseline = (group.sum() - rollout.scores[row]) / 3
        advantage = rollout.scores[row] - baseline
        total = total - advantage * token_logprobs(logits, text[:, prompt:], 0.7).sum()
    (total / len(tokens)).backward()
    for learned, before in zip(networks.policy.parameters(), start.parameters(), strict=True):
        expected = before - 0.1 * (0 if before.grad is None else before.grad)
        assert torch.allclose(learned, expected, atol=2e-6)
    assert any(
        not torch.equal(learned, before)
        for learned, before in zip(networks.policy.parameters(), start.parameters(), strict=True)
    )


def test_the_samples_of_a_query_are_neighbours_and_differ(before_ppo):
    learner = learner_of(before_ppo, make_config("tiny"))
    sampled = sample_responses(learner, QUERIES, NOISE, Rloo())
    assert [row.tolist() for row in sampled.queries[::4]] == [
        row.tolist() for row in sampled.queries[3::4]
    ]
    lengths = (sampled.queries != before_ppo.pad_id).sum(dim=1).tolist()
    assert lengths == [2] * 4 + [3] * 4 + [4] * 4
    assert len({tuple(row) for row in sampled.responses[:4].tolist()}) > 1
    assert share_of_batch(Accelerator(cpu=True), QUERIES, 2) == [2, 3, 0, 1, 4, 5]


def gradient(networks, settings, rollout):
    """The policy's gradient of one optimizer step, as one vector."""
    learner = learner_of(copy.deepcopy(networks), make_config("tiny"))
    weights = list(learner.networks.policy.parameters())
    before = [weight.detach().clone() for weight in weights]
    learner.optimizer = torch.optim.SGD(weights, lr=1.0)
    optimize(learner, rollout, settings, 1, settings.kl_coef)
    return torch.cat([(x - y).detach().flatten() for x, y in zip(before, weights, strict=True)])


def without_critic(networks, dtype=torch.float64, **others):
    """The same networks for a stage that has no critic, in an exact dtype."""
    copied = copy.deepcopy(networks)
    policy, reward_model = copied.policy.to(dtype), copied.reward_model.to(dtype)
    given = {"policy": policy, "ref_policy": policy, "reward_model": reward_model, "critic": None}
    return replace(copied, **given | others)


@pytest.mark.parametrize("group", [1, 2])
def test_a_response_is_drawn_with_the_noise_of_its_place_in_whichever_process(before_ppo, group):
    settings = Ppo() if group == 1 else Rloo(samples_per_query=group)
    config = make_config("tiny")
    drawn: list[dict[int, list[int]]] = []
    for count in (1, 2):
        drawn.append({})
        for index in range(count):
            process: Any = Process(index, count)
            learner = learner_of(before_ppo, config, accelerator=process)
            sampled = sample_responses(learner, QUERIES, NOISE, settings)
            places = share_of_batch(process, QUERIES, group)
            drawn[-1] |= dict(zip(places, sampled.responses.tolist(), strict=True))
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == len({tuple(tokens) for tokens in drawn[0].values()}) == 3 * group


def test_the_gradient_of_rloo_is_that_of_dr_grpo_times_k_over_k_minus_1(before_ppo):
    networks, settings = without_critic(before_ppo), Rloo(batch_size=12, eos_trick="off")
    rollout = rolled_out(learner_of(networks, make_config("tiny")), settings)
    shaped = Shaped(**{field.name: getattr(rollout, field.name) for field in fields(Shaped)})
    other = credit(shaped, settings, minus_group_mean)
    ours, theirs = (gradient(networks, settings, each) for each in (rollout, other))
    assert float(theirs.abs().max()) > 1e-3
    close(ours, theirs * 4 / 3, 1e-12)


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@pytest.mark.parametrize("size", [64, 4, 1])
def test_a_query_computed_once_changes_nothing(family, size, before_ppo, monkeypatch):
    """Samples, log-probabilities, scores, values and gradients are those of rows of their own."""
    config, vocabulary = CONFIGS[family], before_ppo.pad_id
    monkeypatch.setattr(LlamaRMSNorm, "forward", in_float64)  # its own computes in float32
    policy, scorer = (made(auto, config, vocabulary) for auto in (CausalLM, TokenClassification))
    networks = without_critic(
        before_ppo, policy=policy, ref_policy=policy, reward_model=scorer, critic=scorer
    )
    settings = Ppo(batch_size=12, total_episodes=12, samples_per_query=4, logprob_dtype="float32")
    sizes = {"microbatch_size": size, "forward_batch_size": size}
    found = []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(forward, "shares_query", lambda model, longest: False)
            monkeypatch.setattr("stages.rl.rollout.sample", apart(sample))
        assert forward.shares_query(policy, 64) == shares
        learner = learner_of(copy.deepcopy(networks), make_config("tiny"), **sizes)
        sampled = sample_responses(learner, QUERIES, NOISE, settings)
        episodes = score(learner, measure(learner, sampled, settings), settings)
        pad_id = networks.pad_id
        learned = by_gae(learner.accelerator, shape(episodes, settings, pad_id), settings)
        weights = list(learner.trained.parameters())
        learner.optimizer = torch.optim.SGD(weights, lr=1.0)
        optimize(learner, learned, replace(settings, num_ppo_epochs=1), 1, settings.kl_coef)
        found.append((learned, torch.cat([weight.detach().flatten() for weight in weights])))
    (shared, moved), (own, expected) = found
    assert torch.equal(shared.responses, own.responses)
    for name in ("sampled_logprobs", "logprobs", "values", "scores"):
        close(getattr(shared, name), getattr(own, name), 1e-6)  # read in float32
    close(moved, expected, 1e-12)


def in_float64(norm, x):
    return norm.weight * x * (x.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).rsqrt()


def apart(right):
    """The sampler with each query computed for each of its samples."""
    return lambda policy, queries, *rest: right(policy, queries.repeat_interleave(4, 0), *rest)


def made(auto, family, vocabulary):
    """A model of a family with new weights, in float64."""
    config = with_dropout(copy.deepcopy(family), 0.0)
    config.vocab_size, config.initializer_range, config.num_labels = vocabulary + 1, 0.3, 1
    torch.manual_seed(5)
    return auto.from_config(config, dtype=torch.float64).eval()


def test_a_run_with_rloo_goes_from_sft_to_the_page_with_its_curves(runs):
    arguments = ["--preset", "tiny", "--name", "r", "--set", *SMALL]
    for module in (base, sft, rm, normalize, ppo, rloo, summaries, judge, controls, win_rate):
        run_module(module, arguments)
    folder = runs / "r" / "seed44413"
    rows = read_lines(folder / "rloo" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["objective/kl"] != rows[0]["objective/kl"]
    assert not {"val/explained_variance", "loss/value_avg"} & rows[0].keys()
    assert not (folder / "rloo" / "critic").exists()
    rates = read_json(folder / "win_rate" / "facts" / "manifest.json")["results"]
    assert rates["policies"]["rloo"]["posts"] == 8
    assert list(rates["best"]["means"]) == ["sft", "ppo-1", "ppo"]
    run_page.main(arguments)
    (page,) = (folder / "report" / "facts").glob("r-*.md")
    kl = read_lines(folder / "ppo" / "metrics.jsonl")[1]["objective/kl"]
    assert f"| ppo-1 | {kl:.2f} | " in page.read_text().split("## When PPO was best")[1]
    plots = [path.name for path in (folder / "report" / "facts").glob("*rloo*.svg")]
    assert plots, "the page shows no curves of rloo"
