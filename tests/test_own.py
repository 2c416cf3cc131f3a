"""PRESET=own: what follows from data, model and memory is chosen, said, and a setting."""

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer, GPTNeoXConfig

from reports.needs.own import with_choices
from stages import base
from stages.driving.start import run_module
from stages.settings.checks import UserError
from stages.settings.command_line import NEXT, Request, config_of

WORDS = ["my boss", "sold", "my bike", "he", "did", "tifu"]
BILLION = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}


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


def test_a_model_of_one_billion_on_a_card_has_the_papers_rate(asked, tmp_path, tokenizer_folder):
    folder = tmp_path / "billion"
    shutil.copytree(tokenizer_folder, folder)
    GPTNeoXConfig(vocab_size=50304, intermediate_size=8192, **BILLION).save_pretrained(folder)
    asked["SET"] = f"base.checkpoint={folder}"
    large = chosen(asked | {"GPU": "h100-80gb"})
    assert large["ppo.learning_rate"] == "3e-06"
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
