"""Calibration: agreement with labels by hand, and what is said of a judge who has none."""

import json
import random

import pytest

from eval import calibration
from eval.calibration import calibrate, correct, describe, sample_pairs, with_answers
from eval.judges import protocol
from eval.judges.protocol import About, Reply
from stages.config.command_line import make_config
from stages.config.config import Checks, Data, JudgeSettings, UserError
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from tests.lib.make_stages import run_module

SMALL_WORLD = ["--set", "world.train_posts=5", "world.train_comparisons=5"]
SMALL_WORLD += ["world.validation_posts=300", "world.validation_comparisons=700"]


def labelled(number, policies=("ref", "sup"), choice=0, confidence=None, batch="b1"):
    summaries = [{"text": f" text {policy}", "policy": policy} for policy in policies]
    info = {"id": f"t{number}", "subreddit": "x", "title": "t", "post": "p."}
    extra = {"confidence": confidence}
    row = {"info": info, "summaries": summaries, "choice": choice, "batch": batch}
    return f"file:{number}", row | {"split": "valid1", "extra": extra}


def test_a_pair_puts_the_reference_in_its_place_and_keeps_the_label():
    located = [labelled(0), labelled(1, ("sup", "ref")), labelled(2, ("sup", "best"), choice=1)]
    pairs = sample_pairs(located, 9, seed=1)
    found = [(one["summary"], one["reference"], one["label"]) for one in pairs]
    assert found == [
        ("text sup", "text ref", False),
        ("text sup", "text ref", True),
        ("text sup", "text best", False),
    ]
    assert [one["with_reference"] for one in pairs] == [True, True, False]
    assert pairs[0]["query"] == "SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: p.\n\nTL;DR:"


def judgements_of(pairs, verdicts):
    """Both orders of each pair: verdicts like `policy`, or two of them."""
    return [
        {"policy": "labelled", "id": pair["id"], "order": order, "verdict": verdict}
        for pair, both in zip(pairs, verdicts, strict=True)
        for order, verdict in zip(("policy_first", "reference_first"), both, strict=True)
    ]


def test_agreement_and_kappa_are_counted():
    located = [labelled(k, choice=int(k >= 4), confidence=2 if k < 3 else 9) for k in range(8)]
    pairs = sample_pairs(located, 8, seed=1)  # labels: 4 for the reference, 4 for the summary
    win, loss = ("policy", "policy"), ("reference", "reference")
    verdicts = [loss, loss, win, ("policy", "reference"), win, win, win, ("unjudged", "policy")]
    judgements = judgements_of(pairs, verdicts)
    found = describe(with_answers(pairs, judgements), judgements)
    assert (found["pairs"], found["judged"], found["ties"]) == (8, 7, 1)
    assert found["agreement"]["estimate"] == pytest.approx(5.5 / 7)
    assert found["agreement_decided"]["estimate"] == pytest.approx(5 / 6)
    # Decided: 2 of 3 against, 3 of 3 for: observed 5/6, by chance (3 * 4 + 3 * 2) / 36 = 1/2.
    assert found["kappa_interval"]["estimate"] == pytest.approx(2 / 3)
    assert found["specificity"]["estimate"] == pytest.approx(2.5 / 4)
    assert found["sensitivity"]["estimate"] == 1.0
    json.dumps(found, allow_nan=False)


class Chance(protocol.Judge):
    """A judge who takes the first so often, by a coin of each question's own."""

    about = About(kind="chance", name="chance", is_llm=False, note="for tests")

    def __init__(self, first):
        self.first = first

    def reply(self, comparison):
        assert comparison.post_id.startswith("toy")
        coin = random.Random(f"0 {comparison.post_id} {comparison.first} {comparison.second}")
        return Reply(choice="A" if coin.random() < self.first else "B", text="")


def small_config(**changes):
    config = make_config("tiny", name="small", overrides=tuple(SMALL_WORLD[1:]))
    return config.changed(**changes)


@pytest.mark.parametrize(("first", "flagged"), [(0.5, False), (0.75, True)])
def test_a_judge_who_guesses_is_flagged_and_so_is_one_who_takes_the_first(
    runs, monkeypatch, first, flagged
):
    monkeypatch.setattr(calibration, "make_judge", lambda config, policies: Chance(first))
    found = calibrate(small_config())
    assert found["agreement"]["low"] < 0.5 < found["agreement"]["high"]
    assert "agree with the labels on more than 60%" in found["flags"][0]
    assert "not shown to agree more often than the longest text" in " ".join(found["flags"])
    assert found["pairs"] == found["of_pairs"] == 700  # all there are
    assert any("shown first" in flag for flag in found["flags"]) == flagged
    assert abs(found["kappa_interval"]["estimate"]) < 0.2


