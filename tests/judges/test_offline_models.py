"""Models of `tests/lib/offline_models.py` load in transformers, and one judges behind a server.

Tests that need weights run only where the packages with these weights are installed.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest

from eval.judge import make_judge
from eval.judges.gold import weights_note
from eval.judges.protocol import Comparison, judge_all
from stages.config.errors import UserError
from stages.data.builtin import make_post
from tests.lib.chat_server import llm_config
from tests.lib.offline_models import MODELS, OFFLINE_MODELS, joined, write_model
from tests.lib.places import ROOT

SECONDS_TO_START = 180
MAIN = "from transformers.cli.transformers import main; main()"
SERVE = [sys.executable, "-c", MAIN, "serve", "--device", "cpu", "--host", "127.0.0.1"]


# -- real weights ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """The folder of the model that the test names: in runs/models, or else written now."""
    model = OFFLINE_MODELS[request.param]
    weights = [part.partition("/")[0] for part in model.parts]
    missing = [
        package
        for package in (*weights, "gguf", "fastapi", "uvicorn")
        if importlib.util.find_spec(package) is None
    ]
    if missing:
        command = f"python -m tests.lib.offline_models {request.param}"
        pytest.skip(f"not installed: {missing}; run `{command}`")

    folder = ROOT / MODELS / model.folder
    if (folder / "config.json").exists():
        return folder
    return write_model(model, tmp_path_factory.mktemp("models") / model.folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def answers(address: str) -> bool:
    """Whether a server at this address answers."""
    try:
        urllib.request.urlopen(address, timeout=1)
    except (urllib.error.URLError, OSError):
        return False
    return True


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """The address of `transformers serve` with the model."""
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*SERVE, str(folder), "--port", str(port)], stdout=output, stderr=output
        )
    try:
        for _ in range(SECONDS_TO_START):
            assert server.poll() is None, log.read_text()
            if answers(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(30)


@pytest.mark.walk
@pytest.mark.parametrize("folder", ["smollm2"], indirect=True)
@pytest.mark.usefixtures("judge_environment")
def test_a_real_server_is_asked_and_its_words_are_kept(folder, url, runs):
    model = str(folder.resolve())
    server = SimpleNamespace(url=url)
    config = llm_config(server, model=model, max_tokens=24, structured="off")
    pairs = []
    for number in range(3):
        post = make_post(f"toy1-validation-{number}")
        pair = Comparison(
            post_id=post["id"], query=post["post"], first=post["summary"], second=post["title"]
        )
        pairs += [pair, pair._replace(first=pair.second, second=pair.first)]

    replies = list(judge_all(make_judge(config, {}), pairs, 2))

    assert len(replies) == 6
    for reply in replies:
        assert reply.text.strip()
        assert reply.prompt_tokens > 100
        assert reply.model.split("@")[0] == model
        assert reply.choice in ("A", "B", "tie", None)
    assert list(judge_all(make_judge(config, {}), pairs, 2)) == replies


@pytest.mark.walk
@pytest.mark.parametrize("folder", list(OFFLINE_MODELS), indirect=True)
def test_a_written_model_is_plain_and_ends_as_its_tokenizer_says(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert getattr(model.config, "quantization_config", None) is None
    assert tokenizer.eos_token_id == model.config.eos_token_id


def continuation(folder, text: str) -> str:
    """The most probable 12 tokens after a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.walk
@pytest.mark.parametrize("folder", ["smollm2"], indirect=True)
def test_the_written_chat_model_answers_a_question(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    assert tokenizer.eos_token == "<|im_end|>"
    assert "Paris" in continuation(folder, prompt)


@pytest.mark.walk
@pytest.mark.parametrize("folder", ["gemma"], indirect=True)
def test_the_written_base_model_continues_a_text(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert not tokenizer.chat_template
    assert tokenizer.eos_token == "<eos>"
    assert "France" in continuation(folder, "Paris is the capital of")


# -- packages --------------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages with the parts of Gemma's GGUF, one byte each, which fail if their code is run."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gguf.py").touch()
    for number, part in enumerate(OFFLINE_MODELS["gemma"].parts):
        path = tmp_path / part
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes([number]))
        (path.parents[1] / "__init__.py").write_text("raise SystemError")


def test_the_parts_of_a_model_are_joined(packages):
    content = bytes([0, 1, 2, 3])
    model = replace(OFFLINE_MODELS["gemma"], sha256=sha256(content).hexdigest())
    assert joined(model) == content


def test_weights_with_another_hash_are_refused(packages):
    with pytest.raises(UserError, match="do not have the sha256"):
        joined(OFFLINE_MODELS["gemma"])


def test_a_missing_package_is_named():
    model = replace(OFFLINE_MODELS["gemma"], parts=("of_nobody/part00",))
    with pytest.raises(UserError, match="the package of_nobody or gguf is missing"):
        joined(model)


def test_a_gold_model_from_an_offline_model_says_that_its_weights_began_with_4_bits():
    assert "4-bit copy of gemma-3-270m" in weights_note("runs/models/gemma-3-270m")


def test_a_gold_model_from_the_hub_says_nothing_about_4_bits():
    assert weights_note("google/gemma-3-270m") == ""
