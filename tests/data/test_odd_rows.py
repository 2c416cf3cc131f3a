"""Rows that are not as the paper describes them: which are kept and counted, refused, skipped."""

import math
import re
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from eval.calibration import calibrate
from stages import base, dpo, rm
from stages.base import remarks
from stages.data.bad_rows import BadRows
from stages.data.builtin import make_comparison, make_post
from stages.data.formats import learned
from stages.data.readers import (
    beside_known,
    check_comparison,
    differences,
    kept_odd_rows,
    label_strength,
    read_source,
)
from stages.data.tokens import (
    CNNDM_LIMITS,
    Limits,
    length_report,
    over_limit,
    plain_encoder,
    tokenize_comparisons,
    tokenize_posts,
)
from stages.driving.start import run_module
from stages.models.loading import positions_of, require_room
from stages.running.files import read_json, read_lines
from stages.settings.command_line import make_config
from stages.settings.config import Data, UserError
from stages.settings.sections import format_post
from tests.data.test_posts import ARTICLE, BAD_ROWS, LIMITS, PAIR, POST, edited, write_folder
from tests.lib.asserts import close, refusal_of
from tests.lib.learners import state_of

EMPTY = edited(PAIR, "summaries.1.text", "")  # the chosen one
EQUAL = edited(PAIR, "summaries.1.text", " one is better")


def limits(**changed: Any) -> Limits:
    return replace(LIMITS, **changed)


def test_an_empty_summary_of_a_comparison_is_kept_and_its_response_is_eos_alone(tokenizer):
    check_comparison("here", EMPTY)
    blank = edited(PAIR, "summaries.1.text", " ")
    rows = [("x:1", EMPTY), ("x:2", PAIR), ("x:3", blank)]
    split = tokenize_comparisons(rows, tokenizer, LIMITS, "pairs")
    assert split.columns["chosen"][0].tolist() == [tokenizer.eos_token_id]
    assert tokenizer.decode(split.columns["rejected"][0]) == " one is better<|endoftext|>"
    assert tokenizer.decode(split.columns["chosen"][1]) == " two<|endoftext|>"
    assert tokenizer.decode(split.columns["chosen"][2]) == " <|endoftext|>"  # as it was written


def test_odd_comparisons_are_counted_by_kind():
    doubtful = edited(PAIR, "extra.confidence", 2)  # the choice is the second
    bare = {key: value for key, value in PAIR.items() if key != "extra"}
    both_empty = edited(EMPTY, "summaries.0.text", " ")
    tie = edited(PAIR, "extra.confidence", 5)
    assert kept_odd_rows([PAIR, EMPTY, EQUAL, doubtful, bare, both_empty, tie]) == {
        "empty_summaries": 2,
        "equal_summaries": 2,
        "without_confidence": 1,
        "against_choice": 1,
        "chose_first": 0,
        "contradicted": 0,
    }
    turned = edited(edited(PAIR, "info.id", "other"), "choice", 0)
    labels = kept_odd_rows([PAIR, turned, edited(turned, "info.post", "Another.")])
    assert (labels["chose_first"], labels["contradicted"]) == (2, 2)


def test_held_out_rows_are_found_in_the_training_data_by_their_text_and_not_by_their_ids():
    spaced = {"id": "b", "post": "First part.\n\n My boss  sold my bike.\n"}
    again, other = POST | spaced, POST | {"post": "Another."}
    turned = PAIR | {"summaries": PAIR["summaries"][::-1], "info": PAIR["info"] | spaced}
    rows = {
        "sft_train": [POST],
        "sft_validation": [again, other, other | {"id": "c", "post": "A third."}],
        "ppo_train": [{key: value for key, value in other.items() if key != "summary"}],
        "comparisons_train": [PAIR],
        # The same pair in the other order: with its label, and with the opposite one.
        "comparisons_validation": [turned | {"choice": 0}, turned, edited(PAIR, "info.title", "x")],
    }
    assert learned(rows) == {
        "in": {"sft_train": 1, "ppo_train": 1, "comparisons_train": 1},
        "posts": 2,
        "of_posts": 3,
        "pairs": 2,
        "of_pairs": 3,
        "against": 1,
    }


