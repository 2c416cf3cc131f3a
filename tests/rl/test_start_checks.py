"""Checks before the first update: each fault is caught, with its likely cause."""

from dataclasses import fields, replace

import pytest
import torch

from stages import functional
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.ppo import Ppo
from stages.data.ragged import make_ragged, pad_left, pad_right
from stages.models.forward import ResponseBatch, score_responses
from stages.models.loading import load_policy, new_reward_model
from stages.models.policy import PolicyModel
from stages.models.sampling import Noise
from stages.rl import start_checks
from stages.rl.algorithms import Grpo, Rloo
from stages.rl.episodes import Episodes, Rollout, Sampled, ValueRange
from stages.rl.networks import Origins
from stages.rl.rollout import measure, sample_responses, score
from stages.rl.start_checks import StartCheckError
from stages.rl.value_range import in_range
from stages.rm import read_scores_before
from tests.lib.learners import learner_of, rolled_out, rollout_from
from tests.lib.planted import PLANTED

BOUNDS = start_checks.BOUNDS["float32"]


@pytest.fixture
def start(before_ppo):
    """A rollout before the first update, where everything holds."""
    return first_rollout(before_ppo)


def first_rollout(networks):
    """Two responses that end with EOS, and two columns of padding after them."""
    eos_id = networks.eos_id
    pad_id = networks.pad_id
    queries = pad_left([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], pad_id)
    ended = pad_right([torch.tensor([4, 3, eos_id]), torch.tensor([5, eos_id])], pad_id)
    responses = torch.nn.functional.pad(ended, (0, 2), value=pad_id)
    zeros = torch.zeros(responses.shape)
    sampled = Sampled(queries=queries, responses=responses, pad_id=pad_id, sampled_logprobs=zeros)

    learner = learner_of(networks, make_config("tiny"))
    episodes = score(learner, measure(learner, sampled, Ppo()), Ppo())
    response_mask, value_mask = functional.response_masks(responses, pad_id)
    return Rollout(
        **vars(episodes),
        response_mask=response_mask,
        value_mask=value_mask,
        rewards=zeros,
        advantages=zeros,
        returns=zeros,
    )


@torch.no_grad()
def check_ratio(networks, rollout):
    learner = learner_of(networks, make_config("tiny"))
    start_checks.check_ratio(learner, [rollout], Ppo().temperature, BOUNDS)


@torch.no_grad()
def check_padding(networks, rollout):
    start_checks.check_padding(networks.reward_model, rollout, BOUNDS)


def test_nothing_is_refused_where_everything_holds(before_ppo, start):
    check_ratio(before_ppo, start)
    check_padding(before_ppo, start)
    start_checks.check_kl(start, BOUNDS, "ppo")
    start_checks.check_critic(start, before_ppo.eos_id, BOUNDS)
    start_checks.check_scores_at_eos(start, before_ppo.eos_id, "ppo")


def test_a_bounded_critic_must_say_the_bounded_score(before_ppo, start):
    bounded = in_range(start, ValueRange(low=-2.0, high=3.0))
    start_checks.check_critic(bounded, before_ppo.eos_id, BOUNDS)
    with pytest.raises(StartCheckError, match="the critic differs from the reward model"):
        start_checks.check_critic(replace(bounded, values=start.values), before_ppo.eos_id, BOUNDS)


# -- stop, warn, off -------------------------------------------------------------------------------


@pytest.fixture
def check_start(before_ppo, tmp_path):
    """Runs all start checks, with checks.start as given, on a reference that is another model."""

    def run(mode):
        overrides = ("ppo.batch_size=2", f"checks.start={mode}")
        config = make_config("tiny", name="mine", overrides=overrides)
        learner = learner_of(before_ppo, config)
        rollout, _ = rolled_out(config, learner, make_ragged([[5, 6, 7], [8]]))
        wrong = replace(rollout, ref_logprobs=rollout.ref_logprobs - 0.01)
        origins = Origins(policy=tmp_path, reward_model=tmp_path / "model")
        start_checks.check_start(learner, wrong, origins, config.ppo, config, score)

    return run


