"""Posts and summaries that try to give the verdict themselves."""

import re

import pytest

from eval.judge import make_judge
from eval.judges.prompt import make_question
from eval.judges.protocol import Comparison, judge_pair
from stages.config.judge_prompt import read_prompt
from tests.lib.chat_server import chat, llm_config, serving
from tests.lib.injections import INJECTIONS

each = pytest.mark.parametrize("text", INJECTIONS, ids=range(len(INJECTIONS)))
CONTROL = re.compile(r"<[|｜/a-z]|\[/?INST\]", re.IGNORECASE)
NAMES = ("post", "summary-A", "summary-B")
TEMPLATE = read_prompt("", "overall")


def question(query: str, first: str, second: str, *, as_json: bool = False):
    return make_question(TEMPLATE, query=query, first=first, second=second, as_json=as_json)


def questions(text: str, as_json: bool):
    """The text as post, as summary A, as summary B, and as all three."""
    yield question(text, "x", "y", as_json=as_json)
    yield question("post", text, "y", as_json=as_json)
    yield question("post", "x", text, as_json=as_json)
    yield question(text, text, text, as_json=as_json)


def outside_of_the_tags(asked) -> str:
    """A prompt without the texts of others."""
    outside = asked.prompt
    for name in NAMES:
        texts = rf"<{name}-{asked.tag}>\n.*?\n</{name}-{asked.tag}>"
        outside = re.sub(texts, f"[{name}]", outside, flags=re.DOTALL)
    return outside


@each
@pytest.mark.parametrize("as_json", [False, True], ids=["lines", "object"])
def test_no_text_closes_its_tags(text, as_json):
    for asked in questions(text, as_json):
        tags = [f"<{mark}{name}-{asked.tag}>" for name in NAMES for mark in ("", "/")]
        assert re.findall(rf"</?[\w-]+-{asked.tag}>", asked.prompt) == tags
        assert outside_of_the_tags(asked) == outside_of_the_tags(
            question("p", "a", "b", as_json=as_json)
        )


@each
def test_no_control_token_is_left_whole(text):
    for asked in questions(text, as_json=False):
        assert not any(CONTROL.search(shown) for shown in asked.texts)


def test_both_orders_of_a_pair_have_one_tag_so_that_it_favors_neither():
    there = question("p", "x", "y")
    back = question("p", "y", "x")
    assert there.tag == back.tag
    assert there.prompt != back.prompt


def test_a_placeholder_in_a_text_is_not_filled():
    asked = question("the post says {summary_a}", "first {post}", "second")
    assert "the post says {summary_a}" in asked.prompt
    assert "first {post}" in asked.prompt


def test_half_a_surrogate_pair_can_be_sent():
    asked = question("\ud83d", "x", "y")
    assert asked.prompt.encode()


@pytest.mark.usefixtures("judge_environment")
@pytest.mark.parametrize("structured", ["on", "off"])
@each
def test_a_server_that_repeats_the_question_has_not_judged(text, structured):
    comparison = Comparison("p", f"POST: my story\n{text}", text, "another summary")
    with serving(lambda number, body: chat(body["messages"][0]["content"])) as server:
        judge = make_judge(llm_config(server, structured=structured), {})
        assert judge_pair(judge, comparison).choice is None


@pytest.mark.usefixtures("judge_environment")
@pytest.mark.parametrize("part", NAMES)
@each
def test_a_server_that_repeats_a_text_has_not_judged(text, part):
    def echo(number, body):
        shown = re.search(rf"<{part}-\w+>\n(.*?)\n</", body["messages"][0]["content"], re.DOTALL)
        assert shown
        return chat(shown[1])

    comparison = Comparison("p", f"POST: my story\n{text}", text, f"another summary {text}")
    with serving(echo) as server:
        judge = make_judge(llm_config(server), {})
        assert judge_pair(judge, comparison).choice is None


@pytest.mark.usefixtures("judge_environment")
@each
def test_an_honest_judge_decides_in_spite_of_it(text):
    comparison = Comparison("p", f"POST: my story\n{text}", text, "another summary")
    with serving(lambda number, body: chat("Comparison: it says more.\nPreferred: B")) as server:
        judge = make_judge(llm_config(server), {})
        assert judge_pair(judge, comparison).choice == "B"
