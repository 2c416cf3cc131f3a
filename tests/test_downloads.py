"""The small models of `make smollm` and `make gemma`; the first behind `transformers serve`.

Each runs where its goal has installed the packages with the weights.
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
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.judge import make_judge
from eval.judges.downloads import DOWNLOADS, MODELS, joined, weights_note, write_model
from eval.judges.protocol import Comparison, judge_all
from stages.config.checks import UserError
from stages.data.builtin import make_post
from tests.lib.chat_server import llm_config

ROOT = Path(__file__).parents[1]
SECONDS = 180
MAIN = "from transformers.cli.transformers import main; main()"
SERVE = [sys.executable, "-c", MAIN, "serve", "--device", "cpu", "--host", "127.0.0.1"]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """The model that make has written, or one made now."""
    download = DOWNLOADS[request.param]
    needed = [part.partition("/")[0] for part in download.parts] + ["gguf", "fastapi", "uvicorn"]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {missing}; run `make {download.goal}`")
    written = ROOT / MODELS / request.param
    if (written / "config.json").exists():
        return written
    return write_model(request.param, tmp_path_factory.mktemp("models") / request.param)


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
@pytest.mark.parametrize("folder", ["smollm2-135m-instruct"], indirect=True)
@pytest.mark.usefixtures("judge_environment")
def test_a_real_server_is_asked_and_its_words_are_kept(folder, url, runs):
    changes = {"model": str(folder.resolve()), "max_tokens": 24, "asks": 1, "structured": "off"}
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
    ("folder", "answer"), [*zip(DOWNLOADS, ("Paris", "France"), strict=True)], indirect=["folder"]
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


def test_parts_are_joined_and_noted_and_other_bytes_or_no_package_refused(tmp_path, monkeypatch):
    download = DOWNLOADS["gemma-3-270m"]
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="run `make gemma`"):
        joined(download._replace(parts=["of_nobody/part00"]))
    (tmp_path / "gguf.py").touch()
    for number, part in enumerate(download.parts):
        (tmp_path / part).parent.mkdir(parents=True)
        (tmp_path / part).parents[1].joinpath("__init__.py").write_text("raise SystemError")
        (tmp_path / part).write_bytes(bytes([number]))
    with pytest.raises(UserError, match="sha256"):
        joined(download)
    assert "4-bit copy of gemma-3-270m" in weights_note("runs/models/gemma-3-270m")
    assert not weights_note("google/gemma-3-270m")
    assert joined(download._replace(sha256=sha256(bytes(range(4))).hexdigest())) == bytes(range(4))
