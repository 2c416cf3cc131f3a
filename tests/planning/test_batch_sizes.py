"""memory.microbatch_size=auto and memory.forward_batch_size=auto: as many rows as fit."""

import pytest
import torch

from stages.config.command_line import make_config
from stages.config.identity import settings_hash
from stages.planning.batch_sizes import with_sizes
from stages.planning.memory import GIB

CONFIG = make_config("pythia-1b")


@pytest.fixture
def gpu(runs, monkeypatch):
    """Pretends that there is a GPU of 80 GiB, of which the given number is free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def free(gib: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib * GIB, 80 * GIB))

    return free


# 90% of what is free is for the stage. The GiB at most are what the plan says of these numbers.
@pytest.mark.parametrize(
    ("stage", "free_gib", "line"),
    [
        (
            "ppo",
            79,
            "ppo: memory.microbatch_size=32 memory.forward_batch_size=256"
            " (at most 61.8 of 71.1 GiB)",
        ),
        (
            "sft",
            79,
            "sft: memory.microbatch_size=64 memory.forward_batch_size=512"
            " (at most 61.8 of 71.1 GiB)",
        ),
        (
            "ppo",
            40,
            "ppo: memory.microbatch_size=1 memory.forward_batch_size=1"
            " (at most 41.0 of 36.0 GiB: TOO LARGE, add lora.rank=16)",
        ),
    ],
)
def test_auto_is_what_fits_into_what_is_free(gpu, capsys, stage, free_gib, line):
    gpu(free_gib)
    with_sizes(CONFIG, stage)
    assert capsys.readouterr().err.splitlines() == [line]


def test_the_sizes_change_no_result(gpu):
    gpu(79)
    assert settings_hash(with_sizes(CONFIG, "ppo"), "ppo") == settings_hash(CONFIG, "ppo")


def test_a_stage_that_runs_no_model_needs_no_sizes(gpu):
    gpu(79)
    assert with_sizes(CONFIG, "base") == CONFIG


def test_a_microbatch_that_changes_the_result_is_the_papers(gpu):
    gpu(80)
    config = make_config("pythia-1b", name="mine", overrides=("ppo.compat=paper",))
    assert with_sizes(config, "ppo").memory.microbatch_size == 16


def test_a_model_of_unknown_shape_gets_small_passes(gpu, capsys):
    gpu(79)
    config = make_config("pythia-1b", name="mine", overrides=("base.checkpoint=org/unknown",))
    with_sizes(config, "sft")
    assert capsys.readouterr().err.splitlines() == [
        "sft: memory.microbatch_size=4 memory.forward_batch_size=16 "
        "(no memory plan for this family)"
    ]
