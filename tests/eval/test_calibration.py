"""Calibration: a judge's agreement with labels by people, and what is flagged about it."""

import json
import random

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import normal_sample_size_one_tail

from eval import calibration
from eval.calibration import (
    HUMAN_CEILING,
    LABELED,
    LEAST_AGREEMENT,
    POSTS_NEEDED,
    calibrate,
    correct,
    describe,
    sample_pairs,
    with_answers,
)
from eval.judges.protocol import VERDICTS, About, Judge, Reply
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.judge import Checks, JudgeSettings
from stages.config.sections import Data
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from tests.lib.make_stages import run_module

SMALL_WORLD = (
    "world.train_posts=5",
    "world.train_comparisons=5",
    "world.validation_posts=300",
    "world.validation_comparisons=700",
)
WIN = ("policy", "policy")
TIE = ("policy", "reference")
LOSS = ("reference", "reference")


def comparison(number, policies=("ref", "sup"), choice=0):
    """A published comparison about a post, with its place."""
    row = {
        "info": {"id": f"t{number}", "subreddit": "x", "title": "t", "post": "p."},
        "summaries": [{"text": f" text {policy}", "policy": policy} for policy in policies],
        "choice": choice,
        "batch": "b1",
        "split": "valid1",
        "extra": {"confidence": None},
    }
    return f"file:{number}", row


def judgements_of(pairs, verdicts):
    """The judgements of labeled pairs; `verdicts` has those in both orders for each pair."""
    judgements = []
    for pair, verdicts_of_pair in zip(pairs, verdicts, strict=True):
        for order, verdict in zip(VERDICTS, verdicts_of_pair, strict=True):
            judgements.append(
                {"policy": LABELED, "id": pair["id"], "order": order, "verdict": verdict}
            )
    return judgements


def described(comparisons, verdicts):
    """The results of a judge with these verdicts."""
    pairs = sample_pairs(comparisons, count=0, seed=1)
    judgements = judgements_of(pairs, verdicts)
    return describe(with_answers(pairs, judgements), judgements)


# -- pairs -----------------------------------------------------------------------------------------


def test_the_reference_is_the_reference_and_the_label_follows_the_summary():
    comparisons = [
        comparison(0),
        comparison(1, ("sup", "ref")),
        comparison(2, ("sup", "best"), choice=1),
    ]

    pairs = sample_pairs(comparisons, count=9, seed=1)

    assert [pair["summary"] for pair in pairs] == ["text sup", "text sup", "text sup"]
    assert [pair["reference"] for pair in pairs] == ["text ref", "text ref", "text best"]
    assert [pair["label"] for pair in pairs] == [False, True, False]
    assert [pair["with_reference"] for pair in pairs] == [True, True, False]


def test_a_pair_shows_its_post_in_the_prompt():
    [pair] = sample_pairs([comparison(0)], count=9, seed=1)
    assert pair["query"] == "SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: p.\n\nTL;DR:"


def test_a_sample_is_drawn_by_seed_and_stays_in_the_files_order():
    comparisons = [comparison(number) for number in range(100)]

    posts = [pair["post"] for pair in sample_pairs(comparisons, count=10, seed=1)]
    other_posts = [pair["post"] for pair in sample_pairs(comparisons, count=10, seed=2)]

    assert posts == sorted(posts, key=lambda post: int(post[1:]))
    assert len(set(posts)) == 10
    assert posts != other_posts


# -- agreement -------------------------------------------------------------------------------------


@pytest.fixture
def eight_pairs():
    """Four labels for the reference and four for the summary; the judge is silent on one pair."""
    comparisons = [comparison(number, choice=int(number >= 4)) for number in range(8)]
    verdicts = [LOSS, LOSS, WIN, TIE, WIN, WIN, WIN, ("unjudged", "policy")]
    return described(comparisons, verdicts)


def test_agreement_counts_a_tie_half(eight_pairs):
    assert eight_pairs["pairs"] == 8
    assert eight_pairs["judged"] == 7
    assert eight_pairs["ties"] == 1
    assert eight_pairs["agreement"]["estimate"] == pytest.approx(5.5 / 7)
    assert eight_pairs["agreement_decided"]["estimate"] == pytest.approx(5 / 6)


def test_kappa_is_that_of_the_decided_pairs(eight_pairs):
    # 2 of 3 against and 3 of 3 for: 5/6 observed, and (3 * 4 + 3 * 2) / 36 = 1/2 by chance.
    assert eight_pairs["kappa_interval"]["estimate"] == pytest.approx(2 / 3)


def test_errors_are_counted_for_each_kind_of_label(eight_pairs):
    assert eight_pairs["specificity"]["estimate"] == pytest.approx(2.5 / 4)
    assert eight_pairs["sensitivity"]["estimate"] == 1.0


def test_the_results_are_plain_json(eight_pairs):
    assert json.loads(json.dumps(eight_pairs, allow_nan=False)) == eight_pairs


