"""A rehearsal: its short run, its rows, its table, and what it leaves behind."""

from pathlib import Path

import pytest

from stages.__main__ import main
from stages.config import paths
from stages.config.command_line import Request, config_of, make_config
from stages.config.errors import UserError
from stages.data.prompt import plain_encoder
from stages.models.tokenizers import load_tokenizer
from stages.planning.memory import setting_of
from stages.planning.random_inputs import draw_weights, write_rows, write_tokenizer
from stages.planning.rehearsal import (
    Rehearsal,
    measurements,
    prepare,
    short_settings,
    updates_by_stage,
)
from stages.planning.shapes import parameters, read_shape, shape_of
from stages.runs.files import read_lines, write_lines
from tests.lib.fake_stages import finish_alone

SMALL = (
    "SET=memory.microbatch_size=2 memory.forward_batch_size=2 memory.cpu_threads=1"
    " data.max_summary_tokens=4 ppo.num_ppo_epochs=1"
)


@pytest.fixture
def place(place, monkeypatch):
    """A current folder of the test's own, with its runs."""
    monkeypatch.setattr(paths, "RUNS", Path("runs"))
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return place


# -- a whole rehearsal -----------------------------------------------------------------------------


@pytest.mark.walk
def test_a_rehearsal_runs_the_stages_and_leaves_only_its_table(place, capsys):
    main(["sft", "rm", "ppo", "REHEARSE=1", "PRESET=tiny-xs", "NAME=tried", SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rehearsal with random weights: ignore losses and scores")
    heading = lines.index("tried, measured in 2 updates with the longest rows:")
    table = lines[heading + 1 :]
    assert table[0].split() == ["stage", "planned", "GiB", "peak", "GiB", "s/update", "hours"]
    assert [line.split()[0] for line in table[1:5]] == ["sft", "rm", "normalize", "ppo"]
    assert max(map(len, table)) <= 80
    assert [path.name for path in Path("runs").iterdir()] == ["cache"]


@pytest.mark.walk
def test_a_rehearsal_that_fails_prints_the_stages_that_finished(place, capsys, monkeypatch):
    def fail(config):
        raise UserError("no room")

    monkeypatch.setattr("stages.rm.train_reward_model", fail)
    with pytest.raises(SystemExit):
        main(["rm", "REHEARSE=1", "PRESET=tiny-xs", "NAME=tried", SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("sft  ") for line in lines)
    assert not Path("runs/rehearsal-tried").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["eval"], "eval does not read REHEARSE: name sft rm ppo, or other training targets"),
        (["sft", "eval"], "REHEARSE=1 only measures training: leave out eval"),
        (["sft", "POLICY=a/b"], "REHEARSE=1 only measures training: leave out POLICY= and INPUT="),
        (["sft", "DRY=1"], "REHEARSE=1 and DRY=1 cannot be combined"),
        (["sft", "LAUNCH=srun"], "REHEARSE=1 starts its own processes: give GPUS="),
        (
            ["sft", "PRESET=pythia-1b", "NAME=x", "SET=base.checkpoint=a/b"],
            "the shape of a/b is unknown",
        ),
    ],
    ids=["eval", "eval as well", "POLICY", "DRY", "LAUNCH", "unknown shape"],
)
def test_what_cannot_be_rehearsed_is_refused(place, capsys, words, line):
    with pytest.raises(SystemExit):
        main([*words, "REHEARSE=1"])
    assert line in capsys.readouterr().err
    assert not Path("runs").exists()


# -- the short run ---------------------------------------------------------------------------------


def test_batches_are_two_passes_of_every_process():
    overrides = ("memory.microbatch_size=8", "memory.forward_batch_size=64")
    changes = short_settings(make_config("pythia-1b", overrides=overrides), processes=2)
    assert changes["sft.batch_size"] == 2 * 2 * 8
    assert changes["rm.batch_size"] == 2 * 2 * 8 // 2  # a pair is two sequences
    assert changes["ppo.batch_size"] == 2 * 2 * 64
    assert changes["ppo.total_episodes"] == 2 * changes["ppo.batch_size"]


def test_a_batch_is_not_larger_than_that_of_the_run():
    config = make_config("tiny", name="mine", overrides=("sft.batch_size=3",))
    assert short_settings(config, processes=1)["sft.batch_size"] == 3


def test_every_process_gets_whole_groups_of_samples():
    overrides = ("rloo.samples_per_query=3", "rloo.batch_size=96", "memory.forward_batch_size=4")
    changes = short_settings(make_config("tiny", name="mine", overrides=overrides), processes=2)
    assert changes["rloo.batch_size"] == 18  # the first multiple of 6 above 16


def test_memory_and_adapters_are_those_of_the_run(place):
    overrides = ("lora.rank=4", "memory.microbatch_size=2", "memory.forward_batch_size=2")
    request = Request(preset="tiny-xs", name="mine", overrides=overrides)
    config = make_config("tiny-xs", name="mine", overrides=overrides)

    short = config_of(prepare(request, ["ppo"]).request)

    assert short.memory == config.memory
    assert short.lora == config.lora
    assert short.optimizer == config.optimizer
    assert short.name == "rehearsal-mine"
    assert short.ppo.num_updates == 2


