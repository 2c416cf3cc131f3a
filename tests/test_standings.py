"""Several systems and several judges: strengths, corrected tests, the panel, the page of all."""

import json
import shutil
from collections import Counter
from math import log
from typing import Any

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from eval import leaderboard
from eval.controls import judge_controls
from eval.judge import judge_summaries
from eval.judges.openai.budget import cost
from eval.judges.prompt import ALONE, CRITERIA, LETTER, PROMPT, make_question
from eval.outputs import take_outputs
from eval.pairs import judge_pairs
from eval.questions import pair_rows
from eval.rates.strengths import Game, fleiss, holm, majority, strengths
from eval.standings import BASE, agreement, panel, standings
from eval.win_rate import measure_win_rates
from reports import leaderboard_page, outputs_page
from reports.parts.page import Table
from reports.parts.words import at_equal_length
from reports.sections import systems
from stages.driving.grid import Execution
from stages.finished import read_manifest, stage_folder
from stages.running.files import read_lines
from stages.settings.command_line import Request, make_config
from stages.settings.config import JudgeSettings, UserError, hash_of
from tests.chat_server import ask, chat, serving
from tests.test_outputs import config_of_file, rows_of_world, write_jsonl
from tests.told import told


def games(wins):
    """One game a post: `wins[a, b]` posts on which a was preferred to b."""
    found = []
    for (a, b), count in wins.items():
        found += [Game(a, b, f"{a}{b}{number}", 1.0) for number in range(count)]
    return found


def by_minorisation(wins, base, rounds=2000):
    """Bradley-Terry by another algorithm: Hunter 2004, `p <- wins / sum n / (p_i + p_j)`."""
    names = sorted({name for pair in wins for name in pair})
    p = dict.fromkeys(names, 1.0)
    for _ in range(rounds):
        for name in names:
            won = sum(count for (a, _), count in wins.items() if a == name)
            met: Counter[str] = Counter()
            for (a, b), count in wins.items():
                if name in (a, b):
                    met[b if a == name else a] += count
            p[name] = won / sum(n / (p[name] + p[other]) for other, n in met.items())
    return {name: log(p[name] / p[base]) for name in names}


def test_strengths_are_those_of_another_algorithm():
    wins = {("a", "b"): 30, ("b", "a"): 12, ("a", BASE): 25, (BASE, "a"): 17}
    wins |= {("b", BASE): 14, (BASE, "b"): 28}
    found = strengths(games(wins), BASE)
    expected = by_minorisation(wins, BASE)
    for name in ("a", "b", BASE):
        assert found[name]["estimate"] == pytest.approx(expected[name], abs=1e-5), name
    assert found["a"]["low"] < found["a"]["estimate"] < found["a"]["high"]


def test_a_strength_from_the_reference_alone_is_the_logit_of_the_raw_rate_with_its_error():
    scores = [1.0] * 20 + [0.5] * 10 + [0.0] * 10
    found = strengths([Game("a", BASE, str(k), x) for k, x in enumerate(scores)], BASE)["a"]
    rate, n = np.mean(scores), len(scores)
    assert found["estimate"] == pytest.approx(log(rate / (1 - rate)), abs=1e-6)
    # Delta method on the sandwich: sd(scores) / sqrt(n - 1) / (rate (1 - rate)).
    error = np.std(scores) / np.sqrt(n - 1) / (rate * (1 - rate))
    assert found["high"] - found["estimate"] == pytest.approx(1.96 * error, rel=0.01)


def test_a_system_that_lost_everything_has_no_strength_and_moves_no_other():
    wins = {("a", BASE): 3, (BASE, "a"): 5}
    alone = strengths(games(wins), BASE)
    found = strengths(games(wins | {("a", "c"): 4, (BASE, "c"): 4}), BASE)
    assert found["a"] == alone["a"]
    assert found["c"]["estimate"] is None
    assert "won, or lost, every comparison" in found["c"]["why"]


