"""What a summary is like beside its post: each measure by a count on paper."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from eval.summaries import describe, make_rows
from reports.parts.sentences import unshown
from reports.parts.style import MEASURES, fragments, measures, novel, repeated, style_of
from stages.learning.models import load_tokenizer
from stages.posts.text_metrics import words_of
from stages.rl.metrics import describe_special, describe_texts, summarize
from stages.settings.prompt import format_post

POST = {
    "subreddit": "x",
    "title": "My cat",
    "post": "The cat sat on the mat. It purred, and I slept.",
}
# my cat the cat sat on the mat it purred and i slept: 13 words
QUERY = format_post(POST)


def test_fragments_are_the_longest_runs_from_left_to_right():
    # "the cat sat" and "purred" are runs of the post; "dog" is not in it.
    assert fragments(words_of("the cat sat on the mat"), words_of("the cat sat dog mat")) == [3, 1]
    # "a b" stands first, but "a b c" is longer.
    assert fragments(list("abxabc"), list("abc")) == [3]
    # The fragment "a b" ends; "c" begins another.
    assert fragments(list("abxc"), list("abc")) == [2, 1]
    assert fragments([], ["a"]) == fragments(["a"], []) == []


def test_each_measure_is_that_of_a_count_on_paper():
    found = measures(QUERY, "The cat sat on a mat. Why did the cat sat on it?")
    # 13 words: the cat sat on | a | mat | why did | the cat sat on | it. Fragments 4, 1, 4, 1.
    assert found["coverage"] == pytest.approx(10 / 13)
    assert found["density"] == pytest.approx((16 + 1 + 16 + 1) / 13)
    assert found["compression"] == pytest.approx(13 / 13)
    assert found["novel_1"] == pytest.approx(3 / 13)  # a, why, did
    # 12 pairs; the post has "the cat", "cat sat" and "sat on", each twice.
    assert found["novel_2"] == pytest.approx(6 / 12)
    # 11 triples; "the cat sat" and "cat sat on" come again.
    assert found["repeated_3"] == pytest.approx(2 / 11)
    assert found["copied_title"] == pytest.approx(1 / 2)  # cat, not my
    assert (found["closing_questions"], found["words"]) == (1.0, 13)


@pytest.mark.parametrize(
    ("text", "asks"), [("Why?", 1), ('He said "why?" ', 1), ("Why? So.", 0), ("", 0), ("Why?)", 1)]
)
def test_a_question_counts_where_it_ends_the_summary(text, asks):
    assert measures(QUERY, text)["closing_questions"] == asks


def test_a_copy_and_a_text_without_a_word_of_the_post_are_the_ends_of_each_scale():
    copy = measures(QUERY, POST["post"])
    assert (copy["coverage"], copy["novel_1"], copy["novel_2"]) == (1.0, 0.0, 0.0)
    assert copy["density"] == 11.0  # one fragment of 11 words
    other = measures(QUERY, "nothing alike nothing alike nothing alike")
    assert (other["coverage"], other["density"], other["novel_2"]) == (0.0, 0.0, 1.0)
    assert other["repeated_3"] == pytest.approx(2 / 4)


def test_an_empty_summary_has_no_compression_and_means_leave_it_out():
    rows = [{"query": QUERY, "summary": text} for text in ("", "cat")]
    found = style_of(rows)
    assert list(found) == list(MEASURES)
    assert found["compression"] == 13.0
    assert found["coverage"] == 0.5
    assert set(style_of([]).values()) == {None}


def test_a_text_that_is_no_prompt_of_ours_is_the_post_as_it_stands():
    assert measures("one two three", "two three four")["coverage"] == pytest.approx(2 / 3)
    assert novel(["a"], [], 1) == repeated(["a"], 3) == 0.0


def test_the_mean_of_copied_titles_is_over_the_posts_that_show_one():
    """A post without a title counted as one whose title was not copied."""
    rows = [{"query": query, "summary": "cat"} for query in (QUERY, "one two three")]
    assert style_of(rows)["copied_title"] == pytest.approx(1 / 2)
    assert style_of(rows[1:])["copied_title"] is None


def test_training_says_nothing_of_copied_titles_where_no_prompt_shows_one():
    """It was 0 %, also on the curve."""
    decode = {"batch_decode": lambda texts, skip_special_tokens: texts}
    tokenizer: Any = SimpleNamespace(
        eos_token_id=0, pad_token_id=1, added_tokens_decoder={}, **decode
    )
    learner: Any = SimpleNamespace(accelerator=Accelerator(cpu=True))
    key, logged = "text/copied_title_words", []
    for queries in (["one two"], ["one two", QUERY]):
        rollout: Any = SimpleNamespace(queries=queries, responses=["cat"] * len(queries))
        logged.append(describe_texts(learner, rollout, tokenizer))
    assert [row.get(key) for row in logged] == [None, pytest.approx(1 / 2)]
    others = "objective/kl objective/kl_k1 objective/scores policy/eos_rate policy/response_length"
    history = [dict.fromkeys(others.split(), 1.0) | row for row in logged]
    settings: Any = SimpleNamespace(batch_size=1)
    assert key not in summarize(history[:1], settings)
    assert summarize(history, settings)[key] == pytest.approx(1 / 2)


def test_special_tokens_that_no_summary_shows_are_counted(tokenizer_folder):
    """A policy ended all with <|im_end|> and then its EOS: score up, gold score down."""
    tokenizer = load_tokenizer(tokenizer_folder)
    learner: Any = SimpleNamespace(accelerator=Accelerator(cpu=True))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    responses = torch.tensor([[5, 6, eos], [5, eos, pad], [5, 6, 7]])
    rollout: Any = SimpleNamespace(responses=responses)
    assert describe_special(learner, rollout, tokenizer) == {}  # it has no others
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert describe_special(learner, rollout, tokenizer) == {"text/special_tokens": 0.0}
    responses[0, 1] = tokenizer.convert_tokens_to_ids("<|im_end|>")
    shown = describe_special(learner, rollout, tokenizer)
    assert shown == {"text/special_tokens": pytest.approx(1 / 3)}
    # The same of held-out summaries, and of 0.33 the page warns.
    posts: Any = SimpleNamespace(rows=[{"id": 1, "query": QUERY, "reference": "cat"}] * 3)
    texts = {"ppo": responses.tolist(), "reference": [[5]] * 3}
    rows = make_rows(posts, texts, dict.fromkeys(texts, [0.0] * 3), "ppo", tokenizer)
    assert [row["special_tokens"] for row in rows] == [1, 0, 0]
    assert "im_end" not in rows[0]["summary"]
    share = describe([row | {"kl": 0.0} for row in rows])["special_tokens"]
    (line,) = unshown({"policies": ["sft", "ppo"], "ppo/special_tokens": share})
    assert line.startswith("33.3% of PPO's summaries hold special tokens beside the EOS")


def of_the_paper(article, summary):
    """Algorithm 1 of Grusky et al. 2018, word for word."""
    found, i, j = [], 0, 0
    while i < len(summary):
        best: list[str] = []
        while j < len(article):
            if summary[i] == article[j]:
                i2, j2 = i, j
                while i2 < len(summary) and j2 < len(article) and summary[i2] == article[j2]:
                    i2, j2 = i2 + 1, j2 + 1
                if len(best) < i2 - i:
                    best = summary[i:i2]
                j = j2
            else:
                j += 1
        i, j = i + max(len(best), 1), 0
        found += [len(best)] if best else []
    return found


def test_fragments_are_those_of_the_papers_algorithm_where_no_run_overlaps_itself():
    rng = random.Random(1)
    for _ in range(200):
        article = [str(rng.randrange(400)) for _ in range(300)]
        summary = [*article[40:52], *(str(rng.randrange(400)) for _ in range(20)), *article[7:10]]
        assert fragments(article, summary) == of_the_paper(article, summary)