def test_stop_ends_the_stage(check_start):
    with pytest.raises(StartCheckError, match=r"update 1: KL.* is not 0 .*Likely causes: ppo"):
        check_start("stop")


def test_warn_prints_the_same_as_one_line_and_training_continues(check_start, capsys):
    check_start("warn")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: update 1: KL(policy, ref_policy) is not 0")


def test_off_checks_nothing(check_start, capsys):
    check_start("off")
    assert capsys.readouterr().err == ""


# -- one fault at a time ---------------------------------------------------------------------------


def test_a_reference_that_is_another_model_is_caught(start):
    other = replace(start, ref_logprobs=start.ref_logprobs - 0.01)
    with pytest.raises(UserError, match=r"KL.*by 0\.01.*Likely causes: rloo .* or sft"):
        start_checks.check_kl(other, BOUNDS, "rloo")


def test_dropout_left_on_is_caught_by_the_ratio(before_ppo, start, policy_folder):
    torch.manual_seed(0)
    dropping = PolicyModel(load_policy(policy_folder, dropout=0.1)).train()
    with pytest.raises(UserError, match=r"ratio is not 1.*Likely causes: ppo"):
        check_ratio(replace(before_ppo, policy=dropping), start)


def test_queries_padded_on_the_right_are_caught_by_the_ratio(before_ppo, start):
    pad_id = before_ppo.pad_id
    query = start.queries[1]
    padded_right = start.queries.clone()
    padded_right[1] = torch.cat([query[query != pad_id], query[query == pad_id]])
    with pytest.raises(UserError, match=r"ratio is not 1.* step 1 pads queries on the right"):
        check_ratio(before_ppo, replace(start, queries=padded_right))


def test_dropout_in_the_reward_model_is_caught_by_scores_that_change(
    before_ppo, start, policy_folder
):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    dropping = new_reward_model(policy_folder, generator, dropout=0.3).train()
    with pytest.raises(UserError, match=r"padding changes a score.* rm \(the model has dropout on"):
        check_padding(replace(before_ppo, reward_model=dropping), start)


@pytest.mark.parametrize("name", ["score-at-padding", "query-one-short", "penalty-for-ended"])
def test_a_critic_that_is_not_the_reward_model_is_caught(before_ppo, start, name, monkeypatch):
    causes = r"Likely causes: ppo \(step 3 .* or normalize"
    other = replace(start, values=start.values + 0.5)
    with pytest.raises(UserError, match=rf"critic.*0\.5.*{causes}"):
        start_checks.check_critic(other, before_ppo.eos_id, BOUNDS)
    PLANTED[name].plant(monkeypatch.setattr)
    with pytest.raises(UserError, match=causes):
        start_checks.check_critic(first_rollout(before_ppo), before_ppo.eos_id, BOUNDS)


def test_an_eos_at_the_last_place_has_no_value_after_it_to_compare(before_ppo, start):
    eos_id = before_ppo.eos_id
    parts = ("responses", "response_mask", "values")
    cut = replace(start, **{part: getattr(start, part)[:, :3].clone() for part in parts})
    assert cut.responses[0, -1] == eos_id  # no column follows it
    cut.values[0] += 0.5
    start_checks.check_critic(cut, eos_id, BOUNDS)
    cut.values[1] += 0.5
    with pytest.raises(UserError, match="critic differs"):
        start_checks.check_critic(cut, eos_id, BOUNDS)


def test_the_critic_is_compared_at_eos_where_its_value_there_is_not_learned(before_ppo, start):
    settings = Ppo(score_at="eos")
    episodes = Episodes(**{column.name: getattr(start, column.name) for column in fields(Episodes)})
    rollout = rollout_from(episodes, settings, before_ppo.pad_id)
    assert torch.equal(rollout.value_mask, rollout.response_mask)
    assert rollout.values is not None
    start_checks.check_critic(rollout, before_ppo.eos_id, BOUNDS)
    other = replace(rollout, values=rollout.values + 0.5)
    with pytest.raises(UserError, match="critic differs"):
        start_checks.check_critic(other, before_ppo.eos_id, BOUNDS)


