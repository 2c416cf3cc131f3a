"""The form of a page: cells, numbers beside it, templates that escape, files that go with it."""

import json
import re

import pytest

from reports.parts import page
from reports.parts.blocks import Details, Figure, Heading, Sample, Table, Text
from reports.parts.cells import MISSING, Number, PValue, columns_of
from reports.parts.page import files_of, write


def test_a_link_leads_into_each_section_by_the_anchor_that_github_gives_its_heading():
    html = page.to_html("x", [Text("first"), Heading("Judge: who?"), Heading("A b")])
    assert html.index("first") < html.index('id="judge-who"')
    assert re.findall(r'<div class="inside" id="([^"]+)"', html) == ["judge-who", "a-b"]


def test_what_stands_before_the_first_heading_is_in_sight_and_each_section_is_folded():
    answer = [Text("the answer"), Table(("", "n"), [["a", "1"]])]
    blocks = [Heading("One"), Text("1 more"), Heading("Two"), Text("2 more")]
    html = page.to_html("x", [*answer, *blocks])
    opening, *sections = html.split('<details class="section">')
    assert "the answer" in opening
    assert ["1 more" in section for section in sections] == [True, False]
    assert ["2 more" in section for section in sections] == [False, True]
    assert page.to_markdown("x", "x", [*answer[:1], *blocks]) == (
        "# x\n\nthe answer\n\n"
        "<details><summary>\n\n## One\n\n</summary>\n\n1 more\n\n</details>\n\n"
        "<details><summary>\n\n## Two\n\n</summary>\n\n2 more\n\n</details>\n"
    )


def test_every_table_stands_in_the_json_under_a_name_of_its_own(tmp_path):
    table = Table(("", "n"), [["a", "1"]])
    named = Table(("run", "n"), [["b", "2"]], name="sizes")
    inner = Details("More of it", [Table(("run", "n"), [["c", "3"]])])
    blocks = [Text("Yes."), Heading("Result"), table, table, Heading("Other"), named, inner]
    write(tmp_path, "p", "Title", blocks, {})
    found = json.loads((tmp_path / "p.json").read_text())
    assert (found["title"], found["lead"]) == ("Title", "Yes.")
    assert [(one["name"], one["section"]) for one in found["tables"]] == [
        ("result", "Result"),
        ("result-1", "Result"),
        ("sizes", "Other"),
        ("other-run", "Other"),
    ]


def test_a_page_that_is_written_again_leaves_no_file_of_the_earlier_one(tmp_path):
    figure = Figure("plot", "c", "<svg></svg>")
    write(tmp_path, "p", "x", [figure, Table(("a",), [["b"]], name="one")], {})
    (tmp_path / "p-two.svg").write_text("of nobody")
    write(tmp_path, "p", "x", [Table(("a",), [["b"]], name="two")], {})
    listed = {one.name for one in files_of(tmp_path, "p")}
    assert listed == {"p.md", "p.json"}
    assert {one.name for one in tmp_path.iterdir()} == {*listed, "p.html", "p-two.svg"}


SHARE = Number(63.05, 1, "%", 60.04, 66.0)
GAP = Number(1.5, 1, "points", -0.54, 3.5, signed=True)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (SHARE, "63.0% [60.0, 66.0]"),
        (GAP, "+1.5 points [-0.5, +3.5]"),
        (Number(1234, 0), "1,234"),
        (Number(-0.001), "0.00"),
        (Number(None, 1, "%", 59.0, 61.5), "[59.0, 61.5]"),
        (Number(14, 1, "%", 12, 16, is_range=True), "14.0% (12.0 to 16.0)"),
        (Number(note="(2.0% unjudged)"), "– (2.0% unjudged)"),
        (PValue(0.0004), "p < 0.001"),
        (PValue(0.0321), "p = 0.032"),
        (MISSING, "–"),
        (Number(float("nan")), "–"),
    ],
)
def test_a_number_prints_as_pages_show_it(cell, text):
    assert str(cell) == f"{cell}" == text
    assert f"| {text.replace('<', '&lt;')} |" in Table(("a",), [[cell]]).markdown("p")


@pytest.mark.parametrize(
    ("cells", "columns"),
    [
        ([SHARE, MISSING], {"rate, %": [63.05, None], "rate low": [60.04, None]}),
        ([GAP], {"rate, points": [1.5], "rate low": [-0.54], "rate high": [3.5]}),
        ([Number(1234, 0)], {"rate [95%]": [1234]}),
        ([SHARE, GAP], {"rate": [63.05, 1.5], "rate unit": ["%", "points"]}),
        (
            [Number(3.25), "too few"],
            {"rate [95%]": [3.25, None], "rate [95%] note": [None, "too few"]},
        ),
        (["none", MISSING], {"rate [95%]": ["none", None]}),
    ],
)
def test_programs_read_every_number_in_full_precision(cells, columns):
    named = dict(columns_of(("", "rate [95%]"), [["x", cell] for cell in cells]))
    assert named[""] == ["x"] * len(cells)
    assert columns.items() <= named.items()
    json.dumps(named, allow_nan=False)


BAD = '</title><script>alert(1)</script>"><img src=x onerror=alert(1)>'


def test_no_text_of_a_block_becomes_markup():
    sample = Sample(BAD, BAD, [("SFT" + BAD, BAD, BAD)])
    blocks = [Text(BAD), *[Heading(BAD)] * 6, Table((BAD,), [[BAD]], BAD, name="t"), sample]
    html = page.to_html(BAD, [*blocks, Details(BAD, [Text(BAD)])])
    assert "<script" not in html
    assert "<img" not in html
    assert html.count("&lt;script&gt;") > 15
    assert not re.search(r'="[^"]*"&gt;|="[^"]*<', html)


def test_what_others_wrote_is_left_out_inside_details_too():
    sample = Sample("t", "their post", [("Reference", "theirs", ""), ("PPO", "ours", "")])
    (block,) = [one.without_the_data() for one in [Details("x", [sample])]]
    html = page.to_html("x", [block])
    assert "ours" in html
    assert "their post" not in html
    assert "theirs" not in html
