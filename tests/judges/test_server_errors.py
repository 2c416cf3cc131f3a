"""Posts that are longer than the judge takes, by the words of seven servers."""

from typing import Any

import pytest

from eval.judge import judge_summaries, make_judge
from eval.judges.openai.replies import BLAMED, blamed_by
from eval.judges.protocol import Comparison, judge_all
from tests.lib.chat_server import GOOD, chat, llm_config, serving
from tests.lib.fabricated_runs import finish_summaries

pytestmark = pytest.mark.usefixtures("judge_environment")


def openai_error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, **more}}


TOKENS = "exceeds the maximum number of tokens allowed (1048576)."
REFUSALS: dict[str, tuple[int, Any]] = {
    "openai": (400, openai_error("Input tokens exceed it.", code="context_length_exceeded")),
    "openai, a limit by the minute": (
        429,
        openai_error("Request too large for gpt-6-luna on tokens per min (TPM): Limit 30000."),
    ),
    "vllm": (400, {"message": "This model's maximum context length is 4096 tokens. However, 9256"}),
    "vllm, an older one": (400, openai_error("max_tokens must be at least 1, got -186.")),
    "llama.cpp": (
        400,
        openai_error("request (4390 tokens) exceeds the available context size (4096 tokens)"),
    ),
    "llama.cpp, as a server error": (500, openai_error("Context size has been exceeded.")),
    "anthropic": (400, openai_error("prompt is too long: 212345 tokens > 200000 maximum")),
    "google": (400, [{"error": {"message": f"The input token count (1200000) {TOKENS}"}}]),
    "a proxy": (413, "Request Entity Too Large"),
}


def answer_of(refusal: tuple[int, Any]) -> Any:
    def answer(number: int, body: dict[str, Any]) -> Any:
        return refusal if "very long" in body["messages"][0]["content"] else chat(GOOD)

    return answer


def questions(*long: int) -> list[Comparison]:
    posts = [f"post {k}. {'very long ' * 40 if k in long else ''}" for k in range(6)]
    return [Comparison(f"p{k}", post, "one", "two") for k, post in enumerate(posts)]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_post_that_is_too_long_is_unjudged(name):
    """The first one too: the shortest is asked first, so the schema is not what it is blamed on."""
    with serving(answer_of(REFUSALS[name])) as server:
        judge = make_judge(llm_config(server, max_retries=0), {})
        replies = list(judge_all(judge, questions(0, 3), 2))
        assert [one.choice for one in replies] == [None, *"AA", None, *"AA"]
        assert all("response_format" in one for one in server.requests)
        assert len(server.requests) == 6
        assert replies[0].finish_reason == "too long"
        assert replies[0].text.startswith("[no reply] too long: ")
        again = list(judge_all(make_judge(llm_config(server), {}), questions(0, 3), 2))
    assert again == replies
    assert len(server.requests) == 8  # a refusal costs nothing, and the model may be another


def results_of(server, asked, **changes):
    """The manifest's results of a run whose summaries make these questions."""
    config = llm_config(server, **changes)
    names = ("id", "query", "summary", "reference")
    rows = [(one.post_id, one.query, one.first, one.second) for one in asked]
    finish_summaries(config, ppo=[dict(zip(names, row, strict=True)) for row in rows])
    return judge_summaries(config)


@pytest.mark.parametrize(
    ("answer", "finish_reason"),
    [
        ((400, openai_error("The response was filtered", code="content_filter")), "filtered"),
        ((403, {"error": {"code": 403, "message": "Your input was flagged"}}), "filtered"),
        (chat("", "content_filter"), "content_filter"),
        (chat("Comparison: the first", "content_filter"), "content_filter"),
    ],
)
def test_a_filtered_post_is_unjudged_named_and_asked_for_once(answer, finish_reason):
    with serving(answer_of(answer)) as server:
        results = results_of(server, questions(2), asks=4)
        assert len(server.requests) == 12  # 6 posts in both orders
        assert (results["filtered"], results["unjudged"]) == (["p2"], pytest.approx(1 / 6))
        assert "too_long" not in results
        replies = list(judge_all(make_judge(llm_config(server), {}), questions(2), 2))
    assert [one.finish_reason for one in replies] == ["stop"] * 2 + [finish_reason] + ["stop"] * 3
    assert [one.choice for one in replies] == [*"AA", None, *"AAA"]


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ('{"error": {"message": "Unsupported value", "param": "temperature"}}', "temperature"),
        (
            '{"error": {"message": "not with temperature", "param": "reasoning_effort"}}',
            "reasoning_effort",
        ),
        # Google, where a model cannot be asked not to think
        (
            '[{"error": {"message": "Budget 0 is invalid. It works in thinking mode."}}]',
            "reasoning_effort",
        ),
        # vLLM and others that check the request by its types
        (
            '{"detail": [{"loc": ["body", "reasoning_effort"], "msg": "Input should be"}]}',
            "reasoning_effort",
        ),
        ('{"detail": "Extra inputs are not permitted: response_format"}', "response_format"),
        ("Unsupported parameter: temperature", "temperature"),
        ("no", "reasoning_effort"),
    ],
)
def test_what_a_refusal_blames_is_left_out(text, left_out):
    assert blamed_by(text, BLAMED) == left_out