def test_a_judge_is_calibrated_on_empty_and_equal_summaries_too(tmp_path, runs):
    post = make_post("toy1-validation-0")
    comparison = make_comparison(post, "1 0", "valid1")
    rows = [edited(comparison, f"summaries.{side}.text", "") for side in (0, 1)]
    rows.append(edited(rows[0], "summaries.1.text", ""))
    folder = write_folder(tmp_path / "data", comparisons_validation=[*rows, "{"])
    overrides = ("data.on_bad_row=skip", "judge.kind=facts")
    config = make_config("tiny", overrides=overrides, name="odd")
    config = replace(config, data=replace(config.data, source=str(folder)))
    found = calibrate(config)
    assert found["judged"] == 3
    assert (runs / "odd/seed44413/calibration/facts/skipped.jsonl").exists()


def test_strength_is_the_distance_of_the_confidence_from_the_tie():
    found = [label_strength(edited(PAIR, "extra.confidence", point)) for point in range(1, 10)]
    assert found == [4, 3, 2, 1, 0, 1, 2, 3, 4]
    assert label_strength(edited(PAIR, "extra.confidence", None)) is None
    assert label_strength(PAIR | {"extra": None}) is None


def test_a_limit_counts_the_eos_and_longer_rows_are_kept_and_counted(tokenizer):
    located = [("f:1", POST | {"summary": "y"}), ("f:2", POST)]
    split = tokenize_posts(located, tokenizer, LIMITS, "posts")
    report = length_report(split)
    exact = len(plain_encoder(tokenizer)([" " + POST["summary"]])[0]) + 1
    assert report["longest_summary"] == exact
    joint = report["longest_query"] + exact
    assert report["longest_query_summary"] == joint
    none = {"over_limit": 0, "most_over": 0}
    assert over_limit(split, limits(response=exact, query_response=joint)) == none
    one = {"over_limit": 1, "most_over": 2}
    for small in (limits(response=exact - 2), limits(query_response=joint - 2)):
        assert len(tokenize_posts(located, tokenizer, small, "posts")) == 2
        assert over_limit(split, small) == one
    cut = tokenize_posts(located[1:], tokenizer, limits(query=report["longest_query"] - 1), "")
    assert cut.rows[0]["query"] == format_post(POST | {"post": "First part."})
    pairs = tokenize_comparisons([("f:9", PAIR)], tokenizer, LIMITS, "pairs")
    longest = length_report(pairs)["longest_rejected"]  # " one is better" is longer than " two"
    assert over_limit(pairs, limits(response=longest - 1)) == {"over_limit": 1, "most_over": 1}


def test_the_newline_after_an_article_counts_for_the_query_and_not_for_both_together(
    source_tokenizer,
):
    """Huang et al. 2024 cut the whole template, and measure 2021 on query.strip() + response."""
    tokenizer = source_tokenizer
    encode = plain_encoder(tokenizer)
    article = "line\n" * 50
    (query,) = encode([f"Article:\n{article}\n\nTL;DR:"])
    (with_newline,) = encode([f"Article:\n{article}\n\nTL;DR:\n"])
    assert len(with_newline) == len(query) + 1
    located = [("f:1", edited(ARTICLE, "info.article", article))]
    (response,) = encode([" one is better"])
    exact = replace(CNNDM_LIMITS, query=len(with_newline))
    split = tokenize_comparisons(located, tokenizer, exact, "news")
    assert split.columns["queries"][0].tolist() == query
    joint = len(query) + len(response) + 1  # with EOS
    assert over_limit(split, replace(exact, query_response=joint))["over_limit"] == 0
    assert over_limit(split, replace(exact, query_response=joint - 1))["most_over"] == 1
    shorter = tokenize_comparisons(located, tokenizer, replace(exact, query=len(query)), "news")
    assert len(shorter.columns["queries"][0]) < len(query)


@pytest.fixture
def odd_pairs(tokenizer):
    located = [(f"f:{number}", row) for number, row in enumerate((PAIR, EMPTY, EQUAL))]
    return tokenize_comparisons(located, tokenizer, LIMITS, "pairs")


def odd_state(network):
    config = make_config("tiny", overrides=("memory.microbatch_size=4",), name="odd")
    run = types.SimpleNamespace(config=config, resume=None, main=False, append=lambda *_: None)
    return state_of(config, network, torch.optim.SGD(network.parameters(), lr=1e-3), run=run)


def all_finite(numbers):
    return all(math.isfinite(one) for one in numbers.values() if isinstance(one, float))


