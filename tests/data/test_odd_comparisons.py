"""Empty and equal summaries go through every stage; bad rows are skipped and listed by base."""

import math
import types

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from eval.calibration import calibrate
from stages import base, dpo, rm
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.data.builtin import make_comparison, make_post
from stages.data.tokens import tokenize_comparisons
from stages.models.loading import max_positions, require_room
from stages.models.policy import PolicyModel
from stages.runs.files import read_json, read_lines
from tests.lib.asserts import close
from tests.lib.learners import state_of
from tests.lib.make_stages import run_module
from tests.lib.rows import EMPTY_PAIR, EQUAL_PAIR, LIMITS, PAIR, POST, edited, write_folder

CPU = torch.device("cpu")
ROWS = [0, 1, 2]


@pytest.fixture
def odd_pairs(tokenizer):
    """A plain comparison, one whose chosen summary is empty, and one of equal summaries."""
    rows = [("f:0", PAIR), ("f:1", EMPTY_PAIR), ("f:2", EQUAL_PAIR)]
    return tokenize_comparisons(rows, tokenizer, LIMITS, "pairs")


# -- training --------------------------------------------------------------------------------------


def odd_state(network):
    config = make_config("tiny", overrides=("memory.microbatch_size=4",), name="odd")
    run = types.SimpleNamespace(config=config, resume=None, is_main=False, append=lambda *_: None)
    return state_of(config, network, torch.optim.SGD(network.parameters(), lr=1e-3), run=run)


def assert_all_finite(metrics, network):
    for value in metrics.values():
        assert not isinstance(value, float) or math.isfinite(value)
    for weight in network.parameters():
        assert torch.isfinite(weight).all()


def test_the_reward_model_learns_from_empty_and_equal_summaries(reward_model, odd_pairs):
    metrics = rm.take_step(odd_state(reward_model), odd_pairs, ROWS)
    assert_all_finite(metrics, reward_model)


def test_the_reward_model_is_evaluated_on_empty_and_equal_summaries(reward_model, odd_pairs):
    state = odd_state(reward_model)
    budget = state.learner.budget
    metrics = rm.evaluate(state.run, state.accelerator, budget, reward_model, odd_pairs, "odd")
    assert_all_finite(metrics, reward_model)
    assert metrics["pairs"] == 3


@torch.no_grad()
def test_an_empty_summary_is_scored_at_its_eos(reward_model, odd_pairs):
    chosen, _ = rm.score_pairs(reward_model, odd_pairs, ROWS, CPU)
    query = odd_pairs.columns["queries"][1]
    query_and_eos = torch.cat([query, torch.tensor([0])]).unsqueeze(0)
    close(chosen[1], reward_model(input_ids=query_and_eos).logits[0, -1, 0], 1e-5)


@torch.no_grad()
def test_equal_summaries_get_equal_scores(reward_model, odd_pairs):
    chosen, rejected = rm.score_pairs(reward_model, odd_pairs, ROWS, CPU)
    close(chosen[2], rejected[2].item())


def test_dpo_learns_from_empty_and_equal_summaries(policy, odd_pairs):
    network = PolicyModel(policy)
    with torch.no_grad():
        reference = torch.stack(dpo.pair_logprobs(network, odd_pairs, ROWS, CPU), dim=1)
    metrics = dpo.take_step(odd_state(network), odd_pairs, reference, ROWS)
    assert metrics["loss/train"] == pytest.approx(math.log(2), abs=1e-5)
    assert_all_finite(metrics, network)


# -- calibration of a judge ------------------------------------------------------------------------


def test_a_judge_is_calibrated_on_empty_and_equal_summaries(tmp_path, runs):
    comparison = make_comparison(make_post("toy1-validation-0"), "1 0", "valid1")
    first_empty = edited(comparison, "summaries.0.text", "")
    second_empty = edited(comparison, "summaries.1.text", "")
    both_empty = edited(first_empty, "summaries.1.text", "")
    folder = write_folder(
        tmp_path / "data",
        comparisons_validation=[first_empty, second_empty, both_empty, "{"],
    )
    overrides = ("data.on_bad_row=skip", "judge.kind=facts")
    config = make_config("tiny", overrides=overrides, name="odd")
    config = config.changed(data=config.data.changed(source=str(folder)))

    results = calibrate(config)

    assert results["judged"] == 3
    assert (runs / "odd/seed44413/calibration/facts/skipped.jsonl").exists()


# -- base ------------------------------------------------------------------------------------------


def test_base_lists_and_counts_skipped_rows(place, capsys):
    write_folder(
        place / "data",
        sft_train=[
            POST,
            POST | {"title": None},
            POST | {"title": "x " * 400},
            POST | {"summary": "x " * 90},
        ],
        comparisons_train=[PAIR, EMPTY_PAIR, EQUAL_PAIR],
    )
    limit = make_config("tiny").data.max_summary_tokens
    reasons = ["no field title", "cannot be cut to fit", f"times the limit {limit}"]
    for name in ("first", "again"):  # the second run takes the tokens from the cache
        arguments = ["--preset", "tiny", "--data", "data", "--set", "data.on_bad_row=skip"]
        run_module(base, [*arguments, "--name", name])
        folder = place / f"runs/{name}/seed44413/base"

        skipped = read_lines(folder / "data/skipped.jsonl")
        assert [row["where"] for row in skipped] == [
            "data/sft_train.jsonl:2",
            "data/sft_train.jsonl:3",
            "data/sft_train.jsonl:4",
        ]
        for row, reason in zip(skipped, reasons, strict=True):
            assert reason in row["reason"]

        counts = (read_json(folder / "manifest.json") or {})["results"]["rows"]
        assert counts["sft_train"] == {"rows": 1, "skipped": 3, "over_limit": 0, "most_over": 0}
        assert counts["sft_validation"]["skipped"] == 0
        assert counts["comparisons_train"]["rows"] == 3
        assert counts["comparisons_train"]["empty_summaries"] == 1
        assert counts["comparisons_train"]["equal_summaries"] == 1

        printed = " ".join(capsys.readouterr().err.split())
        path = f"runs/{name}/seed44413/base/data/skipped.jsonl"
        assert f"3 bad rows were skipped; the reasons are in {path}" in printed


# -- positions of a model --------------------------------------------------------------------------


def test_a_models_positions_are_found_by_what_its_family_calls_them(policy):
    config = GPT2Config(vocab_size=8, n_positions=33, n_embd=8, n_layer=1, n_head=2)
    assert max_positions(GPT2LMHeadModel(config)) == 33
    assert max_positions(policy) == 256
    require_room(policy, 200, 56, "eval.dpo_summary_tokens")
    with pytest.raises(UserError, match=r"eval\.dpo_summary_tokens is 57, after .* 256 positions"):
        require_room(policy, 200, 57, "eval.dpo_summary_tokens")
