"""With data.chat_template, the tokenizer's own template formats prompts and answers."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eval import judge, summaries
from eval.summarize import FinishedRun, finished_policies
from stages import base, normalize, ppo, rm, sft
from stages.config.errors import UserError
from stages.config.recorded import recorded_config
from stages.config.sections import format_post
from stages.data.bad_rows import BadRows
from stages.data.chat import ChatFormat, end_answers_as_the_template
from stages.data.formats import to_openai_schema
from stages.data.lengths import Limits
from stages.data.prompt import first_tokens
from stages.data.ragged import load_split
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from stages.models.tokenizers import load_tokenizer
from stages.pipeline import model_cards
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from tests.lib.asserts import refusal_of
from tests.lib.chat_models import (
    END_OF_TURN,
    TEMPLATES,
    save_chat_checkpoint,
    save_chat_tokenizer,
    write_chats,
)
from tests.lib.make_stages import run_module
from tests.lib.rows import POST, write_rows

QUESTION = {"role": "user", "content": "My boss sold my bike. Why?"}
ANSWER = {"role": "assistant", "content": "he did"}


@pytest.fixture(scope="module", params=list(TEMPLATES))
def family(request) -> str:
    """A family of chat models."""
    return str(request.param)


@pytest.fixture
def folder(tokenizer_folder, tmp_path, family):
    return save_chat_tokenizer(tokenizer_folder, tmp_path / family, family)


@pytest.fixture
def chat_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    end_answers_as_the_template(tokenizer)
    return tokenizer


@pytest.fixture
def by_template(folder, family):
    """A function from messages to tokens that uses only transformers and its template."""

    def tokens_of(messages: list[dict[str, str]]) -> list[int]:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    return tokens_of


def limits_of(tokenizer, bos: str = "auto", query: int = 100) -> Limits:
    return Limits(
        query=query,
        response=40,
        query_response=200,
        first=first_tokens(tokenizer, bos, chat_template=True),
        chat_template=True,
    )


def posts_of(tokenizer, limits, *rows, bad_rows: BadRows | None = None):
    located = [("x:1", to_openai_schema("x:1", row, "sft_train")) for row in rows]
    return tokenize_posts(located, tokenizer, limits, "sft_train", bad_rows)


def query_and_response(split) -> list[int]:
    """The tokens of the first row."""
    query: list[int] = split.columns["queries"][0].tolist()
    response: list[int] = split.columns["summaries"][0].tolist()
    return query + response


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", [[QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION | {"content": "So?"}, ANSWER]]
)
def test_query_and_response_are_the_tokens_of_the_whole_conversation(
    chat_tokenizer, by_template, messages
):
    split = posts_of(chat_tokenizer, limits_of(chat_tokenizer), {"messages": messages})
    # Both templates write a newline after the turn.
    newline = chat_tokenizer("\n", add_special_tokens=False).input_ids
    assert query_and_response(split) + newline == by_template(messages)


def test_a_text_is_one_turn_of_the_user(chat_tokenizer, by_template):
    row = {"prompt": QUESTION["content"], "completion": " he did "}
    split = posts_of(chat_tokenizer, limits_of(chat_tokenizer), row)
    tokens = query_and_response(split)
    assert tokens == by_template([QUESTION, ANSWER])[: len(tokens)]


def test_a_post_of_the_published_schema_is_one_turn_of_the_user(chat_tokenizer, by_template):
    split = posts_of(chat_tokenizer, limits_of(chat_tokenizer), POST)
    prompt = f"SUBREDDIT: r/tifu\n\nTITLE: my bike\n\nPOST: {POST['post']}\n\nTL;DR:"
    answer = {"role": "assistant", "content": POST["summary"]}
    tokens = query_and_response(split)
    assert tokens == by_template([{"role": "user", "content": prompt}, answer])[: len(tokens)]
    assert split.rows[0]["query"] == prompt


def test_a_response_ends_with_the_turn_which_is_eos(chat_tokenizer, family):
    split = posts_of(chat_tokenizer, limits_of(chat_tokenizer), {"messages": [QUESTION, ANSWER]})
    response = split.columns["summaries"][0].tolist()
    assert chat_tokenizer.eos_token == END_OF_TURN[family]
    assert response[-1] == chat_tokenizer.eos_token_id
    assert response.count(chat_tokenizer.eos_token_id) == 1
    assert chat_tokenizer.pad_token_id not in response
    text = chat_tokenizer.decode(response, skip_special_tokens=True)
    assert text == ANSWER["content"]


def test_an_empty_chain_of_thought_belongs_to_the_query(tokenizer_folder, tmp_path):
    folder = save_chat_tokenizer(tokenizer_folder, tmp_path / "t", "chatml")
    thinking = "{% if message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    content = "{{ message['content'] }}"
    template = TEMPLATES["chatml"].replace(content, thinking + content)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    end_answers_as_the_template(tokenizer)

    split = posts_of(tokenizer, limits_of(tokenizer), {"messages": [QUESTION, ANSWER]})

    plain: Any = AutoTokenizer.from_pretrained(folder)
    plain.chat_template = template
    conversation = plain.apply_chat_template([QUESTION, ANSWER], tokenize=False)
    response = split.columns["summaries"][0].tolist()
    assert plain.decode(query_and_response(split)) == conversation.rstrip("\n")
    assert plain.decode(response) == "he did<|im_end|>"


def test_a_space_before_an_answer_belongs_to_the_response(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "[INST] {{ message['content'] }} [/INST]"
        "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    split = posts_of(tokenizer, limits_of(tokenizer), {"messages": [QUESTION, ANSWER]})
    response = split.columns["summaries"][0].tolist()
    assert response == [*tokenizer(" he did").input_ids, tokenizer.eos_token_id]


def test_chosen_and_rejected_are_answers(chat_tokenizer, by_template):
    poor = {"role": "assistant", "content": "no"}
    row = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [poor]}
    located = [("x:1", to_openai_schema("x:1", row, "comparisons_train"))]
    split = tokenize_comparisons(
        located, chat_tokenizer, limits_of(chat_tokenizer), "comparisons_train"
    )
    query = split.columns["queries"][0].tolist()
    for column, answer in (("chosen", ANSWER), ("rejected", poor)):
        tokens = query + split.columns[column][0].tolist()
        assert tokens == by_template([QUESTION, answer])[: len(tokens)]


@pytest.mark.parametrize(("bos", "count"), [("auto", 1), ("always", 1), ("never", 0)])
def test_bos_begins_a_query_at_most_once(tokenizer_folder, tmp_path, bos, count):
    tokenizer = load_tokenizer(save_chat_tokenizer(tokenizer_folder, tmp_path / "t", "gemma"))
    split = posts_of(tokenizer, limits_of(tokenizer, bos), {"messages": [QUESTION, ANSWER]})
    query = split.columns["queries"][0].tolist()
    assert query.count(tokenizer.bos_token_id) == count
    assert (query[0] == tokenizer.bos_token_id) == bool(count)


def test_the_judge_reads_the_conversation_without_the_template(chat_tokenizer):
    first = {"messages": [QUESTION, ANSWER, {"role": "user", "content": "So?"}, ANSWER]}
    second = {"prompt": "Why?", "completion": "So."}
    split = posts_of(chat_tokenizer, limits_of(chat_tokenizer), first, second)
    assert split.rows[0]["query"] == (
        "User: My boss sold my bike. Why?\n\nAssistant: he did\n\nUser: So?\n\nAssistant:"
    )
    assert split.rows[1]["query"] == "Why?"


# -- truncation ------------------------------------------------------------------------------------


def test_a_long_text_loses_its_beginning_and_the_template_stays(chat_tokenizer, by_template):
    words = " ".join(["my boss sold my bike"] * 40) + ". Why?"
    split = posts_of(
        chat_tokenizer, limits_of(chat_tokenizer, query=40), {"prompt": words, "completion": "he"}
    )
    query = split.columns["queries"][0].tolist()
    end_of_text = split.rows[0]["query"]
    assert 35 <= len(query) <= 40
    assert words.endswith(end_of_text)
    expected = by_template([{"role": "user", "content": end_of_text}, ANSWER])
    assert query == expected[: len(query)]


def test_of_a_long_conversation_the_oldest_turns_go_first(chat_tokenizer):
    long = {"role": "user", "content": "my boss " * 30}
    last = {"role": "user", "content": "Why?"}
    room = len(ChatFormat(chat_tokenizer).query([last])) + len(limits_of(chat_tokenizer).first)
    split = posts_of(
        chat_tokenizer,
        limits_of(chat_tokenizer, query=room),
        {"messages": [long, ANSWER, last, ANSWER]},
    )
    assert split.rows[0]["query"] == "User: Why?\n\nAssistant:"


def test_a_limit_below_the_template_is_refused_with_the_place(chat_tokenizer):
    row = {"prompt": "Why?", "completion": "So."}
    limits = limits_of(chat_tokenizer, query=3)
    line = refusal_of(posts_of, chat_tokenizer, limits, row)
    assert line.startswith("x:1: data.chat_template: the chat template alone has more than 3")


# -- refusals --------------------------------------------------------------------------------------


def test_a_tokenizer_without_a_template_is_refused_with_the_ways_out(tokenizer):
    line = refusal_of(end_answers_as_the_template, tokenizer)
    assert "has no chat template: start from an instruct model, put a chat_template.jinja" in line


def test_control_tokens_in_a_text_are_refused(chat_tokenizer, family):
    row = {"prompt": f"Why?{END_OF_TURN[family]}", "completion": "So."}
    line = refusal_of(posts_of, chat_tokenizer, limits_of(chat_tokenizer), row)
    assert line.startswith(
        f"x:1: data.chat_template: the text contains the control token {END_OF_TURN[family]}"
    )


def test_what_a_template_refuses_is_a_bad_row(tokenizer_folder, tmp_path):
    tokenizer = load_tokenizer(save_chat_tokenizer(tokenizer_folder, tmp_path / "t", "gemma"))
    bad = {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]}
    good = {"messages": [QUESTION, ANSWER]}
    bad_rows = BadRows("skip")
    split = posts_of(tokenizer, limits_of(tokenizer), bad, good, bad_rows=bad_rows)
    assert len(split) == 1
    [skipped] = bad_rows.skipped
    assert "the chat template says: System role not supported" in skipped["reason"]


# -- a run -----------------------------------------------------------------------------------------


RUN_SETTINGS = [
    "base.checkpoint=model",
    "base.tokenizer=",
    "data.chat_template=true",
    "data.max_query_tokens=200",
    "ppo.total_episodes=16",
    "ppo.batch_size=8",
    "ppo.critic_updates=0",
    "ppo.samples_every=1",
    "sft.epochs=1",
    "rm.epochs=1",
    "eval.posts=0",
    "judge.kind=reward_model",
    "memory.cpu_threads=1",
]


@pytest.fixture(scope="module")
def chat_run(tokenizer_folder, tmp_path_factory, family):
    """The folder of a run of all stages that began with a chat model."""
    root = tmp_path_factory.mktemp("chat")
    save_chat_checkpoint(tokenizer_folder, root / "model", family)
    write_chats(root / "pairs.jsonl", 48)
    arguments = ["--preset", "tiny", "--name", "chat", "--data", "pairs.jsonl", "--set"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage in (base, sft, rm, normalize, ppo, summaries, judge):
            run_module(stage, [*arguments, *RUN_SETTINGS])
    return root / "runs/chat/seed44413"


@pytest.fixture
def finished_run(chat_run, monkeypatch):
    """The run, as `make summarize` opens it."""
    monkeypatch.chdir(chat_run.parents[2])
    return FinishedRun(finished_policies("tiny", "chat", 44413))


def prompt_tokens_by_template(folder: Path, message: dict[str, str]) -> list[int]:
    """The tokens of a prompt by transformers and the template that is saved with a model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


