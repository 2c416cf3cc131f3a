"""How many rows a pass holds is a memory setting and nothing else.

SFT and the reward model get equal weights for any microbatch size, and every kind of pass gives
equal numbers after running out of memory. PPO's weights are in test_stages.py, DPO's in
test_dpo.py, those of two processes in test_processes.py.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eval import summaries
from eval.judges.gold import GoldJudge, Text, TokenizedText
from stages import dpo, normalize, rm, sft
from stages.config.command_line import make_config
from stages.config.config import Config
from stages.config.errors import UserError
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.models.policy import PolicyModel
from stages.models.sampling import Noise, Sampling, respond_often
from stages.rl import start_checks
from stages.rl.networks import Networks, PolicyLearner, freeze
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize
from stages.training.memory import FORWARD, MICROBATCH
from stages.training.optimizer import make_optimizer
from stages.training.step import NonFiniteError, optimizer_step
from tests.lib.learners import flat, learner_of, rolled_out, state_of
from tests.lib.short_memory import limit_every_pass
from tests.lib.small_splits import PAIRS, POSTS, ROWS, random_texts

STAGES = pytest.mark.parametrize(("stage", "split"), [(sft, POSTS), (rm, PAIRS)], ids=["sft", "rm"])


def weights_after_two_updates(
    stage: Any, split: TokenizedSplit, network: Any, microbatch_size: int
) -> torch.Tensor:
    config = make_config("tiny")
    config = config.changed(memory=config.memory.changed(microbatch_size=microbatch_size))
    network = copy.deepcopy(network)
    optimizer = make_optimizer(network.parameters(), 1e-3, config.optimizer)
    for rows in (list(range(8)), list(range(8, 16))):
        stage.take_step(state_of(config, network, optimizer), split, rows)
    return flat(network)


@STAGES
def test_two_updates_give_equal_weights_for_any_microbatch(stage, split, policy, reward_model):
    network = PolicyModel(policy) if stage is sft else reward_model
    whole = weights_after_two_updates(stage, split, network, microbatch_size=8)
    assert (whole - flat(network)).abs().max() > 1e-4
    for microbatch_size in (1, 2, 16):
        in_parts = weights_after_two_updates(stage, split, network, microbatch_size)
        assert (in_parts - whole).abs().max() < 1e-5, microbatch_size


@STAGES
def test_a_gradient_that_is_not_finite_stops_before_the_step(stage, split, policy, reward_model):
    network = copy.deepcopy(PolicyModel(policy) if stage is sft else reward_model)
    weights = next(network.parameters())
    weights.register_hook(lambda gradient: gradient * torch.nan)  # the loss stays finite
    config = make_config("tiny")
    before = weights.detach().clone()
    optimizer = make_optimizer(network.parameters(), 1e-3, config.optimizer)
    state = state_of(config, network, optimizer)
    with pytest.raises(
        NonFiniteError, match=rf"{state.learner.stage} stopped .* not finite: gradient"
    ):
        stage.take_step(state, split, list(range(8)))
    assert torch.equal(weights, before)


def test_processes_exchange_gradients_with_the_last_microbatch_only(policy):
    config = make_config("tiny")
    optimizer = make_optimizer(policy.parameters(), 1e-3, config.optimizer)
    learner = state_of(config, policy, optimizer).learner
    steps: list[str] = []

    def no_sync(model: Any) -> Any:
        steps.append("without exchange")
        return nullcontext()

    def losses(microbatch: str) -> Any:
        steps.append(microbatch)
        yield next(policy.parameters()).sum(), {"microbatches": torch.tensor(1)}

    learner.accelerator.no_sync = no_sync
    statistics = optimizer_step(learner, lambda size: ["a", "b", "c"], losses)
    assert statistics == {"microbatches": 3}
    assert steps == ["without exchange", "a", "without exchange", "b", "c"]


# -- weights that are cast once --------------------------------------------------------------------


class CountCasts(TorchDispatchMode):
    """Counts how often a tensor is cast."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.count += 1
        return function(*args, **kwargs or {})


