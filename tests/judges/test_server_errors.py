"""Errors of many servers, as they are documented: what each of them is about decides what follows.

A post that is too long or filtered is left unjudged, a wrong key or model stops the judge at once,
and an outage is waited for.
"""

from typing import Any

import pytest

from eval.judge import judge_summaries, make_judge
from eval.judges.openai.replies import blamed_parameter, find_error
from eval.judges.protocol import Comparison, judge_all
from stages.config.errors import UserError
from tests.lib.chat_server import GOOD, always, ask, chat, llm_config, prompt_of, serving
from tests.lib.fabricated_runs import finish_summaries

pytestmark = pytest.mark.usefixtures("judge_environment")


# -- what servers answer: status and body ----------------------------------------------------------

Response = tuple[int, Any]


def openai_error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, **fields}}


def google_error(code: int, message: str, status: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"error": {"code": code, "message": message, "status": status, **fields}}]


MAX_LENGTH = "This model's maximum context length is 4096 tokens. However, you requested 9256."
GOOGLE_LIMIT = "You exceeded your current quota, please check your plan and billing details."

TOO_LONG: dict[str, Response] = {
    "OpenAI": (400, openai_error(MAX_LENGTH, code="context_length_exceeded")),
    "OpenAI, a limit by the minute": (
        429,
        openai_error("Request too large for gpt-6-luna on tokens per min (TPM): Limit 30000."),
    ),
    "Azure": (400, openai_error("Input tokens exceed it.", code="context_length_exceeded")),
    "vLLM": (400, {"object": "error", "message": MAX_LENGTH, "code": 400}),
    "vLLM, an older one": (400, openai_error("max_tokens must be at least 1, got -186.")),
    "llama.cpp": (
        400,
        {
            "error": {
                "code": 400,
                "message": "request (4390 tokens) exceeds the available context size (4096 tokens)",
                "type": "exceed_context_size_error",
            }
        },
    ),
    "llama.cpp, as a server error": (500, openai_error("Context size has been exceeded.")),
    "Ollama": (400, openai_error("input length exceeds the maximum context length")),
    "xAI": (
        400,
        {
            "code": "Client specified an invalid argument",
            "error": "This model's maximum prompt length is 131072 but the request contains 140000",
        },
    ),
    "Qwen": (400, openai_error("Range of input length should be [1, 30720]")),
    "DeepSeek": (400, openai_error(MAX_LENGTH)),
    "Google": (
        400,
        google_error(
            400,
            "The input token count (1200000) exceeds the maximum number of tokens allowed (1000).",
            "INVALID_ARGUMENT",
        ),
    ),
    "Anthropic": (400, openai_error("prompt is too long: 212345 tokens > 200000 maximum")),
    "OpenRouter, in a 200": (
        200,
        {"error": {"code": 400, "message": f"This endpoint's {MAX_LENGTH}"}},
    ),
    "a code by name, in a 200": (200, openai_error("Too long.", code="context_length_exceeded")),
    "a proxy": (413, "Request Entity Too Large"),
}
FILTERED: dict[str, Response] = {
    "OpenAI": (400, openai_error("Invalid prompt: flagged", code="invalid_prompt")),
    "Azure": (
        400,
        openai_error(
            "The response was filtered due to the prompt triggering Azure OpenAI's content"
            " management policy.",
            code="content_filter",
        ),
    ),
    "xAI": (
        403,
        {
            "code": "The caller does not have permission to execute the specified operation",
            "error": "Content violates usage guidelines. Failed check: SAFETY_CHECK_TYPE_BIO",
        },
    ),
    "Qwen": (
        400,
        openai_error(
            "Input data may contain inappropriate content.", code="data_inspection_failed"
        ),
    ),
    "DeepSeek": (400, openai_error("Content Exists Risk")),
    "OpenRouter": (403, {"error": {"code": 403, "message": "Your input was flagged"}}),
    "OpenRouter, in a 200": (200, {"error": {"code": 403, "message": "Your input was flagged"}}),
}
# The judge stops at once.
KEY: dict[str, Response] = {
    "OpenAI": (401, openai_error("Incorrect API key provided.", code="invalid_api_key")),
    "Azure": (401, {"error": {"code": "401", "message": "Access denied due to invalid key."}}),
    "vLLM": (401, {"error": "Unauthorized"}),
    "llama.cpp": (401, openai_error("Invalid API Key", type="authentication_error", code=401)),
    "xAI": (
        400,
        {
            "code": "Client specified an invalid argument",
            "error": "Incorrect API key provided: ab***z.",
        },
    ),
    "Qwen": (401, openai_error("Incorrect API key provided.", code="invalid_api_key")),
    "DeepSeek": (401, openai_error("Authentication Fails, your api key is invalid")),
    "Google": (
        400,
        google_error(400, "API key not valid. Please pass a valid API key.", "INVALID_ARGUMENT"),
    ),
    "in a 200": (200, openai_error("Incorrect API key provided.", code="invalid_api_key")),
}
MODEL: dict[str, Response] = {
    "OpenAI": (404, openai_error("The model `m` does not exist", code="model_not_found")),
    "Azure": (404, {"error": {"code": "DeploymentNotFound", "message": "It does not exist."}}),
    "vLLM": (404, {"object": "error", "message": "The model `m` does not exist.", "code": 404}),
    "Ollama": (404, openai_error('model "m" not found, try pulling it first')),
    "xAI": (400, {"code": "invalid-argument", "error": "Model not found: m"}),
    "DeepSeek": (400, openai_error("Model Not Exist")),
    "Google": (404, google_error(404, "models/m is not found for API version v1", "NOT_FOUND")),
    "Mistral": (400, {"object": "error", "message": "Invalid model: m", "code": "1500"}),
    "OpenRouter, in a 200": (200, openai_error("m: model not found", code=404)),
}
# The judge stops at once if the status says that no wait helps; otherwise it waits first.
ACCOUNT: dict[str, Response] = {
    "OpenAI": (429, openai_error(GOOGLE_LIMIT, code="insufficient_quota")),
    "Azure": (429, openai_error("You exceeded your quota.", code="insufficient_quota")),
    "xAI": (
        429,
        {
            "code": "Some resource has been exhausted",
            "error": "Your team has either used all available credits or reached its monthly"
            " spending limit. To continue, please purchase more credits.",
        },
    ),
    "xAI, as a refusal": (
        403,
        {"code": "permission-denied", "error": "Your team has used all available credits."},
    ),
    "Qwen": (429, openai_error("Quota exceeded, please increase your quota limit.")),
    "Qwen, the free tier": (
        403,
        openai_error("The free tier is over.", code="AllocationQuota.FreeTierOnly"),
    ),
    "Qwen, unpaid": (
        400,
        openai_error(
            "Access denied, please make sure your account is in good standing.", code="Arrearage"
        ),
    ),
    "DeepSeek": (402, openai_error("Insufficient Balance", code="invalid_request_error")),
    "DeepSeek, in a 200": (200, openai_error("Insufficient Balance")),
    "Google, by the day": (
        429,
        google_error(429, f"{GOOGLE_LIMIT} {{RequestsPerDay}}", "RESOURCE_EXHAUSTED"),
    ),
    "Anthropic": (400, openai_error("Your credit balance is too low to access the API.")),
    "Moonshot": (429, openai_error("Suspended.", type="exceeded_current_quota_error")),
    "OpenRouter": (402, {"error": {"code": 402, "message": "Insufficient credits"}}),
    "OpenRouter, in a 200": (200, {"error": {"code": 402, "message": "This needs credits"}}),
}
# The judge waits, and then says that the same command resumes.
OUTAGE: dict[str, Response] = {
    "OpenAI, a limit by the minute": (
        429,
        openai_error(
            "Rate limit reached for m on requests per min (RPM): Limit 3. Please try again in 20s."
            " You can increase it at https://platform.openai.com/account/billing.",
            code="rate_limit_exceeded",
        ),
    ),
    "OpenAI": (500, openai_error("The server had an error", type="server_error")),
    "Azure": (429, openai_error("exceeded the call rate limit. Please retry after 7 seconds.")),
    "vLLM": (500, {"object": "error", "message": "EngineCore encountered an issue", "code": 500}),
    "llama.cpp": (503, openai_error("Loading model", type="unavailable_error", code=503)),
    "Ollama": (503, openai_error("server busy, please try again. maximum pending requests")),
    "xAI": (429, {"code": "Some resource has been exhausted", "error": "Too many requests"}),
    "Qwen": (429, openai_error("Requests rate limit exceeded", code="limit_requests")),
    "DeepSeek": (503, "Service Unavailable"),
    "Google, by the minute": (
        429,
        google_error(429, f"{GOOGLE_LIMIT} {{RequestsPerMinute}}", "RESOURCE_EXHAUSTED"),
    ),
    "Google": (503, google_error(503, "The model is overloaded.", "UNAVAILABLE")),
    "Bedrock": (429, openai_error("Too many tokens, please wait before trying again.")),
    "OpenRouter, in a 200": (200, {"error": {"code": 502, "message": "Provider returned error"}}),
    "an error without a code, in a 200": (200, {"error": "the backend is gone"}),
    "an error in the choice": (
        200,
        {"choices": [{"error": {"code": 502, "message": "down"}, "finish_reason": "error"}]},
    ),
    "an ending of its own": chat("", "error"),
    "DeepSeek, an ending of its own": chat("Compar", "insufficient_system_resource"),
    "vLLM, an ending of its own": chat(GOOD, "abort"),
    "no choices": chat("", choices=[]),
    "a web page": (200, "<html>Bad gateway</html>"),
    "nothing": (200, ""),
    "null": (200, None),
    "a number": (200, 7),
    "half a reply": (200, '{"choices": [{"message": {"content": "Compar'),
}


