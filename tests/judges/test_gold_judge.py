"""The gold judge: another run's reward model scores the texts itself, and says what it is."""

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
from eval.judges.protocol import TOO_LONG, Comparison, judge_all
from stages import base, normalize, rm, sft
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.judge import Checks, JudgeSettings
from stages.data.halves import in_half
from stages.models.forward import summary_scores
from stages.runs.files import read_json, read_lines
from stages.runs.gold import gold_folder
from stages.runs.manifest import stage_folder
from stages.runs.staleness import find_problem
from stages.training.preferences import training_pairs
from tests.lib.make_stages import run_module
from tests.lib.resuming import SETTINGS, Killed

GOLD_ARGUMENTS = [
    "--preset",
    "tiny",
    "--name",
    "gold",
    "--seed",
    "7",
    "--set",
    *SETTINGS,
    "rm.pairs=odd",
    "base.vocab_size=600",
]
GOLD = Path("runs/gold/seed7/normalize")


@pytest.fixture(scope="module")
def two_runs(whole, tmp_path_factory):
    """A folder with a finished run, `resumed`, and a gold reward model, `gold/seed7`.

    The gold model was trained on the posts of the odd half, and its tokenizer has another size.
    """
    root = tmp_path_factory.mktemp("gold")
    shutil.copytree(whole.parents[1], root / "runs", copy_function=os.link)
    shutil.rmtree(root / "runs/resumed/seed44413/judge")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for module in (base, sft, rm, normalize):
            run_module(module, GOLD_ARGUMENTS)
    return root


@pytest.fixture
def config(two_runs, place):
    """The config of the finished run in a copy of the folder, judged by the gold model."""
    shutil.copytree(two_runs / "runs", place / "runs", copy_function=os.link)
    resumed = make_config("tiny", name="resumed", overrides=tuple(SETTINGS))
    return resumed.changed(judge=JudgeSettings(kind="reward_model", model="gold/seed7"))


def summaries_by_policy(config):
    """The rows of each policy's summaries."""
    folder = stage_folder(config, "summaries")
    return {path.stem: read_lines(path) for path in folder.glob("*.jsonl")}


def gold_scores(config):
    """The rows of scores that the judge wrote."""
    return read_lines(stage_folder(config, "judge") / "gold_scores.jsonl")


# -- scores and verdicts ---------------------------------------------------------------------------


def score_by_transformers(query: str, summary: str) -> float:
    """The gold model's output at the EOS of one unpadded text, without our code."""
    folder = GOLD / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(f"{query} {summary}", add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, tokenizer.eos_token_id]])).logits
    return logits[0, -1, 0].item()


def test_every_summary_of_every_policy_is_scored(config):
    judge_summaries(config)

    scored = {(row["policy"], row["id"]) for row in gold_scores(config)}
    written = set()
    for policy, rows in summaries_by_policy(config).items():
        for row in rows:
            written.add((policy, row["id"]))
    assert scored == written


def test_scores_are_the_gold_models_and_not_the_runs_own(config):
    judge_summaries(config)

    summaries = summaries_by_policy(config)
    rows = gold_scores(config)
    for row in (rows[0], rows[-1]):
        [text] = [text for text in summaries[row["policy"]] if text["id"] == row["id"]]
        score = score_by_transformers(text["query"], text["summary"])
        reference_score = score_by_transformers(text["query"], text["reference"])
        assert row["score"] == pytest.approx(score, abs=1e-4)
        assert row["reference_score"] == pytest.approx(reference_score, abs=1e-4)
        assert row["score"] != text["score"]


def test_the_judge_prefers_the_higher_score(config):
    judge_summaries(config)

    judgements = read_lines(stage_folder(config, "judge") / "judgements.jsonl")
    verdicts = {(row["policy"], row["id"], row["verdict"]) for row in judgements}
    for row in gold_scores(config):
        if row["score"] > row["reference_score"]:
            expected = "policy"
        elif row["score"] < row["reference_score"]:
            expected = "reference"
        else:
            expected = "tie"
        assert (row["policy"], row["id"], expected) in verdicts


def test_the_results_say_who_judged(config):
    results = judge_summaries(config)

    assert results["judge"]["is_llm"] is False
    assert results["judge"]["name"] == "gold reward model gold seed 7, not an LLM"
    assert "it ranks" in results["judge"]["note"]
    assert find_problem(config, "judge") is None


def test_controls_work_with_a_gold_model(config):
    results = controls.judge_controls(config.changed(checks=Checks(control_posts=4)))

    assert results["controls"]["title"]["judgements"] == 8
    assert results["controls"]["reference"]["passed"]


def test_calibration_works_with_a_gold_model(config):
    results = calibration.calibrate(config.changed(checks=Checks(calibration_pairs=12)))

    assert results["pairs"] == 12
    assert results["statistics"]["swap_consistency"]["estimate"] == 1  # a score has no order


