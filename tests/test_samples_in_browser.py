"""Samples of a page in a real browser: search, filter, sort, scripts."""

import json
import random

import pytest

from reports.parts import page
from reports.parts.sample_views import SampleBrowser, change, fitting, verdict_of
from reports.sections.samples import sample, some_updates, table
from tests.browser import PLANTED

NAMES = ["SFT", "PPO"]
LABELS = {
    "won": "preferred to the reference",
    "even": "even with the reference",
    "lost": "the reference is preferred",
    "unjudged": "unjudged",
}


def side(text, points, number=0.0, tokens=9):
    said = [{"shown": shown, "prefers": "policy", "text": f"words on {text}"} for shown in "AB"]
    numbers = {"tokens": tokens, "score": number, "kl": number / 2, "ends": True}
    verdict = {"points": points, "verdict": verdict_of(points)}
    return {"text": text, **numbers, **verdict, "said": said}


def posts(count=30):
    """Posts whose numbers a generator draws, so that an order is no accident of how it is made."""
    draw = random.Random(7)
    return [
        {
            "id": f"p{at}",
            "post": f"A long post number {at} about a {draw.choice(['lamp', 'Piano', 'dog'])}",
            "reference": {"text": f"reference {at}", "tokens": 5, "score": draw.gauss(0, 1)},
            "sides": [
                side(
                    f"{name} of {at}",
                    draw.choice([0.0, 0.25, 0.5, 0.75, 1.0, None]),
                    draw.gauss(0, 1),
                    draw.randrange(3, 30),
                )
                for name in NAMES
            ],
        }
        for at in range(count)
    ]


def browser_of(rows, **others):
    few = [sample(at, row, NAMES) for at, row in enumerate(rows[:6], start=1)]
    return SampleBrowser("samples", NAMES, rows, few, **others)


@pytest.fixture
def show(tmp_path, browser):
    """Opens a page of some blocks; in the end it must have made no error and asked for nothing."""
    path = tmp_path / "page.html"

    def opened(*blocks, change=lambda text: text):
        path.write_text(change(page.to_html("A page", list(blocks))), "utf-8")
        browser.seen.clear()
        browser.open(path)

    yield opened
    assert browser.wrong() == []
    assert browser.asked() == [path.as_uri()]


