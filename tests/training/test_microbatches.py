"""How many rows a pass holds is a memory knob and nothing else: equal weights in SFT and reward
model, and equal numbers where a pass is refused memory.

PPO's weights are in test_stages.py, DPO's in test_dpo.py, two processes in test_processes.py.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPTNeoXModel

from eval import summaries
from eval.judges.gold import GoldJudge
from stages import dpo, normalize, rm, sft
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.models.policy import PolicyModel
from stages.models.sampling import Noise, Sampling, respond_often
from stages.rl import start_checks
from stages.rl.networks import freeze
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from stages.training.learner import FORWARD, MICROBATCH, NonFiniteError, room_of
from stages.training.loop import make_optimizer
from tests.lib.learners import flat, learner_of, rolled_out, state_of

ROWS = 16


def texts(seed: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, 29) for _ in range(rng.randint(1, longest))] for _ in range(ROWS)]


def split(*names: str) -> TokenizedSplit:
    columns = {name: make_ragged(texts(seed, 9)) for seed, name in enumerate(names)}
    return TokenizedSplit(columns=columns, rows=[{"split": "train"}] * ROWS)


SPLITS = {sft: split("queries", "summaries"), rm: split("queries", "chosen", "rejected")}


def weights_after_two_updates(stage, network, microbatch_size: int) -> torch.Tensor:
    config = make_config("tiny")
    config = replace(config, memory=replace(config.memory, microbatch_size=microbatch_size))
    network = copy.deepcopy(network)
    optimizer = make_optimizer(network.parameters(), 1e-3, config.optimizer)
    for rows in (list(range(8)), list(range(8, 16))):
        stage.take_step(state_of(config, network, optimizer), SPLITS[stage], rows)
    return torch.cat([one.detach().flatten() for one in network.parameters()])


@pytest.mark.parametrize("stage", SPLITS, ids=lambda one: one.__name__)
def test_two_updates_give_equal_weights_for_any_microbatch(stage, policy, reward_model):
    network = PolicyModel(policy) if stage is sft else reward_model
    start = torch.cat([one.detach().flatten() for one in network.parameters()])
    whole = weights_after_two_updates(stage, network, 8)
    assert (whole - start).abs().max() > 1e-4
    for microbatch_size in (1, 2, 16):
        parts = weights_after_two_updates(stage, network, microbatch_size)
        assert (parts - whole).abs().max() < 1e-5, microbatch_size


@pytest.mark.parametrize("stage", SPLITS, ids=lambda one: one.__name__)
def test_a_gradient_that_is_not_finite_stops_before_the_step(stage, policy, reward_model):
    network = copy.deepcopy(PolicyModel(policy) if stage is sft else reward_model)
    weights = next(network.parameters())  # its loss stays finite
    weights.register_hook(lambda gradient: gradient * torch.nan)
    config, before = make_config("tiny"), weights.detach().clone()
    state = state_of(config, network, make_optimizer(network.parameters(), 1e-3, config.optimizer))
    with pytest.raises(NonFiniteError, match=rf"gradient not finite.*{state.learner.stage}"):
        stage.take_step(state, SPLITS[stage], list(range(8)))
    assert torch.equal(weights, before)


class Casts(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **kwargs or {})


def two_updates_in_bf16(place: Any, keeps: bool, dtype: str) -> tuple[int, torch.Tensor]:
    """How often a tensor is cast, and all numbers, in two updates of PPO."""
    config = replace(place.config, ppo=replace(place.ppo, critic_updates=0))
    policy, critic = copy.deepcopy(place.policy), copy.deepcopy(place.reward_model)
    reference = PolicyModel(freeze(copy.deepcopy(policy.model), dtype))
    scorer = freeze(copy.deepcopy(critic), dtype)
    frozen = {"ref_policy": reference, "reward_model": scorer}
    learner = learner_of(replace(place.before_ppo, policy=policy, critic=critic, **frozen), config)
    learner.optimizer = make_optimizer(learner.trained.parameters(), 1e-3, config.optimizer)
    learner.accelerator.autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    autocast = learner.accelerator.autocast(cache_enabled=keeps)
    learner.trained.forward = autocast(learner.trained.forward)
    room_of(learner.accelerator).keeps_copies = keeps
    numbers = []
    with Casts() as casts:
        for update in range(2):
            rollout, _ = rolled_out(config, learner, QUERIES, update)
            optimize(learner, rollout, config.ppo, update, config.ppo.kl_coef)
            assert rollout.values is not None
            numbers += [rollout.logprobs, rollout.ref_logprobs, rollout.values, rollout.scores]
    assert not any(weight.requires_grad for x in frozen.values() for weight in x.parameters())
    return casts.count, torch.cat([x.flatten() for x in numbers] + [flat(learner.trained)])


@pytest.mark.parametrize(("dtype", "frozen"), [("float32", 1), ("bf16", 0)])
def test_weights_that_are_cast_once_a_step_change_no_bit(place, dtype, frozen):
    many, expected = two_updates_in_bf16(place, False, dtype)
    few, numbers = two_updates_in_bf16(place, True, dtype)
    assert torch.equal(numbers, expected)
    # Sampling, measuring, the reference and four steps of learning take two passes each through
    # the policy, whose 17 weights and biases the second does not cast; six through the critic's 16.
    assert many - few == 2 * ((6 + frozen) * 17 + (5 + frozen) * 16)


# -- every pass ------------------------------------------------------------------------------------


@pytest.fixture
def place(policy, reward_model, tokenizer, before_ppo, policy_folder, tmp_path):
    """What passes need; each holds eight sequences."""
    sizes = ("memory.microbatch_size=8", "memory.forward_batch_size=8", "ppo.batch_size=16")
    config = make_config("tiny", name="x", overrides=sizes)
    ppo, eos_id = config.ppo, tokenizer.eos_token_id
    run = SimpleNamespace(config=config, main=False, resume=None, note_halving=list)
    run.require = lambda stage: policy_folder.parent / stage
    policy = before_ppo.policy
    learner = learner_of(before_ppo, config)
    return SimpleNamespace(**{k: v for k, v in locals().items() if k != "sizes"})


def sampled(place: Any) -> Any:
    noise = Noise(seed=1, purpose="x", length=6)
    return sample_responses(place.learner, QUERIES, noise, place.ppo)


def start_checks_pass(place: Any) -> Any:
    reward_model, accelerator = place.reward_model, place.learner.accelerator
    normalize.keep_known_answers(accelerator, place.tmp_path, reward_model, SPLITS[sft])
    rollout, _ = rolled_out(place.config, place.learner, QUERIES)
    origins: Any = SimpleNamespace(reward_model=place.tmp_path / "model", score_shift=0.0)

    def run() -> list[bool]:
        start_checks.check_start(place.learner, rollout, origins, place.ppo, place.config, score)
        return [True]  # nothing is refused

    return run


def gold_pass(place: Any) -> Any:
    """Two texts a post, so four posts a pass."""
    judge: Any = SimpleNamespace(
        model=place.reward_model, accelerator=place.learner.accelerator, batch_size=8, longest=None
    )
    judge.keep, judge._tokens = None, lambda text: [place.tokenizer.encode(x) for x in text]
    texts = {(f"post {number}", word) for number in range(8) for word in ("one", "the other")}

    def run() -> list[float]:
        judge.scores = {}
        GoldJudge.score(judge, texts)
        return [judge.scores[text] for text in sorted(texts)]

    return run


def evaluation_pass(place: Any) -> Any:
    loop = state_of(place.config, place.reward_model, run=place.run)
    row = loop.run, loop.accelerator, place.reward_model, SPLITS[rm], "pairs.jsonl"
    place.learner.accelerator = loop.accelerator
    return lambda: list(rm.evaluate(*row).values())


def normalize_pass(place: Any) -> Any:
    split, accelerator = SPLITS[sft], place.learner.accelerator
    score = partial(normalize.score_rows, accelerator, place.reward_model, split)
    unkept: Any = None
    return lambda: normalize.reference_scores(accelerator, score, split, 8, "x", unkept)


def best_of_pass(place: Any) -> Any:
    """Two samples a query, so four queries a pass."""
    sampling = Sampling(
        seed=1,
        purpose="x",
        length=6,
        temperature=1.0,
        forward_batch_size=8,
        samples_per_query=2,
    )
    row = place.learner.accelerator, place.policy, make_ragged(TEXTS), place.tokenizer, sampling
    return lambda: [len(x) + sum(x) for both in respond_often(*row, None) for x in both]


TEXTS = texts(5, 9)
QUERIES = [torch.tensor(row) for row in TEXTS]
POSTS = TokenizedSplit(columns={"queries": make_ragged(TEXTS)}, rows=[{}] * 16)
# Each prepares a pass, and returns what runs it and gives its numbers.
PASSES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "SFT's validation": lambda p: (
        lambda: [sft.validation_loss(p.learner.accelerator, p.policy, SPLITS[sft], p.config)]
    ),
    "the reward model's evaluation": evaluation_pass,
    "normalize": normalize_pass,
    "a rollout's sampling": lambda p: lambda: sampled(p).sampled_logprobs,
    "measuring": lambda p: partial(
        lambda given: measure(p.learner, given, p.ppo).ref_logprobs, sampled(p)
    ),
    "scoring": lambda p: partial(
        lambda given: score(p.learner, given, p.ppo).scores, measure(p.learner, sampled(p), p.ppo)
    ),
    "start checks": start_checks_pass,
    "sampling of summaries": best_of_pass,
    "scores of summaries": lambda p: (
        lambda: summaries.score_all(
            p.run, p.learner.accelerator, p.reward_model, POSTS, {"a": TEXTS, "b": TEXTS}, "x"
        )["b"]
    ),
    "KL of summaries": lambda p: (
        lambda: summaries.log_likelihoods(p.run, p.learner.accelerator, ("a", "b"), POSTS, TEXTS)
    ),
    "DPO's reference": lambda p: (
        lambda: dpo.split_logprobs(p.learner.accelerator, p.policy, SPLITS[rm], p.config, "x")
    ),
    "the gold judge": gold_pass,
}


def card(patch: pytest.MonkeyPatch, rows: int, times: int = 10**6) -> list[int]:
    """A device that refuses the first passes of more than so many rows; returns their rows."""
    forward = GPTNeoXModel.forward
    refusals: list[int] = []

    def refuse(model: Any, *args: Any, **inputs: Any) -> Any:
        ids = args[0] if args else inputs["input_ids"]
        if len(ids) > rows and len(refusals) < times:
            refusals.append(len(ids))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(model, *args, **inputs)

    patch.setattr(GPTNeoXModel, "forward", refuse)
    return refusals


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_is_refused_memory_goes_on_with_the_same_numbers(
    name, place, monkeypatch, capsys
):
    if name == "KL of summaries":
        monkeypatch.setattr(summaries, "load_policy", lambda folder: place.policy.model)
    run = PASSES[name](place)
    room_of(place.learner.accelerator).settings = {MICROBATCH: 8, FORWARD: 8}
    expected = torch.as_tensor(run())
    capsys.readouterr()
    for rows, times, tolerance in ((0, 1, 0.0), (2, 10**6, 1e-4)):
        with monkeypatch.context() as patch:
            refusals = card(patch, rows, times)
            torch.testing.assert_close(torch.as_tensor(run()), expected, rtol=0, atol=tolerance)
        assert refusals
    lines = capsys.readouterr().err.splitlines()
    setting = next(word for word in (MICROBATCH, FORWARD) if word in lines[0])
    assert lines[0] == f"out of memory ({setting}): trying once more"
    halved = [line for line in lines if line.endswith("from here on")]
    assert halved[0] == f"out of memory: {setting}=4, not 8, from here on"
    card(monkeypatch, 0)
    with pytest.raises(UserError, match=r"a pass of [12], the fewest"):
        run()