def two_updates_in_bf16(place: "Place", keeps_copies: bool, dtype: str) -> tuple[int, torch.Tensor]:
    """Return how often a tensor is cast, and all numbers, in two updates of PPO."""
    config = place.config.changed(ppo=place.config.ppo.changed(critic_updates=0))
    policy = copy.deepcopy(place.policy)
    critic = copy.deepcopy(place.reward_model)
    frozen = {
        "ref_policy": PolicyModel(freeze(copy.deepcopy(policy.model), dtype)),
        "reward_model": freeze(copy.deepcopy(critic), dtype),
    }
    learner = learner_of(replace(place.networks, policy=policy, critic=critic, **frozen), config)
    learner.optimizer = make_optimizer(learner.trained.parameters(), 1e-3, config.optimizer)
    learner.accelerator.autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    autocast = learner.accelerator.autocast(cache_enabled=keeps_copies)
    learner.trained.forward = autocast(learner.trained.forward)
    learner.budget.keeps_copies = keeps_copies
    numbers = []
    with CountCasts() as casts:
        for update in range(2):
            rollout, _ = rolled_out(config, learner, QUERIES, update)
            optimize(learner, rollout, config.ppo, update, config.ppo.kl_coef)
            assert rollout.values is not None
            numbers += [rollout.logprobs, rollout.ref_logprobs, rollout.values, rollout.scores]
    for network in frozen.values():
        assert not any(weight.requires_grad for weight in network.parameters())
    return casts.count, torch.cat([x.flatten() for x in numbers] + [flat(learner.trained)])


@pytest.mark.parametrize(("dtype", "frozen_passes"), [("float32", 1), ("bf16", 0)])
def test_weights_that_are_cast_once_a_step_change_no_bit(small, dtype, frozen_passes):
    casts_of_each_pass, expected = two_updates_in_bf16(small, keeps_copies=False, dtype=dtype)
    casts, numbers = two_updates_in_bf16(small, keeps_copies=True, dtype=dtype)
    assert torch.equal(numbers, expected)
    # Sampling, measuring, the reference and four steps of learning take two passes each through
    # the policy, whose 17 weights and biases the second does not cast; six through the critic's 16.
    saved = 2 * ((6 + frozen_passes) * 17 + (5 + frozen_passes) * 16)
    assert casts_of_each_pass - casts == saved


# -- every kind of pass ----------------------------------------------------------------------------

TEXTS = random_texts(5)
QUERIES = [torch.tensor(text) for text in TEXTS]
HELD_OUT = TokenizedSplit(columns={"queries": make_ragged(TEXTS)}, rows=[{}] * ROWS)


@dataclass(kw_only=True)
class Place:
    """What passes need; each holds eight sequences."""

    config: Config
    policy: PolicyModel
    reward_model: Any
    tokenizer: Any
    networks: Networks
    learner: PolicyLearner
    run: Any
    """A run that keeps nothing on disk."""
    folder: Path


@pytest.fixture
def small(reward_model, tokenizer, before_ppo, policy_folder, tmp_path):
    sizes = ("memory.microbatch_size=8", "memory.forward_batch_size=8", "ppo.batch_size=16")
    config = make_config("tiny", name="x", overrides=sizes)
    return Place(
        config=config,
        policy=before_ppo.policy,
        reward_model=reward_model,
        tokenizer=tokenizer,
        networks=before_ppo,
        learner=learner_of(before_ppo, config),
        run=SimpleNamespace(
            config=config,
            is_main=False,
            resume=None,
            require=lambda stage: policy_folder.parent / stage,
        ),
        folder=tmp_path,
    )


def sampled(place: Place) -> Any:
    noise = Noise(seed=1, purpose="x", length=6)
    return sample_responses(place.learner, QUERIES, noise, place.config.ppo)


# Each of these prepares a pass, and returns a function that runs it and returns its numbers.
Pass = Callable[[], Any]


def sft_validation(place: Place) -> Pass:
    learner = place.learner
    return lambda: [
        sft.validation_loss(learner.accelerator, learner.budget, place.policy, POSTS, place.config)
    ]


def reward_model_evaluation(place: Place) -> Pass:
    learner = place.learner
    return lambda: list(
        rm.evaluate(
            place.run,
            learner.accelerator,
            learner.budget,
            place.reward_model,
            PAIRS,
            "pairs.jsonl",
        ).values()
    )


def normalization(place: Place) -> Pass:
    accelerator = place.learner.accelerator
    return lambda: normalize.reference_scores(
        accelerator,
        place.learner.budget,
        partial(normalize.score_rows, accelerator, place.reward_model, POSTS),
        POSTS,
        label="x",
        keep=None,
    )


def rollout_sampling(place: Place) -> Pass:
    return lambda: sampled(place).sampled_logprobs


def rollout_measuring(place: Place) -> Pass:
    episodes = sampled(place)
    return lambda: measure(place.learner, episodes, place.config.ppo).ref_logprobs


def rollout_scoring(place: Place) -> Pass:
    ppo = place.config.ppo
    episodes = measure(place.learner, sampled(place), ppo)
    return lambda: score(place.learner, episodes, ppo).scores


