"""Released reward models: in our layout, or in that of the code of Huang et al. 2024.

The latter is a class of its own: a backbone under `lm_backbone`, a linear layer `scalar_head` on
its last hidden state, and the mean score of the references in `config.bias`, which its forward pass
subtracts. It is converted to a native class: the head's bias becomes `scalar_head.bias -
config.bias`, so every score stays what it was. Its weights are read as data; no code is run.
Source: Huang et al. 2024, details 11 and 15; `ScalarModel` of their code.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from stages.learning.heads import head_of, in_float32, require_heads
from stages.learning.models import load_reward_model, with_dropout
from stages.running.files import read_json
from stages.settings.config import UserError

BACKBONE, HEAD = "lm_backbone.", "scalar_head."
# Checkpoints of older versions of transformers hold these; they are computed, not learned.
OLD_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def load_released_reward_model(folder: Path) -> tuple[PreTrainedModel, float | None]:
    """A reward model in our layout, in float32, and the mean that was folded into its bias.

    The mean is None where the folder is in our layout already. Raises UserError for a folder that
    holds neither.
    """
    saved = read_json(folder / "config.json")
    if saved is None:
        raise UserError(f"{folder} holds no reward model: config.json is missing")
    if "base_config" not in saved and "base_model" not in saved:
        if len(saved.get("id2label", ())) != 1:
            raise UserError(
                f"{folder} holds no reward model: that is an AutoModelForTokenClassification with"
                " one label, or a released ScalarModel"
            )
        return load_reward_model(folder).eval(), None
    weights = read_weights(folder)
    missing = {f"{HEAD}weight", f"{HEAD}bias"} - weights.keys()
    if missing:
        raise UserError(f"{folder} lacks {', '.join(sorted(missing))}: no released reward model")
    model = AutoModelForTokenClassification.from_config(_base_config(folder, saved))
    _fill_backbone(folder, model.float().base_model, weights)
    head, mean = head_of(model), float(saved.get("bias", 0.0))
    with torch.no_grad():
        head.weight.copy_(weights[f"{HEAD}weight"])
        head.bias.copy_(weights[f"{HEAD}bias"].float() - mean)
    in_float32(model)
    return model.eval(), mean


def _base_config(folder: Path, saved: dict[str, Any]) -> Any:
    """The configuration of the backbone, as the folder holds it, with one label and no dropout."""
    fields = dict(saved.get("base_config") or {})
    kind = fields.pop("model_type", None)
    for name in ("architectures", "torch_dtype", "dtype", "id2label", "label2id", "num_labels"):
        fields.pop(name, None)
    if kind is None:
        raise UserError(f"{folder}: base_config in config.json names no model_type")
    try:
        config = AutoConfig.for_model(kind, **fields, num_labels=1, token_classification_bias=True)
    except (KeyError, TypeError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"{folder}: its base_config does not load: {first_line}") from None
    require_heads(config, str(folder))
    return with_dropout(config, 0.0)


def _fill_backbone(folder: Path, backbone: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load the backbone's weights; none may be missing, of another shape or left over."""
    ours = {
        name.removeprefix(BACKBONE): weight.float()
        for name, weight in weights.items()
        if name.startswith(BACKBONE) and not name.endswith(OLD_BUFFERS)
    }
    try:
        found = backbone.load_state_dict(ours, strict=False)
    except RuntimeError:  # it lists every weight of another shape
        why = "its weights have other shapes than its base_config"
        raise UserError(f"{folder} does not load: {why}") from None
    wrong = [*found.missing_keys, *found.unexpected_keys]
    if wrong:
        names = ", ".join(wrong[:3])
        raise UserError(f"{folder} lacks or adds {len(wrong)} backbone weights ({names})")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint: safetensors or `.bin`, in one file or several.

    Raises UserError if there are none.
    """
    names: list[str] = [name for name in SINGLE_FILES if (folder / name).exists()][:1]
    for index in () if names else INDEXES:
        parts = read_json(folder / index)
        if parts is not None:
            names = sorted(set(parts["weight_map"].values()))
            break
    if not names:
        raise UserError(f"{folder} holds no weights: neither {' nor '.join(SINGLE_FILES)}")
    found: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if name.endswith(".safetensors"):
            found |= load_file(path)
        else:
            found |= torch.load(path, map_location="cpu", weights_only=True)
    return found
