"""The algorithms of the table: gradients by hand, groups of samples, runs from SFT to the page."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eval import controls, judge, summaries, win_rate
from reports import run as run_page
from stages import base, normalize, ppo, rm, sft
from stages.config.command_line import make_config
from stages.config.ppo import Ppo
from stages.functional import token_logprobs
from stages.models import forward
from stages.models.loading import with_dropout
from stages.models.policy import PolicyModel
from stages.models.sampling import Noise, sample
from stages.rl.algorithms import ALGORITHMS, Grpo, Rloo
from stages.rl.rollout import measure, sample_responses, score, share_of_batch
from stages.rl.update import optimize
from stages.runs.files import read_json, read_lines
from tests.lib.asserts import close
from tests.lib.episodes import PAD, two_episodes
from tests.lib.families import CONFIGS, random_model
from tests.lib.learners import flat, learner_of, rollout_from
from tests.lib.make_stages import run_module
from tests.lib.processes import Process
from tests.lib.resuming import OFTEN, Killed, kill_at

QUERIES = [torch.tensor(tokens) for tokens in ([5, 6, 7], [8, 9], [3, 4, 5, 6])]
NOISE = Noise(seed=1, purpose="rloo", length=6)


def without_critic(networks, dtype=torch.float64):
    """The same networks for an algorithm that has no critic, in an exact dtype."""
    copied = copy.deepcopy(networks)
    policy = copied.policy.to(dtype)
    return replace(
        copied,
        policy=policy,
        ref_policy=policy,
        reward_model=copied.reward_model.to(dtype),
        critic=None,
    )


def sample_episodes(learner, settings):
    """Steps 1 to 3 of an update: scored episodes of QUERIES."""
    sampled = sample_responses(learner, QUERIES, NOISE, settings)
    return score(learner, measure(learner, sampled, settings), settings)


def gradient(networks, settings, rollout):
    """The gradient of one optimizer step, as one vector: the weights before less those after."""
    learner = learner_of(copy.deepcopy(networks), make_config("tiny"))
    learner.optimizer = torch.optim.SGD(learner.trained.parameters(), lr=1.0)
    before = flat(learner.trained)
    optimize(learner, rollout, settings, seed=1, kl_coef=settings.kl_coef)
    return before - flat(learner.trained)


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_called_as_its_section_is(name):
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name
    assert isinstance(getattr(make_config("tiny"), name), algorithm.settings)


@pytest.mark.parametrize(
    ("settings", "uses_critic"),
    [
        (Ppo(), True),
        (Ppo(baseline="gated"), True),
        (Ppo(baseline="mean"), False),
        (Rloo(), False),
        (Grpo(), False),
    ],
)
def test_an_algorithm_has_a_critic_where_its_advantages_need_one(settings, uses_critic):
    assert settings.uses_critic is uses_critic


def test_gae_without_values_is_refused():
    with pytest.raises(ValueError, match="GAE needs a critic's values"):
        rollout_from(two_episodes(values=None), Ppo(), PAD)


# -- advantages of groups --------------------------------------------------------------------------


def test_rloo_and_dr_grpo_give_each_token_the_relative_reward_of_its_episode():
    episodes = two_episodes(samples_per_query=2)
    kl = (episodes.logprobs - episodes.ref_logprobs).masked_fill(episodes.responses == PAD, 0)
    first, second = (episodes.scores - 0.05 * kl.sum(dim=1)).tolist()

    rloo = rollout_from(episodes, Rloo(samples_per_query=2), PAD, "rloo")
    close(rloo.advantages[0], [first - second] * 3 + [0.0])  # the fourth place is padding
    close(rloo.advantages[1], [second - first] * 4)

    grpo = rollout_from(episodes, Grpo(samples_per_query=2), PAD, "grpo")
    close(grpo.advantages, rloo.advantages / 2)


def test_a_step_of_rloo_is_that_of_reinforce_with_the_mean_of_the_others_as_baseline(before_ppo):
    settings = Rloo(batch_size=12, eos_trick="off")
    networks = without_critic(before_ppo, torch.float32)
    start = copy.deepcopy(networks.policy)
    learner = learner_of(networks, make_config("tiny"))
    learner.optimizer = torch.optim.SGD(networks.policy.parameters(), lr=0.1)
    rollout = rollout_from(sample_episodes(learner, settings), settings, networks.pad_id, "rloo")
    assert rollout.values is None
    assert rollout.returns is None

    optimize(learner, rollout, settings, seed=1, kl_coef=settings.kl_coef)

    # By hand, episode by episode and without padding. The KL is 0 before a step.
    tokens = torch.cat([rollout.queries, rollout.responses], dim=1)
    loss = torch.zeros(())
    for row in range(len(tokens)):
        query_length = int((rollout.queries[row] != networks.pad_id).sum())
        text = tokens[row][tokens[row] != networks.pad_id].unsqueeze(0)
        logits = start.model(input_ids=text).logits[:, query_length - 1 : -1]
        first = 4 * (row // 4)
        scores_of_query = rollout.scores[first : first + 4]
        mean_of_others = (scores_of_query.sum() - rollout.scores[row]) / 3
        advantage = rollout.scores[row] - mean_of_others
        loss = loss - advantage * token_logprobs(logits, text[:, query_length:], 0.7).sum()
    (loss / len(tokens)).backward()

    pairs = list(zip(networks.policy.parameters(), start.parameters(), strict=True))
    for learned, before in pairs:
        step = torch.zeros_like(before) if before.grad is None else 0.1 * before.grad
        assert torch.allclose(learned, before - step, atol=2e-6)
    assert any(not torch.equal(learned, before) for learned, before in pairs)


def test_the_gradient_of_rloo_is_that_of_dr_grpo_times_k_over_k_minus_1(before_ppo):
    networks = without_critic(before_ppo)
    settings = Rloo(batch_size=12, eos_trick="off")
    episodes = sample_episodes(learner_of(networks, make_config("tiny")), settings)
    rloo, grpo = (
        gradient(networks, settings, rollout_from(episodes, settings, networks.pad_id, name))
        for name in ("rloo", "grpo")
    )
    assert float(grpo.abs().max()) > 1e-3
    close(rloo, grpo * 4 / 3, 1e-12)


# -- several samples of a query --------------------------------------------------------------------


def test_the_samples_of_a_query_are_neighbors_and_differ(before_ppo):
    learner = learner_of(before_ppo, make_config("tiny"))
    sampled = sample_responses(learner, QUERIES, NOISE, Rloo())
    first_samples, last_samples = sampled.queries[::4], sampled.queries[3::4]
    assert torch.equal(first_samples, last_samples)
    lengths = (sampled.queries != before_ppo.pad_id).sum(dim=1).tolist()
    assert lengths == [2] * 4 + [3] * 4 + [4] * 4  # the shortest query comes first
    assert len({tuple(row) for row in sampled.responses[:4].tolist()}) > 1
    assert share_of_batch(Accelerator(cpu=True), QUERIES, 2) == [2, 3, 0, 1, 4, 5]


@pytest.mark.parametrize("samples_per_query", [1, 2])
def test_a_response_is_drawn_with_the_noise_of_its_place_in_whichever_process(
    before_ppo, samples_per_query
):
    settings = Ppo() if samples_per_query == 1 else Rloo(samples_per_query=samples_per_query)
    config = make_config("tiny")

    def responses_by_place(processes: int) -> dict[int, list[int]]:
        drawn: dict[int, list[int]] = {}
        for index in range(processes):
            process: Any = Process(index, processes)
            learner = learner_of(before_ppo, config, accelerator=process)
            sampled = sample_responses(learner, QUERIES, NOISE, settings)
            places = share_of_batch(process, QUERIES, samples_per_query)
            drawn |= dict(zip(places, sampled.responses.tolist(), strict=True))
        return drawn

    drawn = responses_by_place(processes=1)
    assert drawn == responses_by_place(processes=2)
    assert len({tuple(tokens) for tokens in drawn.values()}) == 3 * samples_per_query


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@pytest.mark.parametrize("size", [64, 4, 1])
def test_a_query_computed_once_changes_nothing(family, size, before_ppo, monkeypatch):
    """Samples, log-probabilities, scores, values and gradients are those of rows of their own."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", in_float64)  # its own computes in float32
    vocabulary = before_ppo.pad_id + 1
    config = with_dropout(copy.deepcopy(CONFIGS[family]), 0.0)
    policy = PolicyModel(random_model(AutoModelForCausalLM, config, vocabulary=vocabulary))
    scorer = random_model(AutoModelForTokenClassification, config, vocabulary=vocabulary)
    networks = replace(
        before_ppo, policy=policy, ref_policy=policy, reward_model=scorer, critic=scorer
    )
    settings = Ppo(batch_size=12, total_episodes=12, samples_per_query=4, num_ppo_epochs=1)

    def update():
        sizes = (f"memory.microbatch_size={size}", f"memory.forward_batch_size={size}")
        config = make_config("tiny", name="small-passes", overrides=sizes)
        learner = learner_of(copy.deepcopy(networks), config)
        rollout = rollout_from(sample_episodes(learner, settings), settings, networks.pad_id)
        return rollout, gradient(networks, settings, rollout)

    assert forward.shares_query(policy, 64)
    shared, shared_gradient = update()
    monkeypatch.setattr(forward, "shares_query", lambda model, longest: False)
    monkeypatch.setattr("stages.rl.rollout.sample", one_row_per_sample)
    alone, expected_gradient = update()

    assert torch.equal(shared.responses, alone.responses)
    for name in ("sampled_logprobs", "logprobs", "values", "scores"):
        close(getattr(shared, name), getattr(alone, name), 1e-6)  # read in float32
    close(shared_gradient, expected_gradient, 1e-12)


