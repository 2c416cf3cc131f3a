"""A reward of one's own takes one line: the stages' document says where, and here it is done."""

import torch

from stages import base, normalize, ppo, reward, sft
from stages.rl import rollout
from stages.running.files import read_lines

OWN = """
    base.hidden_size=32 base.num_layers=1 ppo.critic_init=sft
    world.train_posts=96 world.validation_posts=16
    world.train_comparisons=64 world.validation_comparisons=32
    ppo.total_episodes=640 ppo.batch_size=64 ppo.learning_rate=0.003 ppo.missing_eos_penalty=-60
""".split()


def test_a_reward_of_ones_own_passes_the_start_checks_and_is_learned(runs, monkeypatch):
    def shorter_is_better(model, queries, responses, pad_id):
        return -(responses != pad_id).sum(dim=1).to(torch.float32)

    for module in (base, sft, reward, normalize):
        module.main(["--preset", "tiny", "--name", "own", "--set", *OWN])
    monkeypatch.setattr(rollout, "score_responses", shorter_is_better)
    ppo.main(["--preset", "tiny", "--name", "own", "--set", *OWN])
    rows = read_lines(runs / "own" / "seed44413" / "ppo" / "metrics.jsonl")
    for row in rows:
        ended = row["policy/eos_rate"]
        assert row["objective/scores"] <= -row["policy/response_length"] * ended
    assert rows[-1]["objective/scores"] > rows[0]["objective/scores"] + 2
