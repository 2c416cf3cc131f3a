"""`ppo.target_kl` compares the mean KL of an epoch with the target."""

import shutil
from pathlib import Path

import pytest

from stages import ppo
from stages.runs.files import read_lines
from tests.lib.make_stages import run_module
from tests.lib.resuming import ARGUMENTS

# One update in which the policy learns, with two minibatches an epoch.
ONE_UPDATE = (
    "ppo.total_episodes=16",
    "ppo.num_minibatches=2",
    "ppo.critic_updates=0",
    "ppo.checkpoints=0",
    "ppo.learning_rate=0.001",
)


def metrics_of_one_update(folder: Path, *settings: str) -> dict[str, float]:
    """What one update of PPO reports under these settings."""
    shutil.rmtree(folder, ignore_errors=True)
    run_module(ppo, [*ARGUMENTS, *ONE_UPDATE, *settings])
    (row,) = read_lines(folder / "metrics.jsonl")
    return row


@pytest.fixture
def folder(attempt):
    """Where the stage `ppo` of a run will be, of which all before it is there."""
    return attempt("ppo")


@pytest.mark.parametrize(
    ("target_over_mean", "epochs"),
    [
        (0.5, 1),  # the first epoch's mean is above the target
        # Between the mean and the last minibatch: the first minibatch is measured before the
        # policy has learned, so its KL is 0 and the last one's is twice the mean.
        (1.5, 2),
    ],
)
def test_the_mean_kl_of_an_epoch_decides_whether_another_one_follows(
    folder, target_over_mean, epochs
):
    one_epoch = metrics_of_one_update(folder, "ppo.num_ppo_epochs=1")
    mean_kl = one_epoch["policy/approxkl_avg"]
    assert mean_kl > 1e-6

    target = f"ppo.target_kl={target_over_mean * mean_kl:.6g}"
    row = metrics_of_one_update(folder, "ppo.num_ppo_epochs=2", target)

    assert row["policy/epochs"] == epochs
