"""Errors of many servers, as they are documented: each is sorted by what it is about."""

from typing import Any

import pytest

from eval.judge import judge_summaries, make_judge
from eval.judges.openai.replies import blamed_parameter, find_error
from eval.judges.protocol import Comparison, judge_all
from stages.config.errors import UserError
from tests.lib.chat_server import GOOD, ask, chat, llm_config, serving
from tests.lib.fabricated_runs import finish_summaries

pytestmark = pytest.mark.usefixtures("judge_environment")


def openai_error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, **fields}}


def google_error(code: int, message: str, status: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"error": {"code": code, "message": message, "status": status, **fields}}]


MAX_LENGTH = "This model's maximum context length is 4096 tokens. However, you requested 9256."
GOOGLE_LIMIT = "You exceeded your current quota, please check your plan and billing details."

TOO_LONG: dict[str, tuple[int, Any]] = {
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
FILTERED: dict[str, tuple[int, Any]] = {
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
# Stop at once.
KEY: dict[str, tuple[int, Any]] = {
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
MODEL: dict[str, tuple[int, Any]] = {
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
# Stop at once if the status says that no wait helps; else wait first.
ACCOUNT: dict[str, tuple[int, Any]] = {
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
# Wait, and then say that the same command resumes.
OUTAGE: dict[str, tuple[int, Any]] = {
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


def cases(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("answer", table.values(), ids=table)


def says_no_to_long_posts(answer: tuple[int, Any]) -> Any:
    return lambda number, body: (
        answer if "very long" in body["messages"][0]["content"] else chat(GOOD)
    )


def questions(*long: int) -> list[Comparison]:
    posts = [f"post {k}. {'very long ' * 40 if k in long else ''}" for k in range(6)]
    return [Comparison(f"p{k}", post, "one", "two") for k, post in enumerate(posts)]


@cases(TOO_LONG)
def test_a_post_that_is_too_long_is_unjudged_and_nothing_else_changes(answer):
    with serving(says_no_to_long_posts(answer)) as server:
        judge = make_judge(llm_config(server, max_retries=3), {})
        replies = list(judge_all(judge, questions(0, 3), 2))

    assert [reply.choice for reply in replies] == [None, "A", "A", None, "A", "A"]
    assert replies[0].finish_reason == "too long"
    assert replies[0].text.startswith("[no reply] too long: ")
    assert len(server.requests) == 6  # no try again, and no parameter is blamed
    assert all("response_format" in body for body in server.requests)


@cases(FILTERED)
def test_a_post_that_a_filter_refuses_is_unjudged_and_nothing_else_changes(answer):
    with serving(says_no_to_long_posts(answer)) as server:
        judge = make_judge(llm_config(server, max_retries=3), {})
        replies = list(judge_all(judge, questions(2), 2))

    assert [reply.choice for reply in replies] == ["A", "A", None, "A", "A", "A"]
    assert replies[2].finish_reason == "filtered"
    assert len(server.requests) == 6


GOOGLES_REASONS = ["content_filter: PROHIBITED_CONTENT", "SAFETY", "RECITATION", "BLOCKLIST"]


@pytest.mark.parametrize(
    "answer",
    [
        chat("", "content_filter"),
        chat("Comparison: the first", "content_filter"),
        *[
            chat("", choices=[{"index": 0, "finish_reason": reason}])  # it has no message
            for reason in GOOGLES_REASONS
        ],
    ],
)
def test_a_reply_that_a_filter_ends_is_unjudged_and_not_asked_for_again(answer):
    with serving(says_no_to_long_posts(answer)) as server:
        judge = make_judge(llm_config(server), {})
        replies = list(judge_all(judge, questions(2), 2))

    assert [reply.choice for reply in replies] == ["A", "A", None, "A", "A", "A"]
    assert replies[2].finish_reason == "content_filter"
    assert len(server.requests) == 6


def test_refused_posts_are_counted_and_named_in_the_results():
    refused = {"p1": TOO_LONG["vLLM"], "p2": FILTERED["Azure"], "p3": chat("", "content_filter")}
    rows = [
        {"id": f"p{k}", "query": f"post p{k}.", "summary": "one", "reference": "two"}
        for k in range(4)
    ]

    def answer(number, body):
        prompt = body["messages"][0]["content"]
        return next((no for name, no in refused.items() if f"post {name}." in prompt), chat(GOOD))

    with serving(answer) as server:
        config = llm_config(server)
        finish_summaries(config, ppo=rows)
        results = judge_summaries(config)

    assert results["too_long"] == ["p1"]
    assert results["filtered"] == ["p2", "p3"]
    assert results["unjudged"] == 0.75


def stop_of(server: Any, **changes: Any) -> str:
    with pytest.raises(UserError) as stop:
        ask(server, structured="off", reasoning_effort="default", **changes)
    said = str(stop.value)
    assert said.startswith("judge judge: ")
    assert "\n" not in said
    return said


@cases(KEY)
def test_a_wrong_key_stops_at_once(answer):
    with serving(lambda number, body: answer) as server:
        assert "OPENAI_API_KEY" in stop_of(server, max_retries=3)
    assert len(server.requests) == 1


@cases(MODEL)
def test_an_unknown_model_stops_at_once(answer):
    with serving(lambda number, body: answer) as server:
        assert "check judge.model" in stop_of(server, max_retries=3)
    assert len(server.requests) == 1


@cases(ACCOUNT)
def test_a_spent_account_stops_the_judge_with_the_words_of_the_server(answer):
    status, body = answer
    with serving(lambda number, request: answer) as server:
        said = stop_of(server, max_retries=2)
    error = body[0]["error"] if isinstance(body, list) else body["error"]
    words = error if isinstance(error, str) else error["message"]
    assert words[:40] in said
    assert "finished replies are kept" in said or "OPENAI_API_KEY" in said
    assert len(server.requests) == (3 if status == 429 else 1)


@cases(OUTAGE)
def test_an_outage_is_waited_for_and_then_stops_the_judge(answer):
    with serving(lambda number, body: answer) as server:
        said = stop_of(server, max_retries=2)
    assert "finished replies are kept: run the same command again later" in said
    assert len(server.requests) == 3


@cases(OUTAGE)
def test_an_outage_that_ends_leaves_no_trace(answer):
    with serving(lambda number, body: answer if number < 2 else chat(GOOD)) as server:
        assert ask(server, max_retries=2).choice == "A"
        assert ask(server).choice == "A"
    assert len(server.requests) == 3


@cases({**KEY, **MODEL, **ACCOUNT, **OUTAGE})
def test_nothing_of_an_error_is_kept(answer):
    with serving(lambda number, body: answer if number < 1 else chat(GOOD)) as server:
        stop_of(server, max_retries=0)
        assert ask(server, structured="off", reasoning_effort="default").choice == "A"


def test_a_server_that_asks_for_a_long_wait_stops_the_judge_with_its_seconds():
    later = (429, {"error": {"message": "later"}}, {"Retry-After": "7200"})
    with serving(lambda number, body: later) as server:
        assert "the server asks for a wait of 7200 s" in stop_of(server, max_retries=3)
    assert len(server.requests) == 1


def test_an_error_of_no_kind_stops_at_once_and_is_quoted():
    no = (400, {"error": {"message": "no\nway"}})
    with serving(lambda number, body: no) as server:
        said = stop_of(server)
    assert "no" in said
    assert "check judge.model, judge.temperature and judge.max_tokens" in said
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        chat("the post asks for an error")[1],
        chat(GOOD, error=None)[1],
        chat(GOOD, code=0, message="ok")[1],
    ],
)
def test_a_completion_is_no_error(body):
    assert find_error(200, "", body) is None


# -- parameters ------------------------------------------------------------------------------------

PARAMETERS = ("max_tokens", "temperature", "reasoning_effort", "response_format")


@pytest.mark.parametrize(
    ("text", "left_out"),
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
def test_what_a_refusal_blames_is_left_out(text, left_out):
    assert blamed_parameter(text, PARAMETERS) == left_out
