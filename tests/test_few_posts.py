"""A judge at random, one that takes the first, and a perfect one on 3 posts: what pages say."""

import random

import pytest

from eval import calibration, controls, judge
from eval.judges import protocol
from eval.judges.protocol import About, Reply
from eval.outputs import take_outputs
from eval.win_rate import measure_win_rates
from reports import calibration_page, outputs_page
from stages.finished import stage_folder
from stages.posts.toy import facts_of, score_summary
from stages.settings.command_line import make_config
from tests.test_outputs import rows_of_world, write_jsonl

LETTERS = random.Random(5)


class Rule(protocol.Judge):
    """A judge by a rule of the post and both texts."""

    about = About(kind="facts", name="a rule", is_llm=True, note="for tests")

    def __init__(self, rule):
        self.rule = rule

    def reply(self, comparison):
        return Reply(choice=self.rule(*comparison[:4]), text="")


def perfect(post, query, first, second):
    """The text that tells more right facts; the shorter one if both tell as many."""
    worth = [(score_summary(text, facts_of(post)), -len(text)) for text in (first, second)]
    return "A" if worth[0] > worth[1] else "B"


RULES = {
    "random": lambda *texts: LETTERS.choice("AB"),
    "first": lambda *texts: "A",
    "perfect": perfect,
}


@pytest.fixture
def pages(runs, tmp_path, monkeypatch):
    """All pages of 3 posts and two systems by one judge, as one text each."""

    def make(rule):
        rows = [row | {"people": number % 2} for number, row in enumerate(rows_of_world(3))]
        path = write_jsonl(tmp_path / "three.jsonl", rows)
        given = (f"outputs.file={path}", "judge.kind=facts", "outputs.label=people")
        config = make_config("outputs", overrides=given)
        for module in (calibration, controls, judge):
            monkeypatch.setattr(module, "make_judge", lambda config, policies: Rule(RULES[rule]))
        take_outputs(config)
        for stage in (judge.judge_summaries, controls.judge_controls, measure_win_rates):
            stage(config)
        calibration.calibrate(config)
        outputs_page.write_report(config)
        words = ["--preset", "outputs", "--set", *given]
        calibration_page.main(words)
        folder = stage_folder(config, "report")
        found = {"run": next(folder.glob("*.md")).read_text()}
        found["calibration"] = next(runs.glob("*/*/calibration_report/*/*.md")).read_text()
        return found

    return make


@pytest.mark.parametrize("rule", RULES)
def test_three_posts_decide_nothing_and_every_page_says_so(pages, rule):
    found = pages(rule)
    for name, text in found.items():
        # That no verdict about 3 posts survives a swap is enough to tell.
        is_flagged = "keep its verdict after a swap" in text
        assert ("FAILED" in text) is is_flagged is (rule == "first"), name
    text = found["run"]
    assert "is inconclusive against the reference" in text
    assert "reliably" not in text.replace("does not reliably", "")
    assert "too few posts (3 of 20 needed)" in text
    assert "too few posts (3 of 125 needed)" in text
    assert "neither passed nor failed" in found["calibration"]
    assert "of 125 needed)" in found["calibration"]
    lead = found["calibration"].split("\n\n")[1]
    assert lead.startswith("It agrees with the labels on ")
    assert "than the longer text does (" in lead