def test_verdicts_that_are_alike_on_every_post_have_no_interval_and_say_so():
    ties = [Game("a", BASE, str(post), 0.5) for post in range(20)]
    alone = strengths(ties, BASE)["a"]
    assert (alone["estimate"], "alike on every post" in alone["why"]) == (None, True)
    others = [Game("b", BASE, str(post), post % 2) for post in range(20)]
    found = strengths(ties + others, BASE)
    assert "alike on every post" in found["a"]["why"]
    for key, value in strengths(others, BASE)["b"].items():
        assert key == "beyond" or found["b"][key] == pytest.approx(value, abs=0.02)


def test_one_post_has_no_strength_and_stops_nothing():
    found = strengths([Game("a", BASE, "p", 0.5)], BASE)
    assert found["a"]["estimate"] is None
    assert found[BASE]["estimate"] == 0.0


def test_a_rate_that_the_model_made_up_is_marked_wherever_it_stands():
    made = {"estimate": 0.475, "low": 0.158, "high": 0.814, "extrapolated": True}
    assert at_equal_length(made) == "47.5% [15.8, 81.4] EXTRAPOLATED"
    assert at_equal_length(made | {"extrapolated": False}) == "47.5% [15.8, 81.4]"
    assert at_equal_length({"estimate": None, "extrapolated": True}) == "–"
    one: dict[str, Any] = {"win_rate": 0.6, "low": 0.4, "high": 0.8, "unjudged": 0.0, "words": 9.0}
    one |= {"strength": None, "statistics": {"length_controlled": made}}
    standing = {"systems": {"a": one}, "differences": [], "posts": 24, "with_pairs": False}
    cells = systems.table(standing | {"reference_words": 9.0}).rows[0]
    assert cells[3] == "47.5% [15.8, 81.4] EXTRAPOLATED"


def test_holm_multiplies_the_smallest_by_all_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # by hand
    assert holm([]) == []
    p_values = np.random.default_rng(1).random(40) ** 3
    assert holm(list(p_values)) == pytest.approx(multipletests(p_values, method="holm")[1])


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["policy", "policy", "reference"], "policy"),
        (["policy", "reference"], "tie"),
        (["policy", "tie", "reference"], "tie"),
        (["policy", "policy", "unjudged"], "policy"),
        (["policy", "policy", "tie", "unjudged"], "tie"),
        (["policy", "reference", "unjudged"], "tie"),
        (["policy", "unjudged"], "unjudged"),
        (["policy", "unjudged", "unjudged"], "unjudged"),
    ],
)
def test_a_majority_is_more_than_half_of_all_judges(verdicts, expected):
    assert majority(verdicts) == expected


def test_fleiss_kappa_is_that_of_a_hand_calculation():
    # Three judges, four things: agreement (1 + 1/3 + 1 + 1/3) / 4, by chance 2 (1/2)^2.
    answers = [["a"] * 3, ["a", "a", "b"], ["b"] * 3, ["a", "b", "b"]]
    assert fleiss(answers) == pytest.approx((2 / 3 - 1 / 2) / (1 - 1 / 2))
    assert fleiss([["a", "a"]]) is None


def verdicts(policy, said):
    """Judgements of one policy: for each post the verdicts in both orders."""
    orders = ("policy_first", "reference_first")
    return [
        {"policy": policy, "id": str(post), "order": order, "verdict": verdict}
        for post, both in enumerate(said)
        for order, verdict in zip(orders, both, strict=True)
    ]


WIN, LOSS, SPLIT = ("policy",) * 2, ("reference",) * 2, ("policy", "reference")
TEXTS = {str(post): ("one two three", "one two") for post in range(12)}


