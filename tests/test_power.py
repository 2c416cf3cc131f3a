"""How many posts a difference needs: beside textbook formulas, and simulated studies."""

import numpy as np
import pytest

from eval.judges.prompt import LINES, make_question
from eval.power import (
    detectable_difference,
    dollars_a_question,
    lines_of,
    main,
    needed,
    posts_needed,
    spread_under,
    warnings_of,
)
from eval.rates.formulas import sign_flip_p_value
from stages.runs import open_stage
from stages.settings.command_line import make_config
from stages.settings.config import JudgeSettings

VERDICTS = {1.0: ("policy", "policy"), 0.5: ("policy", "reference"), 0.0: ("reference",) * 2}


def rows_of(policy, scores, tokens=(0, 0)):
    """Both orders of each post; None is a post whose second order is unjudged."""
    return [
        {"policy": policy, "id": f"p{number}", "order": order, "verdict": verdict}
        | dict(zip(("prompt_tokens", "completion_tokens"), tokens, strict=True))
        for number, score in enumerate(scores)
        for order, verdict in zip(
            ("policy_first", "reference_first"),
            VERDICTS.get(score, ("policy", "unjudged")),
            strict=True,
        )
    ]


def pool(rng, posts, gain=0.0):
    """Scores of two policies on the same posts; many tie, and the second gains `gain` on average.

    A post's difference is -1/2, 0 or 1/2.
    """
    first = rng.choice([0.0, 0.5], p=[0.5, 0.5], size=posts)
    up, down = 0.2 + gain, 0.2 - gain
    step = rng.choice([0.5, 0.0, -0.5], p=[up, 1 - up - down, down], size=posts)
    second = np.where(first == 0.0, np.abs(step) * (step > 0), first + step)
    flat = (first == 0.0) & (step < 0)  # a loss cannot be taken from 0: let the first win instead
    return np.where(flat, 0.5, first), np.where(flat, 0.0, second)


def test_the_number_of_posts_is_the_textbooks():
    # (1.95996 + 0.84162)^2 = 7.849 times (spread / difference)^2, and two more for Student's t.
    assert posts_needed(0.4, 0.03) == pytest.approx(7.849 * (0.4 / 0.03) ** 2 + 2, abs=1.1)
    assert detectable_difference(0.4, 1398) == pytest.approx(0.03, abs=1e-4)
    assert posts_needed(0.4, 0.9) == posts_needed(0.4, 0.4) == 10  # a test needs some posts


def test_ties_leave_no_room_for_a_difference_without_more_posts_that_differ():
    differences = np.repeat([0.5, 0.0, -0.5], [1, 98, 1])  # two of 100 posts differ, by 1/2
    assert spread_under(differences, 0.001) == pytest.approx(differences.std(ddof=1))
    # 3 points by halves: at least 6 of 100 posts, so a variance of 0.06 * 0.25 - 0.03^2.
    assert spread_under(differences, 0.03) == pytest.approx((0.06 * 0.25 - 0.0009) ** 0.5)


@pytest.mark.parametrize("gain", [0.08, 0.1])
def test_simulated_studies_of_that_many_posts_find_the_difference_in_4_of_5(gain):
    rng = np.random.default_rng(0)
    first, second = pool(rng, 4000)  # the run at hand: no difference, its spread and ties
    judgements = [*rows_of("sft", first), *rows_of("ppo", second)]
    plan = needed(judgements, gain)[0]
    assert plan.pair == ("ppo", "sft")
    assert plan.ties == pytest.approx(0.6, abs=0.03)
    found: list[bool] = []
    for _ in range(400):
        a, b = pool(rng, plan.posts, gain)  # the mean difference is 1/2 * 2 * gain
        found.append(sign_flip_p_value(b - a) < 0.05)
    assert np.mean(found) == pytest.approx(0.8, abs=0.06)  # three standard errors


