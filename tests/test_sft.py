"""What the SFT stage ends with."""

from accelerate.state import AcceleratorState

from stages import base, sft
from stages.config.command_line import make_config
from stages.models.loading import load_policy
from stages.models.lora import keep_model
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder


def test_sft_ends_with_the_loss_of_its_last_update_in_the_precision_of_the_others(
    runs, monkeypatch
):
    """A sharded model is read again where it was saved, and computes without autocast."""

    def keep_as_sharded(accelerator, network, tokenizer, folder):
        keep_model(accelerator, network, tokenizer, folder)
        return load_policy(folder)

    monkeypatch.setattr(sft, "keep_model", keep_as_sharded)
    small = """base.hidden_size=32 base.num_layers=1 world.train_posts=32 world.validation_posts=4
        world.train_comparisons=16 world.validation_comparisons=4 sft.epochs=1
        memory.mixed_precision=bf16""".split()
    config = make_config("tiny", name="half", overrides=tuple(small))
    base.make_base(config)
    AcceleratorState._reset_state(reset_partial_state=True)  # as a process of its own would
    sft.train_sft(config)
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = stage_folder(config, "sft")
    last = read_lines(folder / "metrics.jsonl")[-1]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["results"]["loss/validation"] == last["loss/validation"]