@pytest.fixture
def first_text_of_3_posts():
    """A judge that always takes the first text, on 150 pairs about 3 posts."""
    comparisons = [comparison(number % 3, choice=number % 2) for number in range(150)]
    return described(comparisons, [TIE] * 150)


def test_150_pairs_about_3_posts_count_as_3_posts(first_text_of_3_posts):
    share_first = first_text_of_3_posts["statistics"]["share_first"]
    consistency = first_text_of_3_posts["statistics"]["swap_consistency"]

    # Wilson's bound for 3 of 3 is 3 / (3 + 1.96^2), or 44%; for 150 of 150 it is 97.5%.
    low = 3 / (3 + 1.959964**2)
    assert first_text_of_3_posts["pairs"] == 150
    assert first_text_of_3_posts["posts"] == 3
    assert share_first["posts"] == 3
    assert share_first["estimate"] == 1.0
    assert share_first["low"] == pytest.approx(low, abs=1e-4)
    assert consistency["posts"] == 3
    assert consistency["estimate"] == 0.0
    assert consistency["high"] == pytest.approx(1 - low, abs=1e-4)


def test_3_posts_are_too_few_for_flags(first_text_of_3_posts):
    undecided = first_text_of_3_posts["undecided"]
    assert undecided == "its calibration, too few posts (3 of 125 needed)"
    assert "shown first" not in "; ".join(first_text_of_3_posts["flags"])


# -- flags -----------------------------------------------------------------------------------------


def judged_with(right, wrong):
    """The results of a judge that is right on the first pairs and wrong on the others.

    Every second pair has a label for the summary.
    """
    comparisons = []
    verdicts = []
    for number in range(right + wrong):
        label = number % 2 == 1
        is_right = number < right
        comparisons.append(comparison(number, choice=int(label)))
        verdicts.append(WIN if label == is_right else LOSS)
    return described(comparisons, verdicts)


def test_a_judge_that_is_always_right_has_no_flag():
    results = judged_with(right=300, wrong=0)
    assert results["flags"] == []
    assert results["undecided"] == ""


def test_a_judge_that_is_always_wrong_is_flagged_on_six_pairs():
    results = judged_with(right=0, wrong=6)  # Wilson's upper bound for 0 of 6 is 39%
    assert results["flags"][0].startswith("it does not agree with the labels on more than 60%")
    assert results["undecided"] == "its calibration, too few posts (6 of 125 needed)"


def test_a_judge_that_fails_every_check_is_not_undecided():
    results = judged_with(right=0, wrong=60)
    flags = "; ".join(results["flags"])
    assert "does not agree more often than the longest text" in flags
    assert results["undecided"] == ""


def test_four_right_answers_are_too_few():
    results = judged_with(right=4, wrong=0)
    assert results["flags"] == []
    assert results["undecided"] == "its calibration, too few posts (4 of 125 needed)"


def test_a_judge_that_is_hardly_better_than_a_coin_is_flagged_on_300_pairs():
    results = judged_with(right=156, wrong=144)
    flags = "; ".join(results["flags"])
    assert "it is not shown to agree more often than the longest text" in flags
    assert results["undecided"] == ""


def test_the_posts_needed_are_those_of_a_test_with_80_percent_power():
    [least, _] = HUMAN_CEILING
    posts = normal_sample_size_one_tail(
        diff=least - LEAST_AGREEMENT,
        power=0.8,
        alpha=0.025,
        std_null=np.sqrt(LEAST_AGREEMENT * (1 - LEAST_AGREEMENT)),
        std_alternative=np.sqrt(least * (1 - least)),
    )
    assert np.ceil(posts) == POSTS_NEEDED
    # By hand: ((1.95996 * 0.48990 + 0.84162 * 0.44900) / 0.12)^2 = 124.1.
    z_power = stats.norm.ppf(0.8)
    assert posts == pytest.approx(
        ((1.959964 * 0.489898 + z_power * 0.448999) / 0.12) ** 2, rel=1e-4
    )


# -- labels by people ------------------------------------------------------------------------------


def calibrated_by_people(choose, shared):
    """The results of a judge on 500 labels by people; `choose(pair)` is 1, 0.5 or 0."""
    lines = read_lines(shared / "tldr-human" / "comparisons_train.jsonl")
    comparisons = [(f"file:{number}", row) for number, row in enumerate(lines)]
    pairs = sample_pairs(comparisons, count=500, seed=44413)
    verdict_of_choice = {1.0: "policy", 0.5: "tie", 0.0: "reference"}
    verdicts = []
    for pair in pairs:
        verdict = verdict_of_choice[choose(pair)]
        verdicts.append((verdict, verdict))
    judgements = judgements_of(pairs, verdicts)
    return describe(with_answers(pairs, judgements), judgements)


def choose_longest(pair):
    first, second = pair["words"]
    return float((1 + np.sign(first - second)) / 2)


