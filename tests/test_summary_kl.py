"""The KL of a held-out summary: its log-ratio to SFT, beside plain transformers; best-of-n."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from eval.summaries import best_of, best_of_bound, kl_from_sft, sample_best, score_all
from stages.config.command_line import make_config
from stages.config.config import UserError
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.models.loading import load_policy, save_model
from stages.training.memory import MemoryBudget

BUDGET = MemoryBudget(forward_batch_size=32, microbatch_size=8)
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
    found = kl_from_sft(run, Accelerator(cpu=True), BUDGET, "ppo", posts, RESPONSES)
    expected = [
        by_plain_transformers(tmp_path / "ppo" / "model", query, response)
        - by_plain_transformers(tmp_path / "sft" / "model", query, response)
        for query, response in zip(QUERIES, RESPONSES, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected)) > 0.1
    assert kl_from_sft(run, Accelerator(cpu=True), BUDGET, "sft", posts, RESPONSES) == [0.0] * 3


def test_summaries_of_a_run_without_sft_have_no_kl(run, runs):
    run.config = make_config("outputs", overrides=("outputs.file=x",))
    posts = TokenizedSplit(columns={"queries": make_ragged(QUERIES)}, rows=[{}] * len(QUERIES))
    assert kl_from_sft(run, Accelerator(cpu=True), BUDGET, "x", posts, RESPONSES) == [None] * 3


def test_the_best_of_n_wins_n_times_in_n_plus_1_against_one_more_sample():
    """By the score that chose it: the sample beside it is the best of n + 1 one time in n + 1."""
    scores = torch.rand(20_000, 17, generator=torch.Generator().manual_seed(0)).tolist()
    assert best_of(scores, 1) == [0] * 20_000
    for n in (2, 4, 16):
        chosen = best_of(scores, n)
        assert all(0 <= place < n for place in chosen)
        wins = sum(of[place] > of[16] for of, place in zip(scores, chosen, strict=True))
        rate = n / (n + 1)
        assert abs(wins / 20_000 - rate) < 4 * math.sqrt(rate * (1 - rate) / 20_000)


def test_the_bound_on_the_kl_of_best_of_n_is_that_of_the_paper():
    """Stiennon et al. 2020 give 1.2 for 8, 3.2 for 64 and 5.2 for 512."""
    assert [round(best_of_bound(n), 1) for n in (1, 8, 64, 512)] == [0.0, 1.2, 3.2, 5.2]


def test_best_of_n_is_the_best_scored_of_the_first_n_samples(
    run, reward_model, tokenizer, tmp_path, monkeypatch
):
    run.config = make_config("tiny", name="many", overrides=("eval.best_of=4,1",))
    process, queries = Accelerator(cpu=True), make_ragged(QUERIES)
    posts = TokenizedSplit(columns={"queries": queries}, rows=[{}] * len(QUERIES))
    scored: dict[str, Any] = {}

    def score(*given):
        scored.update(texts=given[5], scores=score_all(*given))
        return scored["scores"]

    monkeypatch.setattr("eval.summaries.score_all", score)
    found = sample_best(run, process, BUDGET, reward_model, posts, tokenizer)
    assert list(found) == ["best-of-1", "best-of-4"]
    assert len({tuple(of[0]) for of in scored["texts"].values()}) > 1
    for row in range(len(QUERIES)):
        samples = [(scored["scores"][name][row], of[row]) for name, of in scored["texts"].items()]
        assert len(samples) == 4
        assert found["best-of-1"][row] == samples[0][1]
        assert found["best-of-4"][row] == max(samples, key=lambda pair: pair[0])[1]
    (kl, *others) = kl_from_sft(run, process, BUDGET, "best-of-4", posts, found["best-of-4"])
    assert [kl, *others] == [pytest.approx(math.log(4) - 3 / 4)] * 3


@pytest.mark.parametrize("wrong", ["0", "4,x", "4,,8", "2000"])
def test_numbers_of_best_of_n_are_checked(wrong):
    with pytest.raises(UserError, match=r"eval\.best_of must be numbers from 1 to 1000"):
        make_config("tiny", name="many", overrides=(f"eval.best_of={wrong}",))
    with pytest.raises(UserError, match=r"eval\.best_of must be empty where no SFT is trained"):
        make_config("outputs", overrides=("outputs.file=x", "eval.best_of=4"))
