"""Step-0 checks: each fault is caught before the first update, with its likely cause."""

from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from stages import functional, normalize
from stages.data.ragged import make_ragged, pad_left, pad_right
from stages.models.forward import score_responses
from stages.models.loading import load_policy
from stages.models.sampling import Noise
from stages.rl import advantages, start_checks
from stages.rl.episodes import Episodes, Rollout, Sampled
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.update import optimize
from stages.rm import read_scores_before
from stages.settings.command_line import make_config
from stages.settings.config import Ppo, UserError
from stages.settings.ppo import Grpo, Rloo
from stages.training.learner import NonFiniteError
from tests.lib.learners import learner_of, rolled_out
from tests.lib.planted import PLANTED

BOUNDS = start_checks.BOUNDS["float32"]


@pytest.fixture
def networks(policy, reward_model, tokenizer):
    """Policy with critic, reward model, and the ids of EOS and PAD."""
    return policy, reward_model, tokenizer.eos_token_id, tokenizer.pad_token_id


@pytest.fixture
def start(before_ppo):
    """A rollout before the first update, where everything holds."""
    return started(before_ppo)


def started(before_ppo):
    eos_id, pad_id = before_ppo.eos_id, before_ppo.pad_id
    queries = pad_left([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], pad_id)
    rows = [torch.tensor([4, 3, eos_id]), torch.tensor([5, eos_id])]
    responses = torch.nn.functional.pad(pad_right(rows, pad_id), (0, 2), value=pad_id)
    learner = learner_of(before_ppo, make_config("tiny"))
    unknown = torch.zeros(responses.shape)
    sampled = Sampled(queries=queries, responses=responses, sampled_logprobs=unknown)
    episodes = score(learner, measure(learner, sampled, Ppo()), Ppo())
    mask, value_mask = functional.response_masks(responses, pad_id)
    extra = dict.fromkeys(("rewards", "advantages", "returns"), torch.zeros(responses.shape))
    return Rollout(**vars(episodes), response_mask=mask, value_mask=value_mask, **extra)


@torch.no_grad()
def ratio(before_ppo, start):
    learner = learner_of(before_ppo, make_config("tiny"))
    start_checks.check_ratio(learner, [start], Ppo().temperature, BOUNDS)


def test_nothing_is_refused_where_everything_holds(networks, before_ppo, start):
    _, reward_model, eos_id, pad_id = networks
    ratio(before_ppo, start)
    start_checks.check_kl(start, BOUNDS, "ppo")
    start_checks.check_critic(start, eos_id, BOUNDS)
    start_checks.check_scores_at_eos(start, eos_id, "ppo")
    with torch.no_grad():
        start_checks.check_padding(reward_model, start.queries, start.responses, pad_id, BOUNDS)
    assert start.response_mask.sum() == 5


def test_a_reference_that_is_another_model_is_caught(start):
    other = replace(start, ref_logprobs=start.ref_logprobs - 0.01)
    with pytest.raises(UserError, match=r"KL.*by 0\.01.*Likely causes: rloo .* or sft"):
        start_checks.check_kl(other, BOUNDS, "rloo")


def test_dropout_left_on_is_caught_by_the_ratio(before_ppo, start, policy_folder):
    torch.manual_seed(0)
    dropping = load_policy(policy_folder, dropout=0.1).train()
    with pytest.raises(UserError, match=r"ratio is not 1.*Likely causes: ppo"):
        ratio(replace(before_ppo, policy=dropping), start)


def test_a_mean_of_references_that_is_not_0_is_caught_within_what_bf16_rounds():
    normalize.check_mean(5e-4, normalize.TOLERANCES["no"])
    normalize.check_mean(-0.004, normalize.TOLERANCES["bf16"])  # SmolLM2-135M, 16 rows
    for mean, precision in ((2e-3, "no"), (0.06, "bf16"), (float("nan"), "bf16")):
        with pytest.raises(UserError, match="look at the rm stage"):
            normalize.check_mean(mean, normalize.TOLERANCES[precision])


