"""A rehearsal: a short real run end to end, its rows, its table, and the hours that follow."""

import json
from pathlib import Path

import pytest

from stages.__main__ import run_rehearsal
from stages.config import config as settings
from stages.config.command_line import make_config
from stages.data.prompt import plain_encoder
from stages.models.tokenizers import load_tokenizer
from stages.planning import rehearsal
from stages.planning.random_inputs import draw_weights, write_rows, write_tokenizer
from stages.planning.shapes import read_shape, shape_of

SMALL = "memory.microbatch_size=2 memory.forward_batch_size=2 memory.cpu_threads=1"
SHORT = "data.max_summary_tokens=4 ppo.num_ppo_epochs=1"
WORDS = ["--preset", "tiny-xs", "--name", "tried", "--set", *SMALL.split(), *SHORT.split()]
FOLDER = Path("runs/tried/rehearsal")


@pytest.fixture
def place(place, monkeypatch):
    """A current folder of the test's own, with its runs."""
    monkeypatch.setattr(settings, "RUNS", Path("runs"))
    return place


def record():
    return json.loads((FOLDER / "rehearsal.json").read_text("utf-8"))


@pytest.mark.walk
def test_a_rehearsal_is_a_run_of_every_stage_of_which_the_table_alone_stays(place, capsys):
    with pytest.raises(SystemExit) as ended:
        rehearsal.main(WORDS, run=run_rehearsal)
    assert ended.value.code == 0
    assert Path.cwd() == place
    names = {path.name for path in Path("runs").rglob("*")}
    assert names == {"tried", "rehearsal", "rehearsal.json"}
    stages = record()["stages"]
    assert tuple(stages) == rehearsal.REHEARSED
    assert all(row["plan"] > 0 and row["seconds"] > 0 for row in stages.values())
    assert all(stages[stage]["update"] > 0 for stage in rehearsal.LEARNED)
    assert tuple(stage for stage in stages if "hours" in stages[stage]) == rehearsal.LEARNED
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.walk
def test_a_rehearsal_that_is_stopped_leaves_the_table_of_the_stages_that_finished(place):
    def stop_after_sft(request, targets, gpus, engine):
        run_rehearsal(request, ["sft"], gpus, engine)
        raise SystemExit(143)

    with pytest.raises(SystemExit) as ended:
        rehearsal.main(WORDS, run=stop_after_sft)
    assert ended.value.code == 143
    assert [*record()["stages"]] == ["sft"]


def test_a_rehearsal_in_which_no_stage_finished_leaves_nothing(place):
    def stop(request, targets, gpus, engine):
        Path("half").write_text("half")
        return 2

    with pytest.raises(SystemExit) as ended:
        rehearsal.main(WORDS, run=stop)
    assert ended.value.code == 2
    assert list(FOLDER.iterdir()) == []


def test_a_rehearsal_changes_counts_alone():
    rows = ("memory.microbatch_size=8", "memory.forward_batch_size=64")
    config = make_config("pythia-1b", overrides=rows)
    counts = rehearsal.counts_of(config, processes=2)
    assert counts["sft.batch_size"] == 2 * 2 * config.memory.microbatch_size
    assert counts["rm.batch_size"] == counts["sft.batch_size"] // 2  # a pair is two sequences
    assert counts["ppo.batch_size"] == 2 * 2 * config.memory.forward_batch_size
    # Whoever waits for the critic longer than a rehearsal takes is overruled.
    changed = (*rows, "ppo.critic_updates=50", *(f"{key}={value}" for key, value in counts.items()))
    short = make_config("pythia-1b", name="short", overrides=changed)
    for part in ("memory", "lora", "optimizer"):
        assert getattr(short, part) == getattr(config, part)
    assert (short.ppo.num_updates, short.ppo.policy_learns(0)) == (2, True)


def test_hours_are_the_papers_updates_at_the_measured_seconds_and_the_size_of_their_batch():
    config = make_config("pythia-1b")
    assert rehearsal.updates_of(config) == {"sft": 911, "rm": 1450, "ppo": 1953}
    short = make_config("pythia-1b", name="short", overrides=("ppo.batch_size=128",))
    assert rehearsal.hours_of(config, short, "ppo", 9.0) == 1953 * 9.0 * 4 / 3600


def test_rows_are_as_long_as_the_limits_allow_and_weights_have_the_published_shape(tmp_path):
    shape = shape_of(make_config("pythia-14m").base)
    draw_weights(shape, 1, tmp_path / "model")
    assert read_shape(tmp_path / "model/config.json") == shape
    write_tokenizer(512, tmp_path / "words")
    tokenizer = load_tokenizer(tmp_path / "words")
    assert len(tokenizer) == 512  # with [PAD]: all that the embedding has
    counts = {"sft_train": 3, "comparisons_train": 2}
    write_rows(tmp_path / "data", make_config("pythia-70m").data, counts)
    encode = plain_encoder(tokenizer)
    posts, pairs = (
        [json.loads(line) for line in (tmp_path / f"data/{name}.jsonl").read_text().splitlines()]
        for name in counts
    )
    query = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    # Equal posts would be read once, and every number of the reward model's stage too small.
    queries = encode([query.format(**post) for post in (*posts, *(pair["info"] for pair in pairs))])
    assert [len(tokens) for tokens in queries] == [509] * 3 + [469] * 2
    assert len({tuple(tokens) for tokens in queries}) == 5
    summaries = [posts[0]["summary"], *(summary["text"] for summary in pairs[0]["summaries"])]
    with_eos = [len(tokens) + 1 for tokens in encode(summaries)]
    assert with_eos == [53, 169, 168]  # 562 and 638 together