def test_standings_are_on_the_posts_that_all_systems_have_best_first():
    rows = verdicts("weak", [LOSS] * 9 + [WIN]) + verdicts("b-c", [WIN] * 9 + [SPLIT] + [LOSS] * 2)
    posts = {post: TEXTS[post] for post in list(TEXTS)[:10]}
    found = standings(rows, {"weak": posts, "b-c": TEXTS})
    assert (found["posts"], found["left_out"]) == (10, 2)
    assert list(found["systems"]) == ["b-c", "weak"]
    assert found["systems"]["b-c"]["win_rate"] == pytest.approx(0.95)
    assert (found["systems"]["weak"]["words"], found["reference_words"]) == (3.0, 2.0)
    (difference,) = found["differences"]
    assert difference["estimate"] == pytest.approx(0.85)
    assert difference["holm"] == difference["p_value"]
    assert [systems.rank(name, found) for name in found["systems"]] == ["1", "2"]
    assert "reliably better than the next, weak" in systems.leads(found)
    with pytest.raises(UserError, match="no post was summarised by all systems"):
        standings(rows, {"weak": {"0": TEXTS["0"]}, "b-c": {"1": TEXTS["1"]}})


def test_systems_that_are_not_told_apart_share_their_ranks_and_a_silent_one_has_none():
    said = [WIN] * 6 + [LOSS] * 6
    rows = [*verdicts("a", said), *verdicts("b", said[::-1])]
    rows += verdicts("silent", [("unjudged",) * 2] * 12)
    found = standings(rows, dict.fromkeys(("a", "b", "silent"), TEXTS))
    assert [systems.rank(name, found) for name in ("a", "b")] == ["1-2", "1-2"]
    assert found["systems"]["silent"]["win_rate"] is None
    assert "its lead over b is inconclusive" in systems.leads(found)
    cells = {row[0]: row for row in systems.table(found).rows}
    assert cells["silent"][1:3] == ["–", "– (100.0% unjudged)"]


def test_with_direct_comparisons_the_order_the_ranks_and_the_headline_follow_the_strengths():
    """a beats the reference more often; b beats a in 58 of 60 posts."""
    posts = {str(post): ("one two", "three") for post in range(60)}
    texts = dict.fromkeys("ab", posts)
    rows = verdicts("a", [WIN] * 40 + [LOSS] * 20) + verdicts("b", [WIN] * 35 + [LOSS] * 25)
    assert list(standings(rows, texts)["systems"]) == ["a", "b"]
    found = standings(rows, texts, verdicts("a-b", [WIN] * 2 + [LOSS] * 58))
    assert list(found["systems"]) == ["b", "a"]
    assert [systems.rank(name, found) for name in "ba"] == ["1", "2"]
    assert "b leads by strength" in systems.leads(found)
    assert "reliably better than the next, a. It reliably beats" in systems.leads(found)
    (matrix,) = systems.matrix(found)
    assert isinstance(matrix, Table)
    assert matrix.rows == [["b", "–", "96.7%"], ["a", "3.3%", "–"]]
    (gap,) = found["differences"]
    each = [found["systems"][name]["strength"]["estimate"] for name in "ba"]
    assert gap["estimate"] == pytest.approx(each[0] - each[1])


def test_a_panel_is_asked_order_by_order_and_agreement_is_counted_by_post():
    one = verdicts("a", [WIN, WIN, LOSS, SPLIT])
    two = verdicts("a", [WIN, LOSS, LOSS, WIN])
    three = verdicts("a", [WIN, LOSS, WIN, LOSS])
    by_post = [row["verdict"] for row in panel([one, two, three])]
    assert by_post == [*WIN, *LOSS, *LOSS, "policy", "reference"]
    found = agreement({"one": one, "two": two})
    (pair,) = found["pairs"]
    assert pair["share"]["estimate"] == 0.5  # posts 0 and 2; a split verdict is a tie
    assert (found["shared"], pair["summaries"]) == (4, 4)
    assert pair["kappa"]["low"] <= pair["kappa"]["estimate"] <= pair["kappa"]["high"]
    rows = agreement({"one": one, "two": two, "three": three[:4]})  # two posts
    assert [row["summaries"] for row in rows["pairs"]] == [4, 2, 2]
    assert (rows["shared"], rows["fleiss"]["posts"]) == (2, 2)
    assert panel([one, two[:2]]) == panel([one[:2], two[:2]])  # the rest was not asked of both


