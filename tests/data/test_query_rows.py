"""Where PPO takes its queries from."""

from pathlib import Path

import pytest

from stages import base, normalize, ppo, rm, sft
from stages.config.sections import World
from stages.data.builtin import make_post, write_world
from stages.runs.files import read_json, read_lines
from tests.lib.make_stages import run_module
from tests.lib.rows import without, write_rows

SETTINGS = [
    "base.hidden_size=32",
    "base.num_layers=2",
    "ppo.total_episodes=16",
    "ppo.batch_size=8",
    "ppo.critic_updates=0",
    "ppo.samples_every=1",
    "memory.cpu_threads=1",
]


@pytest.mark.parametrize("has_ppo_train", [True, False])
def test_ppo_uses_ppo_train_for_queries_if_present(place, has_ppo_train):
    Path("data").mkdir()
    world = World(
        train_posts=24, validation_posts=4, train_comparisons=16, validation_comparisons=4
    )
    write_world(Path("data"), world, lambda items, *_: items)
    if has_ppo_train:
        posts = [make_post(f"toy9-more-{number}") | {"subreddit": "more"} for number in range(24)]
        write_rows(Path("data/ppo_train.jsonl"), [without(post, "summary") for post in posts])

    arguments = ["--preset", "tiny", "--name", "more", "--data", "data", "--set", *SETTINGS]
    for stage in (base, sft, rm, normalize, ppo):
        run_module(stage, arguments)

    folder = place / "runs/more/seed44413/ppo"
    queries = [row["query"] for row in read_lines(folder / "samples.jsonl")]
    assert queries
    for query in queries:
        assert query.startswith("SUBREDDIT: r/more\n") == has_ppo_train
    results = (read_json(folder / "manifest.json") or {})["results"]
    assert results["queries_from"] == ("ppo_train" if has_ppo_train else "sft_train")