def each(table: dict[str, Response]) -> Any:
    """Run a test with each response of a table."""
    return pytest.mark.parametrize("response", table.values(), ids=table)


# -- posts that cannot be judged -------------------------------------------------------------------


def questions_with_long_posts(*long_posts: int) -> list[Comparison]:
    """Six questions; the posts with these numbers are very long."""
    questions = []
    for number in range(6):
        post = f"post {number}. "
        if number in long_posts:
            post += "very long " * 40
        question = Comparison(post_id=f"p{number}", query=post, first="one", second="two")
        questions.append(question)
    return questions


def if_long(response: Response) -> Any:
    """Answer questions about very long posts with this response, and others with a verdict."""
    return lambda number, body: response if "very long" in prompt_of(body) else chat(GOOD)


@each(TOO_LONG)
def test_a_post_that_is_too_long_is_unjudged_and_nothing_else_changes(response):
    with serving(if_long(response)) as server:
        judge = make_judge(llm_config(server, max_retries=3), {})
        replies = list(judge_all(judge, questions_with_long_posts(0, 3), 2))

    assert [reply.choice for reply in replies] == [None, "A", "A", None, "A", "A"]
    assert replies[0].finish_reason == "too long"
    assert replies[0].text.startswith("[no reply] too long: ")
    assert len(server.requests) == 6  # no request is repeated
    for body in server.requests:
        assert "response_format" in body  # no parameter is blamed


