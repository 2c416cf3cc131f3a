"""A rehearsal: a short real run end to end, its rows, its table, and the hours that follow."""

import json
from pathlib import Path

import pytest

from reports.needs import rehearse
from reports.needs.gpus import GPUS, gpu_of_device
from reports.needs.inputs import draw_weights, write_rows, write_tokenizer
from reports.needs.memory import Setting
from reports.needs.shapes import lengths_of, read_shape, shape_of
from reports.needs.work import work_of
from stages import pipeline
from stages.learning.models import load_tokenizer
from stages.posts.tokens import plain_encoder
from stages.settings import config as settings
from stages.settings.command_line import make_config
from stages.settings.presets import PRESETS

SMALL = "memory.microbatch_size=2 memory.forward_batch_size=2 memory.cpu_threads=1"
SHORT = "data.max_summary_tokens=4 eval.dpo_summary_tokens=4 ppo.num_ppo_epochs=1"
NAME = "tried"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The folder that a rehearsal of the smallest preset leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("rehearsal"))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(settings, "RUNS", Path("runs"))
        words = ["--preset", "tiny-xs", "--name", NAME, "--set", *SMALL.split(), *SHORT.split()]
        with pytest.raises(SystemExit) as ended:
            rehearse.main([*words, "--price-per-hour", "2"])
        assert ended.value.code == 0
        yield Path("runs", NAME).absolute()


@pytest.mark.walk
def test_a_rehearsal_is_a_run_of_every_stage_of_which_the_table_alone_stays(rehearsed):
    assert {path.name for path in rehearsed.iterdir()} == {"rehearsal"}
    files = {path.name for path in (rehearsed / "rehearsal").iterdir()}
    assert files == {"rehearsal.json", "rehearsal.md"}
    record = json.loads((rehearsed / "rehearsal/rehearsal.json").read_text("utf-8"))
    assert tuple(record["stages"]) == rehearse.REHEARSED
    for stage in ("sft", "rm", "ppo", "dpo"):
        assert record["stages"][stage]["steps"] > 0, stage
        assert record["stages"][stage]["steps_speed"] > 0, stage
    assert record["stages"]["ppo"]["rollout_speed"] > 0
    assert all(row["plan"] > 0 and row["seconds"] > 0 for row in record["stages"].values())
    assert record["weights"] == "random, of the published shape"
    assert record["batches"] == {"sft": 4, "rm": 2, "ppo": 4, "dpo": 2}


@pytest.mark.walk
def test_the_table_says_all_of_it_in_80_columns(rehearsed):
    lines = (rehearsed / "rehearsal/rehearsal.md").read_text("utf-8").splitlines()
    assert [line for line in lines if len(line) > 80] == []
    text = "\n".join(lines)
    for words in ("ratio", "an update of PPO", "together", "$", *rehearse.REHEARSED):
        assert words in text, words


@pytest.mark.walk
def test_a_stage_that_has_failed_leaves_the_others_rows(rehearsed):
    record = json.loads((rehearsed / "rehearsal/rehearsal.json").read_text("utf-8"))
    del record["stages"]["ppo"]
    text = "\n".join(rehearse.table_lines(record | {"hours": {}}, 0.0))
    assert "\nsft " in text
    assert "not known, because a stage has not finished" in text


def test_a_price_below_0_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        rehearse.main(["--preset", "tiny", "--price-per-hour", "-1"])
    assert "PRICE_PER_HOUR must be at least 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_changes_counts_alone():
    config = make_config("pythia-1b")
    counts = rehearse.counts_of(config, processes=2)
    assert all(isinstance(value, int) for value in counts.values())
    assert counts["sft.batch_size"] == 2 * 2 * config.memory.microbatch_size
    assert counts["rm.batch_size"] == counts["sft.batch_size"] // 2  # a pair is two sequences
    assert counts["ppo.batch_size"] == 2 * 2 * config.memory.forward_batch_size
    assert counts["ppo.total_episodes"] == 2 * counts["ppo.batch_size"]
    changed = [f"{key}={value}" for key, value in counts.items()]
    short = make_config("pythia-1b", name="short", overrides=tuple(changed))
    assert (short.memory, short.lora, short.optimizer) == (
        config.memory,
        config.lora,
        config.optimizer,
    )
    assert short.ppo.num_updates == 2
    changed.insert(0, "ppo.critic_updates=50")  # more than a rehearsal has updates
    assert make_config("pythia-1b", name="short", overrides=tuple(changed)).ppo.policy_learns(0)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name]().data.source])
def test_hours_follow_from_measured_speeds_by_counting(preset):
    config = make_config(preset)
    setting = Setting(config=config, shape=shape_of(config.base), lengths=lengths_of(config))
    rows = {stage: {"steps_speed": 2e9} for stage in ("sft", "rm", "ppo", "dpo")}
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


