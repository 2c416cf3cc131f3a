"""Published verdicts: counted by hand, beside what others published of them, and fast enough."""

import json
import subprocess

import pytest

from eval.verdict_analysis import analyse_folder, characters, lines_of, main, token_counter
from stages.settings.checks import UserError
from tests.test_outputs import ROOT

PUBLISHED = {  # of all 1,000 verdicts, by another author; 880 of them are in ../shared/tldr
    "raw": 0.640,
    "shown_first": 0.716,
    "shown_second": 0.558,
    "order_balanced": 0.637,
    "share_first": 0.584,
    "length_controlled": 0.536,
}


def comparison(number, first, second, choice):
    summaries = [{"text": text, "policy": policy} for policy, text in (first, second)]
    return {
        "info": {"id": f"t{number}", "subreddit": "x", "title": "t", "post": "p"},
        "summaries": summaries,
        "choice": choice,
        "batch": "b",
        "split": "valid1",
        "extra": {"confidence": None},
    }


MINE, REF = ("mine", " one two three four"), ("ref", " one two")


def write(folder, rows, name="comparisons_validation.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rates_by_order_are_counted(tmp_path):
    rows = [comparison(k, MINE, REF, int(k >= 3)) for k in range(4)]  # first: wins 3 of 4
    rows += [comparison(k, REF, MINE, int(k < 6)) for k in range(4, 10)]  # second: wins 2 of 6
    rows += [comparison(99, ("other", " x"), REF, 0)]  # not asked for
    write(tmp_path, rows[:5], "comparisons_train.jsonl")
    write(tmp_path, rows[5:])
    found = analyse_folder(tmp_path, "mine")
    assert (found["judgements"], found["posts"]) == (10, 10)
    expected = {"raw": 0.5, "shown_first": 0.75, "shown_second": 2 / 6, "share_first": 0.7}
    for key, value in expected.items():
        assert found[key]["estimate"] == pytest.approx(value), key
    assert found["median_length_ratio"] == pytest.approx(2.0)
    assert found["swap_consistency"] is None
    assert max(map(len, lines_of(found))) <= 80


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("nobody", "policies there are mine, ref: name two of them, --policy and --reference"),
        ("mine", "summaries has 1"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, capsys, policy, said):
    rows = [comparison(0, MINE, REF, 0)]
    if policy == "mine":
        rows[0]["summaries"] = rows[0]["summaries"][:1]
    write(tmp_path, rows)
    with pytest.raises(SystemExit):
        main(["--comparisons", str(tmp_path), "--policy", policy])
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no comparisons"):
        analyse_folder(tmp_path, "mine")


def test_the_published_verdicts_give_the_published_rates(shared, capsys, tmp_path):
    folder = shared / "tldr"
    out = tmp_path / "found.json"
    main(["--comparisons", str(folder), "--policy", "ppo_1.3b", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["judgements"] == 880
    for key, value in PUBLISHED.items():
        one = found[key]
        assert one["low"] < value < one["high"], key
        assert one["estimate"] == pytest.approx(value, abs=0.02), key
    assert found["length_controlled"]["order_logits"][0] == pytest.approx(0.74, abs=0.15)
    worth, low, high = found["length_controlled"]["doubled_length_logits"]
    assert low < 2.16 * 0.6931 < high  # published with an unbounded term: logits a unit
    assert worth > 0.7
    # Of 880 draws without replacement from 1,000 little can differ; a wide interval would.
    width = found["length_controlled"]["high"] - found["length_controlled"]["low"]
    assert width == pytest.approx((57.6 - 49.3) / 100 * (1000 / 880) ** 0.5, abs=0.012)
    assert "raw rate" in capsys.readouterr().out


def test_length_can_be_counted_in_characters_and_tokens(tokenizer_folder):
    assert characters(" abc ") == 3
    tokens = token_counter(str(tokenizer_folder))
    assert 1 <= tokens("My boss sold my bike.") < len("My boss sold my bike.")
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        token_counter(str(tokenizer_folder / "no"))


def test_make_names_whom_a_policy_is_compared_with():
    words = ["make", "-n", "verdict-analysis", "DATA=x", "JUDGED=ppo", "AGAINST=lead3", "VENV="]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--policy ppo" in done.stdout
    assert "--reference lead3" in done.stdout
