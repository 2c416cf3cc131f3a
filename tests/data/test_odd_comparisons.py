"""Empty and equal summaries go through every stage; base skips bad rows and lists them."""

import io
import math
import types
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class Base:
    """A finished base on data with bad rows."""

    folder: Path
    printed: str
    """What it printed to the standard error stream."""


def make_base(name: str) -> Base:
    """Run the stage on the folder `data`, skipping bad rows."""
    arguments = ["--preset", "tiny", "--name", name, "--data", "data"]
    with redirect_stderr(io.StringIO()) as printed:
        run_module(base, [*arguments, "--set", "data.on_bad_row=skip"])
    folder = Path(f"runs/{name}/seed44413/base").absolute()
    return Base(folder=folder, printed=printed.getvalue())


@pytest.fixture(scope="module", params=["new tokens", "tokens from the cache"])
def finished_base(request, tmp_path_factory):
    """A base on three bad posts and two odd comparisons; the bad rows were skipped."""
    root = tmp_path_factory.mktemp("odd")
    write_folder(
        root / "data",
        sft_train=[
            POST,
            POST | {"title": None},
            POST | {"title": "x " * 400},
            POST | {"summary": "x " * 90},
        ],
        comparisons_train=[PAIR, EMPTY_PAIR, EQUAL_PAIR],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        first = make_base("first")
        if request.param == "new tokens":
            return first
        return make_base("again")


def test_base_lists_skipped_rows(finished_base):
    limit = make_config("tiny").data.max_summary_tokens

    rows = read_lines(finished_base.folder / "data/skipped.jsonl")

    no_title, too_long_title, too_long_summary = rows
    assert no_title["where"] == "data/sft_train.jsonl:2"
    assert "no field title" in no_title["reason"]
    assert too_long_title["where"] == "data/sft_train.jsonl:3"
    assert "cannot be cut to fit" in too_long_title["reason"]
    assert too_long_summary["where"] == "data/sft_train.jsonl:4"
    assert f"times the limit {limit}" in too_long_summary["reason"]


def test_base_counts_skipped_and_odd_rows(finished_base):
    counts = read_json(finished_base.folder / "manifest.json")["results"]["rows"]
    assert counts["sft_train"] == {"rows": 1, "skipped": 3, "over_limit": 0, "most_over": 0}
    assert counts["sft_validation"]["skipped"] == 0
    assert counts["comparisons_train"]["rows"] == 3
    assert counts["comparisons_train"]["empty_summaries"] == 1
    assert counts["comparisons_train"]["equal_summaries"] == 1


def test_base_says_where_skipped_rows_are_listed(finished_base):
    printed = " ".join(finished_base.printed.split())
    name = finished_base.folder.parents[1].name
    path = f"runs/{name}/seed44413/base/data/skipped.jsonl"
    assert f"3 bad rows were skipped; the reasons are in {path}" in printed


# -- positions of a model --------------------------------------------------------------------------


def test_the_number_of_positions_is_read_whatever_its_family_calls_it(policy):
    config = GPT2Config(vocab_size=8, n_positions=33, n_embd=8, n_layer=1, n_head=2)
    assert max_positions(GPT2LMHeadModel(config)) == 33
    assert max_positions(policy) == 256


def test_a_query_and_its_summary_must_fit_into_the_positions(policy):
    require_room(policy, 200, 56, "eval.dpo_summary_tokens")
    with pytest.raises(UserError, match=r"eval\.dpo_summary_tokens is 57, after .* 256 positions"):
        require_room(policy, 200, 57, "eval.dpo_summary_tokens")
