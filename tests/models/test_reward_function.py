"""A reward of one's own: a function of texts, from its module to the policy that learns it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from eval import controls, judge, summaries, win_rate
from reports import run as run_page
from stages import base, dpo, normalize, ppo, rm, sft
from stages.config import paths
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.options import config_from_arguments
from stages.config.recorded import recorded_config
from stages.data.ragged import TokenizedSplit, make_ragged, pad_right
from stages.models.forward import ResponseBatch, score_responses
from stages.models.heads import shift_scores
from stages.models.loading import load_reward_model, save_model
from stages.models.reward_function import TextReward
from stages.rl.episodes import Sampled, concatenate
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from stages.runs.staleness import find_problem
from tests.lib.asserts import refusal_of
from tests.lib.make_stages import run_module

# Every token of a response can raise this reward, so no rare event decides whether it is learned.
MODULE = """
def letters(queries, responses, rows):
    for query, row in zip(queries, rows):
        # The prompt of row n is "What of n?", and its topic is "rain n".
        assert row["topic"] == "rain " + row["prompt"].removeprefix("What of ").removesuffix("?")
        assert query == row["prompt"]
        assert row["query"] == "a column of mine"
    return [response.count("e") for response in responses]

def count_e(queries, responses, rows):
    return [response.count("e") for response in responses]

def alone(texts):
    return [1.0 for text in texts]

def exits(queries, responses, rows):
    raise SystemExit(0)

def none(queries, responses, rows):
    pass

def words(queries, responses, rows):
    return ["good" for response in responses]

def fails(queries, responses, rows):
    return [1 / (len(response) - len("short")) for response in responses]

def fewer(queries, responses, rows):
    return [1.0]

def infinite(queries, responses, rows):
    return [float("inf") if response == "long" else 0 for response in responses]

def remember(queries, responses, rows):
    remember.calls.append((queries, responses, rows))
    return range(1, len(queries) + 1)

remember.calls = []
"""
SETTINGS = [
    "base.hidden_size=32",
    "base.num_layers=1",
    "ppo.critic_init=sft",
    "memory.cpu_threads=1",
    "eval.posts=6",
    "checks.control_posts=3",
    "judge.kind=reward_model",
    "ppo.total_episodes=256",
    "ppo.batch_size=32",
    "ppo.learning_rate=0.02",
    "ppo.eos_trick=off",
    "ppo.critic_updates=0",
    "ppo.critic_learning_rate=0.02",
    "rloo.total_episodes=64",
    "rloo.batch_size=32",
    "rloo.eos_trick=off",
    "reward.function=mine:letters",
]
JUDGED = (summaries, judge, controls, win_rate, run_page)
RISE = 1.0


def write_module():
    """The module in the working folder, and rows without pairs."""
    Path("mine.py").write_text(MODULE)
    words = "rain green tree seven bird letter he went".split()
    rows = []
    for number in range(160):
        completion = " ".join(words[number % 5 :])
        rows.append(
            {
                "prompt": f"What of {number}?",
                "completion": completion,
                "topic": f"rain {number}",
                "query": "a column of mine",
            }
        )
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def module(place):
    write_module()


ARGUMENTS = ["--preset", "tiny", "--name", "mine", "--data", "rows.jsonl", "--set", *SETTINGS]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that trained with a function and judged its policies; returns its folder."""
    root = tmp_path_factory.mktemp("function")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_module()
        for stage in (base, sft, rm, normalize, ppo):
            run_module(stage, ARGUMENTS)
        run_module(ppo, ARGUMENTS, "rloo")
        for stage in JUDGED:
            run_module(stage, ARGUMENTS)
    return root / "runs" / "mine" / "seed44413"


@pytest.fixture
def mean(finished):
    """The references' mean score, which is subtracted from every score."""
    manifest = read_manifest(finished / "normalize") or {}
    return manifest["results"]["mean_before"]


def test_the_mean_is_that_of_the_references(finished, mean):
    rows = read_lines(finished / "base/data/sft_train.jsonl")
    scores = [row["reference"].count("e") for row in rows]
    assert mean == pytest.approx(sum(scores) / len(scores))


