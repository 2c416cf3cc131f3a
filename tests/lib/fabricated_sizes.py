"""Fabricated runs of two sizes."""

from reports.results import RunResult, find_all
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import fabricate


def two_sizes(**changes: object) -> list[RunResult]:
    """Two sizes with two seeds each; `changes` go to the larger one's config."""
    for seed, ppo in ((1, 0.3), (2, 0.4)):
        fabricate(make_config("tiny-s", seed=seed), ppo=ppo, sft=0.25, accuracy=0.7, size=10**5)
    for seed, ppo in ((1, 0.6), (2, 0.64)):
        config = make_config("tiny", seed=seed).changed(**changes)
        fabricate(config, ppo=ppo, sft=0.25, accuracy=0.7, size=10**6)
    return find_all(["tiny", "tiny-s"])[0]