@pytest.mark.walk
def test_a_trained_chat_model_has_its_template_and_its_end_of_turn(chat_run, family):
    tokenizer = load_tokenizer(chat_run / "ppo/model")
    assert tokenizer.eos_token == END_OF_TURN[family]
    assert tokenizer.chat_template == TEMPLATES[family]


@pytest.mark.walk
def test_all_queries_of_a_run_are_formatted_by_the_template(chat_run):
    model = chat_run.parents[2] / "model"
    split = load_split(chat_run / "base/data", "sft_train")
    for number, row in enumerate(split.rows):
        [message] = row["columns"]["prompt"]
        expected = prompt_tokens_by_template(model, message)
        assert split.columns["queries"][number].tolist() == expected


@pytest.mark.walk
def test_summaries_of_a_chat_model_are_without_the_template(chat_run, family):
    for row in read_lines(chat_run / "summaries/ppo.jsonl"):
        assert row["query"].startswith("User: My boss sold bike")
        assert END_OF_TURN[family] not in row["summary"]


@pytest.mark.walk
def test_a_typed_post_is_formatted_by_the_template(chat_run, finished_run):
    post = finished_run.post_of_text("Why?")

    model = chat_run.parents[2] / "model"
    expected = prompt_tokens_by_template(model, {"role": "user", "content": "Why?"})
    assert post.tokens.tolist() == expected
    assert post.query == "Why?"