def test_no_reward_model_is_trained(finished):
    assert not list(finished.glob("rm/model/*.safetensors"))


@pytest.mark.parametrize("stage", ["ppo", "rloo"])
def test_samples_are_scored_by_the_function(finished, mean, stage):
    for row in read_lines(finished / stage / "samples.jsonl"):
        text = row["response"].removesuffix("<|endoftext|>")
        assert row["score"] == pytest.approx(text.count("e") - mean, abs=1e-4)


def test_summaries_are_scored_by_the_function(finished, mean):
    for row in read_lines(finished / "summaries/ppo.jsonl"):
        assert row["score"] == pytest.approx(row["summary"].count("e") - mean, abs=1e-4)


@pytest.mark.learns
def test_ppo_learns_the_function(finished):
    scores = [row["objective/scores"] for row in read_lines(finished / "ppo/metrics.jsonl")]
    assert sum(scores[-3:]) / 3 > scores[0] + RISE


def test_the_page_names_the_function(finished):
    assert "mine:letters" in next(finished.glob("report/*/*.md")).read_text()


def test_an_edited_function_makes_stale_what_was_trained_and_scored_with_it(finished, monkeypatch):
    root = finished.parents[2]
    monkeypatch.chdir(root)
    monkeypatch.setattr(paths, "RUNS", root / "runs")
    config = config_from_arguments(ARGUMENTS, "")
    stages = ("base", "sft", "rm", "normalize", "ppo", "rloo", "summaries")
    assert [stage for stage in stages if find_problem(config, stage)] == []

    (root / "mine.py").write_text(f"{MODULE}# edited")
    assert [stage for stage in stages if find_problem(config, stage)] == [*stages[2:]]
    (root / "mine.py").write_text(MODULE)


def test_dpo_needs_pairs_also_with_a_function(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished.parents[2])
    with pytest.raises(SystemExit):
        run_module(dpo, ARGUMENTS)
    assert "the data have no split comparisons_train" in capsys.readouterr().err


def encode(tokenizer, *texts):
    """Texts as padded rows of tokens; the pad id is -1."""
    return pad_right([torch.tensor(tokenizer(text).input_ids) for text in texts], -1)


def test_the_function_gets_texts_without_eos_and_the_columns_of_each_row(module, tokenizer):
    reward = TextReward("mine:remember", tokenizer)
    facts = [
        {"id": "a", "query": "Who?", "columns": {"topic": "rain", "id": 7}},
        {"id": "b", "query": "Who?", "columns": {"topic": "bike"}},
    ]
    queries = encode(tokenizer, "Who?", "Who?")
    responses = encode(tokenizer, " My boss<|endoftext|>", " I")

    scores = reward.scores(queries, responses, facts, pad_id=-1)

    assert scores.tolist() == [1.0, 2.0]
    function: Any = reward.function
    [(query_texts, response_texts, rows)] = function.calls
    assert query_texts == ["Who?", "Who?"]
    assert response_texts == ["My boss", "I"]
    assert rows == [
        {"id": 7, "query": "Who?", "topic": "rain"},
        {"id": "b", "query": "Who?", "topic": "bike"},
    ]


def test_each_of_two_rows_with_one_prompt_gets_its_own_columns(module, tokenizer):
    reward = TextReward("mine:remember", tokenizer)
    tokens = {text: encode(tokenizer, text)[0] for text in ("Who?", "he", "he did")}
    split = TokenizedSplit(
        columns={
            "queries": make_ragged([tokens["Who?"].tolist()] * 2),
            "summaries": make_ragged([tokens["he"].tolist(), tokens["he did"].tolist()]),
        },
        rows=[
            {"id": "a", "query": "Who?", "columns": {"wish": "short"}},
            {"id": "a", "query": "Who?", "columns": {"wish": "long"}},
        ],
    )

    normalize.score_rows(Accelerator(cpu=True), reward, split, [1, 0])

    function: Any = reward.function
    _, responses, rows = function.calls[-1]
    assert responses == ["he did", "he"]
    assert [row["wish"] for row in rows] == ["long", "short"]