@each(FILTERED)
def test_a_post_that_a_filter_refuses_is_unjudged_and_nothing_else_changes(response):
    with serving(if_long(response)) as server:
        judge = make_judge(llm_config(server, max_retries=3), {})
        replies = list(judge_all(judge, questions_with_long_posts(2), 2))

    assert [reply.choice for reply in replies] == ["A", "A", None, "A", "A", "A"]
    assert replies[2].finish_reason == "filtered"
    assert len(server.requests) == 6


def google_without_message(finish_reason: str) -> Response:
    return chat("", choices=[{"index": 0, "finish_reason": finish_reason}])


ENDED_BY_A_FILTER: dict[str, Response] = {
    "an empty text": chat("", "content_filter"),
    "a text that is cut off": chat("Comparison: the first", "content_filter"),
    "Google, prohibited": google_without_message("content_filter: PROHIBITED_CONTENT"),
    "Google, safety": google_without_message("SAFETY"),
    "Google, recitation": google_without_message("RECITATION"),
    "Google, blocklist": google_without_message("BLOCKLIST"),
}


@each(ENDED_BY_A_FILTER)
def test_a_reply_that_a_filter_ends_is_unjudged_and_not_requested_again(response):
    with serving(if_long(response)) as server:
        judge = make_judge(llm_config(server), {})
        replies = list(judge_all(judge, questions_with_long_posts(2), 2))

    assert [reply.choice for reply in replies] == ["A", "A", None, "A", "A", "A"]
    assert replies[2].finish_reason == "content_filter"
    assert len(server.requests) == 6


def test_refused_posts_are_counted_and_named_in_the_results():
    refusals = {
        "post p1.": TOO_LONG["vLLM"],
        "post p2.": FILTERED["Azure"],
        "post p3.": chat("", "content_filter"),
    }

    def answer(number, body):
        for post, refusal in refusals.items():
            if post in prompt_of(body):
                return refusal
        return chat(GOOD)

    rows = [
        {
            "id": f"p{number}",
            "query": f"post p{number}.",
            "summary": "one",
            "reference": "two",
        }
        for number in range(4)
    ]
    with serving(answer) as server:
        config = llm_config(server)
        finish_summaries(config, ppo=rows)
        results = judge_summaries(config)

    assert results["too_long"] == ["p1"]
    assert results["filtered"] == ["p2", "p3"]
    assert results["unjudged"] == 0.75


