"""Posts and summaries that try to give the verdict themselves do not get their way."""

import re

import pytest

from eval.judge import make_judge
from eval.judges.prompt import Question, make_question
from eval.judges.protocol import Comparison, judge_pair
from stages.config.judge_prompt import read_prompt
from tests.lib.chat_server import always, chat, llm_config, prompt_of, serving
from tests.lib.injections import INJECTIONS

with_each_injection = pytest.mark.parametrize("injection", INJECTIONS, ids=range(len(INJECTIONS)))
CONTROL_TOKEN = re.compile(r"<[|｜/a-z]|\[/?INST\]", re.IGNORECASE)
TAG_NAMES = ("post", "summary-A", "summary-B")


# -- the prompt ------------------------------------------------------------------------------------


def question(query: str, first: str, second: str, *, as_json: bool = False) -> Question:
    template = read_prompt("", "overall")
    return make_question(template, query=query, first=first, second=second, as_json=as_json)


def questions_with(injection: str, *, as_json: bool = False) -> list[Question]:
    """Questions with the text as post, as either summary, and as all three."""
    return [
        question(injection, "x", "y", as_json=as_json),
        question("post", injection, "y", as_json=as_json),
        question("post", "x", injection, as_json=as_json),
        question(injection, injection, injection, as_json=as_json),
    ]


def without_tagged_texts(asked: Question) -> str:
    """A prompt without what is between its tags."""
    prompt = asked.prompt
    for name in TAG_NAMES:
        tagged_text = rf"<{name}-{asked.tag}>\n.*?\n</{name}-{asked.tag}>"
        prompt = re.sub(tagged_text, f"[{name}]", prompt, flags=re.DOTALL)
    return prompt


@with_each_injection
@pytest.mark.parametrize("as_json", [False, True], ids=["lines", "object"])
def test_no_text_closes_its_tags(injection, as_json):
    for asked in questions_with(injection, as_json=as_json):
        assert re.findall(rf"</?[\w-]+-{asked.tag}>", asked.prompt) == [
            f"<post-{asked.tag}>",
            f"</post-{asked.tag}>",
            f"<summary-A-{asked.tag}>",
            f"</summary-A-{asked.tag}>",
            f"<summary-B-{asked.tag}>",
            f"</summary-B-{asked.tag}>",
        ]


@with_each_injection
@pytest.mark.parametrize("as_json", [False, True], ids=["lines", "object"])
def test_no_text_changes_the_prompt_around_it(injection, as_json):
    harmless = question("p", "a", "b", as_json=as_json)
    for asked in questions_with(injection, as_json=as_json):
        assert without_tagged_texts(asked) == without_tagged_texts(harmless)


@with_each_injection
def test_no_control_token_stays_intact(injection):
    for asked in questions_with(injection):
        for text in asked.texts:
            assert not CONTROL_TOKEN.search(text)


def test_both_orders_of_a_pair_have_one_tag_so_that_it_favors_neither():
    first_order = question("p", "x", "y")
    second_order = question("p", "y", "x")
    assert first_order.tag == second_order.tag
    assert first_order.prompt != second_order.prompt


def test_a_placeholder_in_a_text_is_not_filled():
    asked = question("the post says {summary_a}", "first {post}", "second")
    assert "the post says {summary_a}" in asked.prompt
    assert "first {post}" in asked.prompt


def test_half_a_surrogate_pair_can_be_sent():
    asked = question("\ud83d", "x", "y")
    assert asked.prompt.encode()


# -- the verdict -----------------------------------------------------------------------------------


def comparison_with(injection: str, other_summary: str) -> Comparison:
    """A pair whose post and first summary contain the text."""
    return Comparison(
        post_id="p",
        query=f"POST: my story\n{injection}",
        first=injection,
        second=other_summary,
    )


@pytest.mark.usefixtures("judge_environment")
@pytest.mark.parametrize("structured", ["on", "off"])
@with_each_injection
def test_a_server_that_repeats_the_question_gives_no_verdict(injection, structured):
    comparison = comparison_with(injection, "another summary")
    with serving(lambda number, body: chat(prompt_of(body))) as server:
        judge = make_judge(llm_config(server, structured=structured), {})
        reply = judge_pair(judge, comparison)
    assert reply.choice is None


@pytest.mark.usefixtures("judge_environment")
@pytest.mark.parametrize("name", TAG_NAMES)
@with_each_injection
def test_a_server_that_repeats_a_text_gives_no_verdict(injection, name):
    def repeat_text(number, body):
        text = re.search(rf"<{name}-\w+>\n(.*?)\n</", prompt_of(body), re.DOTALL)
        assert text
        return chat(text[1])

    comparison = comparison_with(injection, f"another summary {injection}")
    with serving(repeat_text) as server:
        judge = make_judge(llm_config(server), {})
        reply = judge_pair(judge, comparison)
    assert reply.choice is None


@pytest.mark.usefixtures("judge_environment")
@with_each_injection
def test_the_verdict_of_an_honest_judge_counts(injection):
    comparison = comparison_with(injection, "another summary")
    with serving(always(chat("Comparison: it says more.\nPreferred: B"))) as server:
        judge = make_judge(llm_config(server), {})
        reply = judge_pair(judge, comparison)
    assert reply.choice == "B"