def test_the_critic_is_compared_where_the_reward_model_is_read(before_ppo):
    read_scores_before(before_ppo.reward_model, before_ppo.eos_id)
    start = first_rollout(before_ppo)
    start_checks.check_critic(start, before_ppo.eos_id, BOUNDS, before_eos=True)
    with pytest.raises(UserError, match="critic differs"):
        start_checks.check_critic(start, before_ppo.eos_id, BOUNDS)


def test_a_response_that_goes_on_after_its_eos_is_caught(before_ppo, start):
    uncut = start.responses.clone()
    uncut[1, 2] = 4
    mask, _ = functional.response_masks(uncut, before_ppo.pad_id)
    rollout = replace(start, responses=uncut, response_mask=mask)
    with pytest.raises(UserError, match="not read at EOS"):
        start_checks.check_scores_at_eos(rollout, before_ppo.eos_id, "ppo")


def test_padding_that_is_seen_is_caught(before_ppo, start):

    def see_all(model, inputs, output):
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)

    before_ppo.reward_model.register_forward_hook(see_all)
    with pytest.raises(UserError, match=r"padding changes a score.*causes: rm"):
        check_padding(before_ppo, start)


@pytest.fixture
def known(before_ppo, tokenizer, tmp_path):
    """Two summaries with the scores that the reward model gives them, and one without EOS."""
    pad_id = tokenizer.pad_token_id
    texts = [tokenizer.encode(text) for text in (" My boss sold my bike", " My bike")]
    responses = [torch.tensor([*text, tokenizer.eos_token_id]) for text in texts]
    queries = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    batch = ResponseBatch(
        queries=pad_left(queries, pad_id), responses=pad_right(responses, pad_id), pad_id=pad_id
    )
    with torch.no_grad():
        scores = score_responses(before_ppo.reward_model, batch)

    without_eos = responses[0][:-1]
    path = tmp_path / "known.json"
    start_checks.save_known_answers(
        path,
        queries=[*queries, queries[0]],
        responses=[*responses, without_eos],
        scores=torch.tensor([*scores.tolist(), 99.0]),
    )
    return path


@pytest.mark.parametrize(
    "settings", [Ppo(critic_init="zero"), Rloo(), Grpo()], ids=lambda x: x.section()
)
def test_step_3_gives_known_answers_their_scores_and_another_text_or_model_is_caught(
    before_ppo, known, settings, monkeypatch
):
    learner = learner_of(before_ppo, make_config("tiny"))

    def replay(step_3=score, shift=0.0):
        start_checks.replay_known_answers(learner, step_3, known, shift, settings, BOUNDS)

    replay()
    with pytest.raises(UserError, match=r"saved with.*0\.1.*or a library"):
        replay(shift=0.1)
    PLANTED["query-one-short"].plant(monkeypatch.setattr)
    with pytest.raises(UserError, match=rf"causes: {settings.section()} \(step 3 scores another"):
        replay()


def unmeasured(sampled):
    """A rollout of which only the samples are known."""
    zeros = torch.zeros(sampled.responses.shape)
    mask = sampled.responses != sampled.pad_id
    return Rollout(
        **vars(sampled),
        logprobs=zeros,
        ref_logprobs=zeros,
        values=None,
        sampler_gaps=zeros[:, 0],
        scores=zeros[:, 0],
        response_mask=mask,
        value_mask=mask,
        rewards=zeros,
        advantages=zeros,
        returns=None,
    )


@pytest.mark.parametrize("settings", [Ppo(), Rloo()], ids=lambda x: x.section())
def test_tokens_that_are_not_drawn_from_the_whole_distribution_are_caught(
    before_ppo, settings, monkeypatch
):
    learner = learner_of(before_ppo, make_config("tiny"))
    noise = Noise(seed=1, purpose="ppo", length=8)
    queries = [torch.tensor([5, 6, 7])] * 4

    @torch.no_grad()
    def check(temperature=0.7):
        sampled = sample_responses(learner, queries, noise, settings)
        start_checks.check_draws(learner, [unmeasured(sampled)], temperature, BOUNDS)

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
