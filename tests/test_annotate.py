"""People as judges: the page in a real browser, by keyboard; its verdicts in our own analysis."""

import json
import time

import pytest

from eval import annotations
from eval.annotations import describe, pair_of, pairs_of_folder, pairs_of_sides, read_annotations
from eval.calibration import calibrate, sample_pairs
from reports import annotate_page
from reports.annotate_page import to_html
from reports.parts.page import as_data
from stages.posts.readers import check_comparison
from stages.posts.toy import make_post
from stages.running.files import read_lines
from stages.runs import open_stage
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from stages.settings.prompt import format_post
from tests.browser import PLANTED
from tests.told import told


def pair(number, texts=("first", "second"), policies=("ppo", "ref"), post="A post."):
    summaries = [
        {"text": f" {text} {number}", "policy": policy, "note": None}
        for text, policy in zip(texts, policies, strict=True)
    ]
    info = {"id": f"t{number}", "subreddit": "x", "title": f"Title {number}", "post": post}
    return {"info": info, "summaries": summaries}


# -- in a browser ----------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, browser):
    """Writes a page and opens it; the file has a name of its own, so nothing is kept of another."""

    def opened(pairs, change=lambda text: text):
        path = tmp_path / "annotate.html"
        path.write_text(change(to_html(pairs)), encoding="utf-8")
        browser.seen.clear()
        browser.open(path)
        return path

    return opened


def text_of(browser, name):
    return browser.value(f"document.getElementById('{name}').textContent")


def saved(browser, name):
    path = browser.downloads / f"annotations_{name}.jsonl"
    browser.press("d")
    for _ in range(300):
        if path.exists() and path.stat().st_size:
            return read_lines(path)
        time.sleep(0.05)
    raise AssertionError(f"{path} was not saved")


def test_pairs_are_judged_by_keyboard_and_saved_as_comparisons(browser, place):
    pairs = [pair(k) for k in range(6)]
    place(pairs)
    browser.press(*"Anna B", "Enter")
    expected = []
    for key, choice, confidence in (("1", 0, 1), ("a", 0, None), ("b", 1, None), ("9", 1, 9)):
        shown = [text_of(browser, name) for name in ("title", "first", "second")]
        seen = browser.value("document.body.innerText")
        assert "ppo" not in seen  # blind
        assert "ref" not in seen
        expected.append((*shown, choice, confidence))
        browser.press(key)
    browser.press("5", "x")  # no answers
    browser.press("s")
    assert text_of(browser, "progress") == "Anna-B: 4 of 6 judged, 1 skipped"
    rows = saved(browser, "Anna-B")
    found = [
        (
            row["info"]["title"],
            *(one["text"].strip() for one in row["summaries"]),
            row["choice"],
            row["extra"]["confidence"],
        )
        for row in rows
    ]
    assert found == expected
    known = {pair_of(one) for one in pairs}
    for row in rows:
        check_comparison("saved", row)
        assert (row["worker"], row["split"]) == ("Anna-B", "annotated")
        assert pair_of(row) in known  # each text still has its policy
        assert row["extra"]["seconds"] >= 0


def test_progress_is_kept_through_a_reload_and_a_step_back_takes_a_verdict_back(browser, place):
    path = place([pair(k) for k in range(10, 14)])
    browser.press(*"carl", "Enter", "a", "b", "a")
    browser.press("u")
    for _ in range(50):  # a page's process sees what another has stored a moment later
        browser.open(path)
        browser.press("Enter")  # the name is still there
        if text_of(browser, "progress") == "carl: 2 of 4 judged, 0 skipped":
            break
        time.sleep(0.1)
    assert text_of(browser, "progress") == "carl: 2 of 4 judged, 0 skipped"
    browser.press("b", "b")
    assert not browser.value("document.getElementById('done').hidden")
    browser.press("b")  # after the end: nothing
    assert [row["choice"] for row in saved(browser, "carl")] == [0, 1, 1, 1]


def test_each_person_has_an_order_of_their_own_which_stays(browser, place):
    orders: dict[str, str] = {}
    for name in ("dora", "emil", "dora"):
        place([pair(k) for k in range(20, 50)])
        browser.call("Page.enable")
        order = browser.value(f"JSON.stringify(orderFor('{name}'))")
        assert orders.setdefault(name, order) == order
    dora, emil = (json.loads(orders[name]) for name in ("dora", "emil"))
    assert dora != emil
    assert sorted(number for number, _ in dora) == list(range(30))
    assert 5 <= sum(exchanged for _, exchanged in dora) <= 25
    assert [number for number, _ in dora] != list(range(30))