def test_facts_stay_with_their_responses():
    first = {"id": "a"}
    second = {"id": "b"}
    columns = torch.zeros(2, 3, dtype=torch.long)
    sampled = Sampled(
        queries=columns,
        responses=columns,
        pad_id=-1,
        sampled_logprobs=columns.float(),
        facts=[first, second],
    )
    chosen = sampled.rows(torch.tensor([1, 0, 1]))
    assert chosen.facts == [second, first, second]
    assert concatenate([sampled, chosen], torch.zeros(5, 3)).facts == [
        first,
        second,
        second,
        first,
        second,
    ]
    assert [part.facts for part in sampled.passes(size=1)] == [[first], [second]]


def test_a_saved_function_loads_with_its_bias(module, tokenizer, tmp_path):
    reward = TextReward("mine:count_e", tokenizer)
    shift_scores(reward, -1.5)
    save_model(reward, tokenizer, tmp_path / "model")
    again = load_reward_model(tmp_path / "model")
    batch = ResponseBatch(
        queries=encode(tokenizer, "What?"), responses=encode(tokenizer, "tree"), pad_id=-1
    )
    assert score_responses(again, batch).tolist() == [2 - 1.5]


FAILURES = [
    ("fails", "mine.py:{line}: ZeroDivisionError: division by zero, for 'short'"),
    ("exits", "mine.py:{line}: sys.exit(0) was called: return numbers or raise an exception"),
    ("alone", "mine.py:{line}: TypeError: alone() takes 1 positional argument but 3 were given"),
    ("fewer", "returned 1 numbers for 2 texts"),
    ("none", "returned NoneType instead of a list of 2 numbers"),
    ("words", "returned 'good', which is not a number"),
    ("infinite", "returned inf, for 'long'"),
]


@pytest.mark.parametrize(("function", "reason"), FAILURES)
def test_a_function_that_fails_is_one_line_with_the_place_in_its_code(
    module, tokenizer, function, reason
):
    reward = TextReward(f"mine:{function}", tokenizer)
    queries = encode(tokenizer, "?", "?")
    responses = encode(tokenizer, "short", "long")
    lines = MODULE.splitlines()
    start = next(n for n, line in enumerate(lines, start=1) if line.startswith(f"def {function}("))
    line = start if function == "alone" else start + 1

    problem = refusal_of(reward.scores, queries, responses, [], pad_id=-1)

    assert problem == f"reward.function=mine:{function}: {reason.format(line=line)}"


@pytest.mark.parametrize("text", ["import sys; sys.exit(0)", "1 / 0", "def f(:"])
def test_a_module_that_fails_when_it_is_imported_is_one_line(place, tokenizer, text):
    Path("broken_reward.py").write_text(f"# A comment.\n{text}\n")
    problem = refusal_of(TextReward, "broken_reward:f", tokenizer)
    assert problem.startswith("reward.function=broken_reward:f does not load (broken_reward.py:2: ")


@pytest.mark.parametrize("name", ["nowhere:f", "mine:nothing"])
def test_a_function_that_does_not_exist_is_one_line(module, tokenizer, name):
    line = refusal_of(TextReward, name, tokenizer)
    assert line.startswith(f"reward.function={name} does not load (")


def test_a_critic_cannot_start_as_a_function():
    with pytest.raises(UserError, match="critic_init must be sft or zero with reward"):
        make_config("tiny", name="mine", overrides=("reward.function=mine:letters",))


def test_a_run_from_before_there_was_such_a_section_is_read_as_one_without_a_function(tmp_path):
    config = make_config("tiny")
    saved = config.model_dump()
    del saved["reward"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert recorded_config(tmp_path) == config


def test_a_module_that_is_not_there_is_refused_before_any_stage_is_made(runs, capsys):
    with pytest.raises(SystemExit):
        run_module(base, ["--preset", "tiny", "--name", "x", "--set", *SETTINGS])
    assert "reward.function: no file mine.py in this folder" in capsys.readouterr().err
    assert not (runs / "x").exists()


def test_the_example_of_the_document_counts_what_it_says():
    text = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(def asks.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    texts = ["Should I ask?", "My boss sold my bike and I want it back. Should I?", "word " * 31]
    assert names["asks"]([""] * 3, texts, [{}] * 3) == [1, 2, 0]