def test_pairs_are_about_the_posts_that_both_have():
    def rows(name, posts):
        return [{"id": p, "query": "q", "summary": f"{name}{p}", "score": None} for p in posts]

    found = pair_rows({"a": rows("a", "12"), "b": rows("b", "23")})
    ((name, (row,)),) = found.items()
    assert name == "a-b"
    assert (row["summary"], row["reference"]) == ("a2", "b2")


def test_the_cost_is_the_price_of_the_replies_that_were_used():
    rows = [{"prompt_tokens": 1000, "completion_tokens": 100}] * 10
    judge = JudgeSettings(model="m", input_price=2.0, output_price=5.0)
    assert cost(judge, rows) == pytest.approx(10 * (2000 + 500) / 1e6)
    assert cost(JudgeSettings(kind="facts"), rows) == 0
    assert cost(JudgeSettings(model="nobody-knows"), rows) is None


def test_an_axis_is_another_question_and_another_judge():
    assert CRITERIA in PROMPT
    assert hash_of(ALONE) == "d4080e8aa69dd6c7", (
        "another wording of an axis needs another name in WORDING"
    )
    prompts = {axis: make_question("p", "a", "b", LETTER, axis).prompt for axis in ALONE}
    whole = make_question("p", "a", "b", LETTER).prompt
    assert len({whole, *prompts.values()}) == 4
    assert all(axis in prompt and CRITERIA not in prompt for axis, prompt in prompts.items())
    judge = JudgeSettings(model="m", axis="accuracy")
    assert judge.folder != JudgeSettings(model="m").folder
    assert judge.label == "m, accuracy alone"
    with pytest.raises(UserError, match=r"judge\.axis must be overall"):
        JudgeSettings(kind="facts", axis="accuracy")
    with pytest.raises(UserError, match=r"judge\.axis must be one of"):
        JudgeSettings(axis="style")


def test_the_server_is_asked_about_the_axis(judge_environment):
    with serving(lambda number, body: chat("Preferred: A")) as server:
        ask(server, axis="coverage", structured="off")
        ask(server, structured="off")
    prompts = [body["messages"][0]["content"] for body in server.requests]
    assert [ALONE["coverage"] in prompt for prompt in prompts] == [True, False]


def answer_by_length(number, body):
    """A judge that prefers the longer summary; asked about one axis, the shorter one."""
    prompt = body["messages"][0]["content"]
    first, second = (
        len(prompt.split(f"<summary-{letter}-")[1].split(">\n")[1].split("\n</")[0].split())
        for letter in "AB"
    )
    if ALONE["coherence"] in prompt:
        first, second = second, first
    letter = "tie" if first == second else "A" if first > second else "B"
    reply = json.dumps({"comparison": "One is better.", "preferred": letter})
    return chat(reply, model=body["model"])


def make_all(config, pairs):
    for stage in (take_outputs, judge_summaries, judge_controls, measure_win_rates):
        if stage is not take_outputs or read_manifest(stage_folder(config, "summaries")) is None:
            stage(config)
    if pairs:
        judge_pairs(config)
    outputs_page.write_report(config)


def test_a_leaderboard_shows_all_judges_their_panel_and_an_axis(
    judge_environment, tmp_path, capsys
):
    rows = rows_of_world(16)
    rows += [
        row | {"system": "odd", "summary": told(row["id"], "second", "event")} for row in rows[::2]
    ]
    path = write_jsonl(tmp_path / "three.jsonl", rows)
    with serving(answer_by_length) as server:
        served = [f"judge.base_url={server.url}", "judge.model=long", "judge.kind=openai"]
        served += ["judge.input_price=1", "judge.output_price=1"]
        for own in (["judge.kind=facts"], served, [*served, "judge.axis=coherence"]):
            make_all(config_of_file(path, *own), pairs=own[-1] != "judge.axis=coherence")
    pairs = read_lines(stage_folder(config_of_file(path), "pairs") / "judgements.jsonl")
    names = ["all-of-it - lead-3", "all-of-it - odd", "lead-3 - odd"]
    assert list(dict.fromkeys(row["policy"] for row in pairs)) == names
    capsys.readouterr()
    leaderboard_page.main(
        ["--preset", "outputs", "--set", f"outputs.file={path}", "judge.kind=facts"]
    )
    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines() if "/" not in line) <= 80
    runs = judge_environment
    text = (runs / "reports/leaderboard-judged-three-seed44413.md").read_text()
    header = next(line for line in text.splitlines() if "panel |" in line)
    assert [cell.strip() for cell in header.strip("|").split("|")][1:] == [
        "facts (offline rule, not an LLM)",
        "long",
        "long, coherence alone",
        "panel",
    ]
    assert "majority of 2 judges" in text  # the axis is another question
    assert "is NOT an LLM" in text
    assert "strengths rest on the comparisons of all pairs of systems" in text
    # 1,000 tokens read and 100 written at 1 USD a million, both orders, 1,000 pairs.
    priced = next(line for line in text.splitlines() if line.startswith("| long |"))
    assert priced.rstrip("| ").endswith("2.20")
    note = json.loads((runs / "reports/leaderboard-judged-three-seed44413.json").read_text())
    assert len(note["judges"]) == 3