@pytest.mark.parametrize(("differ", "warned"), [(10, False), (9, True)])
def test_a_plan_from_posts_that_nearly_all_tie_is_warned_of(differ, warned):
    seen = [1.0] * (differ - 1) + [0.0] + [0.5] * (100 - differ)
    needs = needed(rows_of("ppo", seen), 0.05)
    text = " ".join(warnings_of(needs))
    assert ("90% of the posts tie for ppo vs reference:" in text) is bool(text) is warned
    assert all(len(line) <= 80 for line in warnings_of(needs))


def test_simulated_studies_where_nearly_all_tie_find_the_difference_too():
    rng = np.random.default_rng(1)
    seen = np.repeat([1.0, 0.5, 0.0], [1, 98, 1])
    plan = needed([*rows_of("sft", [0.5] * 100), *rows_of("ppo", seen)], 0.05)[0]
    found: list[bool] = []
    for _ in range(300):
        # All that differ differ one way.
        differences = np.where(rng.random(plan.posts) < 0.1, 0.5, 0.0)
        found.append(sign_flip_p_value(differences) < 0.05)
    assert 0.7 < np.mean(found) < 0.95


def test_posts_without_a_verdict_are_asked_about_too():
    rng = np.random.default_rng(2)
    scores = rng.choice([0.0, 0.5, 1.0], size=200)
    whole = needed(rows_of("ppo", scores), 0.05)[0]
    lacking = needed(rows_of("ppo", [*scores, *[None] * 50]), 0.05)[0]
    assert lacking.posts == pytest.approx(whole.posts / 0.8, abs=1)
    assert (whole.pair, whole.questions) == (("ppo", "reference"), 2 * whole.posts)


def test_a_policy_that_is_called_reference_is_one_and_not_the_rate_of_a_half():
    rng = np.random.default_rng(1)
    first, second = pool(rng, 200)
    rows = [*rows_of("reference", first), *rows_of("ppo", second)]
    found = {(one.pair, one.alone): one for one in needed(rows, 0.05)}
    pair = ("ppo", "reference")
    assert set(found) == {(pair, False), (pair, True), (("reference", "reference"), True)}
    assert found[pair, False].spread == pytest.approx((second - first).std(ddof=1))
    assert found[pair, True].spread == pytest.approx(second.std(ddof=1))
    assert found[pair, False].questions == 2 * 2 * found[pair, False].posts
    names = [line[:24].strip() for line in lines_of(list(found.values()), 0.0)]
    assert names == ["", "ppo - reference", "reference vs reference", "ppo vs reference"]


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        (JudgeSettings(kind="facts"), 0.0),
        (JudgeSettings(model="mine"), None),
        (JudgeSettings(model="mine", input_price=2.0, output_price=10.0), 0.0016),
    ],
)
def test_a_question_costs_the_tokens_that_the_judge_counted(tmp_path, judge, expected):
    rows = rows_of("ppo", [1.0, 0.5], (500, 60)) + rows_of("sft", [0.5])  # identical: not asked
    assert dollars_a_question(judge, rows, tmp_path) == pytest.approx(expected)


def write_run(scores, tokens=(0, 0), own=()):
    config = make_config("tiny", overrides=own)
    with open_stage(config, "summaries") as run:
        for number in range(3):
            row = {"id": f"p{number}", "query": "q" * 4000, "summary": "s", "reference": "r"}
            run.append("ppo.jsonl", row)
        run.finish({})
    with open_stage(config, "judge") as run:
        for policy, values in scores.items():
            for row in rows_of(policy, values, tokens):
                run.append("judgements.jsonl", row)
        run.finish({})