def test_a_judge_of_length_is_flagged_on_labels_of_people(shared):
    results = calibrated_by_people(choose_longest, shared)

    longest = results["simple"]["longest"]
    assert results["agreement"]["estimate"] == longest["agreement"]["estimate"]
    assert results["prefers_longer"]["judge"]["estimate"] == 1.0
    flags = "; ".join(results["flags"])
    assert "than the longest text: +0.0%" in flags
    assert "than the text that repeats most of the post" in flags


def test_a_judge_as_good_as_people_beats_the_simple_ones(shared):
    generator = random.Random(5)

    def choose(pair):
        is_right = generator.random() < 0.75
        return float(pair["label"] == is_right)

    results = calibrated_by_people(choose, shared)

    assert results["flags"] == []
    assert results["kappa_interval"]["low"] > 0.3
    for simple in results["simple"].values():
        assert simple["difference"]["low"] > 0


# -- the stage -------------------------------------------------------------------------------------


class Chance(Judge):
    """Takes the text that is shown first with a probability, by a coin for each question."""

    about = About(kind="chance", name="chance", is_llm=False, note="for tests")

    def __init__(self, probability):
        self.probability = probability

    def reply(self, comparison):
        assert comparison.post_id.startswith("toy")
        coin = random.Random(f"0 {comparison.post_id} {comparison.first} {comparison.second}")
        if coin.random() < self.probability:
            return Reply(choice="A", text="")
        return Reply(choice="B", text="")


def small_config(**changes):
    config = make_config("tiny", name="small", overrides=SMALL_WORLD)
    return config.changed(**changes)


@pytest.mark.parametrize(("probability", "takes_the_first"), [(0.5, False), (0.75, True)])
def test_a_judge_that_guesses_is_flagged(runs, monkeypatch, probability, takes_the_first):
    monkeypatch.setattr(calibration, "make_judge", lambda config, policies: Chance(probability))

    results = calibrate(small_config())

    flags = "; ".join(results["flags"])
    assert results["agreement"]["low"] < 0.5 < results["agreement"]["high"]
    assert abs(results["kappa_interval"]["estimate"]) < 0.2
    assert "agree with the labels on more than 60%" in results["flags"][0]
    assert "not shown to agree more often than the longest text" in flags
    assert ("shown first" in flags) == takes_the_first


def test_by_default_all_pairs_are_judged(runs, monkeypatch):
    monkeypatch.setattr(calibration, "make_judge", lambda config, policies: Chance(0.5))

    results = calibrate(small_config())

    assert results["pairs"] == 700
    assert results["of_pairs"] == 700


@pytest.fixture
def facts_folder(runs):
    """The folder of a calibration of the built-in judge on 400 of 700 built-in pairs."""
    settings = [*SMALL_WORLD, "checks.calibration_pairs=400"]
    run_module(calibration, ["--preset", "tiny", "--name", "small", "--set", *settings])
    return runs / "small/seed44413/calibration/facts"


def test_the_built_in_judge_agrees_with_the_built_in_labels(capsys, facts_folder):
    results = (read_manifest(facts_folder) or {})["results"]

    assert results["flags"] == []
    assert results["agreement"]["low"] > 0.85
    # The first argument is set up first, so it captures what the stage prints.
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


def test_the_stage_writes_its_pairs_and_judgements(facts_folder):
    results = (read_manifest(facts_folder) or {})["results"]

    assert results["pairs"] == 400
    assert results["of_pairs"] == 700
    assert len(read_lines(facts_folder / "pairs.jsonl")) == 400
    assert len(read_lines(facts_folder / "judgements.jsonl")) == 800


def test_a_judge_of_its_own_texts_is_refused(runs):
    with pytest.raises(UserError, match="which have no labels"):
        calibrate(small_config(judge=JudgeSettings(kind="reward_model")))


def test_the_built_in_judge_refuses_other_posts_and_leaves_no_folder(runs, tmp_path):
    rows = [json.dumps(comparison(number)[1]) for number in range(3)]
    (tmp_path / "comparisons_validation.jsonl").write_text("\n".join(rows))
    config = small_config(data=Data(source=str(tmp_path)), checks=Checks(calibration_pairs=2))

    with pytest.raises(UserError, match="knows only the built-in posts"):
        calibrate(config)

    assert not (runs / "small/seed44413/calibration").exists()


# -- the correction --------------------------------------------------------------------------------


def test_the_correction_recovers_a_known_rate_through_a_judges_errors():
    """A true rate of 0.7, with sensitivity 0.8 and specificity 0.9, is seen as 0.59."""
    answers = [1.0] * 160 + [0.0] * 40 + [0.0] * 180 + [1.0] * 20
    pairs = [
        {
            "post": f"p{number}",
            "label": number < 200,
            "answer": answer,
            "with_reference": True,
            "family": "",
        }
        for number, answer in enumerate(answers)
    ]
    scores = [(f"p{number}", float(number < 59)) for number in range(100)]

    rate = correct(scores, pairs)

    assert rate is not None
    assert rate.estimate == pytest.approx(0.7)
