"""RLOO on the shared heart: its gradient by hand, its groups, and a run from SFT to the page."""

import copy

import pytest
import torch
from accelerate import Accelerator

from eval import controls, judge, summaries, win_rate
from reports import run_page
from stages import base, normalize, ppo, reward, rloo, sft
from stages.functional import token_logprobs
from stages.learning.sampling import Noise
from stages.rl.credit import shape
from stages.rl.rollout import measure, sample_responses, score, share_of_batch
from stages.rl.update import optimize
from stages.running.files import read_json, read_lines
from stages.settings.checks import UserError
from stages.settings.command_line import make_config
from stages.settings.rloo import Rloo
from tests.conftest import learner_of

SMALL = """
    base.hidden_size=32 base.num_layers=1 eval.posts=8 checks.control_posts=4
    world.train_posts=96 world.validation_posts=8 memory.cpu_threads=1
    world.train_comparisons=64 world.validation_comparisons=32
    rloo.total_episodes=64 rloo.batch_size=32 ppo.total_episodes=32 ppo.batch_size=32
    ppo.critic_updates=0
""".split()
QUERIES = [torch.tensor(tokens) for tokens in ([5, 6, 7], [8, 9], [3, 4, 5, 6])]
NOISE = Noise(seed=1, purpose="rloo", length=6)


def rolled_out(learner, settings):
    sampled = sample_responses(learner, QUERIES, NOISE, settings, settings.samples_per_query)
    episodes = score(learner, measure(learner, sampled, settings), settings)
    shaped = shape(episodes, settings, learner.networks.pad_id, settings.kl_coef)
    return rloo.credit(shaped, settings.samples_per_query)


def test_one_step_is_the_gradient_of_reinforce_with_the_others_mean_as_baseline(before_ppo):
    settings = Rloo(batch_size=12, eos_trick="off")
    networks = copy.deepcopy(before_ppo)
    object.__setattr__(networks, "critic", None)
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
    (total / rollout.response_mask.sum()).backward()
    for learned, before in zip(networks.policy.parameters(), start.parameters(), strict=True):
        expected = before - 0.1 * (0 if before.grad is None else before.grad)
        assert torch.allclose(learned, expected, atol=2e-6)
    assert any(
        not torch.equal(learned, before)
        for learned, before in zip(networks.policy.parameters(), start.parameters(), strict=True)
    )


def test_the_samples_of_a_query_are_neighbours_and_differ(before_ppo):
    learner = learner_of(before_ppo, make_config("tiny"))
    sampled = sample_responses(learner, QUERIES, NOISE, Rloo(), 4)
    assert [row.tolist() for row in sampled.queries[::4]] == [
        row.tolist() for row in sampled.queries[3::4]
    ]
    lengths = (sampled.queries != before_ppo.pad_id).sum(dim=1).tolist()
    assert lengths == [2] * 4 + [3] * 4 + [4] * 4
    assert len({tuple(row) for row in sampled.responses[:4].tolist()}) > 1
    assert share_of_batch(Accelerator(cpu=True), QUERIES, 2) == [2, 3, 0, 1, 4, 5]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("rloo.samples_per_query=1", "rloo.samples_per_query must be at least 2"),
        ("rloo.batch_size=30", "rloo.batch_size must divide by rloo.samples_per_query"),
        ("rloo.cliprange=-1", "rloo.cliprange must be at least 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_their_own_names(change, complaint):
    with pytest.raises(UserError, match=complaint):
        make_config("tiny", name="x", overrides=(change,))


def test_a_run_with_rloo_goes_from_sft_to_the_page_with_its_curves(runs):
    arguments = ["--preset", "tiny", "--name", "r", "--set", *SMALL]
    for module in (base, sft, reward, normalize, ppo, rloo, summaries, judge, controls, win_rate):
        module.main(arguments)
    folder = runs / "r" / "seed44413"
    rows = read_lines(folder / "rloo" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["objective/kl"] == 0 != rows[1]["objective/kl"]
    assert not {"val/explained_variance", "loss/value_avg"} & rows[0].keys()
    assert not (folder / "rloo" / "critic").exists()
    rates = read_json(folder / "win_rate" / "facts" / "manifest.json")["results"]
    assert "rloo" in str(rates)
    run_page.main(arguments)
    page = (folder / "report" / "facts" / "r-seed44413.md").read_text()
    assert "RLOO" in page
    plots = [path.name for path in (folder / "report" / "facts").glob("*rloo*.svg")]
    assert plots, "the page shows no curves of rloo"