# -- rows and weights ------------------------------------------------------------------------------


def test_rows_are_as_long_as_the_limits_allow(tmp_path):
    data = make_config("pythia-70m").data
    write_tokenizer(512, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert len(tokenizer) == 512  # with [PAD]: all that the embedding has
    counts = {"sft_train": 3, "comparisons_train": 2}
    write_rows(tmp_path / "data", data, counts, tokenizer)
    encode = plain_encoder(tokenizer)
    posts, pairs = (
        [json.loads(line) for line in (tmp_path / f"data/{name}.jsonl").read_text().splitlines()]
        for name in counts
    )
    assert (len(posts), len(pairs)) == (3, 2)
    query = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    queries, longest = encode([query.format(**posts[0]), query.format(**pairs[0]["info"])])
    (summary,) = encode([posts[0]["summary"]])
    assert (len(queries), len(summary) + 1) == (509, 53)  # 562 together
    # Equal posts would be read once, and every number of the reward model's stage too small.
    others = encode([query.format(**post) for post in (*posts, *(pair["info"] for pair in pairs))])
    assert [len(tokens) for tokens in others] == [509] * 3 + [469] * 2
    assert len({tuple(tokens) for tokens in others}) == 5
    compared = [len(tokens) + 1 for tokens in encode([s["text"] for s in pairs[0]["summaries"]])]
    assert (len(longest), compared) == (469, [169, 168])  # 638 together


def test_random_weights_have_the_published_shape(tmp_path):
    shape = shape_of(make_config("pythia-14m").base)
    draw_weights(shape, 1, tmp_path)
    assert read_shape(tmp_path / "config.json") == shape


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_rehearsal_that_is_stopped_leaves_nothing_half_written(tmp_path, monkeypatch):
    def stop(words):
        Path("half").write_text("half")
        raise SystemExit(130)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "RUNS", Path("runs"))
    monkeypatch.setattr(rehearse, "make_inputs", written)
    monkeypatch.setattr(pipeline, "main", stop)
    with pytest.raises(SystemExit) as ended:
        rehearse.main(["--preset", "tiny-xs"])
    assert ended.value.code == 130
    assert Path.cwd() == tmp_path
    assert list((tmp_path / "runs/tiny-xs/rehearsal").iterdir()) == []


@pytest.mark.walk
def test_a_rehearsal_that_is_stopped_leaves_the_table_of_the_stages_that_finished(
    tmp_path, monkeypatch, capsys
):
    real = pipeline.main

    def stop_after_sft(words):
        with pytest.raises(SystemExit) as ended:
            real(["sft", *words[len(rehearse.GOALS) :]])
        assert ended.value.code == 0
        raise SystemExit(143)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(settings, "RUNS", Path("runs"))
    monkeypatch.setattr(pipeline, "main", stop_after_sft)
    with pytest.raises(SystemExit) as ended:
        rehearse.main(["--preset", "tiny-xs", "--set", *SMALL.split()])
    assert ended.value.code == 143
    folder = tmp_path / "runs/tiny-xs/rehearsal"
    assert {path.name for path in folder.iterdir()} == {"rehearsal.json", "rehearsal.md"}
    assert [*json.loads((folder / "rehearsal.json").read_text("utf-8"))["stages"]] == ["sft"]
    said = capsys.readouterr()
    assert said.err == "stopped: the table holds the stages that had finished\n"
    assert "\nsft " in said.out
    assert "not known, because a stage has not finished" in said.out


def written(request, folder, *_):
    (folder / "data").mkdir()
    return {"settings": [], "weights": "none"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--preset", "tiny-xs"], "no stage of the rehearsal has finished"),
        (["--preset", "smollm2", "--set", "released.policy=x", "judge.kind=openai"], "POLICY="),
    ],
)
def test_what_cannot_be_rehearsed_is_one_line(tmp_path, monkeypatch, capsys, words, reason):
    def fails(words):
        raise SystemExit(2)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "RUNS", Path("runs"))
    monkeypatch.setattr(rehearse, "make_inputs", written)
    monkeypatch.setattr(pipeline, "main", fails)
    (tmp_path / "posts").mkdir()
    data = ["--data", "posts"] if "smollm2" in words else []
    with pytest.raises(SystemExit) as ended:
        rehearse.main([*words, *data])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_device_name_leads_to_its_gpu():
    for name, gpu in (
        ("1 x NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("8 x NVIDIA H200", "h200-141gb"),
        ("1 x NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("2 x NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ):
        assert gpu_of_device(name) == GPUS[gpu]
    assert gpu_of_device("1 x NVIDIA Something") is None