def labelled_pairs_with(answers):
    """As many pairs, half of them with either label: `answers` of a judge in the labels' order."""
    located = [labelled(k, choice=k % 2) for k in range(len(answers))]
    pairs = sample_pairs(located, 0, seed=1)
    judgements = judgements_of(pairs, [(answer, answer) for answer in answers])
    return describe(with_answers(pairs, judgements), judgements)


def test_a_judge_that_is_worse_is_told_from_one_that_posts_are_too_few_for():
    right, wrong = ["reference", "policy"] * 150, ["policy", "reference"] * 150
    for answers, flagged, undecided in (
        (right, "", False),
        (wrong[:6], "does not agree with the labels", True),  # 0 of 6: its interval reaches 39%
        (wrong[:60], "it does not agree more often than the longest text", False),
        (right[:4], "", True),
        ([*right[:156], *wrong[:144]], "not shown to agree more often than the longest", False),
    ):
        found = labelled_pairs_with(answers)
        assert flagged in "; ".join(found["flags"]), answers
        assert bool(flagged) == bool(found["flags"]), answers
        said = f"too few posts ({len(answers)} of 125 needed)" if undecided else ""
        assert said in found["undecided"], answers
        assert bool(said) == bool(found["undecided"]), answers


def test_150_pairs_about_3_posts_count_as_3_posts():
    located = [labelled(number % 3, choice=number % 2) for number in range(150)]
    pairs = sample_pairs(located, 0, seed=1)
    judgements = judgements_of(pairs, [("policy", "reference")] * 150)  # it takes the first
    found = describe(with_answers(pairs, judgements), judgements)
    assert (found["pairs"], found["posts"]) == (150, 3)
    first, same = (found["statistics"][key] for key in ("share_first", "swap_consistency"))
    # Wilson of 3 of 3: 3 / (3 + 1.96^2), which is 44%; of 150 it was 97.5%.
    assert (first["posts"], first["estimate"]) == (3, 1.0)
    assert first["low"] == pytest.approx(3 / (3 + 1.959964**2), abs=1e-4)
    assert (same["posts"], same["estimate"]) == (3, 0.0)
    assert same["high"] == pytest.approx(1 - first["low"], abs=1e-4)
    assert found["undecided"] == "its calibration, too few posts (3 of 125 needed)"
    assert not any("shown first" in flag for flag in found["flags"])


def test_the_built_in_judge_agrees_with_the_built_in_labels(runs, capsys):
    run_module(
        calibration,
        ["--preset", "tiny", "--name", "small", *SMALL_WORLD, "checks.calibration_pairs=400"],
    )
    folder = runs / "small/seed44413/calibration/facts"
    found = (read_manifest(folder) or {})["results"]
    assert found["flags"] == []
    assert found["agreement"]["low"] > 0.85
    assert (found["pairs"], found["of_pairs"]) == (400, 700)
    assert len(read_lines(folder / "pairs.jsonl")) == 400
    assert len(read_lines(folder / "judgements.jsonl")) == 800
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_correction_recovers_a_known_rate_through_a_judges_errors():
    counts = ((True, 1.0, 160), (True, 0.0, 40), (False, 0.0, 180), (False, 1.0, 20))
    answers = [(label, answer) for label, answer, count in counts for _ in range(count)]
    posts = [
        {"post": f"p{k}", "label": label, "answer": answer, "with_reference": True, "family": ""}
        for k, (label, answer) in enumerate(answers)
    ]
    scores = [(f"p{k}", float(k < 59)) for k in range(100)]  # 0.59 = 0.7 * 0.8 + 0.3 * 0.1
    found = correct(scores, posts)
    assert found is not None
    assert found.estimate == pytest.approx(0.7)


def test_a_judge_of_its_own_texts_and_posts_of_another_world_are_refused(runs, tmp_path):
    with pytest.raises(UserError, match="cannot be calibrated"):
        calibrate(small_config(judge=JudgeSettings(kind="reward_model")))
    rows = [json.dumps(labelled(k)[1]) for k in range(3)]
    (tmp_path / "comparisons_validation.jsonl").write_text("\n".join(rows))
    config = small_config(data=Data(source=str(tmp_path)), checks=Checks(calibration_pairs=2))
    with pytest.raises(UserError, match="knows only the built-in world"):
        calibrate(config)
    assert not (runs / "small/seed44413/calibration").exists()
