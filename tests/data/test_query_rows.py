"""PPO takes its queries from the split ppo_train if there is one, otherwise from sft_train."""

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


@pytest.fixture
def data(place):
    """A folder of data without ppo_train."""
    folder = place / "data"
    folder.mkdir()
    world = World(
        train_posts=24, validation_posts=4, train_comparisons=16, validation_comparisons=4
    )
    write_world(folder, world, lambda items, *_: items)
    return folder


def run_to_ppo(place: Path) -> Path:
    """Run all stages up to PPO on the folder `data`; returns PPO's folder."""
    arguments = ["--preset", "tiny", "--name", "more", "--data", "data", "--set", *SETTINGS]
    for stage in (base, sft, rm, normalize, ppo):
        run_module(stage, arguments)
    return place / "runs/more/seed44413/ppo"


def test_ppo_takes_its_queries_from_ppo_train(place, data):
    posts = [make_post(f"toy9-more-{number}") | {"subreddit": "more"} for number in range(24)]
    write_rows(data / "ppo_train.jsonl", [without(post, "summary") for post in posts])

    folder = run_to_ppo(place)

    samples = read_lines(folder / "samples.jsonl")
    assert samples
    for sample in samples:
        assert sample["query"].startswith("SUBREDDIT: r/more\n")
    assert read_json(folder / "manifest.json")["results"]["queries_from"] == "ppo_train"


def test_without_ppo_train_ppo_takes_its_queries_from_sft_train(place, data):
    folder = run_to_ppo(place)

    samples = read_lines(folder / "samples.jsonl")
    assert samples
    for sample in samples:
        assert not sample["query"].startswith("SUBREDDIT: r/more\n")
    assert read_json(folder / "manifest.json")["results"]["queries_from"] == "sft_train"
