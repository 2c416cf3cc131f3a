"""PRESET=own: what follows from data, model and memory is chosen, said, and a setting."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from stages import base
from stages.config.checks import UserError
from stages.config.command_line import NEXT, Request, config_of
from stages.planning.own import _of_size, with_choices
from tests.lib.make_stages import run_module

WORDS = ["my boss", "sold", "my bike", "he", "did", "tifu"]


def pairs(path, count):
    """Pairs whose prompts and answers have from 1 to 40 and from 1 to 8 times the same words."""
    rows = [
        {
            "prompt": " ".join(WORDS[: 2 + n % 4] * (1 + n % 40)),
            "chosen": " ".join(["he did"] * (1 + n % 8)),
            "rejected": "no",
        }
        for n in range(count)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


@pytest.fixture
def asked(runs, tmp_path, policy_folder):
    """The make variables of a small GPT-NeoX on 600 pairs."""
    pairs(tmp_path / "pairs.jsonl", 600)
    data = str(tmp_path / "pairs.jsonl")
    return {"PRESET": "own", "DATA": data, "SET": f"base.checkpoint={policy_folder}"}


def chosen(values):
    return dict(word.split("=", 1) for word in NEXT.split(with_choices(values)["SET"]))


def test_lengths_are_quantiles_of_the_rows_and_the_share_beyond_is_said(
    asked, tmp_path, policy_folder, capsys
):
    rows = pairs(tmp_path / "pairs.jsonl", 600)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    found = chosen(asked)
    answers = [
        len(tokenizer(f" {row[side]}").input_ids) + 1
        for row in rows
        for side in ("chosen", "rejected")
    ]
    expected = int(np.quantile(answers, 0.99, method="higher"))
    assert found["data.max_comparison_tokens"] == str(expected)
    query, answer = (int(found[f"data.max_{name}_tokens"]) for name in ("query", "comparison"))
    assert found["data.max_query_comparison_tokens"] == str(query + answer)
    assert query <= 256 // 2  # of the model's positions
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("data.max_query_tokens"))
    assert "% are longer, the longest has " in line
    assert max(map(len, lines)) <= 80


def test_without_pairs_nothing_is_chosen_for_them(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Why {n}?", "completion": "So it is."} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").touch()
    asked["SET"] += " reward.function=mine:f"
    assert not {"rm.batch_size", "data.max_comparison_tokens"} & chosen(asked).keys()


def test_what_is_typed_stays_and_every_choice_is_a_setting_that_a_run_takes(asked):
    asked["SET"] += " ppo.kl_coef=0.1 data.max_query_tokens=77 ppo.batch_size=8"
    values = with_choices(asked)
    assert values["NAME"].startswith("own-policy")
    words = NEXT.split(values["SET"])
    keys = [word.partition("=")[0] for word in words]
    assert len({*keys}) == len(keys)
    request = Request(preset="own", name=values["NAME"], data=asked["DATA"], overrides=(*words,))
    config = config_of(request)
    assert config.data.max_query_tokens == 77
    assert config.ppo.batch_size == 8
    assert config.ppo.total_episodes % 8 == 0
    assert config.sft.learning_rate == 5e-5  # a small model's
    assert not config.memory.microbatch_size  # each stage finds it when it begins


def test_a_run_that_has_begun_keeps_what_was_chosen(asked, tmp_path, capsys):
    values = with_choices(asked)
    words = ["--preset", "own", "--name", values["NAME"], "--data", asked["DATA"], "--set"]
    run_module(base, [*words, *NEXT.split(values["SET"])])
    capsys.readouterr()
    assert with_choices(asked)["SET"] == values["SET"]
    assert "own chooses" not in capsys.readouterr().out


def test_one_billion_has_the_papers_rate_and_a_card_makes_more_updates(asked):
    assert _of_size(10**9)["ppo.learning_rate"][0] == 3e-6
    large = chosen(asked | {"GPU": "h100-80gb"})
    assert large["ppo.total_episodes"] == str(200 * int(large["ppo.batch_size"]))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"SET": ""}, "PRESET=own needs a model: add SET=base.checkpoint="),
        ({"DATA": ""}, "preset own needs a folder of posts: add"),
        ({"GPU": "h100"}, "unknown GPU 'h100'"),
        ({"SEED": "one"}, "SEED=one must be a whole number"),
        ({"SET": "base.checkpoint=nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(asked, changes, line):
    with pytest.raises(UserError, match=line):
        with_choices(asked | changes)