def in_float64(norm, x):
    return norm.weight * x * (x.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).rsqrt()


def one_row_per_sample(policy, queries, **options):
    """The sampler, with each query computed for each of its samples."""
    return sample(policy, queries.repeat_interleave(4, 0), **options)


# -- whole runs ------------------------------------------------------------------------------------

SMALL = """
    base.hidden_size=32 base.num_layers=1 eval.posts=8 checks.control_posts=4
    world.train_posts=96 world.validation_posts=8 memory.cpu_threads=1
    world.train_comparisons=64 world.validation_comparisons=32
    rloo.total_episodes=64 rloo.batch_size=32 ppo.total_episodes=64 ppo.batch_size=32
    ppo.critic_updates=0 ppo.checkpoints=1
""".split()


def test_a_run_with_rloo_goes_from_sft_to_the_page_with_its_curves(runs):
    arguments = ["--preset", "tiny", "--name", "r", "--set", *SMALL]
    for module in (base, sft, rm, normalize, ppo):
        run_module(module, arguments)
    run_module(ppo, arguments, "rloo")
    for module in (summaries, judge, controls, win_rate, run_page):
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

    (page,) = (folder / "report" / "facts").glob("r-*.md")
    kl = read_lines(folder / "ppo" / "metrics.jsonl")[1]["objective/kl"]
    assert f"| ppo-1 | {kl:.2f} | " in page.read_text().split("## When PPO was best")[1]
    assert list((folder / "report" / "facts").glob("*rloo*.svg")), "no curves of rloo"


def test_ppo_with_a_mean_baseline_loads_saves_and_resumes_without_a_critic(attempt, monkeypatch):
    def never(*args: Any) -> Any:
        raise AssertionError("a critic was loaded")

    folder = attempt("ppo")
    monkeypatch.setattr("stages.rl.networks.load_critic", never)
    arguments = [*OFTEN, "ppo.total_episodes=32", "ppo.baseline=mean", "ppo.critic_updates=0"]
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step=2)
        with pytest.raises(Killed):
            run_module(ppo, arguments)
    (weights,) = folder.with_name("ppo.partial").glob("resume/*/model.safetensors")
    assert {name.split(".")[0] for name in load_file(weights)} == {"policy"}

    run_module(ppo, arguments)

    assert (folder / "model").is_dir()
    assert not (folder / "critic").exists()
    metrics = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    of_critic = {"loss/value_avg", "val/explained_variance", "policy/critic_used"}
    assert not any(of_critic & row.keys() for row in metrics)