def test_one_command_prints_one_short_table(runs, capsys):
    rng = np.random.default_rng(3)
    scores = {name: rng.choice([0.0, 0.5, 1.0], size=300) for name in ("sft", "ppo")}
    write_run(scores)
    main(["--difference", "3", "--set", "judge.kind=openai", "judge.input_price=10"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80
    (row,) = [line.split() for line in lines if line.startswith("ppo - sft")]
    posts, questions, dollars = (float(cell.replace(",", "")) for cell in row[3:6])
    spread = (scores["ppo"] - scores["sft"]).std(ddof=1)
    assert posts == pytest.approx(7.849 * (spread / 0.03) ** 2 + 2, abs=1.1)
    assert questions == 4 * posts
    # 4,000 characters of post and the question's own words, at 4 a token and 10 USD a million.
    assert 1000 < dollars / questions * 1e5 < 1600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--difference", ""], "make power DIFFERENCE=3"),
        (["--difference", "-3"], "between 0 and 100 points"),
        (["--difference", "3", "--name", "tniy"], "unknown run 'tniy': did you mean tiny?"),
        (["--difference", "3", "--seed", "1"], "holds no finished verdicts: run `make eval`"),
        (["--difference", "3", "--set", "ppo.gamma=1"], "power takes judge.* alone"),
        (["--difference", "3"], "have no spread over posts"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(runs, capsys, arguments, said):
    write_run({"ppo": [1.0, 1.0, 1.0]})
    with pytest.raises(SystemExit):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("own", "counted"),
    [
        (["judge.concurrency=3"], True),
        (["judge.base_url=http://127.0.0.1:1/v1", "judge.max_cost=2"], True),
        (["judge.model=another", "judge.input_price=2", "judge.output_price=10"], False),
        (["judge.max_tokens=8"], False),
    ],
)
def test_the_tokens_that_were_counted_price_whatever_asks_the_same(runs, capsys, own, counted):
    mine = ("judge.kind=openai", "judge.model=mine", "judge.input_price=2", "judge.output_price=10")
    rng = np.random.default_rng(3)
    scores = {"ppo": rng.choice([0.0, 0.5, 1.0], size=300)}
    write_run(scores, (500, 60), mine)
    main(["--difference", "3", "--set", *own])
    (row,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("ppo vs")]
    questions, dollars = (float(cell.replace(",", "")) for cell in row.split()[4:6])
    # 500 tokens read and 60 written; else the texts' lengths say how many.
    assert (dollars == pytest.approx(0.0016 * questions, abs=0.01)) is counted


@pytest.mark.parametrize(
    ("own", "prices", "written"),
    [
        (["judge.model=gpt-6-luna"], (0.1, 0.5), 60),
        (["judge.model=nobody-knows"], None, 60),
        (["judge.model=mine"], (2, 10), 60),
        (["judge.reasoning_effort=low"], (2, 10), 60 + 500),  # 500 tokens of reasoning are assumed
        (["judge.reasoning_effort=low", "judge.reasoning_tokens=99"], (2, 10), 60 + 99),
    ],
)
def test_a_price_without_counted_tokens_is_the_models_own_with_its_reasoning(
    runs, capsys, own, prices, written
):
    mine = ("judge.kind=openai", "judge.model=mine", "judge.input_price=2", "judge.output_price=10")
    write_run({"ppo": [1.0, 0.0] * 50}, own=(*mine, "judge.max_cost=9"))  # no counted tokens
    main(["--difference", "3", "--set", *own])
    (row,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("ppo vs")]
    questions, dollars = row.split()[4:6]
    if prices is None:
        assert dollars == "unknown"
        return
    texts = make_question("q" * 4000, "s", "r", LINES).prompt
    expected = (prices[0] * (len(texts) / 4 + 16) + prices[1] * written) / 1e6
    spent = float(dollars.replace(",", ""))
    assert spent == pytest.approx(expected * int(questions.replace(",", "")), abs=0.005)


def test_long_names_that_begin_alike_stay_two(capsys):
    rng = np.random.default_rng(1)
    names = [f"meta-llama-3.1-{size}b-instruct" for size in (8, 70)]
    rows = [row for name in names for row in rows_of(name, rng.choice([0.0, 1.0], 99))]
    lines = lines_of(needed(rows, 0.05), 0.0)
    assert f"{names[1]} - {names[0]}" in lines
    assert max(map(len, lines)) <= 80
    assert len({len(line) for line in lines if line.startswith(" ")}) == 1
