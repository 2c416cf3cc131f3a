"""Readers, prompts, truncation, padding: what goes in, and what is refused with one line."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.data.ragged import load_split, pad_left, pad_right, save_split
from stages.data.readers import SPLITS, Located, is_cnndm, read_source, subsample
from stages.data.tokens import (
    CNNDM_LIMITS,
    Limits,
    fit_query,
    plain_encoder,
    tokenize_comparisons,
    tokenize_posts,
)
from stages.running.files import read_lines
from stages.settings.config import HUB, Data, UserError
from stages.settings.sections import PROMPT, format_post
from tests.lib.asserts import refusal_of
from tests.lib.paper_numbers import query_tokens
from tests.lib.places import SHARED

Row = dict[str, Any]
LIMITS = Limits(query=400, response=100, query_response=450)
POST = {
    "id": "a1",
    "subreddit": "tifu",
    "title": "my bike",
    "post": "First part.\nMy boss sold my bike.",
    "summary": "My boss sold my bike.",
}
OWN_POSTS = [
    POST | {"post": "I left the pot.\nIt burned.\n"},
    POST | {"post": "One.\n\nTwo {braces}.\nThree: naïve – ok."},
    POST | {"post": "My cat sleeps on my bike and will not move"},
    POST | {"title": "A title that is much too long to be kept"},
]
PAIR: Row = {
    "info": {key: POST[key] for key in ("id", "post", "title", "subreddit")}
    | {"site": None, "article": None},
    "summaries": [
        {"text": " one is better", "policy": "sup1", "note": None},
        {"text": " two", "policy": "ref", "note": None},
    ],
    "choice": 1,
    "worker": "w",
    "batch": "batch3",
    "split": "valid2",
    "extra": {"confidence": 8},
}
ARTICLE: Row = PAIR | {
    "info": {"id": "n1", "article": "News.\nMore.", "site": "cnn", "title": None, "post": None},
    "batch": "cnndm0",
}


def write_folder(folder: Path, **changed: list[Any]) -> Path:
    """A data folder with one good row in every split, but for the splits that are given."""
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        rows = changed.get(split, [POST if split.startswith("sft") else PAIR])
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def read_all(folder: Path) -> dict[str, list[Located]]:
    return dict(read_source(Data(source=str(folder)), str(folder)))


def edited(row: Row, path: str, value: object) -> Row:
    """A copy of the row with one field, given like `info.id` or `summaries.0.text`, replaced."""
    row = copy.deepcopy(row)
    *way, last = path.split(".")
    inner: Any = row
    for step in way:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    inner[last] = value
    return row


# -- reading ---------------------------------------------------------------------------------------


def test_jsonl_rows_come_with_file_and_line(tmp_path):
    folder = write_folder(tmp_path, sft_train=[POST, POST | {"id": "a2", "post": "a\u2028b"}])
    found = read_all(folder)
    assert list(found) == list(SPLITS)
    assert [where for where, _ in found["sft_train"]] == [
        f"{folder}/sft_train.jsonl:1",
        f"{folder}/sft_train.jsonl:2",
    ]
    assert found["sft_train"][0][1] == POST
    assert found["comparisons_validation"] == [(f"{folder}/comparisons_validation.jsonl:1", PAIR)]


def test_longer_posts_are_left_out_before_the_draw_and_pairs_are_kept(tmp_path):
    posts = [POST | {"id": f"a{size}", "post": "x" * size} for size in (9, 10, 11, 12)]
    folder = write_folder(tmp_path, sft_train=posts, sft_validation=posts[:1])
    assert len(PAIR["info"]["post"]) > 10

    def used(**settings: Any) -> dict[str, list[str]]:
        kept = subsample(Data(source=str(folder), **settings), read_all(folder))
        return {name: [where for where, _ in rows] for name, rows in kept.items()}

    everything, short = used(), used(max_post_characters=10)
    assert short["sft_train"] == everything["sft_train"][:2]
    assert short["comparisons_train"] == everything["comparisons_train"]
    assert used(max_post_characters=10, train_posts=1)["sft_train"][0] in short["sft_train"]
    with pytest.raises(UserError, match="3 rows of sft_train are asked for, there are 2"):
        used(max_post_characters=10, train_posts=3)
    with pytest.raises(UserError, match="raise 2, no post of sft_train is left"):
        used(max_post_characters=2)


def test_hub_data_sets_are_read_by_id_configuration_and_split(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    posts, pairs = tmp_path / "posts", tmp_path / "pairs"
    files = write_folder(tmp_path / "files", sft_validation=[POST | {"id": "held out"}])
    for part in ("train", "validation"):
        for kind, folder in (("sft", posts), ("comparisons", pairs)):
            folder.mkdir(exist_ok=True)
            text = (files / f"{kind}_{part}.jsonl").read_text()
            (folder / f"{part}.jsonl").write_text(text)
    configuration = "---\nconfigs:\n- config_name: comparisons\n  data_files:\n"
    for part in ("train", "validation"):
        configuration += f"  - split: {part}\n    path: {part}.jsonl\n"
    (pairs / "README.md").write_text(configuration + "---\n")
    data = Data(source=HUB, sft_dataset=str(posts), comparisons_dataset=f"{pairs}:comparisons")
    found = dict(read_source(data, HUB))
    assert found["sft_train"] == [(f"{posts}[train]:1", POST)]
    assert found["sft_validation"][0][1]["id"] == "held out"
    where, row = found["comparisons_train"][0]
    assert where == f"{pairs}:comparisons[train]:1"
    assert row["summaries"] == PAIR["summaries"]
    assert row["choice"] == 1


# Each: split, the line as written, what the message names beside file and line.
BAD_ROWS = {
    "not JSON": ("sft_train", '{"id": ', "JSON"),
    "not an object": ("sft_train", "[1]", "object"),
    "missing field": ("sft_train", {k: v for k, v in POST.items() if k != "title"}, "field title"),
    "wrong type": ("sft_train", POST | {"subreddit": 3}, "field subreddit"),
    "empty summary": ("sft_train", POST | {"summary": " \n"}, "field summary"),
    "no info": ("comparisons_train", edited(PAIR, "info", None), "field info"),
    "no article": ("comparisons_validation", edited(ARTICLE, "info.article", None), "info.article"),
    "one summary": ("comparisons_train", PAIR | {"summaries": PAIR["summaries"][:1]}, "summaries"),
    "summary is text": ("comparisons_train", PAIR | {"summaries": ["a", "b"]}, "summaries[0]"),
    "no policy": ("comparisons_train", edited(PAIR, "summaries.0.policy", None), "[0].policy"),
    "choice 2": ("comparisons_train", PAIR | {"choice": 2}, "field choice"),
    "choice true": ("comparisons_train", PAIR | {"choice": True}, "field choice"),
    "confidence 10": ("comparisons_train", edited(PAIR, "extra.confidence", 10), "confidence"),
    "extra is text": ("comparisons_train", PAIR | {"extra": "sure"}, "extra"),
    "half a letter": ("sft_train", b"\xff\xfe".decode("latin1"), "JSON"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_with_file_line_and_field(tmp_path, name):
    split, bad, named = BAD_ROWS[name]
    good = POST if split.startswith("sft") else PAIR
    folder = write_folder(tmp_path, **{split: [good, bad]})
    if name == "half a letter":  # bytes that are no UTF-8
        path = folder / f"{split}.jsonl"
        path.write_bytes(path.read_text().encode("latin1"))
    text = refusal_of(read_all, folder)
    assert text.startswith(f"{folder}/{split}.jsonl:2: ")
    assert named in text


# -- truncation ------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    """A tokenizer with one token per character."""
    return [ord(letter) for letter in text]


def cut(post: str, limit: int, title: str = "T") -> str:
    fields = {"title": title, "post": post}
    before = dict(fields)
    text, tokens = fit_query(letters, "{title}|{post}|", fields, "post", limit)
    assert letters(text) == tokens
    assert fields == before
    assert len(tokens) <= limit
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("post", "limit", "expected"),
    [
        ("{braces} \n", 13, "T|{braces} \n|"),
        ("one\ntwo\nthree", 15, "T|one\ntwo|"),
        ("one\ntwo\nthree", 9, "T|one|"),
        ("one\ntwo\n", 10, "T|one\ntwo|"),
        ("\nabcdef", 4, "T||"),
        ("one\ntwo", 5, "T|on|"),  # no line fits: characters go
        ("abcdef", 8, "T|abcde|"),
        ("abcdef", 3, "T||"),
    ],
)
def test_a_post_is_cut_at_its_last_newline_and_its_title_never(post, limit, expected):
    assert cut(post, limit) == expected
    with pytest.raises(ValueError, match="empty post"):
        cut(post, limit=11, title="long title")


def test_queries_are_those_of_the_papers_code(source, source_tokenizer):
    """And of the transcription: on posts of our own too, where the paper's are not here."""
    limits = (50, 60, 70, 150)
    rows: list[Row] = [post | {"max_query_length": n} for post in OWN_POSTS for n in limits]
    if source == "shared":
        assert (source_tokenizer.eos_token_id, source_tokenizer.pad_token_id) == (0, 50277)
        posts = {row["id"]: row for row in read_lines(SHARED / "tldr/sft_validation.jsonl")}
        rows = [posts[row["id"]] | row for row in read_lines(SHARED / "golden/queries.jsonl")]
    encode = plain_encoder(source_tokenizer)
    for row in rows:
        limit = row["max_query_length"]
        expected = query_tokens(lambda text: encode([text])[0], row, limit)
        try:
            _, tokens = fit_query(lambda text: encode([text])[0], PROMPT, row, "post", limit)
        except ValueError:
            tokens = None
        assert tokens == expected, row
        if source == "own":
            continue
        assert (tokens is None) == ("error" in row), row["id"]
        if tokens is not None:
            assert [50277] * (limit - len(tokens)) + tokens == row["query_token"], row["id"]
            assert source_tokenizer.decode(tokens) == row["query"]