def test_the_reward_model_learns_from_empty_and_equal_summaries(reward_model, odd_pairs):
    state = odd_state(reward_model)
    assert all_finite(rm.take_step(state, odd_pairs, [0, 1, 2]))
    assert all(torch.isfinite(weight).all() for weight in reward_model.parameters())
    found = rm.evaluate(state.run, state.accelerator, reward_model, odd_pairs, "odd")
    assert all_finite(found)
    assert found["pairs"] == 3
    # Read at EOS: of an empty summary that is the token after the query. Equal texts, equal scores.
    cpu = torch.device("cpu")
    with torch.no_grad():
        chosen, rejected = rm.score_pairs(reward_model, odd_pairs, [0, 1, 2], cpu)
        query = odd_pairs.columns["queries"][1]
        alone = torch.cat([query, torch.tensor([0])]).unsqueeze(0)
        close(chosen[1], reward_model(input_ids=alone).logits[0, -1, 0], 1e-5)
    close(chosen[2], rejected[2].item())


def test_dpo_learns_from_empty_and_equal_summaries(policy, odd_pairs):
    state = odd_state(policy)
    cpu = torch.device("cpu")
    with torch.no_grad():
        both = dpo.pair_logprobs(policy, odd_pairs, [0, 1, 2], cpu)
    reference = torch.stack(both, dim=1)
    stats = dpo.take_step(state, odd_pairs, reference, [0, 1, 2])
    assert stats["loss/train"] == pytest.approx(math.log(2), abs=1e-5)
    assert all_finite(stats)
    assert all(torch.isfinite(weight).all() for weight in policy.parameters())


def test_rows_that_cannot_be_used_are_refused_with_file_line_field_and_setting(tokenizer):
    located = [("f:1", POST | {"post": "x", "summary": "y"}), ("f:2", POST)]
    report = length_report(tokenize_posts(located, tokenizer, LIMITS, ""))
    joint = report["longest_query_summary"]
    half = (report["longest_summary"] - 1) // 2
    cases = {
        r"f:1: field post cannot be cut to fit": limits(query=5),
        rf"f:2: field summary has \d+ tokens with EOS, more than 2 times the limit {half}": limits(
            response=half, setting="data.max_summary_tokens"
        ),
        rf"f:2: .* {joint - 1} positions": limits(positions=joint - 1),
        rf"f:2: .* up to 90, the model has {report['longest_query'] + 89} positions": limits(
            positions=report["longest_query"] + 89, sampled=90
        ),
    }
    for message, small in cases.items():
        line = refusal_of(tokenize_posts, located, tokenizer, small, "posts")
        assert re.search(message, line)
        assert "data.on_bad_row=skip" in line
    assert len(tokenize_posts(located, tokenizer, limits(positions=joint), "posts")) == 2
    line = refusal_of(tokenize_comparisons, [("f:9", PAIR)], tokenizer, limits(response=1), "pairs")
    assert "f:9: field summaries[].text has" in line


def test_a_models_positions_are_found_by_what_its_family_calls_them(policy):
    config = GPT2Config(vocab_size=8, n_positions=33, n_embd=8, n_layer=1, n_head=2)
    assert positions_of(GPT2LMHeadModel(config)) == 33
    assert positions_of(policy) == 256
    require_room(policy, 200, 56, "eval.dpo_summary_tokens")
    with pytest.raises(UserError, match=r"eval\.dpo_summary_tokens is 57, after .* 256 positions"):
        require_room(policy, 200, 57, "eval.dpo_summary_tokens")


@pytest.mark.parametrize("name", ["not JSON", "missing field", "choice 2"])
def test_a_bad_row_is_skipped_and_listed_where_that_is_asked(tmp_path, name):
    split, row, named = BAD_ROWS[name]
    good = (POST, POST | {"id": "a2"}) if split.startswith("sft") else (PAIR, PAIR)
    folder = write_folder(tmp_path, **{split: [good[0], row, good[1]]})
    bad = BadRows("skip")
    data = Data(source=str(folder), on_bad_row="skip")
    found = dict(read_source(data, str(folder), bad))
    assert [where.rpartition(":")[2] for where, _ in found[split]] == ["1", "3"]
    (listed,) = bad.skipped
    assert (listed["split"], listed["where"]) == (split, f"{folder}/{split}.jsonl:2")
    assert named in listed["reason"]