def choose(browser, label, value):
    """Set the field with a label, as a reader does."""
    browser.value(
        "(() => { const label = [...document.querySelectorAll('.sample-browser label')]"
        f".find((one) => one.textContent.startsWith({json.dumps(label)}));"
        "const field = label.querySelector('select, input');"
        f"field.type === 'checkbox' ? field.click() : field.value = {json.dumps(value)};"
        "field.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def titles(browser):
    """The posts that are shown, all turns of the list together."""
    found = []
    while True:
        read = "[...document.querySelectorAll('.found h3 small')].map((one) => one.textContent)"
        found += browser.value(read)
        later = "document.querySelector('.pager button:last-child')"
        if browser.value(f"{later}.disabled"):
            return found
        browser.value(f"{later}.click()")


def status(browser):
    return browser.value("document.querySelector('[role=status]').textContent")


def test_samples_are_searched_filtered_and_sorted(browser, show):
    rows = posts()
    show(browser_of(rows))
    assert titles(browser) == [row["id"] for row in rows]
    ppo = {row["id"]: row["sides"][1] for row in rows}
    for key, label in (("score", "score"), ("kl", "kl"), ("length", "length")):
        number = {"length": "tokens"}.get(key, key)
        choose(browser, "Sort by", key)
        falling = sorted(ppo, key=lambda post: -ppo[post][number])
        found = titles(browser)
        assert [ppo[one][number] for one in found] == [ppo[one][number] for one in falling], label
        assert sorted(found) == sorted(ppo)
    choose(browser, "largest first", "")
    assert [ppo[one]["tokens"] for one in titles(browser)] == sorted(
        one["tokens"] for one in ppo.values()
    )
    for verdict in LABELS:
        choose(browser, "Verdict", verdict)
        expected = {post for post, one in ppo.items() if one["verdict"] == verdict}
        assert set(titles(browser)) == expected
        assert status(browser) == f"{len(expected)} of 30 posts"
        shown = "document.querySelector('.found .ppo .verdict').textContent"
        assert browser.value(shown) == LABELS[verdict]
    choose(browser, "Policy", "0")
    sft = [row["id"] for row in rows if row["sides"][0]["verdict"] == "unjudged"]
    assert sorted(titles(browser)) == sorted(sft)


def test_a_search_finds_all_words_in_any_case_and_marks_them(browser, show):
    rows = posts()
    show(browser_of(rows))
    browser.press("Tab")
    while browser.value("document.activeElement.type") != "search":
        browser.press("Tab")
    browser.press(*"piano POST")
    expected = [row["id"] for row in rows if "Piano" in row["post"]]
    assert 0 < len(expected) < len(rows)
    assert titles(browser) == expected
    marks = browser.value("[...document.querySelectorAll('.found mark')].map((x) => x.textContent)")
    assert set(marks) == {"Piano", "post"}
    choose(browser, "Search", "words on PPO of 17")
    assert titles(browser) == ["p17"]  # what the judge said
    choose(browser, "Search", "(no such [thing")
    assert titles(browser) == []
    assert status(browser) == "0 of 30 posts: nothing fits all of these choices"


def test_by_keyboard_alone_one_goes_on_to_the_next_posts(browser, show):
    show(browser_of(posts()))
    browser.value("document.querySelector('.pager button:last-child').focus()")
    browser.press("Enter")
    assert browser.value("document.activeElement.textContent") == "Post 6 p5"
    assert browser.value("document.querySelector('.pager p').textContent") == "6 to 10"


def test_a_change_against_the_first_policy_is_filtered(browser, show):
    rows = posts()
    for row in rows:
        first, second = row["sides"]
        second["change"] = change(first["verdict"], second["verdict"])
    show(browser_of(rows, shown=1))
    for name in ("better", "worse", "failing", "unchanged"):
        choose(browser, "Against SFT", name)
        expected = [row["id"] for row in rows if row["sides"][1]["change"] == name]
        assert expected
        assert titles(browser) == expected


def planted(rows):
    for row in rows:
        row["id"] = row["post"] = row["reference"]["text"] = PLANTED
        for one in row["sides"]:
            one["text"] = PLANTED
            for said in one["said"]:
                said["text"] = PLANTED
    return rows


def test_a_script_planted_in_posts_and_replies_is_shown_and_does_not_run(browser, show):
    rows = planted(posts(7))
    episode = {"step": 1, "response": PLANTED, "score": 1.5, "kl": 0.7}
    show(browser_of(rows), table([episode]))
    assert browser.value("document.querySelector('.found .post').textContent") == PLANTED
    assert browser.value("document.querySelector('.found .ppo p').textContent") == PLANTED
    assert browser.value("document.querySelector('tbody td').textContent") == PLANTED
    choose(browser, "Search", "<script> onerror")
    assert browser.value("document.querySelectorAll('.found mark').length") > 0
    assert (
        browser.value("document.querySelectorAll('main img, main b, main script script').length")
        == 0
    )
    assert browser.value("typeof window.planted") == "undefined"


def test_without_escape_and_policy_the_planted_script_would_run(browser, tmp_path):
    """So the test above can fail."""
    text = page.to_html("A page", [browser_of(planted(posts(1)))])
    for code, character in (("003c", "<"), ("003e", ">")):
        text = text.replace(f"\\u{code}", character)
    (tmp_path / "open.html").write_text(text.replace("Content-Security-Policy", "none"), "utf-8")
    browser.open(tmp_path / "open.html")
    assert browser.value("window.planted") in (1, 2, 3)


def test_on_a_phone_nothing_scrolls_sideways(browser, show):
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        **{"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True},
    )
    rows = posts()
    rows[0]["sides"][1]["text"] = "x" * 300
    show(browser_of(rows))
    assert browser.value("document.documentElement.scrollWidth") <= 360
    browser.call("Emulation.clearDeviceMetricsOverride")


# -- without a browser -----------------------------------------------------------------------------


def test_where_no_script_runs_six_samples_stand_there():
    text = page.to_markdown("x", "A page", [browser_of(posts())])
    assert [f"### Post {at}" in text for at in range(1, 8)] == [True] * 6 + [False]
    bare = page.to_html("A page", [browser_of(posts())]).split('class="few"')
    assert bare[1].count("<article") == 6


def test_a_page_to_be_published_holds_no_post_reference_or_word_of_the_judge(tmp_path):
    blocks = [browser_of(posts())]
    public = [block.without_the_data() for block in blocks]
    path = page.write(tmp_path, "x", "A page", public, {})
    files = [file.read_text("utf-8") for file in path.parent.rglob("*") if file.is_file()]
    for secret in ("A long post", "reference 3", "words on"):
        assert not any(secret in text for text in files), secret
        assert secret in page.to_html("A page", blocks)  # or the test shows nothing
    assert any("PPO of 3" in text for text in files)


def test_the_samples_of_a_page_are_the_first_that_fit():
    rows = posts()
    assert fitting(rows, most=4) == rows[:4]
    size = len(page.as_data(rows[0])) + len(page.as_data(rows[1])) + 1
    assert fitting(rows, size=size) == rows[:2]
    assert len(fitting(posts(300))) == 200


def test_the_updates_shown_are_spread_from_the_first_to_the_last():
    rows = [{"step": step, "place": place} for step in range(1, 101) for place in range(8)]
    shown = some_updates(rows)
    assert [row["step"] for row in shown][:3] == [1, 10, 19]
    assert (shown[-1]["step"], len(shown)) == (100, 12)
    assert {row["place"] for row in shown} == {0}
    assert some_updates(rows[:16]) == [rows[0], rows[8]]


def test_numbers_that_are_none_do_no_harm():
    rows = posts(1)
    rows[0]["sides"][0] |= {"score": None, "kl": None, "tokens": None}
    assert "NaN" not in json.dumps(browser_of(rows).data)
