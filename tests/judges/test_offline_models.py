"""The models of `tests/lib/offline_models.py`; the first one behind `transformers serve`.

The tests run where the packages with the weights are installed.
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

SECONDS = 180
MAIN = "from transformers.cli.transformers import main; main()"
SERVE = [sys.executable, "-c", MAIN, "serve", "--device", "cpu", "--host", "127.0.0.1"]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """The model that make has written, or one made now."""
    model = OFFLINE_MODELS[request.param]
    needed = [part.partition("/")[0] for part in model.parts] + ["gguf", "fastapi", "uvicorn"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        run = f"python -m tests.lib.offline_models {request.param}"
        pytest.skip(f"not installed: {missing}; run `{run}`")
    written = ROOT / MODELS / model.folder
    if (written / "config.json").exists():
        return written
    return write_model(model, tmp_path_factory.mktemp("models") / model.folder)


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """The address of `transformers serve` with the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*SERVE, str(folder), "--port", str(port)], stdout=output, stderr=output
        )
    try:
        for _ in range(SECONDS):
            assert server.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(30)


@pytest.mark.walk
@pytest.mark.parametrize("folder", ["smollm2"], indirect=True)
@pytest.mark.usefixtures("judge_environment")
def test_a_real_server_is_asked_and_its_words_are_kept(folder, url, runs):
    changes = {"model": str(folder.resolve()), "max_tokens": 24, "structured": "off"}
    config = llm_config(SimpleNamespace(url=url), **changes)
    posts = [make_post(f"toy1-validation-{k}") for k in range(3)]
    texts = [(post["id"], post["post"], post["summary"], post["title"]) for post in posts]
    pairs = [Comparison(*row) for row in texts]
    pairs += [Comparison(name, post, second, first) for name, post, first, second in texts]
    replies = list(judge_all(make_judge(config, {}), pairs, 2))
    assert len(replies) == 6
    assert all(reply.text.strip() and reply.prompt_tokens > 100 for reply in replies)
    assert {reply.model.split("@")[0] for reply in replies} == {str(folder.resolve())}
    assert {reply.choice for reply in replies} <= {"A", "B", "tie", None}
    again = list(judge_all(make_judge(config, {}), pairs, 2))
    assert again == replies


@pytest.mark.walk
@pytest.mark.parametrize(
    ("folder", "answer"),
    [*zip(OFFLINE_MODELS, ("Paris", "France"), strict=True)],
    indirect=["folder"],
)
def test_the_written_model_is_plain_and_speaks(folder, answer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert getattr(model.config, "quantization_config", None) is None
    assert tokenizer.eos_token == ("<|im_end|>" if tokenizer.chat_template else "<eos>")
    assert tokenizer.eos_token_id == model.config.eos_token_id
    text, question = "Paris is the capital of", "What is the capital of France?"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert answer in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages with the parts of Gemma's GGUF, which would fail if their code were run."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gguf.py").touch()
    for number, part in enumerate(OFFLINE_MODELS["gemma"].parts):
        (tmp_path / part).parent.mkdir(parents=True)
        (tmp_path / part).parents[1].joinpath("__init__.py").write_text("raise SystemError")
        (tmp_path / part).write_bytes(bytes([number]))


def test_the_parts_of_a_model_are_joined(packages):
    model = replace(OFFLINE_MODELS["gemma"], sha256=sha256(bytes(range(4))).hexdigest())
    assert joined(model) == bytes(range(4))


def test_other_weights_than_expected_are_refused(packages):
    with pytest.raises(UserError, match="do not have the sha256"):
        joined(OFFLINE_MODELS["gemma"])


def test_a_missing_package_is_named():
    with pytest.raises(UserError, match="the package of_nobody or gguf is missing"):
        joined(replace(OFFLINE_MODELS["gemma"], parts=("of_nobody/part00",)))


def test_a_gold_model_says_that_its_weights_began_with_4_bits():
    assert "4-bit copy of gemma-3-270m" in weights_note("runs/models/gemma-3-270m")
    assert not weights_note("google/gemma-3-270m")
