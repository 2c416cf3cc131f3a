"""Where a rehearsal's weights come from: the checkpoint, or new ones of its published shape.

Speed and memory depend on shapes, not on what a model has learned. So a rehearsal needs no network.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from reports.needs.shapes import NEOX, Shape
from stages.learning.models import load_policy, with_dropout
from stages.posts.toy import fresh_folder, put_folder
from stages.settings.config import RANDOM, Config, UserError

INITIALIZER = 0.02


def weights_for(config: Config, shape: Shape, folder: Path) -> tuple[Path, str]:
    """A folder with a policy of the run's shape, and where its weights come from.

    The checkpoint is taken where it is a folder or can be had from the hub; else weights are drawn
    from the seed and kept in `folder`.
    """
    checkpoint = config.base.checkpoint
    if Path(checkpoint, "config.json").is_file():
        return Path(checkpoint), f"of the folder {checkpoint}"
    if (folder / "config.json").is_file():
        return folder, (folder / "from.txt").read_text(encoding="utf-8")
    partial = fresh_folder(folder)
    said = _write(config, shape, partial)
    (partial / "from.txt").write_text(said, encoding="utf-8")
    put_folder(partial, folder)
    return folder, said


def _write(config: Config, shape: Shape, folder: Path) -> str:
    checkpoint = config.base.checkpoint
    if checkpoint != RANDOM:
        try:
            model = load_policy(checkpoint)
        except UserError:
            pass
        else:
            model.save_pretrained(folder)
            return f"{checkpoint} from the hub"
    draw_weights(config, shape, folder)
    why = "" if checkpoint == RANDOM else f", because {checkpoint} could not be had"
    return f"random, of the published shape{why}"


def draw_weights(config: Config, shape: Shape, folder: Path) -> None:
    """Write a policy of this shape with new weights, drawn from the seed."""
    torch.manual_seed(config.seed)
    made = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16)
    made.save_pretrained(folder)


def model_config(shape: Shape) -> PretrainedConfig:
    """transformers' configuration of a shape, without dropout. EOS is token 0."""
    given = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "initializer_range": INITIALIZER,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if shape.family != NEOX:
        given["num_key_value_heads"] = shape.kv_heads or shape.heads
    return with_dropout(AutoConfig.for_model(shape.family, **given), 0.0)