def test_the_policy_learns_although_the_critic_would_warm_up(place):
    request = Request(preset="tiny-xs", name="mine", overrides=("ppo.critic_updates=5",))
    rehearsed = prepare(request, ["ppo"])
    assert config_of(rehearsed.request).ppo.policy_learns(0)


@pytest.mark.parametrize(
    ("preset", "checkpoint", "count"),
    [
        ("pythia-14m", "EleutherAI/pythia-14m-deduped", 14_067_712),
        ("tiny", "HuggingFaceTB/SmolLM2-135M", 134_515_008),
    ],
)
def test_a_model_of_the_hub_is_rehearsed_without_a_network(place, preset, checkpoint, count):
    overrides = (
        f"base.checkpoint={checkpoint}",
        "base.tokenizer=",
        "memory.microbatch_size=1",
        "memory.forward_batch_size=1",
    )
    request = Request(preset=preset, name="mine", overrides=overrides)
    rehearsed = prepare(request, ["sft"])
    short = config_of(rehearsed.request)
    saved_shape = read_shape(Path(short.base.checkpoint) / "config.json")
    assert parameters(saved_shape) == count
    assert Path(short.data.source, "sft_train.jsonl").exists()


# -- weights and rows ------------------------------------------------------------------------------


def test_weights_have_the_published_shape(tmp_path):
    shape = shape_of(make_config("pythia-14m").base)
    draw_weights(shape, seed=1, folder=tmp_path)
    assert read_shape(tmp_path / "config.json") == shape


def test_the_tokenizer_fills_the_embedding(tmp_path):
    write_tokenizer(512, tmp_path)
    assert len(load_tokenizer(tmp_path)) == 512  # with [PAD]


@pytest.fixture
def count_tokens(tmp_path):
    """Gives the number of tokens of a text."""
    write_tokenizer(512, tmp_path / "words")
    encode = plain_encoder(load_tokenizer(tmp_path / "words"))

    def count(text: str) -> int:
        (tokens,) = encode([text])
        return len(tokens)

    return count


def test_posts_and_summaries_are_as_long_as_the_limits_allow(tmp_path, count_tokens):
    """562 tokens together, 53 of them in the summary with its EOS."""
    write_rows(tmp_path / "data", make_config("pythia-70m").data, {"sft_train": 3})
    rows = read_lines(tmp_path / "data/sft_train.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert count_tokens(row["prompt"]) == 562 - 53
    assert count_tokens(rows[0]["completion"]) == 53 - 1


def test_comparisons_are_as_long_as_the_limits_allow(tmp_path, count_tokens):
    """638 tokens with each answer, 169 of them in the answer with its EOS."""
    write_rows(tmp_path / "data", make_config("pythia-70m").data, {"comparisons_train": 2})
    rows = read_lines(tmp_path / "data/comparisons_train.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert count_tokens(row["prompt"]) == 638 - 169
    assert count_tokens(rows[0]["chosen"]) == 169 - 1
    assert count_tokens(rows[0]["rejected"]) == 169 - 2


def test_no_two_prompts_are_equal(tmp_path):
    counts = {"sft_train": 3, "sft_validation": 3, "comparisons_train": 3}
    write_rows(tmp_path / "data", make_config("pythia-70m").data, counts)
    prompts = set()
    for path in (tmp_path / "data").iterdir():
        for row in read_lines(path):
            prompts.add(row["prompt"])
    assert len(prompts) == 9


# -- the table -------------------------------------------------------------------------------------


def test_the_updates_of_a_run_are_the_papers():
    updates = updates_by_stage(make_config("pythia-1b"))
    assert updates["sft"] == 911
    assert updates["rm"] == 1450
    assert updates["ppo"] == 1953


def test_the_updates_on_your_own_pairs_are_counted(tmp_path):
    rows = [{"prompt": f"Why {row}?", "chosen": "So.", "rejected": "No."} for row in range(200)]
    write_lines(tmp_path / "pairs.jsonl", rows)
    config = make_config(
        "tiny",
        name="mine",
        data=str(tmp_path / "pairs.jsonl"),
        overrides=("rm.batch_size=10", "rm.epochs=2"),
    )
    assert 2 * 180 // 10 <= updates_by_stage(config)["rm"] < 2 * 200 // 10  # 5% are held out


def test_hours_are_all_updates_at_the_measured_seconds(runs):
    """A short update of 128 episodes took 9 seconds, and the run has 1953 updates of 512."""
    sizes = ("memory.microbatch_size=8", "memory.forward_batch_size=64")
    request = Request(preset="pythia-1b", name="short", overrides=(*sizes, "ppo.batch_size=128"))
    folder = finish_alone(config_of(request), "ppo")
    write_lines(folder / "metrics.jsonl", [{"seconds/update": 30.0}, {"seconds/update": 9.0}])
    planned = setting_of(make_config("pythia-1b", overrides=sizes), on_gpu=False)

    (row,) = measurements(Rehearsal(setting=planned, request=request))

    assert row.stage == "ppo"
    assert row.update_seconds == 9.0
    assert row.hours == pytest.approx(1953 * 9.0 * (512 / 128) / 3600)
