"""SET comes through make as it was typed, with spaces and line breaks in its values."""

from tests.lib.pipeline import typed

WRITTEN = r"r/{subreddit}\n\n# {title}\n{post}\n\nTL;DR:"


def test_a_value_with_spaces_comes_through_make(tmp_path):
    (tmp_path / "my posts").mkdir()
    words = "SET=data.source=my posts  judge.kind=openai judge.model=a  b"
    printed = typed(tmp_path, "settings", "NAME=x", words)
    assert printed.stderr == ""
    expected = {"data.source=my posts", "judge.kind=openai", "judge.model=a  b"}
    assert expected <= {*printed.stdout.splitlines()}


def test_a_prompt_with_line_breaks_comes_through_make(tmp_path):
    text = f"data.prompt={WRITTEN}"
    printed = typed(tmp_path, "settings", "NAME=x", f"SET={text} sft.epochs=2")
    assert {text, "sft.epochs=2"} <= {*printed.stdout.splitlines()}
