"""The gold reward model: another run's model reads the texts itself, and says what it is."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from eval import calibration, controls
from eval.judge import judge_summaries, make_judge
from eval.judges.gold import GoldJudge, Text
from eval.judges.protocol import Comparison, judge_all
from eval.scores import proxy_and_gold
from stages import base, normalize, rm, sft
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.judge import Checks, JudgeSettings
from stages.data.halves import in_half
from stages.models.forward import summary_scores
from stages.runs.files import read_lines
from stages.runs.gold import gold_folder
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.staleness import find_problem
from stages.training.preferences import training_pairs
from tests.lib.make_stages import run_module
from tests.lib.resuming import SETTINGS, Killed

GOLD_ARGUMENTS = "--preset tiny --name gold --seed 7 --set".split()


@pytest.fixture(scope="module")
def judged(whole, tmp_path_factory):
    """A folder with a finished run (seed 44413) and a gold reward model, `gold/seed7`, that was
    trained on the posts of the odd half alone and has a tokenizer of another size."""
    root = tmp_path_factory.mktemp("gold")
    shutil.copytree(whole.parents[1], root / "runs", copy_function=os.link)
    shutil.rmtree(root / "runs/resumed/seed44413/judge")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for module in (base, sft, rm, normalize):
            run_module(module, [*GOLD_ARGUMENTS, *SETTINGS, "rm.pairs=odd", "base.vocab_size=600"])
    return root


@pytest.fixture
def config(judged, place):
    shutil.copytree(judged / "runs", place / "runs", copy_function=os.link)
    made = make_config("tiny", name="resumed", overrides=tuple(SETTINGS))
    return made.changed(judge=JudgeSettings(kind="reward_model", model="gold/seed7"))


def by_hand(folder: Path, query: str, summary: str) -> float:
    """The score of one text, alone, without padding: the scalar at the EOS."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(f"{query} {summary}", add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, tokenizer.eos_token_id]])).logits
    return logits[0, -1, 0].item()


def test_the_gold_model_reads_every_text_itself_and_prefers_the_higher_score(config):
    results = judge_summaries(config)
    folder = stage_folder(config, "judge")
    summaries = stage_folder(config, "summaries")
    rows = read_lines(folder / "gold_scores.jsonl")
    written = {
        (path.stem, row["id"]): row
        for path in summaries.glob("*.jsonl")
        for row in read_lines(path)
    }
    assert {(row["policy"], row["id"]) for row in rows} == written.keys()
    model = Path("runs/gold/seed7/normalize/model")
    for row in (rows[0], rows[-1]):
        text = written[row["policy"], row["id"]]
        assert row["score"] == pytest.approx(
            by_hand(model, text["query"], text["summary"]), abs=1e-4
        )
        expected = by_hand(model, text["query"], text["reference"])
        assert row["reference_score"] == pytest.approx(expected, abs=1e-4)
        assert row["score"] != text["score"]  # not the run's own
    verdicts = {
        (row["policy"], row["id"], row["verdict"])
        for row in read_lines(folder / "judgements.jsonl")
    }
    for row in rows:
        better = "policy" if row["score"] > row["reference_score"] else "reference"
        same = row["score"] == row["reference_score"]
        assert (row["policy"], row["id"], "tie" if same else better) in verdicts
    assert results["judge"]["is_llm"] is False
    assert results["judge"]["name"] == "gold reward model gold seed 7, not an LLM"
    assert "it ranks" in results["judge"]["note"]
    assert find_problem(config, "judge") is None


def test_a_run_whose_name_begins_with_seed_can_be_gold(runs):
    for name, folder in {
        "seedling": "seedling/seed44413/normalize",
        "seed12": "seed12/seed44413/normalize",
        "other/seed1": "other/seed1/normalize",
    }.items():
        overrides = ("judge.kind=reward_model", f"judge.model={name}")
        assert gold_folder(make_config("tiny", overrides=overrides)) == runs / folder


def test_another_gold_model_makes_the_judgement_stale_and_a_damaged_one_is_refused(config):
    judge_summaries(config)
    folder = Path("runs/gold/seed7/normalize")
    manifest = read_manifest(folder) or {}
    path = folder / "manifest.json"
    path.unlink()
    another = manifest | {"content": "another"}
    path.write_text(json.dumps(another))
    assert str(find_problem(config, "judge")) == "ran with an earlier gold reward model"
    assert find_problem(config, "summaries") is None
    weights = folder / "model/model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="normalize has changed on disk"):
        make_judge(config, {})


