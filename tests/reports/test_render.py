"""Templates become Markdown and HTML, and no text becomes markup on the way."""

import json
import re

import pytest

from reports import render
from reports.plots import Drawing, Figure
from reports.results import Interval
from stages.config.errors import UserError
from tests.lib.places import ROOT

HOSTILE = (
    '</title><script>alert(1)</script>"><img src=x onerror=alert(1)> [x](javascript:1) | **b**'
)
FOLDED = """
{% from "macros.md" import fold %}
# T

x

{% call fold(text) %}{{ text }}{% endcall %}
"""
SVG = '<svg viewBox="0 0 1 1"></svg>'


def test_no_line_is_broken_within_an_interval_or_a_p_value():
    page = render.to_html("x", "+34.2 [+3.3, +65.0] (p = 0.124), 1, 2\n", figures={})
    assert "+34.2 [+3.3,&nbsp;+65.0] (p&nbsp;=&nbsp;0.124), 1, 2" in page


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Writes a template, and returns the page that it gives with some values."""
    (tmp_path / "page.html").write_text((render.TEMPLATES / "page.html").read_text("utf-8"))
    (tmp_path / "style.css").write_text("")
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)

    def fill(source, **values):
        (tmp_path / "page.md").write_text(source)
        return render.fill("page.md", "stem", **values)

    return fill


def test_the_title_and_the_answer_are_those_of_the_first_lines(template):
    page = template("# {{ name }}: yes\n\nIt **beats** SFT.\n\nMore.\n", name="a*b")
    assert page.title == "a*b: yes"
    assert page.answer == "It beats SFT."


def test_values_are_escaped_and_the_template_is_not(template):
    page = template("# T\n\n**bold** {{ text }}\n", text="<b>*x*</b>")
    assert page.markdown == "# T\n\n**bold** &lt;b&gt;\\*x\\*&lt;/b&gt;\n"


@pytest.mark.parametrize(
    "place",
    [
        "# {{ text }}\n\nx\n",
        "# T\n\n{{ text }}\n",
        "# T\n\n- {{ text }}\n",
        "# T\n\n| a |\n|---|\n| {{ text | cell }} |\n",
        "# T\n\n{{ text | quote }}\n",
        "# T\n\n{{ [text, 'b'] | join(', ') }}\n",
        FOLDED,
    ],
)
def test_no_text_becomes_markup_wherever_it_is_printed(template, place, monkeypatch):
    macros = ROOT / "reports/templates/macros.md"
    (render.TEMPLATES / "macros.md").write_text(macros.read_text("utf-8"))
    page = template(place, text=HOSTILE)
    assert "<script" not in page.html
    assert "<img" not in page.html
    assert "<a " not in page.html
    assert "<strong>b" not in page.html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.html


def test_a_text_with_lines_that_look_like_markdown_stays_a_quotation(template):
    page = template("# T\n\n{{ text | quote }}\n", text="# no heading\n- no list\n1. none\n\n> no")
    assert "<h1>no" not in page.html
    assert "<li>" not in page.html
    assert page.html.count("<blockquote>") == 1


def test_a_cell_stays_one_cell_in_one_line(template):
    page = template("# T\n\n| a | b |\n|---|---|\n| {{ x | cell }} | c |\n", x="1 | 2\n3")
    assert "| 1 \\| 2 3 | c |" in page.markdown
    assert page.html.count("<td>") == 2


def test_a_figure_is_an_image_in_markdown_and_the_drawing_itself_in_html(template):
    figure = Figure("rates", (Drawing('Win "rate"', SVG), Drawing("KL", SVG)))
    page = template('# T\n\n{{ figure(rates, "A caption.") }}\n', rates=figure)
    assert '<img class="figure" src="stem-rates-1.svg" alt="Win &quot;rate&quot;">' in page.markdown
    assert "*A caption.*" in page.markdown
    assert page.figures == {"stem-rates-1.svg": SVG, "stem-rates-2.svg": SVG}
    assert page.html.count("<svg") == 2
    assert "<img" not in page.html


def test_a_figure_that_is_missing_leaves_nothing(template):
    assert template('# T\n\n{{ figure(none, "A caption.") }}\n').markdown == "# T\n"


def test_the_html_forbids_scripts_and_loads_nothing(template):
    html = template("# T\n\nx\n").html
    assert "default-src 'none'" in html
    assert not re.search(r"https?://|<link|<script|@import", html)


def test_a_written_page_has_its_numbers_in_full_precision_and_the_hashes_of_its_files(
    template, tmp_path
):
    figure = Figure("rates", (Drawing("Rates", SVG),))
    page = template("# T\n\nYes.\n\n{{ figure(rates) }}\n", rates=figure)
    rate = Interval(estimate=1 / 3, low=0.25, high=0.5)
    path = render.write(tmp_path / "out", page, rate, {"kind": "run"})
    record = render.read_page_record(tmp_path / "out", "stem")
    assert path.name == "stem.html"
    assert record["title"] == "T"
    assert record["lead"] == "Yes."
    assert record["numbers"] == {"estimate": 1 / 3, "low": 0.25, "high": 0.5}
    assert record["files"].keys() == {"stem.md", "stem-rates.svg"}


def test_a_page_that_is_written_again_leaves_no_file_of_the_earlier_one(template, tmp_path):
    figure = Figure("rates", (Drawing("Rates", SVG),))
    folder = tmp_path / "out"
    with_figure = template("# T\n\nx\n\n{{ figure(rates) }}\n", rates=figure)
    render.write(folder, with_figure, {}, {})
    (folder / "other.svg").write_text("not of this page")
    render.write(folder, template("# T\n\nx\n"), {}, {})
    names = {path.name for path in folder.iterdir()}
    assert names == {"stem.md", "stem.html", "stem.json", "other.svg"}


def test_a_file_that_is_no_record_of_a_page_is_refused(tmp_path):
    (tmp_path / "stem.json").write_text(json.dumps({"title": "x"}))
    with pytest.raises(UserError, match="not the record of a page"):
        render.read_page_record(tmp_path, "stem")


def test_control_characters_reach_neither_a_page_nor_the_terminal(template):
    steering = "\x1b[31mred\x07\x9b2J\u202e"
    page = template("# T\n\n{{ text }}\n", text=steering)
    text = render.fill_text("page.md", text=steering)
    for written in (page.markdown, page.html, text):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", written)


def test_prose_is_broken_at_80_columns_in_the_terminal_and_a_table_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)
    (tmp_path / "page.md").write_text("{{ prose }}\n\n{{ table }}\n{{ path }}\n")
    table = "name" + "  1" * 30
    text = render.fill_text("page.md", prose="word " * 40, table=table, path="/a" * 60)
    lines = text.splitlines()
    assert max(len(line) for line in lines[:3]) <= 80
    assert table in lines
    assert "/a" * 60 in lines
