"""Summaries of held-out posts: their KL from SFT by plain transformers, best-of-n, their rows."""

from math import log, sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from eval.summaries import (
    Evaluation,
    best_of,
    best_of_bound,
    describe,
    kl_from_sft,
    make_rows,
    sample_best,
    score_all,
)
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.models.loading import load_policy, save_model
from stages.models.tokenizers import load_tokenizer
from stages.training.memory import MemoryBudget

QUERIES = [[5, 6, 7, 8], [9, 10], [11]]
RESPONSES = [[4, 3], [12, 13, 14, 0], [0]]


@pytest.fixture
def evaluation(policy_folder, reward_model, tokenizer, tmp_path, runs):
    """A run with two policies: SFT, and PPO's, which is SFT's with other weights in the head."""
    ppo = load_policy(policy_folder)
    with torch.no_grad():
        ppo.get_output_embeddings().weight.mul_(1.5)
    save_model(ppo, tokenizer, tmp_path / "ppo" / "model")
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "model").symlink_to(policy_folder)
    run: Any = SimpleNamespace(
        config=make_config("tiny"),
        require=lambda stage: tmp_path / stage,
        resume=tmp_path / "resume",
    )
    return Evaluation(
        run=run,
        accelerator=Accelerator(cpu=True),
        budget=MemoryBudget(forward_batch_size=32, microbatch_size=8),
        posts=TokenizedSplit(columns={"queries": make_ragged(QUERIES)}, rows=[{}] * len(QUERIES)),
        tokenizer=tokenizer,
        reward_model=reward_model,
    )


# -- KL --------------------------------------------------------------------------------------------


def log_likelihood(folder, query, response):
    """The log-probability of a response by plain transformers."""
    policy = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = policy(torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
    logprobs = (logits / 0.7).log_softmax(-1)  # the temperature at which PPO samples
    return sum(logprobs[place, token].item() for place, token in enumerate(response))


def test_the_kl_of_a_summary_is_its_log_ratio_to_sft(evaluation, tmp_path):
    ratios = kl_from_sft(evaluation, "ppo", RESPONSES)

    expected = [
        log_likelihood(tmp_path / "ppo/model", query, response)
        - log_likelihood(tmp_path / "sft/model", query, response)
        for query, response in zip(QUERIES, RESPONSES, strict=True)
    ]
    assert max(abs(ratio) for ratio in expected) > 0.1
    assert ratios == pytest.approx(expected, abs=1e-4)


def test_sft_has_a_kl_of_0_from_itself(evaluation):
    assert kl_from_sft(evaluation, "sft", RESPONSES) == [0.0] * 3


def test_best_of_n_has_the_bound_of_its_kl(evaluation):
    kl = kl_from_sft(evaluation, "best-of-4", RESPONSES)
    assert kl == pytest.approx([log(4) - 3 / 4] * 3)


def test_a_run_without_sft_has_no_kl(evaluation):
    evaluation.run.config = make_config("outputs", overrides=("outputs.file=x",))
    assert kl_from_sft(evaluation, "x", RESPONSES) == [None] * 3


# -- best of n -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_best_of_n_beats_another_sample_n_times_in_n_plus_1(n):
    """By the score that chose it: the other sample is the best of n + 1 one time in n + 1."""
    scores = torch.rand(20_000, 17, generator=torch.Generator().manual_seed(0)).tolist()

    chosen = best_of(scores, n)

    assert all(place < n for place in chosen)
    wins = sum(
        scores_of_post[place] > scores_of_post[16]
        for scores_of_post, place in zip(scores, chosen, strict=True)
    )
    rate = n / (n + 1)
    assert abs(wins / 20_000 - rate) < 4 * sqrt(rate * (1 - rate) / 20_000)


def test_the_best_of_1_is_the_first():
    assert best_of([[0.2, 0.9], [0.9, 0.2]], 1) == [0, 0]


def test_of_equal_scores_the_first_is_the_best():
    assert best_of([[0.2, 0.9, 0.9]], 3) == [1]


def test_the_bound_of_best_of_n_is_that_of_the_paper():
    """Stiennon et al. 2020 give 1.2 for 8, 3.2 for 64 and 5.2 for 512."""
    assert [round(best_of_bound(n), 1) for n in (1, 8, 64, 512)] == [0.0, 1.2, 3.2, 5.2]


def test_best_of_n_is_the_best_scored_of_the_first_n_samples(evaluation, monkeypatch):
    evaluation.run.config = make_config("tiny", name="many", overrides=("eval.best_of=4,1",))
    texts: dict[str, Any] = {}
    scores: dict[str, Any] = {}

    def score(evaluation, texts_of_writers, label):
        texts.update(texts_of_writers)
        scores.update(score_all(evaluation, texts_of_writers, label))
        return scores

    monkeypatch.setattr("eval.summaries.score_all", score)
    best = sample_best(evaluation)

    assert list(best) == ["best-of-1", "best-of-4"]
    assert len(texts) == 4
    assert len({tuple(responses[0]) for responses in texts.values()}) > 1
    for row in range(len(QUERIES)):
        samples = [(scores[name][row], texts[name][row]) for name in texts]
        _, first = samples[0]
        _, best_scored = max(samples, key=lambda sample: sample[0])
        assert best["best-of-1"][row] == first
        assert best["best-of-4"][row] == best_scored


@pytest.mark.parametrize("wrong", ["0", "4,x", "4,,8", "2000"])
def test_numbers_of_best_of_n_are_checked(wrong):
    with pytest.raises(UserError, match=r"eval\.best_of must be numbers from 1 to 1000"):
        make_config("tiny", name="many", overrides=(f"eval.best_of={wrong}",))


def test_best_of_n_needs_a_trained_sft():
    with pytest.raises(
        UserError, match=r"eval\.best_of must be empty in a run that trains no SFT model"
    ):
        make_config("outputs", overrides=("outputs.file=x", "eval.best_of=4"))


# -- rows ------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tokenizer_folder):
    """Three rows; the first summary contains a special token that is not shown."""
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    eos = tokenizer.eos_token_id
    post = {"id": 1, "query": "TITLE: My cat", "reference": "cat"}
    posts: Any = SimpleNamespace(rows=[post] * 3)
    texts = {"ppo": [[5, im_end, eos], [5, eos], [5, 6, 7]], "reference": [[5]] * 3}
    scores = {"ppo": [1.0, 2.0, 6.0], "reference": [0.0] * 3}
    return make_rows(posts, texts, scores, "ppo", tokenizer)


def test_a_row_counts_tokens_and_eos(rows):
    assert [row["tokens"] for row in rows] == [3, 2, 3]
    assert [row["has_eos"] for row in rows] == [True, True, False]
    assert [row["reference_tokens"] for row in rows] == [1, 1, 1]


def test_special_tokens_are_counted_and_not_shown(rows):
    assert [row["special_tokens"] for row in rows] == [1, 0, 0]
    assert "im_end" not in rows[0]["summary"]


def test_the_description_has_means_over_posts(rows):
    description = describe([row | {"kl": None} for row in rows])
    assert description["score"] == pytest.approx(3.0)
    assert description["tokens"] == pytest.approx(8 / 3)
    assert description["eos_rate"] == pytest.approx(2 / 3)
    assert description["special_tokens"] == pytest.approx(1 / 3)
    assert description["kl"] is None