def test_controls_and_calibration_work_with_a_gold_model(config):
    config = config.changed(checks=Checks(control_posts=4, calibration_pairs=12))
    found = controls.judge_controls(config)
    assert found["controls"]["title"]["judgements"] == 8
    assert found["controls"]["reference"]["passed"]
    calibrated = calibration.calibrate(config)
    assert calibrated["pairs"] == 12
    assert calibrated["statistics"]["swap_consistency"]["estimate"] == 1  # a score has no order


def test_a_long_post_is_cut_as_in_its_training_and_a_text_over_its_positions_is_not_judged(config):
    judge = GoldJudge(config)
    post = "\n".join(f"Line {number} of a long story." for number in range(60))
    query = f"SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: {post}\n\nTL;DR:"
    tokens, _ = judge.tokenize(Text(query, "short"))
    assert len(tokens) <= 160 < len(judge.encode([query])[0])
    assert judge.tokenizer.decode(tokens).endswith("TL;DR:")
    asked = Comparison("p", query, "short", "word " * 3000)
    (reply,) = judge_all(judge, [asked], 1)
    assert (reply.choice, reply.finish_reason) == (None, "too long")


def test_halves_share_no_post_and_are_all_pairs_together(judged):
    data = judged / "runs/resumed/seed44413/base/data"
    halves = ("all", "even", "odd")
    ids = {pairs: [row["id"] for row in training_pairs(data, pairs).rows] for pairs in halves}
    assert sorted(ids["even"] + ids["odd"]) == sorted(ids["all"])
    assert not set(ids["even"]) & set(ids["odd"])
    assert min(len(ids["even"]), len(ids["odd"])) > len(ids["all"]) // 4
    # The published digests of "abc" and "hello" end in ad and in 24.
    assert [in_half("abc", one) for one in ("all", "even", "odd")] == [True, False, True]
    assert [in_half("hello", one) for one in ("all", "even", "odd")] == [True, True, False]
    half = training_pairs(data, "odd")
    whole = training_pairs(data, "all")
    for row, about in enumerate(half.rows):
        at = whole.rows.index(about)
        for name in ("queries", "chosen", "rejected"):
            assert half.columns[name][row].tolist() == whole.columns[name][at].tolist()


def test_gains_are_paired_by_post_and_a_text_without_a_score_is_left_out():
    sft = [{"id": k, "score": s, "reference_score": 0.5} for k, s in enumerate((0.0, 1.0, 5.0))]
    ppo = [{"id": k, "score": s, "reference_score": 0.5} for k, s in enumerate((2.0, 5.0, None))]
    found = proxy_and_gold({}, {"sft": sft, "ppo": ppo})
    gain = found["gains"]["ppo"]["gold"]  # differences 2 and 4: mean 3, s = sqrt 2, half t(1) * 1
    assert (gain["estimate"], gain["posts"]) == (3.0, 2)
    assert gain["high"] - 3.0 == pytest.approx(12.706205)
    assert proxy_and_gold({}, {"sft": sft, "ppo": ppo[:1]})["gains"]["ppo"]["gold"] is None
    assert found["gains"]["ppo"]["proxy"] is None
    assert found["gold"]["sft"]["estimate"] == 2.0
    assert found["gold"]["reference"]["low"] == found["gold"]["reference"]["high"] == 0.5
    assert found["proxy"] == {"reference": None}


def test_an_interrupted_scoring_goes_on_where_it_was(config, monkeypatch):
    whole_config = config.changed(
        judge=config.judge.changed(model="runs/gold/seed7/normalize/model")
    )
    judge_summaries(whole_config)
    calls: list[int] = []

    def die_at_third(*inputs):
        calls.append(len(inputs[1]))
        if len(calls) == 3:
            raise Killed
        return summary_scores(*inputs)

    monkeypatch.setattr("eval.judges.gold.summary_scores", die_at_third)
    with pytest.raises(Killed):
        judge_summaries(config)
    calls[:] = [0] * 3
    judge_summaries(config)
    texts = {
        (row["query"], row[key])
        for path in stage_folder(config, "summaries").glob("*.jsonl")
        for row in read_lines(path)
        for key in ("summary", "reference")
    }
    # A row holds a post with all of its texts, and a pass as many rows as have a batch's texts.
    posts = Counter(query for query, _ in texts)
    assert sum(calls) == len(posts) - 2 * (config.memory.forward_batch_size // max(posts.values()))
    written, expected = (
        stage_folder(x, "judge") / "gold_scores.jsonl" for x in (config, whole_config)
    )
    assert read_lines(written) == read_lines(expected)
