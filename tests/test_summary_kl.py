"""The KL of a held-out summary: its log-ratio to SFT, beside plain transformers."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from eval.summaries import kl_from_sft
from stages.learning.models import load_policy, save_model
from stages.posts.ragged import TokenizedSplit, make_ragged
from stages.settings.command_line import make_config

QUERIES = [[5, 6, 7, 8], [9, 10], [11]]
RESPONSES = [[4, 3], [12, 13, 14, 0], [0]]


@pytest.fixture
def run(policy_folder, tokenizer, tmp_path, runs):
    """A run with two policies: SFT, and PPO's, which is SFT's with other weights in the head."""
    config = make_config("tiny")
    ppo = load_policy(policy_folder)
    with torch.no_grad():
        ppo.get_output_embeddings().weight.mul_(1.5)
    save_model(ppo, tokenizer, tmp_path / "ppo" / "model")
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "model").symlink_to(policy_folder)
    resume = tmp_path / "resume"
    return SimpleNamespace(config=config, require=lambda name: tmp_path / name, resume=resume)


def by_plain_transformers(folder, query, response):
    policy = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = policy(torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
    logprobs = (logits / 0.7).log_softmax(-1)  # the temperature at which PPO samples
    return sum(logprobs[at, token].item() for at, token in enumerate(response))


def test_the_kl_of_a_summary_is_its_log_ratio_to_sft_at_the_temperature_of_ppo(run, tmp_path):
    posts = TokenizedSplit(columns={"queries": make_ragged(QUERIES)}, rows=[{}] * len(QUERIES))
    found = kl_from_sft(run, Accelerator(cpu=True), "ppo", posts, RESPONSES)
    expected = [
        by_plain_transformers(tmp_path / "ppo" / "model", query, response)
        - by_plain_transformers(tmp_path / "sft" / "model", query, response)
        for query, response in zip(QUERIES, RESPONSES, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected)) > 0.1
    assert kl_from_sft(run, Accelerator(cpu=True), "sft", posts, RESPONSES) == [0.0] * 3


def test_summaries_of_a_run_without_sft_have_no_kl(run, runs):
    run.config = make_config("outputs", overrides=("outputs.file=x",))
    posts = TokenizedSplit(columns={"queries": make_ragged(QUERIES)}, rows=[{}] * len(QUERIES))
    assert kl_from_sft(run, Accelerator(cpu=True), "x", posts, RESPONSES) == [None] * 3
