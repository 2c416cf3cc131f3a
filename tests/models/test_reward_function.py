"""A reward of one's own: a function of texts, from its module to the policy that learns it."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval import controls, judge, summaries, win_rate
from reports import run_page
from stages import base, dpo, normalize, ppo, rm, sft
from stages.driving.start import run_module
from stages.finished import read_manifest
from stages.models.reward_function import TextReward
from stages.running.files import read_lines
from stages.settings.checks import UserError
from stages.settings.command_line import make_config, recorded_config
from tests.lib.asserts import refusal_of

# Every token of a response can raise this reward, so no rare event decides whether it is learned.
MODULE = """
def letters(queries, responses, rows):
    assert all(row["query"] == query and row["topic"] for row, query in zip(rows, queries))
    return [response.count("e") for response in responses]

def fails(queries, responses, rows):
    return [1 / (len(response) - len("short")) for response in responses]

def fewer(queries, responses, rows):
    return [1.0]

def infinite(queries, responses, rows):
    return [float("inf") if response == "long" else 0 for response in responses]
"""
OWN = """
    base.hidden_size=32 base.num_layers=1 ppo.critic_init=sft memory.cpu_threads=1
    eval.posts=6 checks.control_posts=3 judge.kind=reward_model
    ppo.total_episodes=256 ppo.batch_size=32 ppo.learning_rate=0.02 ppo.eos_trick=off
    ppo.critic_updates=0 ppo.critic_learning_rate=0.02
    rloo.total_episodes=64 rloo.batch_size=32 rloo.eos_trick=off reward.function=mine:letters
""".split()
JUDGED = (summaries, judge, controls, win_rate, run_page)
RISE = 1.0


@pytest.fixture
def module(runs, place):
    """The module in the working folder, and rows without pairs."""
    Path("mine.py").write_text(MODULE)
    words = "rain green tree seven bird letter he went".split()
    rows = [
        {"prompt": f"What of {n}?", "completion": " ".join(words[n % 5 :]), "topic": "rain"}
        for n in range(160)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return runs


@pytest.mark.learns
def test_a_function_of_texts_is_centred_learned_and_measured_without_pairs(module, capsys):
    words = ["--preset", "tiny", "--name", "mine", "--data", "rows.jsonl", "--set", *OWN]
    for stage in (base, sft, rm, normalize, ppo):
        run_module(stage, words)
    run_module(ppo, words, "rloo")
    for stage in JUDGED:
        run_module(stage, words)
    run = module / "mine" / "seed44413"
    mean = (read_manifest(run / "normalize") or {})["results"]["mean_before"]
    rows = read_lines(run / "base/data/sft_train.jsonl")
    assert mean == pytest.approx(sum(row["reference"].count("e") for row in rows) / len(rows))
    assert not list(run.glob("rm/model/*.safetensors"))
    for name in ("ppo", "rloo"):
        for row in read_lines(run / name / "samples.jsonl"):
            text = row["response"].removesuffix("<|endoftext|>")
            assert row["score"] == pytest.approx(text.count("e") - mean, abs=1e-4)
    for row in read_lines(run / "summaries/ppo.jsonl"):
        assert row["score"] == pytest.approx(row["summary"].count("e") - mean, abs=1e-4)
    scores = [row["objective/scores"] for row in read_lines(run / "ppo/metrics.jsonl")]
    assert sum(scores[-3:]) / 3 > scores[0] + RISE
    assert "mine:letters" in next(run.glob("report/*/*.md")).read_text()
    with pytest.raises(SystemExit):
        run_module(dpo, words)
    assert "the data have no comparisons_train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fails", "ZeroDivisionError: division by zero, for 'short'"),
        ("fewer", "ValueError: gave 1 numbers for 2 texts, for 'short'"),
        ("infinite", "ValueError: gave inf, for 'long'"),
    ],
)
def test_a_function_that_fails_is_one_line_that_names_it_and_the_text(
    module, tokenizer, function, reason
):
    own = TextReward(f"mine:{function}", tokenizer, [])
    line = refusal_of(own._numbers, ["?", "?"], ["short", "long"])
    assert line == f"reward.function=mine:{function}: {reason}"


@pytest.mark.parametrize("name", ["nowhere:f", "mine:nothing"])
def test_a_function_that_is_not_there_is_one_line(module, tokenizer, name):
    with pytest.raises(UserError, match=rf"^reward\.function={name} does not load \("):
        TextReward(name, tokenizer, [])


def test_a_critic_cannot_start_as_a_function():
    with pytest.raises(UserError, match="critic_init must be sft or zero with reward"):
        make_config("tiny", name="mine", overrides=("reward.function=mine:letters",))


def test_a_run_from_before_there_was_such_a_section_is_read_as_one_without_a_function(tmp_path):
    config = make_config("tiny")
    saved = asdict(config)
    del saved["reward"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert recorded_config(tmp_path) == config


def test_a_module_that_is_not_there_is_refused_before_any_stage_is_made(runs, capsys):
    with pytest.raises(SystemExit):
        run_module(base, ["--preset", "tiny", "--name", "x", "--set", *OWN])
    assert "reward.function: no file mine.py in this folder" in capsys.readouterr().err
    assert not (runs / "x").exists()


def test_the_example_of_the_document_counts_what_it_says():
    text = (Path(__file__).parents[2] / "stages" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(def asks.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    texts = ["Should I ask?", "My boss sold my bike and I want it back. Should I?", "word " * 31]
    assert names["asks"]([""] * 3, texts, [{}] * 3) == [1, 2, 0]