# -- tokenising ------------------------------------------------------------------------------------


def test_summaries_get_one_leading_space_and_one_eos(tokenizer):
    split = tokenize_posts([("x:1", POST)], tokenizer, LIMITS, "posts")
    assert tokenizer.decode(split.columns["queries"][0]) == format_post(POST)
    summary = split.columns["summaries"][0].tolist()
    assert tokenizer.decode(summary) == " My boss sold my bike.<|endoftext|>"
    assert summary.count(tokenizer.eos_token_id) == 1
    assert split.rows == [
        {"id": "a1", "title": "my bike", "query": format_post(POST), "reference": POST["summary"]}
    ]


def test_special_tokens_written_in_a_post_are_text(tokenizer):
    text = "a<|endoftext|>b [PAD]"
    split = tokenize_posts([("x:1", POST | {"post": text, "summary": text})], tokenizer, LIMITS, "")
    query, summary = split.columns["queries"][0], split.columns["summaries"][0]
    assert not set(query.tolist()) & {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert summary.tolist().index(tokenizer.eos_token_id) == len(summary) - 1
    assert split.rows[0]["query"] == format_post(POST | {"post": text})


def test_chosen_is_the_summary_that_choice_names(tokenizer):
    unspaced = edited(PAIR | {"choice": 0}, "summaries.0.text", "one is better")
    split = tokenize_comparisons([("x:1", PAIR), ("x:2", unspaced)], tokenizer, LIMITS, "pairs")
    texts = {
        name: [tokenizer.decode(split.columns[name][row]) for row in range(2)]
        for name in ("chosen", "rejected")
    }
    assert texts["chosen"] == [" two<|endoftext|>", " one is better<|endoftext|>"]
    assert texts["rejected"] == [" one is better<|endoftext|>", " two<|endoftext|>"]
    assert split.rows[0] == {
        "id": "a1",
        "split": "valid2",
        "batch": "batch3",
        "strength": 3,
        "policies": "ref--sup1",
    }


def test_news_articles_are_known_by_their_batch_and_have_their_own_prompt(tokenizer):
    batches = ("batch0_cnndm", "cnndm0", "cnndm2")
    assert all(is_cnndm(PAIR | {"batch": batch}) for batch in batches)
    assert not any(is_cnndm(PAIR | {"batch": f"batch{n}"}) for n in (*range(3, 21), 22))
    assert (CNNDM_LIMITS.query, CNNDM_LIMITS.response) == (1919, 155)
    split = tokenize_comparisons([("x:1", ARTICLE)], tokenizer, CNNDM_LIMITS, "news")
    query = tokenizer.decode(split.columns["queries"][0])
    # The template ends in a newline; what is scored is the stripped query and the summary.
    assert query == "Article:\nNews.\nMore.\n\nTL;DR:"


# -- keeping and padding ---------------------------------------------------------------------------


def test_a_saved_split_is_read_back_as_it_was(tokenizer, tmp_path):
    odd = POST | {"id": "a2", "title": "line\u2028break \u00e9", "post": "", "summary": "s"}
    split = tokenize_posts([("x:1", POST), ("x:2", odd)], tokenizer, LIMITS, "posts")
    save_split(split, tmp_path, "sft_train")
    loaded = load_split(tmp_path, "sft_train")
    assert loaded.rows == split.rows
    assert set(loaded.columns) == {"queries", "summaries"}
    for name, column in split.columns.items():
        assert all(torch.equal(loaded.columns[name][row], column[row]) for row in range(2))


def test_padding_left_aligns_ends_and_padding_right_aligns_starts():
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    assert pad_left(rows, 9).tolist() == [[1, 2], [9, 3]]
    assert pad_right(rows, 9).tolist() == [[1, 2], [3, 9]]