def test_as_many_references_as_asked_are_spread_evenly():
    for rows, count in ((8000, 2000), (512, 256), (600, 600)):  # two presets, and all
        assert normalize.evenly(rows, count) == list(range(0, rows, rows // count))
    assert normalize.evenly(5, 3) == [0, 1, 3]
    assert normalize.evenly(3, 5) == [0, 1, 2]
    spread = normalize.evenly(2600, 1000)
    assert len(spread) == 1000
    assert {after - before for before, after in pairwise(spread)} == {2, 3}


@pytest.mark.parametrize("name", ["score-at-padding", "query-one-short", "penalty-for-ended"])
def test_a_critic_that_is_not_the_reward_model_is_caught(before_ppo, start, name, monkeypatch):
    causes = r"Likely causes: ppo \(step 3 .* or normalize"
    other = replace(start, values=start.values + 0.5)
    with pytest.raises(UserError, match=rf"critic.*0\.5.*{causes}"):
        start_checks.check_critic(other, before_ppo.eos_id, BOUNDS)
    PLANTED[name].plant(monkeypatch.setattr)
    with pytest.raises(UserError, match=causes):
        start_checks.check_critic(started(before_ppo), before_ppo.eos_id, BOUNDS)


def test_an_eos_at_the_last_place_has_no_value_after_it_to_compare(networks, start):
    eos_id = networks[2]
    parts = ("responses", "response_mask", "values")
    cut = replace(start, **{part: getattr(start, part)[:, :3].clone() for part in parts})
    assert cut.responses[0, -1] == eos_id  # no column follows it
    cut.values[0] += 0.5
    start_checks.check_critic(cut, eos_id, BOUNDS)
    cut.values[1] += 0.5
    with pytest.raises(UserError, match="critic differs"):
        start_checks.check_critic(cut, eos_id, BOUNDS)


def test_the_critic_is_compared_at_eos_where_its_value_there_is_not_learned(networks, start):
    settings, pad_id = Ppo(score_at="eos"), networks[3]
    episodes = Episodes(**{column.name: getattr(start, column.name) for column in fields(Episodes)})
    shaped = advantages.shape_rewards(episodes, settings, pad_id, settings.kl_coef)
    rollout = advantages.compute_advantages(
        Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], settings
    )
    assert torch.equal(rollout.value_mask, rollout.response_mask)
    assert rollout.values is not None
    start_checks.check_critic(rollout, networks[2], BOUNDS)
    other = replace(rollout, values=rollout.values + 0.5)
    with pytest.raises(UserError, match="critic differs"):
        start_checks.check_critic(other, networks[2], BOUNDS)


def test_the_critic_is_compared_where_the_reward_model_is_read(before_ppo):
    read_scores_before(before_ppo.reward_model, before_ppo.eos_id)
    start = started(before_ppo)
    start_checks.check_critic(start, before_ppo.eos_id, BOUNDS, before_eos=True)
    with pytest.raises(UserError, match="critic differs"):
        start_checks.check_critic(start, before_ppo.eos_id, BOUNDS)


def test_a_response_that_goes_on_after_its_eos_is_caught(networks, start):
    eos_id = networks[2]
    uncut = start.responses.clone()
    uncut[1, 2] = 4
    mask, _ = functional.response_masks(uncut, networks[3])
    with pytest.raises(UserError, match="not read at EOS"):
        start_checks.check_scores_at_eos(
            replace(start, responses=uncut, response_mask=mask), eos_id, "ppo"
        )


def test_padding_that_is_seen_is_caught(networks, start):
    _, reward_model, _, pad_id = networks

    def see_all(model, inputs, output):
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)

    reward_model.register_forward_hook(see_all)
    with torch.no_grad(), pytest.raises(UserError, match=r"padding changes a score.*causes: rm"):
        start_checks.check_padding(reward_model, start.queries, start.responses, pad_id, BOUNDS)


@pytest.fixture
def known(before_ppo, tokenizer, tmp_path):
    """Two summaries with the scores that the reward model gives them, and one without EOS."""
    texts = [tokenizer.encode(text) for text in (" My boss sold my bike", " My bike")]
    responses = [torch.tensor([*text, tokenizer.eos_token_id]) for text in texts]
    queries = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    rows = pad_left(queries, tokenizer.pad_token_id), pad_right(responses, tokenizer.pad_token_id)
    with torch.no_grad():
        scores = score_responses(before_ppo.reward_model, *rows, tokenizer.pad_token_id).tolist()
    cut = queries[0], responses[0][:-1], 99.0
    path = tmp_path / "known.json"
    start_checks.save_known_answers(
        path, [*queries, cut[0]], [*responses, cut[1]], torch.tensor([*scores, cut[2]])
    )
    return path