def test_skipped_rows_are_listed_in_the_stages_folder_and_counted(place, capsys):
    rows = [
        POST,
        POST | {"title": None},
        POST | {"title": "x " * 400},
        POST | {"summary": "x " * 90},
    ]
    write_folder(place / "data", sft_train=rows, comparisons_train=[PAIR, EMPTY, EQUAL])
    arguments = ["--preset", "tiny", "--data", "data", "--set", "data.on_bad_row=skip"]
    most = make_config("tiny").data.max_summary_tokens
    for name in ("first", "again"):  # the second takes the tokens from the cache
        run_module(base, [*arguments, "--name", name])
        folder = place / f"runs/{name}/seed44413/base"
        listed = read_lines(folder / "data/skipped.jsonl")
        assert [row["where"] for row in listed] == [f"data/sft_train.jsonl:{n}" for n in (2, 3, 4)]
        reasons = ("no field title", "cannot be cut to fit", f"times the limit {most}")
        assert all(one in row["reason"] for one, row in zip(reasons, listed, strict=True))
        counts = (read_json(folder / "manifest.json") or {})["results"]["rows"]
        assert counts["sft_train"] == {"rows": 1, "skipped": 3, "over_limit": 0, "most_over": 0}
        of_pairs = [counts["comparisons_train"][key] for key in ("rows", "empty_summaries")]
        assert [*of_pairs, counts["comparisons_train"]["equal_summaries"]] == [3, 1, 1]
        assert counts["sft_validation"]["skipped"] == 0
        said = " ".join(capsys.readouterr().err.split())
        path = f"runs/{name}/seed44413/base/data/skipped.jsonl"
        assert f"3 bad rows were skipped, with the reasons in {path}" in said


def test_a_split_of_bad_rows_alone_is_refused_even_where_rows_are_skipped(tmp_path, tokenizer):
    folder = write_folder(tmp_path, sft_train=["{", "{"])
    with pytest.raises(UserError, match="sft_train is empty"):
        dict(read_source(Data(source=str(folder), on_bad_row="skip"), str(folder)))
    with pytest.raises(UserError, match="no row is left that can be used, the first: field post"):
        tokenize_posts([("f:1", POST)], tokenizer, limits(query=5), "posts", BadRows("skip"))


def known_rows(data):
    return {split: count["known"] for split, count in beside_known(data, {}).items()}


def test_published_data_are_counted_beside_the_known_numbers():
    known = known_rows(Data())
    assert known == {
        "sft_train": 116722,
        "sft_validation": 6447,
        "comparisons_train": 92858,
        "comparisons_validation": 86086,
    }
    assert known_rows(Data(source="folder")) == {}
    assert known_rows(Data(sft_dataset="mine/posts", comparisons_dataset="mine/pairs")) == {}
    pinned = Data(comparisons_dataset="openai/summarize_from_feedback@0123abc")
    assert known_rows(pinned) == known
    located = {
        "sft_train": [("f:1", POST)] * 116722,
        "sft_validation": [("f:1", POST)] * 6447,
        "comparisons_train": [("f:1", PAIR)] * 92858,
        "comparisons_validation": [("f:1", PAIR)] * 86086,
    }
    assert differences(beside_known(Data(), located)) == ""
    located["sft_train"].pop()
    text = differences(beside_known(Data(), located))
    assert "\n" not in text
    assert "sft_train has 116,721 rows, known are 116,722" in text
    assert "comparisons" not in text


def test_what_a_user_should_know_of_the_rows_is_one_line_each():
    quiet = {"rows": 600, "skipped": 0, "over_limit": 0, "most_over": 0}
    counts = {"posts": 0, "of_posts": 600, "pairs": 0, "of_pairs": 9}
    rows: dict[str, Any] = {"sft_validation": quiet}
    results: dict[str, Any] = {"rows": rows, "published": {}, "learned": counts}
    assert remarks(results, Path("listed")) == []
    results["learned"] = counts | {"pairs": 3}
    (told,) = remarks(results, Path("listed"))
    assert told.startswith("held-out pairs: 3 of 9 stand in the training data too")
    results["learned"] = counts
    rows["sft_train"] = {"rows": 1945, "skipped": 2, "over_limit": 27, "most_over": 4}
    results["published"] = {"sft_train": {"rows": 1945, "known": 116722}}
    over, skipped, changed = remarks(results, Path("listed"))
    assert over.startswith("27 rows are up to 4 tokens over data.max_*: they are used whole")
    assert skipped == "2 bad rows were skipped, with the reasons in listed"
    assert "1,945 rows, known are 116,722" in changed
    assert "\n" not in told + over + skipped + changed