def test_a_page_shows_the_judges_that_were_named_and_says_who_made_no_direct_comparisons(
    judge_environment, tmp_path
):
    rows = rows_of_world(8)
    path = write_jsonl(tmp_path / "two.jsonl", rows)
    with serving(answer_by_length) as server:
        served = [f"judge.base_url={server.url}", "judge.model=long", "judge.kind=openai"]
        make_all(config_of_file(path, "judge.kind=facts"), pairs=True)
        make_all(config_of_file(path, *served), pairs=True)
    page = judge_environment / "reports/leaderboard-judged-two-seed44413.md"

    def made(*words):
        leaderboard_page.main(["--preset", "outputs", "--set", f"outputs.file={path}", *words])
        return page.read_text()

    folder = config_of_file(path, *served).judge.folder
    alone = made("--judges", folder, "nobody")
    assert "judged by 1 judge against" in alone  # whatever else lies on disk
    assert "Judge nobody is left out: it has no finished win rates." in alone
    assert "rests on comparisons with the reference alone" not in made()
    shutil.rmtree(stage_folder(config_of_file(path, *served), "pairs"))
    said = "It rests on comparisons with the reference alone: long did not compare all pairs"
    assert said in made()


def test_each_judge_of_the_command_is_one_evaluation_of_the_same_run():
    request = Request(preset="outputs", overrides=("outputs.file=x.jsonl", "judge.asks=2"))
    words = ["kind=facts", "kind=local,model=m,axis=accuracy"]
    found = leaderboard.cells(request, words, pairs=True)
    assert [one.config.judge.kind for one in found] == ["facts", "local"]
    assert (found[1].config.judge.axis, found[1].config.judge.asks) == ("accuracy", 2)
    assert {one.config.name for one in found} == {"judged-x"}
    assert {one.goals for one in found} == {("eval", "pairs")}
    (alone,) = leaderboard.cells(request, [], pairs=False)
    assert alone.config == make_config("outputs", overrides=request.overrides)
    with pytest.raises(UserError, match="did you mean"):
        leaderboard.cells(request, ["modell=x"], pairs=False)
    with pytest.raises(UserError, match="JUDGES: 'local' is no judge"):
        leaderboard.cells(request, ["local"], pairs=False)


def test_the_page_shows_the_judges_that_were_named_and_all_where_none_was():
    class Called:
        stopped = 0
        execution = Execution()

        def __init__(self):
            self.words: list[str] = []

        def make_all(self, todo):
            return [0] * len(todo)

        def call(self, words):
            self.words = words
            return 0

    maker: Any = Called()
    request = Request(preset="outputs", overrides=("outputs.file=x.jsonl",))
    todo = leaderboard.cells(request, ["kind=facts", "kind=local,model=m"], pairs=False)
    assert leaderboard.make_leaderboard(maker, todo, named=True) == 0
    assert maker.words[-3:] == ["--judges", "facts", JudgeSettings(kind="local", model="m").folder]
    assert leaderboard.make_leaderboard(maker, todo[:1], named=False) == 0
    assert "--judges" not in maker.words
