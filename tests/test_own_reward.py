"""A reward of one's own takes one line: the stages' document says where, and here it is done."""

import pytest
import torch

from stages import base, normalize, ppo, reward, sft
from stages.driving.start import run_module
from stages.rl import rollout
from stages.running.files import read_lines

# Every token of a response can raise this reward, so no rare event decides whether it is learned.
OWN = """
    base.hidden_size=32 base.num_layers=1 ppo.critic_init=sft memory.cpu_threads=1
    world.train_posts=96 world.validation_posts=16
    world.train_comparisons=64 world.validation_comparisons=32
    ppo.total_episodes=256 ppo.batch_size=32 ppo.learning_rate=0.02 ppo.eos_trick=off
    ppo.critic_updates=0 ppo.critic_learning_rate=0.02
""".split()
RISE = 1.5  # at least 3.75 with 3 seeds


@pytest.mark.learns
def test_a_reward_of_ones_own_passes_the_start_checks_and_is_learned(runs, monkeypatch):
    def even_tokens(model, queries, responses, pad_id, group):
        return ((responses % 2 == 0) & (responses != pad_id)).sum(dim=1).to(torch.float32)

    for module in (base, sft, reward, normalize):
        run_module(module, ["--preset", "tiny", "--name", "own", "--set", *OWN])
    monkeypatch.setattr(rollout, "score_responses", even_tokens)
    run_module(ppo, ["--preset", "tiny", "--name", "own", "--set", *OWN])
    rows = read_lines(runs / "own" / "seed44413" / "ppo" / "metrics.jsonl")
    scores = [row["objective/scores"] for row in rows]
    for score, row in zip(scores, rows, strict=True):
        assert 0 <= score <= row["policy/response_length"]
    assert sum(scores[-3:]) / 3 > scores[0] + RISE
