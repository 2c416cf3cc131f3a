"""The loss that the SFT stage records at its end."""

import pytest
from accelerate.state import AcceleratorState

from stages import base, sft
from stages.config.command_line import make_config
from stages.models.loading import load_policy
from stages.models.lora import keep_model
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder

SMALL_IN_BF16 = (
    "base.hidden_size=32",
    "base.num_layers=1",
    "world.train_posts=32",
    "world.validation_posts=4",
    "world.train_comparisons=16",
    "world.validation_comparisons=4",
    "sft.epochs=1",
    "memory.mixed_precision=bf16",
)


@pytest.fixture
def no_accelerator_state():
    """accelerate's state of a new process, before the test and after it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_sharded_sft_run_ends_with_the_held_out_loss_of_its_last_update(
    runs, monkeypatch, no_accelerator_state
):
    """A sharded model is loaded again from where it was saved, and would compute without autocast:
    its loss would differ from that of the last update.
    """

    def save_and_reload(accelerator, network, tokenizer, folder):
        keep_model(accelerator, network, tokenizer, folder)
        return load_policy(folder)

    monkeypatch.setattr(sft, "keep_model", save_and_reload)
    config = make_config("tiny", name="half", overrides=SMALL_IN_BF16)
    base.make_base(config)

    sft.train_sft(config)

    folder = stage_folder(config, "sft")
    last_update = read_lines(folder / "metrics.jsonl")[-1]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["results"]["loss/validation"] == last_update["loss/validation"]