# -- errors that stop the judge --------------------------------------------------------------------


def stop_line(server: Any, **changes: Any) -> str:
    """The line with which a judge of this server stops."""
    with pytest.raises(UserError) as stop:
        ask(server, structured="off", reasoning_effort="default", **changes)
    line = str(stop.value)
    assert line.startswith("judge judge: ")
    assert "\n" not in line
    return line


@each(KEY)
def test_a_wrong_key_stops_at_once(response):
    with serving(always(response)) as server:
        line = stop_line(server, max_retries=3)

    assert "OPENAI_API_KEY" in line
    assert len(server.requests) == 1


@each(MODEL)
def test_an_unknown_model_stops_at_once(response):
    with serving(always(response)) as server:
        line = stop_line(server, max_retries=3)

    assert "check judge.model" in line
    assert len(server.requests) == 1


def message_of(body: Any) -> str:
    """The message of an error, wherever the server puts it."""
    if isinstance(body, list):
        body = body[0]
    error = body["error"]
    if isinstance(error, str):
        return error
    return str(error["message"])


@each(ACCOUNT)
def test_a_spent_account_stops_the_judge_with_the_words_of_the_server(response):
    status, body = response
    with serving(always(response)) as server:
        line = stop_line(server, max_retries=2)

    assert message_of(body)[:40] in line
    assert "finished replies are kept" in line or "OPENAI_API_KEY" in line
    requests = 3 if status == 429 else 1
    assert len(server.requests) == requests


@each(OUTAGE)
def test_an_outage_is_waited_for_and_then_stops_the_judge(response):
    with serving(always(response)) as server:
        line = stop_line(server, max_retries=2)

    assert "finished replies are kept: run the same command again later" in line
    assert len(server.requests) == 3


@each(OUTAGE)
def test_an_outage_that_ends_leaves_no_trace(response):
    with serving(lambda number, body: response if number < 2 else chat(GOOD)) as server:
        assert ask(server, max_retries=2).choice == "A"
        assert ask(server).choice == "A"
    assert len(server.requests) == 3


@each({**KEY, **MODEL, **ACCOUNT, **OUTAGE})
def test_the_judge_keeps_nothing_of_an_error(response):
    with serving(lambda number, body: response if number == 0 else chat(GOOD)) as server:
        stop_line(server, max_retries=0)
        assert ask(server, structured="off", reasoning_effort="default").choice == "A"


def test_a_server_that_asks_for_a_long_wait_stops_the_judge_with_its_seconds():
    two_hours = (429, {"error": {"message": "later"}}, {"Retry-After": "7200"})
    with serving(always(two_hours)) as server:
        line = stop_line(server, max_retries=3)

    assert "the server asks for a wait of 7200 s" in line
    assert len(server.requests) == 1


def test_an_unknown_error_stops_at_once_and_is_quoted():
    unknown = (400, {"error": {"message": "no\nway"}})
    with serving(always(unknown)) as server:
        line = stop_line(server)

    assert "no" in line
    assert "check judge.model, judge.temperature and judge.max_tokens" in line
    assert len(server.requests) == 1


# -- completions that look like errors -------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        chat("the post asks for an error"),
        chat(GOOD, error=None),
        chat(GOOD, code=0, message="ok"),
    ],
    ids=["a text about errors", "no error", "a code without error"],
)
def test_a_completion_is_no_error(response):
    status, body = response
    assert find_error(status, "", body) is None


# -- parameters that a server refuses --------------------------------------------------------------

PARAMETERS = ("max_tokens", "temperature", "reasoning_effort", "response_format")


@pytest.mark.parametrize(
    ("text", "parameter"),
    [
        ('{"error": {"message": "Unsupported value", "param": "temperature"}}', "temperature"),
        (
            '{"error": {"message": "not with temperature", "param": "reasoning_effort"}}',
            "reasoning_effort",
        ),
        ('{"error": {"message": "Use max_completion_tokens", "param": null}}', "max_tokens"),
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
        # DeepSeek
        ("This response_format type is unavailable now", "response_format"),
        ("Unsupported parameter: temperature", "temperature"),
        ("no", None),
        ("Incorrect API key provided", None),
    ],
)
def test_a_refusal_blames_a_parameter(text, parameter):
    assert blamed_parameter(text, PARAMETERS) == parameter
