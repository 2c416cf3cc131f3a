"""PRESET=own: what follows from data, model and memory is chosen, printed, and a setting."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from stages import base
from stages.config.command_line import Request, config_of
from stages.config.errors import UserError
from stages.config.values import split_overrides
from stages.pipeline.variables import request_from
from stages.planning.own import count_choices, rate_choices, with_choices
from stages.runs.files import write_lines
from tests.lib.make_stages import run_module

WORDS = ["my boss", "sold", "my bike", "he", "did", "tifu"]


def write_pairs(path, count):
    """Write pairs whose prompts repeat words 1 to 40 times, and whose answers do 1 to 8 times."""
    rows = []
    for number in range(count):
        words = WORDS[: 2 + number % 4] * (1 + number % 40)
        answer = ["he did"] * (1 + number % 8)
        rows.append({"prompt": " ".join(words), "chosen": " ".join(answer), "rejected": "no"})
    write_lines(path, rows)
    return rows


@pytest.fixture
def variables(runs, tmp_path, policy_folder):
    """The make variables for a small GPT-NeoX and 600 pairs."""
    write_pairs(tmp_path / "pairs.jsonl", 600)
    data = str(tmp_path / "pairs.jsonl")
    return {"PRESET": "own", "DATA": data, "SET": f"base.checkpoint={policy_folder}"}


def chosen(variables):
    """The text of each setting in SET, with all choices."""
    words = split_overrides(with_choices(variables)["SET"])
    return dict(word.split("=", 1) for word in words)


# -- what is chosen --------------------------------------------------------------------------------


def test_the_longest_answer_is_a_quantile_of_the_rows(variables, tmp_path, policy_folder):
    rows = write_pairs(tmp_path / "pairs.jsonl", 600)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    lengths = []
    for row in rows:
        for answer in (row["chosen"], row["rejected"]):
            lengths.append(len(tokenizer(f" {answer}").input_ids) + 1)  # EOS
    expected = int(np.quantile(lengths, 0.99, method="higher"))
    assert chosen(variables)["data.max_comparison_tokens"] == str(expected)


def test_the_longest_query_leaves_half_of_the_models_positions(variables):
    choices = chosen(variables)
    query = int(choices["data.max_query_tokens"])
    answer = int(choices["data.max_comparison_tokens"])
    assert query <= 256 // 2
    assert choices["data.max_query_comparison_tokens"] == str(query + answer)


def test_without_pairs_nothing_is_chosen_for_them(variables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Why {number}?", "completion": "So it is."} for number in range(60)]
    write_lines(tmp_path / "pairs.jsonl", rows)
    (tmp_path / "mine.py").touch()
    variables["SET"] += " reward.function=mine:f"
    assert not {"rm.batch_size", "data.max_comparison_tokens"} & chosen(variables).keys()


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [
        (100e6, 1e-5),
        (135e6, 1e-5),
        (367e6, 5.5e-6),  # half way by the logarithm: sqrt(1e-5 * 3e-6)
        (1e9, 3e-6),
        (7e9, 3e-6),
    ],
)
def test_the_rate_of_ppo_falls_with_the_size_of_the_model(parameters, rate):
    assert rate_choices(parameters)["ppo.learning_rate"].value == rate


@pytest.mark.parametrize(
    ("rows", "batch_size", "reason"),
    [
        (60, 4, "the smallest that own chooses"),
        (282, 8, "a power of 2, up to 5% of 282 rows"),  # 14 rows
        (1279, 32, "a power of 2, up to 5% of 1,279 rows"),
        (1280, 64, "the largest that own chooses"),
        (5000, 64, "the largest that own chooses"),
    ],
)
def test_a_batch_has_at_most_a_twentieth_of_the_rows(rows, batch_size, reason):
    choices = count_choices({"sft_train": rows, "sft_validation": 20}, has_gpu=True)
    assert choices["sft.batch_size"].value == batch_size
    assert choices["sft.batch_size"].reason == reason


def test_a_gpu_trains_for_more_updates(variables):
    choices = chosen(variables | {"GPU": "h100-80gb"})
    assert choices["ppo.total_episodes"] == str(200 * int(choices["ppo.batch_size"]))


# -- how it is printed and kept --------------------------------------------------------------------


def test_each_choice_is_printed_with_its_reason(variables, capsys):
    with_choices(variables)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("data.max_query_tokens")]
    assert "% are longer, up to " in line
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("parameters", [135e6, 367e6, 8e9])
@pytest.mark.parametrize("rows", [60, 1279, 1_000_000])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_every_reason_fits_on_its_line(parameters, rows, has_gpu):
    splits = {"sft_train": rows, "sft_validation": rows, "comparisons_train": rows}
    choices = count_choices(splits, has_gpu) | rate_choices(parameters)
    assert max(len(choice.reason) for choice in choices.values()) <= 37


def test_an_llm_judge_with_the_built_in_question_is_pointed_out(variables, capsys):
    variables["SET"] += " judge.kind=openai"
    with_choices(variables)
    assert "add judge.prompt=my_prompt.md to SET" in capsys.readouterr().out


def test_no_question_is_suggested_if_you_have_one_or_no_llm_judges(variables, tmp_path, capsys):
    with_choices(variables)
    (tmp_path / "mine.md").write_text("{post} {summary_a} {summary_b}")
    variables["SET"] += f" judge.kind=openai judge.prompt={tmp_path / 'mine.md'}"
    with_choices(variables)
    assert "judge.prompt" not in capsys.readouterr().out


def test_every_choice_is_a_setting_of_the_run(variables):
    values = with_choices(variables)
    words = split_overrides(values["SET"])
    request = Request(
        preset="own",
        name=values["NAME"],
        data=variables["DATA"],
        overrides=tuple(words),
    )
    config = config_of(request)
    assert values["NAME"].startswith("own-policy")
    assert config.sft.learning_rate == 5e-5  # of a small model
    assert config.memory.microbatch_size == 0  # auto: each stage chooses when it begins


def test_what_you_set_takes_precedence(variables):
    variables["SET"] += " ppo.kl_coef=0.1 data.max_query_tokens=77 ppo.batch_size=8"
    words = split_overrides(with_choices(variables)["SET"])
    keys = [word.partition("=")[0] for word in words]
    assert len(set(keys)) == len(keys)
    assert {"data.max_query_tokens=77", "ppo.batch_size=8"} <= set(words)


def test_a_run_that_has_begun_keeps_its_choices(variables, capsys):
    values = with_choices(variables)
    options = ["--preset", "own", "--name", values["NAME"], "--data", variables["DATA"]]
    run_module(base, [*options, "--set", *split_overrides(values["SET"])])
    capsys.readouterr()

    assert with_choices(variables)["SET"] == values["SET"]
    assert "own chooses" not in capsys.readouterr().out


def test_the_same_command_with_a_reward_model_resumes(variables, runs):
    variables["REWARD_MODEL"] = "org/reward"
    config = config_of(request_from(with_choices(variables)))
    base = runs / config.name / "seed44413/base"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(config.model_dump()))

    assert config_of(request_from(with_choices(variables))) == config


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"SET": ""}, "PRESET=own needs a model: add SET=base.checkpoint="),
        ({"DATA": ""}, "preset own needs posts: add DATA="),
        ({"GPU": "h100"}, "unknown GPU 'h100'"),
        ({"SEED": "one"}, "SEED=one is not a whole number"),
        ({"SET": "base.checkpoint=nowhere"}, "nowhere"),
    ],
    ids=["no model", "no data", "unknown GPU", "no number", "missing model"],
)
def test_what_cannot_be_chosen_is_refused(variables, changes, line):
    with pytest.raises(UserError, match=line):
        with_choices(variables | changes)