@pytest.mark.walk
def test_the_code_of_a_policys_card_formats_its_post_by_the_template(chat_run, finished_run):
    post = finished_run.post_of_text(format_post(model_cards.POST))
    greedy = finished_run.text(finished_run.summary("ppo", post, temperature=1e-6))

    printed = printed_by_card(chat_run / "ppo/model", card_of(chat_run / "ppo"))

    assert printed == [greedy]


@pytest.mark.walk
def test_the_code_of_a_reward_models_card_formats_its_texts_by_the_template(chat_run, finished_run):
    post = finished_run.post_of_text(format_post(model_cards.POST))
    tokens = ChatFormat(finished_run.tokenizer).response(model_cards.SUMMARY)
    [score] = finished_run.scores(post, [tokens])

    printed = printed_by_card(chat_run / "normalize/model", card_of(chat_run / "normalize"))

    assert [float(line) for line in printed] == pytest.approx([score, score], abs=1e-5)


def card_of(folder: Path) -> str:
    config = recorded_config(folder)
    assert config is not None
    return model_cards.card(config, folder.name, "model", read_manifest(folder) or {})


def printed_by_card(folder: Path, card: str) -> list[str]:
    """What the code of a model card prints in a folder, without this project."""
    [code] = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    ended = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_run_without_a_template_is_refused_in_one_line(place, policy_folder, capsys):
    rows = [
        {"prompt": f"Why {number}?", "chosen": "So.", "rejected": "No."} for number in range(40)
    ]
    write_rows(place / "pairs.jsonl", rows)
    settings = [f"base.checkpoint={policy_folder}", "base.tokenizer=", "data.chat_template=true"]
    arguments = ["--preset", "tiny", "--name", "x", "--data", "pairs.jsonl", "--set", *settings]
    with pytest.raises(SystemExit):
        run_module(base, arguments)
    assert "data.chat_template: tokenizer" in capsys.readouterr().err


def test_a_template_that_rewrites_answers_is_refused(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    with pytest.raises(UserError, match="does not write an answer after its own generation"):
        ChatFormat(tokenizer)
