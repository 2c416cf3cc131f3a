"""What `make plan` prints, and which GPUs it plans for."""

from dataclasses import replace

import pytest

from stages.config.presets import PRESETS, preset_config
from stages.planning.parts import most_bytes, part_bytes, sized
from stages.planning.plan import SHARDED, gpus_for, lines_of, parse, usable_bytes
from tests.lib.asserts import refusal_of
from tests.lib.plan_settings import setting

WITH_DATA = [name for name in PRESETS if preset_config(name).data.source]


def plan(*arguments: str) -> list[str]:
    """The lines of a plan."""
    return lines_of(parse(list(arguments)))


def test_a_plan_has_the_parameters_the_gpus_and_every_part():
    text = "\n".join(plan("--preset", "pythia-6.9b", "--gpus", "1"))
    assert "6,857,302,016" in text
    assert "1 x h100-80gb" in text
    for part in part_bytes(setting("pythia-6.9b")):
        assert part in text


def test_a_plan_that_does_not_fit_says_what_does_not():
    lines = plan("--preset", "pythia-6.9b", "--gpus", "1")
    assert any(line.startswith("does not fit: sft step") for line in lines)


def test_a_plan_is_80_columns_wide():
    lines = plan("--preset", "pythia-6.9b", "--gpus", "1")
    assert max(map(len, lines)) <= 80


def test_the_last_line_is_the_command_that_measures_the_hours():
    command = "to measure its hours: make sft rm ppo "
    assert plan("--preset", "tiny")[-1] == f"{command}PRESET=tiny REHEARSE=1"
    with_settings = plan("--preset", "tiny", "--name", "x", "--set", "lora.rank=4")
    assert with_settings[-1] == f"{command}REHEARSE=1 with the same variables"


def test_without_gpus_and_engine_a_plan_is_for_those_that_the_preset_is_made_for():
    text = "\n".join(plan("--preset", "pythia-6.9b"))
    assert "8 x h100-80gb, ENGINE=fsdp2" in text
    assert "everything fits" in text


def test_without_sharding_a_plan_that_does_not_fit_names_fsdp2():
    lines = plan("--preset", "pythia-6.9b", "--engine", "ddp")
    assert "ENGINE=fsdp2 shares the weights" in lines


@pytest.mark.parametrize("preset", WITH_DATA)
def test_every_preset_fits_the_gpus_it_is_made_for(preset):
    gpu, devices = gpus_for(preset)
    run = replace(setting(preset, devices), sharded=preset in SHARDED)
    assert most_bytes(sized(run, usable_bytes(gpu))) <= usable_bytes(gpu)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpu", "h100"], "unknown GPU 'h100': did you mean h100-80gb"),
        (["--gpus", "-1"], "GPUS=-1 is below 1: give the number of GPUs"),
    ],
)
def test_an_unknown_gpu_or_number_is_refused(arguments, line):
    refusal = refusal_of(lambda: plan("--preset", "pythia-1b", *arguments))
    assert refusal.startswith(line)