def checks_before_the_first_update(place: Place) -> Pass:
    learner = place.learner
    normalize.keep_known_answers(
        learner.accelerator, learner.budget, place.folder, place.reward_model, POSTS
    )
    rollout, _ = rolled_out(place.config, learner, QUERIES)
    origins: Any = SimpleNamespace(reward_model=place.folder / "model", score_shift=0.0)

    def run() -> list[bool]:
        start_checks.check_start(learner, rollout, origins, place.config.ppo, place.config, score)
        return [True]

    return run


def best_of_two_sampling(place: Place) -> Pass:
    """Two samples of each query, so four queries in a pass."""
    sampling = Sampling(
        seed=1, purpose="x", length=6, temperature=1.0, forward_batch_size=8, samples_per_query=2
    )

    def run() -> list[int]:
        responses = respond_often(
            place.learner.accelerator,
            place.learner.budget,
            place.policy,
            make_ragged(TEXTS),
            place.tokenizer,
            sampling,
            None,
        )
        return [len(tokens) + sum(tokens) for both in responses for tokens in both]

    return run


def evaluation_at(place: Place) -> summaries.Evaluation:
    return summaries.Evaluation(
        run=place.run,
        accelerator=place.learner.accelerator,
        budget=place.learner.budget,
        posts=HELD_OUT,
        tokenizer=place.tokenizer,
        reward_model=place.reward_model,
    )


def scores_of_summaries(place: Place) -> Pass:
    evaluation = evaluation_at(place)
    texts = {"a": TEXTS, "b": TEXTS}
    return lambda: summaries.score_all(evaluation, texts, label="x")["b"]


def kl_of_summaries(place: Place) -> Pass:
    evaluation = evaluation_at(place)
    return lambda: summaries.log_likelihoods(evaluation, TEXTS, writer="a", reader="b")


def dpo_reference(place: Place) -> Pass:
    learner = place.learner
    return lambda: dpo.split_logprobs(
        learner.accelerator, learner.budget, place.policy, PAIRS, label="x"
    )


def gold_judge(place: Place) -> Pass:
    """Two texts of each post, so four posts in a pass."""
    judge: Any = SimpleNamespace(
        model=place.reward_model,
        accelerator=place.learner.accelerator,
        budget=place.learner.budget,
        positions=None,
        keep=None,
        tokenize=lambda text: TokenizedText(*(place.tokenizer.encode(part) for part in text)),
    )
    texts = {
        Text(f"post {number}", summary) for number in range(8) for summary in ("one", "the other")
    }

    def run() -> list[float]:
        judge.scores = {}
        GoldJudge.score(judge, texts)
        return [judge.scores[text] for text in sorted(texts)]

    return run


@pytest.mark.parametrize(
    ("prepare", "setting"),
    [
        (sft_validation, MICROBATCH),
        (reward_model_evaluation, FORWARD),
        (normalization, FORWARD),
        (rollout_sampling, FORWARD),
        (rollout_measuring, FORWARD),
        (rollout_scoring, FORWARD),
        (checks_before_the_first_update, FORWARD),
        (best_of_two_sampling, FORWARD),
        (scores_of_summaries, FORWARD),
        (kl_of_summaries, FORWARD),
        (dpo_reference, MICROBATCH),
        (gold_judge, FORWARD),
    ],
)
def test_a_pass_that_ran_out_of_memory_gives_the_same_numbers(
    prepare, setting, small, monkeypatch, capsys
):
    monkeypatch.setattr(summaries, "load_policy", lambda folder: small.policy.model)
    run = prepare(small)
    expected = torch.as_tensor(run())
    capsys.readouterr()

    # It fails once: the same pass is repeated, with the same bits.
    with monkeypatch.context() as patch:
        assert limit_every_pass(patch, rows=0, failures=1) == []
        torch.testing.assert_close(torch.as_tensor(run()), expected, rtol=0, atol=0)
    assert capsys.readouterr().err == f"out of memory ({setting}): trying once more\n"

    # Only passes of two rows fit.
    with monkeypatch.context() as patch:
        failed = limit_every_pass(patch, rows=2)
        torch.testing.assert_close(torch.as_tensor(run()), expected, rtol=0, atol=1e-4)
    assert failed
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"out of memory: {setting}=4 instead of 8 from here on"

    # Nothing fits.
    limit_every_pass(monkeypatch, rows=0)
    with pytest.raises(UserError, match=r"a pass of [12], the smallest possible"):
        run()