# -- which model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("seedling", "seedling/seed44413/normalize"),
        ("seed12", "seed12/seed44413/normalize"),
        ("other/seed1", "other/seed1/normalize"),
    ],
)
def test_a_run_whose_name_begins_with_seed_can_be_gold(runs, model, folder):
    config = make_config("tiny", overrides=("judge.kind=reward_model", f"judge.model={model}"))
    assert gold_folder(config) == runs / folder


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file that may be a hard link, and leave its other names alone."""
    path.unlink()
    path.write_bytes(content)


def test_another_gold_model_makes_the_judgement_stale(config):
    judge_summaries(config)
    manifest = read_json(GOLD / "manifest.json")

    retrained = manifest | {"content": "another"}
    rewrite(GOLD / "manifest.json", json.dumps(retrained).encode())

    assert str(find_problem(config, "judge")) == "ran with an earlier gold reward model"
    assert find_problem(config, "summaries") is None


def test_a_damaged_gold_model_is_refused(config):
    weights = GOLD / "model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    rewrite(weights, bytes(content))

    with pytest.raises(UserError, match="normalize has changed on disk"):
        make_judge(config, {})


# -- lengths ---------------------------------------------------------------------------------------


def test_a_long_post_is_cut_as_in_the_gold_models_training(config):
    judge = GoldJudge(config)
    post = "\n".join(f"Line {number} of a long story." for number in range(60))
    query = f"SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: {post}\n\nTL;DR:"

    tokens = judge.tokenize(Text(query=query, summary="short"))

    [all_tokens] = judge.encode([query])
    assert len(tokens.query) <= 160 < len(all_tokens)
    assert judge.tokenizer.decode(tokens.query).endswith("TL;DR:")


def test_a_text_beyond_the_gold_models_positions_is_not_judged(config):
    query = "SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: A story.\n\nTL;DR:"
    question = Comparison(post_id="p", query=query, first="short", second="word " * 3000)

    [reply] = judge_all(GoldJudge(config), [question], 1)

    assert reply.choice is None
    assert reply.finish_reason == TOO_LONG


# -- halves of the training comparisons ------------------------------------------------------------


def test_the_two_halves_share_no_post_and_are_all_pairs_together(two_runs):
    data = two_runs / "runs/resumed/seed44413/base/data"
    every = [row["id"] for row in training_pairs(data, "all").rows]
    even = [row["id"] for row in training_pairs(data, "even").rows]
    odd = [row["id"] for row in training_pairs(data, "odd").rows]

    assert sorted(even + odd) == sorted(every)
    assert not set(even) & set(odd)
    assert min(len(even), len(odd)) > len(every) // 4


@pytest.mark.parametrize(
    ("post_id", "half", "other_half"),
    # The published SHA-256 digests of "abc" and "hello" end in ad and in 24.
    [("abc", "odd", "even"), ("hello", "even", "odd")],
)
def test_the_last_bit_of_the_digest_of_its_id_puts_a_post_into_a_half(post_id, half, other_half):
    assert in_half(post_id, half)
    assert not in_half(post_id, other_half)
    assert in_half(post_id, "all")


def test_a_half_keeps_the_tokens_of_its_rows(two_runs):
    data = two_runs / "runs/resumed/seed44413/base/data"
    odd = training_pairs(data, "odd")
    every = training_pairs(data, "all")

    for number, row in enumerate(odd.rows):
        number_of_all = every.rows.index(row)
        for column in ("queries", "chosen", "rejected"):
            tokens = odd.columns[column][number].tolist()
            assert tokens == every.columns[column][number_of_all].tolist()


# -- interruptions ---------------------------------------------------------------------------------


def test_an_interrupted_scoring_resumes_where_it_was(config, monkeypatch):
    # The same weights in a folder without a run: another judge, and the same scores.
    uninterrupted = config.changed(judge=config.judge.changed(model=str(GOLD / "model")))
    judge_summaries(uninterrupted)
    passes: list[int] = []

    def count_posts_and_die_at_third_pass(*inputs):
        passes.append(len(inputs[1]))
        if len(passes) == 3:
            raise Killed
        return summary_scores(*inputs)

    monkeypatch.setattr("eval.judges.gold.summary_scores", count_posts_and_die_at_third_pass)
    with pytest.raises(Killed):
        judge_summaries(config)
    passes[:] = [0, 0, 0]
    judge_summaries(config)

    texts = set()
    for rows in summaries_by_policy(config).values():
        for row in rows:
            texts.add((row["query"], row["summary"]))
            texts.add((row["query"], row["reference"]))
    texts_of_post = Counter(query for query, _ in texts)
    # A pass scores posts with all of their texts, as many as fit into a batch; two passes are kept.
    posts_of_pass = config.memory.forward_batch_size // max(texts_of_post.values())
    assert sum(passes) == len(texts_of_post) - 2 * posts_of_pass
    assert gold_scores(config) == gold_scores(uninterrupted)
