"""Where PPO takes its queries from, and references that begin with a space."""

import json
from pathlib import Path

import pytest

from stages import base, normalize, ppo, rm, sft
from stages.data.builtin import make_post, write_world
from stages.data.tokens import tokenize_posts
from stages.driving.start import run_module
from stages.running.files import read_json, read_lines
from stages.settings.config import UserError, World
from stages.settings.sections import format_post
from tests.data.test_posts import LIMITS, POST, read_all, write_folder


def test_ppo_train_is_optional_and_needs_no_summary(tmp_path, tokenizer):
    folder = write_folder(tmp_path)
    assert "ppo_train" not in read_all(folder)
    bare = {key: value for key, value in POST.items() if key != "summary"}
    (folder / "ppo_train.jsonl").write_text(json.dumps(bare) + "\n")
    located = read_all(folder)["ppo_train"]
    assert located == [(f"{folder}/ppo_train.jsonl:1", bare)]
    split = tokenize_posts(located, tokenizer, LIMITS, "ppo_train")
    assert set(split.columns) == {"queries"}
    assert split.rows == [{"id": "a1", "title": "my bike", "query": format_post(POST)}]
    (folder / "ppo_train.jsonl").write_text(json.dumps(bare | {"post": 3}) + "\n")
    with pytest.raises(UserError, match=r"ppo_train\.jsonl:1: field post is of type int"):
        read_all(folder)
    (folder / "ppo_train.jsonl").write_text(json.dumps(bare | {"summary": 5}) + "\n")
    with pytest.raises(UserError, match=r"ppo_train\.jsonl:1: field summary is of type int"):
        read_all(folder)


def test_a_reference_that_has_its_leading_space_gets_no_second(tokenizer):
    located = [("f:1", POST), ("f:2", POST | {"summary": " " + POST["summary"]})]
    found = tokenize_posts(located, tokenizer, LIMITS, "posts").columns["summaries"]
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.parametrize("with_ppo_train", [True, False])
def test_ppo_draws_its_queries_from_ppo_train_where_there_is_one(place, with_ppo_train):
    Path("data").mkdir()
    world = World(
        train_posts=24, validation_posts=4, train_comparisons=16, validation_comparisons=4
    )
    write_world(Path("data"), world, lambda items, *_: items)
    if with_ppo_train:
        posts = [make_post(f"toy9-more-{number}") | {"subreddit": "more"} for number in range(24)]
        for post in posts:
            del post["summary"]
        lines = "".join(json.dumps(post) + "\n" for post in posts)
        Path("data/ppo_train.jsonl").write_text(lines)
    small = "base.hidden_size=32 base.num_layers=2 ppo.total_episodes=16 ppo.batch_size=8"
    small += " ppo.critic_updates=0 memory.cpu_threads=1 ppo.samples_every=1"
    arguments = ["--preset", "tiny", "--name", "more", "--data", "data", "--set", *small.split()]
    for stage in (base, sft, rm, normalize, ppo):
        run_module(stage, arguments)
    folder = place / "runs/more/seed44413/ppo"
    queries = [row["query"] for row in read_lines(folder / "samples.jsonl")]
    assert queries
    assert all(query.startswith("SUBREDDIT: r/more\n") == with_ppo_train for query in queries)
    results = (read_json(folder / "manifest.json") or {})["results"]
    assert results["queries_from"] == ("ppo_train" if with_ppo_train else "sft_train")