def test_what_a_post_has_planted_is_shown_and_does_not_run(browser, place):
    planted = [pair(k, (PLANTED, PLANTED + "2"), (PLANTED, "r"), PLANTED) for k in range(60, 62)]
    for one in planted:
        one["info"]["title"] = one["info"]["subreddit"] = PLANTED
    path = place(planted)
    browser.press(*"fay", "Enter")
    assert text_of(browser, "post") == PLANTED
    assert text_of(browser, "title") == PLANTED
    assert text_of(browser, "first").startswith(PLANTED)
    assert browser.value("document.querySelectorAll('#work img, #work b b').length") == 0
    browser.press("a")
    (row,) = saved(browser, "fay")
    assert row["info"]["post"] == PLANTED
    assert browser.value("typeof window.planted") == "undefined"
    asked = [
        event["params"]["request"]["url"]
        for event in browser.seen
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert asked == [path.as_uri()]  # nothing is fetched, nothing is sent
    wrong = ("Runtime.exceptionThrown", "Log.entryAdded")
    assert [event for event in browser.seen if event.get("method") in wrong] == []


def unescaped(text):
    for code, character in (("003c", "<"), ("003e", ">")):
        text = text.replace(f"\\u{code}", character)
    return text


def test_without_escape_and_policy_the_planted_script_would_run(browser, place):
    """So the test above can fail; and the page's policy alone would stop it too."""
    planted = [pair(70, post=PLANTED)]
    place(planted, unescaped)
    assert browser.value("typeof window.planted") == "undefined"
    place(planted, lambda text: unescaped(text).replace("Content-Security-Policy", "none"))
    assert browser.value("window.planted") in (1, 2, 3)


# -- without a browser -----------------------------------------------------------------------------


def test_data_in_the_page_hold_no_markup_and_come_back_whole():
    text = as_data({"text": PLANTED + "\ud800"})
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == {"text": PLANTED + "\ufffd"}


def verdict(one, worker, chosen, when="2026-01-01", swap=False):
    """The verdict of a worker for the policy `chosen`."""
    summaries = one["summaries"][::-1] if swap else one["summaries"]
    choice = [summary["policy"] for summary in summaries].index(chosen)
    return {
        "info": one["info"],
        "summaries": summaries,
        "choice": choice,
        "worker": worker,
        "batch": "annotate 1",
        "split": "annotated",
        "extra": {"confidence": None, "seconds": 1.5, "time": when},
    }


def save(folder, name, rows):
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"annotations_{name}.jsonl").write_text(lines, encoding="utf-8")


