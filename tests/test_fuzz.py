"""`make fuzz` in short, that it can fail, and what it has found."""

import sqlite3

import pytest
from markdown_it import MarkdownIt

from eval.judges.openai.cache import ReplyCache
from reports.parts import page
from reports.parts.blocks import Details, Text, link
from stages.settings.checks import UserError, visible
from tests import fuzz, fuzzed
from tests.chat_server import GOOD

FEW = 60


@pytest.mark.parametrize("name", ["replies", "settings", "rows", "outputs", "cache", "pages"])
def test_odd_inputs_of_each_kind_end_as_promised(name):
    with fuzz.groups() as known:
        outcomes = fuzz.search(known[name], FEW, seed=3)
    assert outcomes.total() >= FEW / 2  # small spaces are soon searched
    assert len(outcomes) > 1


def test_a_check_that_does_not_hold_ends_it_with_the_smallest_input(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "choice_of", lambda *_: "A")
    with pytest.raises(AssertionError):
        fuzz.main(["replies", "--examples", "100"])
    with pytest.raises(SystemExit):
        fuzz.main(["nonsense"])
    assert "no group nonsense" in capsys.readouterr().err


# -- what it has found -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["![a](b)", "a](b", "\\]", "[[a]](b)", "a\\](b)"])
def test_no_label_of_a_link_ends_it(text):
    (paragraph,) = [token for token in MarkdownIt().parse(link(text, "#x")) if token.children]
    kinds = [child.type for child in paragraph.children or ()]
    shown = "".join(child.content for child in paragraph.children or ())
    assert kinds == ["link_open", "text", "link_close"]
    assert shown == text


def test_what_is_unfolded_begins_after_a_label_of_one_line():
    block = Details("|\n\n![a](b)", [Text("x")])
    assert block.markdown("p").startswith("<details><summary>| ![a](b)</summary>\n\nx")
    assert "<img" not in MarkdownIt().render(visible(page.to_markdown("p", "t", [block])))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("UPDATE replies SET raw = x'80'", "a reply's raw is of type bytes"),
        ("UPDATE replies SET raw = substr(raw, 2)", "a reply's raw is no chat completion"),
        ("ALTER TABLE replies RENAME COLUMN raw TO r4w", "no such column: raw"),
        ("UPDATE tries SET usd = 'much'", "what a try has cost is no sum of money"),
        ("UPDATE tries SET usd = -5", "what a try has cost is no sum of money"),
    ],
)
def test_a_cache_with_values_of_another_type_is_one_line(tmp_path, change, what):
    path = tmp_path / "replies.sqlite"
    cache = ReplyCache(path)
    cache.settle(cache.begin("k", 1.0), 0.5, "reply", fuzzed.a_kept_reply("k"))
    assert cache.replies("k")[0]["text"] == GOOD
    assert cache.spent(["k"]) == 0.5
    cache.close()
    with sqlite3.connect(path) as file:
        file.execute(change)
    file.close()
    again = ReplyCache(path)
    with pytest.raises(UserError, match=rf"replies.sqlite: the cache.*\({what}\): make room"):
        again.spent(["k"]) if "tries" in change else again.replies("k")


def test_a_cache_whose_pages_are_no_text_is_one_line(tmp_path):
    path = tmp_path / "replies.sqlite"
    ReplyCache(path).close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"CREATE TABLE replies", b"CREATE TABLE \x80eplies"))
    assert path.read_bytes() != content
    with pytest.raises(UserError, match="the cache of replies fails"):
        ReplyCache(path).replies("k")