@pytest.mark.parametrize("settings", [Ppo(critic_init="zero"), Rloo(), Grpo()], ids=type)
def test_step_3_gives_known_answers_their_scores_and_another_text_or_model_is_caught(
    before_ppo, known, settings, monkeypatch
):
    learner = learner_of(before_ppo, make_config("tiny"))

    def replay(step_3=score, shift=0.0):
        start_checks.replay_known_answers(learner, step_3, known, shift, settings, BOUNDS)

    replay()
    replay(lambda _, texts, __: SimpleNamespace(scores=texts.sampler_gaps + 5))  # one's own reward
    with pytest.raises(UserError, match=r"saved with.*0\.1.*or a library"):
        replay(shift=0.1)
    PLANTED["query-one-short"].plant(monkeypatch.setattr)
    with pytest.raises(UserError, match=rf"causes: {settings.section()} \(step 3 scores another"):
        replay()


@pytest.mark.parametrize("settings", [Ppo(), Rloo()], ids=type)
def test_tokens_that_are_not_drawn_from_the_whole_distribution_are_caught(
    before_ppo, settings, monkeypatch
):
    learner = learner_of(before_ppo, make_config("tiny"))
    noise, queries = Noise(seed=1, purpose="ppo", length=8), [torch.tensor([5, 6, 7])] * 4

    @torch.no_grad()
    def check(temperature=0.7):
        sampled = sample_responses(learner, queries, noise, settings)
        mask = sampled.responses != before_ppo.pad_id
        rollout: Any = SimpleNamespace(**vars(sampled), response_mask=mask)
        start_checks.check_draws(learner, [rollout], temperature, BOUNDS)

    check()
    with pytest.raises(UserError, match="not drawn from the policy's whole distribution"):
        check(temperature=0.75)
    PLANTED["fifty-likeliest"].plant(monkeypatch.setattr)
    with pytest.raises(UserError, match="not drawn from the policy's whole distribution"):
        check()


def test_nan_is_never_small(start):
    other = replace(start, ref_logprobs=start.ref_logprobs * float("nan"))
    with pytest.raises(UserError, match="KL"):
        start_checks.check_kl(other, BOUNDS, "ppo")


def test_a_step_that_is_not_finite_is_refused_and_leaves_the_weights(before_ppo):
    config = make_config("tiny", name="mine", overrides=("ppo.batch_size=2",))
    learner = learner_of(before_ppo, config, update=6)
    rollout, _ = rolled_out(config, learner, make_ragged([[5, 6, 7], [8]]))
    rollout.returns[1, 0] = float("inf")
    learner.optimizer = torch.optim.SGD(learner.trained.parameters(), lr=1.0)
    before = [weight.detach().clone() for weight in learner.trained.parameters()]
    expected = r"ppo stopped before a step of update 7: loss/value_avg.* not finite"
    with pytest.raises(NonFiniteError, match=expected):
        optimize(learner, rollout, config.ppo, 1, config.ppo.kl_coef)
    assert all(map(torch.equal, learner.trained.parameters(), before))


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_critic():
    returns = torch.tensor([1.0, 3.0, float("nan")])
    mask = torch.tensor([True, True, False])
    cases = (([1.0, 3.0, 9.0], 1.0), ([5.0, 5.0, 9.0], 0.0), ([3.0, 1.0, 9.0], -3.0))
    for values, expected in cases:
        found = functional.explained_variance(torch.tensor(values), returns, mask)
        assert found.item() == pytest.approx(expected, abs=1e-6)


def test_masked_nan_reaches_no_loss_and_no_gradient():
    mask, nan = torch.tensor([[True, False]]), float("nan")
    broken = torch.tensor([[0.5, nan]])
    new = torch.tensor([[0.3, nan]], requires_grad=True)
    for loss, _ in (
        functional.policy_loss(new, broken, broken, mask, 0.2),
        functional.value_loss(new, broken, broken, mask, 0.2),
    ):
        (gradient,) = torch.autograd.grad(loss, new)
        assert torch.isfinite(loss)
        assert gradient[0, 1] == 0
        assert gradient[0, 0] != 0