def test_the_agreement_of_two_people_is_counted_whatever_order_each_saw(tmp_path, capsys):
    """Of 10 pairs both judged, a says ppo in 6, b in 5, both in 4: 7 alike, chance 1/2."""
    pairs = [pair(k) for k in range(12)]
    a = ["ppo"] * 6 + ["ref"] * 4 + ["ppo"] * 2
    b = ["ppo"] * 4 + ["ref"] * 2 + ["ppo"] + ["ref"] * 3
    save(tmp_path, "a", [verdict(x, "a", y) for x, y in zip(pairs, a, strict=True)])
    rows = [
        verdict(x, "b", y, swap=k % 2 == 0)
        for k, (x, y) in enumerate(zip(pairs[:10], b, strict=True))
    ]
    save(tmp_path, "b", rows)
    found = describe(read_annotations(tmp_path))
    (both,) = found["agreements"]
    assert (both["workers"], both["pairs"]) == (["a", "b"], 10)
    assert both["agreement"]["estimate"] == pytest.approx(0.7)
    assert both["kappa"]["estimate"] == pytest.approx((0.7 - 0.5) / 0.5)
    assert found["workers"]["a"]["verdicts"] == 12
    assert found["workers"]["a"]["share_first"]["estimate"] == pytest.approx(8 / 12)
    annotations.main(["--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert "a and b: 10 pairs" in said
    assert max(map(len, said.splitlines()[:-1])) <= 80


def test_a_file_that_was_saved_twice_counts_once_with_the_later_verdict(tmp_path):
    one = pair(1)
    save(tmp_path, "a (1)", [verdict(one, "a", "ref", when="2026-02-02")])
    save(tmp_path, "a", [verdict(one, "a", "ppo", when="2026-01-01"), verdict(one, "b", "ppo")])
    rows = read_annotations(tmp_path)
    assert len(rows) == 2
    mine = next(row for row in rows if row["worker"] == "a")
    assert mine["summaries"][mine["choice"]]["policy"] == "ref"


def finish_summaries(config, posts=30):
    with open_stage(config, "summaries") as run:
        for number in range(posts):
            row = make_post(f"toy1-validation-{number}")
            right = told(row["id"], "event", "first")  # a reference may be worth less than nothing
            scores = {"score": 0.0, "reference_score": 0.0, "reference": right}
            line = {"id": row["id"], "query": format_post(row), **scores}
            text = right if number == 0 else row["title"]
            run.append("ppo.jsonl", {**line, "summary": text})
        run.finish({})


def test_what_people_said_of_a_run_calibrates_a_judge_and_gives_a_win_rate(runs, capsys):
    """Everybody prefers the references, and the rule of the built-in world does so too."""
    finish_summaries(make_config("tiny"))
    annotate_page.main(["--a", "tiny:ppo", "--pairs", "25"])
    folder = runs / "annotate" / "tiny-ppo"
    assert (folder / "annotate.html").exists()
    assert "25 pairs" in capsys.readouterr().out
    pairs = pairs_of_sides("tiny:ppo", "", 99, seed=1)
    assert len(pairs) == 29  # identical texts are a tie that nobody is asked about
    save(folder, "a", [verdict(one, "a", "ref", swap=k % 3 == 0) for k, one in enumerate(pairs)])
    annotations.main(["--folder", str(folder)])
    overrides = ("judge.kind=facts", f"data.source={folder}")
    config = make_config("tiny", name="annotated", overrides=overrides)
    found = calibrate(config)
    assert found["pairs"] == 29
    assert found["agreement"]["estimate"] == 1.0
    assert pairs_of_folder(str(folder), 9, seed=1) == pairs_of_folder(str(folder), 9, seed=1)
    located = [("x", row) for row in read_lines(folder / "comparisons_validation.jsonl")]
    assert {one["with_reference"] for one in sample_pairs(located, 9, seed=1)} == {True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name what people shall judge"),
        (["--a", "tiny:ppo", "--comparisons", "x"], "name what people shall judge"),
        (["--a", "tiny:ppo"], "run `make eval`"),
        (["--comparisons", "nowhere"], "nowhere"),
        (["--a", "tiny:ppo", "--pairs", "0"], "--pairs must be at least 1"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(runs, capsys, arguments, said):
    with pytest.raises(SystemExit):
        annotate_page.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_other_labelled_data_are_not_written_over(tmp_path):
    save(tmp_path, "a", [verdict(pair(1), "a", "ppo")])
    other = verdict(pair(2), "x", "ppo") | {"split": "valid1"}
    (tmp_path / "comparisons_validation.jsonl").write_text(json.dumps(other) + "\n")
    with pytest.raises(UserError, match="holds other comparisons"):
        annotations.write_comparisons(tmp_path, read_annotations(tmp_path))
    with pytest.raises(UserError, match="holds no annotations"):
        read_annotations(tmp_path / "empty")
    (tmp_path / "annotations_b.jsonl").write_text('{"half')
    with pytest.raises(UserError, match=r"annotations_b.jsonl:1: not JSON .*: save it again"):
        read_annotations(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "annotations_a.jsonl:3: not a JSON object: save it again"),
        ("[" * 100_000, "annotations_a.jsonl:3: not JSON .*nested too deeply.*: save it again"),
        ("{}", "annotations_a.jsonl:3: fields info, summaries, choice, batch, split are missing"),
    ],
)
def test_a_saved_line_that_is_no_verdict_is_named_and_blank_ones_are_none(tmp_path, line, said):
    good = json.dumps(verdict(pair(1), "a", "ppo"))
    (tmp_path / "annotations_a.jsonl").write_text(f"{good}\n \n")
    assert len(read_annotations(tmp_path)) == 1
    (tmp_path / "annotations_a.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(UserError, match=said) as caught:
        read_annotations(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_comparisons_beside_the_saved_files_are_one_line_and_stay(tmp_path):
    save(tmp_path, "a", [verdict(pair(1), "a", "ppo")])
    broken = tmp_path / "comparisons_validation.jsonl"
    broken.write_text('{"half')
    with pytest.raises(UserError, match=r"comparisons_validation.jsonl:1: not JSON.*: move that"):
        annotations.write_comparisons(tmp_path, read_annotations(tmp_path))
    assert broken.read_text() == '{"half'


def test_posts_without_a_title_are_shown_whole_and_come_back(runs, tmp_path):
    config = make_config("tiny")
    with open_stage(config, "summaries") as run:
        row = {"id": "1", "query": "A plain post.", "score": 0.0, "reference_score": 0.0}
        run.append("ppo.jsonl", row | {"summary": "one", "reference": "two"})
        run.finish({})
    (found,) = pairs_of_sides("tiny:ppo", "", 9, seed=1)
    shown = {"subreddit": "", "title": "", "post": "A plain post.", "id": "1"}
    assert found["info"] == shown
    save(tmp_path / "said", "a", [verdict(found, "a", "ppo")])
    assert len(read_annotations(tmp_path / "said")) == 1
