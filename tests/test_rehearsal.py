"""A rehearsal: a short real run end to end, its rows, its table, and the hours that follow."""

import json
from pathlib import Path

import pytest

from reports.needs import rehearse
from reports.needs.gpus import GPUS, gpu_of_device
from reports.needs.inputs import draw_weights, write_rows, write_tokenizer
from reports.needs.memory import setting_of
from reports.needs.shapes import read_shape, shape_of
from reports.needs.work import work_of
from stages import pipeline
from stages.learning.models import load_tokenizer
from stages.posts.tokens import plain_encoder
from stages.settings import config as settings
from stages.settings.command_line import make_config
from stages.settings.presets import PRESETS

SMALL = "memory.microbatch_size=2 memory.forward_batch_size=2 memory.cpu_threads=1"
SHORT = "data.max_summary_tokens=4 eval.dpo_summary_tokens=4 ppo.num_ppo_epochs=1"
WORDS = ["--preset", "tiny-xs", "--name", "tried", "--set", *SMALL.split(), *SHORT.split()]
FOLDER = Path("runs/tried/rehearsal")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current folder of the test's own, with its runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "RUNS", Path("runs"))
    return tmp_path


def record():
    return json.loads((FOLDER / "rehearsal.json").read_text("utf-8"))


@pytest.mark.walk
def test_a_rehearsal_is_a_run_of_every_stage_of_which_the_table_alone_stays(place):
    with pytest.raises(SystemExit) as ended:
        rehearse.main([*WORDS, "--price-per-hour", "2"])
    assert ended.value.code == 0
    assert Path.cwd() == place
    names = {path.name for path in Path("runs").rglob("*")}
    assert names == {"tried", "rehearsal", "rehearsal.json", "rehearsal.md"}
    stages = record()["stages"]
    assert tuple(stages) == rehearse.REHEARSED
    assert all(row["plan"] > 0 and row["seconds"] > 0 for row in stages.values())
    for stage in rehearse.LEARNED:
        assert min(stages[stage]["steps"], stages[stage]["steps_speed"]) > 0, stage
    assert stages["ppo"]["rollout_speed"] > 0
    assert record()["batches"] == {"sft": 4, "rm": 2, "ppo": 4, "dpo": 2}
    lines = (FOLDER / "rehearsal.md").read_text("utf-8").splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in ("ratio", "an update of PPO", "together", "$", *rehearse.REHEARSED):
        assert words in text, words


@pytest.mark.walk
def test_a_rehearsal_that_is_stopped_leaves_the_table_of_the_stages_that_finished(
    place, monkeypatch, capsys
):
    real = pipeline.main

    def stop_after_sft(words):
        with pytest.raises(SystemExit) as ended:
            real(["sft", *words[len(rehearse.GOALS) :]])
        assert ended.value.code == 0
        raise SystemExit(143)

    monkeypatch.setattr(pipeline, "main", stop_after_sft)
    with pytest.raises(SystemExit) as ended:
        rehearse.main(WORDS)
    assert ended.value.code == 143
    assert [*record()["stages"]] == ["sft"]
    said = capsys.readouterr()
    assert said.err == "stopped: the table holds the stages that had finished\n"
    assert "\nsft " in said.out
    assert "not known, because a stage has not finished" in said.out


@pytest.mark.parametrize(("code", "said"), [(130, ""), (2, "no stage of the rehearsal has fin")])
def test_a_rehearsal_in_which_no_stage_finished_leaves_nothing(
    place, monkeypatch, capsys, code, said
):
    def stop(words):
        Path("half").write_text("half")
        raise SystemExit(code)

    monkeypatch.setattr(pipeline, "main", stop)
    with pytest.raises(SystemExit) as ended:
        rehearse.main(WORDS)
    assert ended.value.code == code
    assert said in capsys.readouterr().err
    assert list(FOLDER.iterdir()) == []


def test_what_cannot_be_rehearsed_is_one_line_and_nothing_is_made(place, capsys):
    (place / "posts").mkdir()
    released = ["--data", "posts", "--set", "released.policy=x", "judge.kind=openai"]
    for words, said in (
        (["--preset", "tiny", "--price-per-hour", "-1"], "PRICE_PER_HOUR must be at least 0"),
        (["--preset", "smollm2", *released], "leave out POLICY="),
    ):
        with pytest.raises(SystemExit):
            rehearse.main(words)
        assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_rehearsal_changes_counts_alone():
    config = make_config("pythia-1b")
    counts = rehearse.counts_of(config, processes=2)
    assert counts["sft.batch_size"] == 2 * 2 * config.memory.microbatch_size
    assert counts["rm.batch_size"] == counts["sft.batch_size"] // 2  # a pair is two sequences
    assert counts["ppo.batch_size"] == 2 * 2 * config.memory.forward_batch_size
    # Whoever waits for the critic longer than a rehearsal takes is overruled.
    changed = ("ppo.critic_updates=50", *(f"{key}={value}" for key, value in counts.items()))
    short = make_config("pythia-1b", name="short", overrides=changed)
    for part in ("memory", "lora", "optimizer"):
        assert getattr(short, part) == getattr(config, part)
    assert (short.ppo.num_updates, short.ppo.policy_learns(0)) == (2, True)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name]().data.source])
def test_hours_follow_from_measured_speeds_by_counting(preset):
    setting = setting_of(make_config(preset))
    rows = {stage: {"steps_speed": 2e9} for stage in rehearse.LEARNED}
    rows["ppo"]["rollout_speed"] = 1e9
    hours = rehearse.hours_of(setting, rows)
    flops = {(work.stage, work.label): work.flops for work in work_of(setting)}
    assert hours["normalize"] == pytest.approx(flops["normalize", "score"] / 2e9 / 3600)
    sampled = flops["sft", "sample"] / 1e9
    learned = (flops["sft", "learn"] + flops["sft", "validate"]) / 2e9
    assert hours["sft"] == pytest.approx((sampled + learned) / 3600)
    of_ppo = {label: value for (stage, label), value in flops.items() if stage == "ppo"}
    seconds = [value / (2e9 if label[:5] == "learn" else 1e9) for label, value in of_ppo.items()]
    assert hours["ppo"] == pytest.approx(sum(seconds) / 3600)


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


def test_a_device_name_leads_to_its_gpu():
    for name, gpu in (
        ("1 x NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("8 x NVIDIA H200", "h200-141gb"),
        ("1 x NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("2 x NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ):
        assert gpu_of_device(name) == GPUS[gpu]
    assert gpu_of_device("1 x NVIDIA Something") is None
