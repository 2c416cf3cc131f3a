"""The bench: an update measured whole, the same tokens for peers, and what is asked."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reports.needs.inputs import draw_weights
from reports.needs.memory import Setting
from reports.needs.parts import part_bytes
from reports.needs.shapes import (
    PUBLISHED,
    QUERY_TOKENS,
    lengths_of,
    policy_parameters,
    scorer_parameters,
    shape_of,
)
from reports.needs.work import STEPS, update_flops
from reports.speed import bench_page, measure, speed
from reports.speed.meter import Meter
from reports.speed.speed import PACKAGES, PEER, peer_interpreter, run_peer, task_of
from stages.settings import config as settings
from stages.settings.command_line import config_of, make_config
from stages.settings.config import UserError

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "runs" / "peers"
MIB = 2**20
# On a CPU the matrix library keeps packed copies of what it multiplies: 10 to 20 MiB were measured
# at the shapes of Pythia-14m and -70m.
CPU_SCRATCH = 12 * MIB
CASE = speed.Case(preset="tiny-s", batch=4, microbatch=2)
ORDER = speed.BenchRequest(cases=(CASE,), runs=2, overrides=("memory.cpu_threads=1",))
REQUEST = ORDER.request(CASE)
RESPONSE = config_of(REQUEST).data.max_summary_tokens


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Weights, texts and queries of the smallest preset."""
    work = tmp_path_factory.mktemp("bench")
    measure.main(["prepare", "--folder", str(work), *REQUEST.arguments])
    return work


@pytest.fixture(scope="module")
def update(prepared):
    """What the part that measures a whole update finds."""
    measure.main(["ppo", "--folder", str(prepared), *REQUEST.arguments])
    return json.loads((prepared / "ppo.json").read_text("utf-8"))


# -- what is measured ------------------------------------------------------------------------------


def test_the_update_that_is_measured_is_one_of_policy_and_critic():
    assert not make_config(CASE.preset).ppo.policy_learns(0)
    assert config_of(REQUEST).ppo.policy_learns(0)


def test_a_whole_update_is_measured_with_its_steps_peak_and_tokens(update, prepared):
    queries = json.loads((prepared / "queries.json").read_text("utf-8"))
    lengths = [len(one) for one in queries]
    assert update["queries"] == {"rows": 4, "mean": sum(lengths) / 4, "longest": max(lengths)}
    assert sum(lengths) < update["tokens"] <= sum(lengths) + 4 * RESPONSE
    steps = [update[step] for step in STEPS]
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) <= update["seconds"]
    assert update["peak"] > 0
    assert update["matrix_rate"] > 1e8


def test_the_least_memory_is_weights_gradients_moments_and_one_networks_activations(update):
    shape = shape_of(config_of(REQUEST).base)
    learned = policy_parameters(shape) + scorer_parameters(shape)
    fixed = 2 * learned * 4 + learned * 4 + learned * 8  # four networks, gradients, Adam's moments
    tokens = 2 * (update["queries"]["longest"] + RESPONSE)
    assert fixed < update["floor"] < fixed + 2 * tokens * shape.layers * 4 * 20 * shape.hidden


def test_the_work_of_an_update_is_what_a_hand_count_gives_row_by_row():
    config = config_of(REQUEST)
    shape = shape_of(config.base)
    setting = Setting(config=config, shape=shape, lengths=lengths_of(config), on_gpu=False)
    hidden, layers, vocabulary, sampled = 64, 2, shape.vocabulary, RESPONSE

    def passed(tokens, attended, logits):
        matrices = 2 * layers * 12 * hidden**2 * tokens  # 3 + 1 + 4 + 4 squares of the width
        return matrices + 4 * layers * hidden * attended + 2 * hidden * vocabulary * logits

    expected = dict.fromkeys(STEPS, 0.0)
    for query in (10, 100):
        whole = query + sampled
        with_logits, without = (passed(whole, whole**2, one) for one in (sampled, 0))
        expected["sample"] += passed(query, query**2, 0) + passed(sampled, sampled * query, sampled)
        expected["measure"] += 2 * with_logits
        expected["score"] += 2 * without
        expected["learn"] += 4 * 3 * (with_logits + without)  # epochs; forward and backward
    assert update_flops(setting, (10, 100)) == pytest.approx(expected)


def test_a_peer_gets_the_same_tokens_and_settings(prepared):
    config = config_of(REQUEST)
    task = task_of(prepared, config)
    assert task["queries"] == json.loads((prepared / "queries.json").read_text("utf-8"))
    assert task["eos_id"] == 0
    assert task["pad_id"] == shape_of(config.base).vocabulary
    assert (task["response_length"], task["num_ppo_epochs"], task["bf16"]) == (RESPONSE, 4, False)
    assert (task["microbatch_size"], task["forward_batch_size"], task["threads"]) == (2, 4, 1)


def no_peer():
    raise UserError("TRL cannot be had")


def test_everything_that_was_ordered_is_measured_and_stands_on_the_page(place, monkeypatch):
    def in_this_process(part, request, folder):
        measure.main([part, "--folder", str(folder), *request.arguments])
        return json.loads((folder / f"{part}.json").read_text("utf-8"))

    monkeypatch.setattr(speed, "run_part", in_this_process)
    monkeypatch.setattr(speed, "peer_interpreter", no_peer)
    overrides = ("memory.cpu_threads=1", "data.max_summary_tokens=4")
    order = speed.BenchRequest(cases=(CASE,), runs=2, overrides=overrides)
    record = speed.measure_in(order, settings.RUNS / "bench")
    assert list((settings.RUNS / "bench").iterdir()) == []  # what it worked with is gone
    assert len(record["shapes"][CASE.text]["measured"]["ours"]) == 2
    markdown = bench_page.write(record, place / "page").with_suffix(".md").read_text("utf-8")
    assert "One update of PPO, tiny-s" in markdown


def measured_in(folder, part, request):
    measure.main([part, "--folder", str(folder), *request.arguments])
    return json.loads((folder / f"{part}.json").read_text("utf-8"))


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_an_update_of_a_rival_is_measured_on_the_same_queries_with_four_samples_each(
    prepared, stage
):
    case = replace(CASE, batch=8, microbatch=4, stage=stage)
    request = ORDER.request(case)
    found = measured_in(prepared, stage, request)
    queries = json.loads((prepared / "queries.json").read_text("utf-8"))[:2]
    lengths = [len(query) for query in queries]
    assert found["queries"] == {"rows": 2, "mean": sum(lengths) / 2, "longest": max(lengths)}
    assert 4 * sum(lengths) < found["tokens"] <= 4 * sum(lengths) + 8 * RESPONSE
    assert all(found[step] > 0 for step in STEPS)
    config = config_of(request)
    assert found["flops"]["learn"] < 2 * 3 * found["flops"]["measure"] / 2 * 1.0001
    task = task_of(prepared, config, stage)
    assert (task["queries"], task["samples_per_query"], task["num_ppo_epochs"]) == (queries, 4, 2)


def test_the_work_of_a_rival_counts_a_query_once_and_no_critic():
    config = config_of(ORDER.request(replace(CASE, batch=8, microbatch=4, stage="rloo")))
    shape = shape_of(config.base)
    setting = Setting(config=config, shape=shape, lengths=lengths_of(config), on_gpu=False)
    hidden, layers, vocabulary, sampled = 64, 2, shape.vocabulary, 4 * RESPONSE

    def passed(tokens, attended, logits):
        matrices = 2 * layers * 12 * hidden**2 * tokens
        return matrices + 4 * layers * hidden * attended + 2 * hidden * vocabulary * logits

    whole, attended = 10 + sampled, (10 + sampled) * (10 + RESPONSE)
    expected = {
        "sample": passed(10, 10**2, 4) + passed(sampled, sampled * 10, sampled),
        "measure": 2 * passed(whole, attended, sampled),
        "score": passed(whole, attended, 0),
        "learn": 2 * 3 * passed(whole, attended, sampled),
    }
    assert update_flops(setting, (10,), "rloo") == pytest.approx(expected)


# -- queries ---------------------------------------------------------------------------------------


def test_synthetic_queries_have_the_mean_length_of_real_ones_and_end_at_the_limit():
    shape = shape_of(make_config("pythia-70m").base)
    queries = measure.synthetic_queries(shape, 512, 2048)
    lengths = [len(query) for query in queries]
    assert sum(lengths) / 2048 == pytest.approx(QUERY_TOKENS, rel=0.03)
    assert max(lengths) == 512
    assert min(map(min, queries)) >= 1  # no EOS
    assert max(map(max, queries)) < shape.vocabulary


# -- meter -----------------------------------------------------------------------------------------

HELD = """
import torch
from reports.speed.meter import Meter
meter = Meter(torch.device("cpu"))
kept = torch.ones(256 * 2**18)
_, _, first = meter.whole(lambda: torch.ones(384 * 2**18).sum())
_, _, second = meter.whole(lambda: None)
print(first, second)
"""


def test_the_meter_sees_what_is_held_and_what_was_held_for_a_moment():
    done = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, cwd=ROOT, check=True
    )
    first, second = map(int, done.stdout.split())
    # What the system counts as resident varies by some 10 MiB: libraries' pages come and go.
    assert first == pytest.approx((256 + 384) * MIB, rel=0.1)
    assert second == pytest.approx(256 * MIB, rel=0.1)


def test_a_meter_times_what_it_runs():
    result, seconds, _ = Meter(torch.device("cpu")).whole(lambda: 7)
    assert result == 7
    assert 0 <= seconds < 1


STEP = """
import sys
from accelerate import Accelerator
import torch
from reports.speed import meter as meters
from stages import sft
from stages.learning.state import begin_supervised
from stages.learning.models import load_policy
from stages.posts.ragged import TokenizedSplit, make_ragged
from stages.runs import Run
from stages.settings.command_line import make_config
config = make_config("pythia-70m", name="measured", overrides=tuple(sys.argv[2:]))
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
meter = meters.Meter(accelerator.device)
meters.keep_freed_memory = lambda: None  # what is freed leaves: the plan is of what is in use
rows = config.memory.microbatch_size
columns = {"queries": [[1] * 509] * 2 * rows, "summaries": [[1] * 53] * 2 * rows}
split = TokenizedSplit(
    columns={name: make_ragged(tokens) for name, tokens in columns.items()},
    rows=[{"id": str(row)} for row in range(2 * rows)],
)
run = Run(config, "sft")
state = begin_supervised(run, accelerator, load_policy(sys.argv[1]), 128)
sft.take_step(state, split, [0])  # the moments come to be
_, _, peak = meter.whole(lambda: sft.take_step(state, split, list(range(2 * rows))))
print(peak)
"""


@pytest.mark.walk
def test_the_plan_is_within_15_percent_of_a_measured_training_step(tmp_path):
    small = PUBLISHED["pythia-14m"]
    shape = replace(small, vocabulary=4096, hidden=256, layers=4, intermediate=1024)
    draw_weights(shape, 1, tmp_path / "model")
    overrides = (
        f"base.checkpoint={tmp_path / 'model'}",
        "memory.mixed_precision=no",
        "memory.microbatch_size=2",
        "memory.cpu_threads=1",
    )
    words = [sys.executable, "-c", STEP, str(tmp_path / "model"), *overrides]
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    run = make_config("pythia-70m", name="measured", overrides=overrides)
    setting = Setting(config=run, shape=shape, lengths=lengths_of(run), on_gpu=False)
    planned = part_bytes(setting)["sft step"].total + CPU_SCRATCH
    assert planned == pytest.approx(int(done.stdout.split()[-1]), rel=0.15)


# -- peers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["ppo", "rloo", "grpo"])
def test_trl_makes_one_update_of_the_same_task(prepared, monkeypatch, stage):
    python = PEERS / PEER / "bin" / "python"
    if not (PEERS / PEER / "installed").is_file():
        pytest.skip("TRL has no environment here: `make bench` makes it")
    monkeypatch.chdir(ROOT)
    request = ORDER.request(replace(CASE, batch=4, microbatch=4, stage=stage))
    task = task_of(prepared, config_of(request), stage)
    found = run_peer(python, prepared, task)
    assert "failed" not in found, found
    steps = [found[step] for step in STEPS]
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) <= found["seconds"]
    assert found["tokens"] == 4 // len(task["queries"]) * sum(map(len, task["queries"])) + (
        4 * RESPONSE
    )
    assert found["versions"]["trl"] == "1.9.2"
    assert found["threads"] == 1


def test_a_peer_that_fails_says_why_in_one_line(prepared, monkeypatch):
    monkeypatch.chdir(ROOT)
    task = task_of(prepared, config_of(REQUEST)) | {"weights": "no/such/folder"}
    found = run_peer(Path(sys.executable), prepared, task)
    assert "no/such/folder" in found["failed"] or "trl" in found["failed"]
    assert "\n" not in found["failed"]


def test_a_peer_that_cannot_be_installed_is_left_out_with_the_reason(place, monkeypatch):
    broken = place / "python"
    broken.write_text("#!/bin/sh\necho 'WARNING: x\nERROR: No matching distribution' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    (place / "constraints.txt").write_text("")
    with pytest.raises(UserError) as refused:
        peer_interpreter()
    assert str(refused.value) == "TRL 1.9.2 cannot be installed: No matching distribution"
    assert not (settings.RUNS / "peers" / "trl" / "installed").exists()


def test_an_environment_is_made_anew_only_if_its_pins_have_changed(place, monkeypatch):
    made: list[list[str]] = []
    monkeypatch.setattr(speed, "_call", made.append)
    monkeypatch.setattr(speed, "write_text", lambda path, text: put(path, text))

    def put(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    (place / "constraints.txt").write_text("torch==1")
    for _ in range(2):
        python = peer_interpreter()
    assert python == (settings.RUNS / "peers" / "trl" / "bin" / "python").absolute()
    assert [words[-1] for words in made[1:]] == ["torch", PACKAGES[-1]]
    (place / "constraints.txt").write_text("torch==2")
    peer_interpreter()
    assert len(made) == 6


# -- what is asked ---------------------------------------------------------------------------------


def test_a_shape_is_typed_as_preset_batch_and_microbatch():
    case = speed.case_of("pythia-14m:32:8")
    assert (case.preset, case.batch, case.microbatch) == ("pythia-14m", 32, 8)
    assert case.text == "pythia-14m:32:8"
    assert speed.case_of("pythia-14m:32:8:rloo").text == "pythia-14m:32:8:rloo"
    with pytest.raises(UserError, match="did you mean rloo"):
        speed.case_of("pythia-14m:32:8:rlo")
    with pytest.raises(UserError, match="4 samples of a query"):
        speed.case_of("pythia-14m:32:2:grpo")
    for wrong in ("pythia-14m", "pythia-14m:32", "pythia-14m:32:x", "pythia-14m:32:0", "a:1:2:3:4"):
        with pytest.raises(UserError, match="preset:batch:microbatch"):
            speed.case_of(wrong)
    with pytest.raises(UserError, match="must divide"):
        speed.case_of("tiny-s:7:2")


def test_a_preset_of_adapters_and_real_posts_is_measured_with_all_weights_and_drawn_queries():
    """A peer has no adapters, and no post is read."""
    case = speed.case_of("smollm2:8:4:rloo")
    config = config_of(speed.BenchRequest(cases=(case,), runs=1).request(case))
    assert config.lora.rank == 0
    assert config.rloo.batch_size == 8
    lengths = lengths_of(config)
    setting = Setting(config=config, shape=shape_of(config.base), lengths=lengths, on_gpu=False)
    assert update_flops(setting, [300, 200], "rloo")["learn"] > 0


def test_a_wrong_setting_is_refused_before_anything_is_made(runs):
    order = speed.BenchRequest(cases=(CASE,), runs=1, overrides=("ppo.klcoef=1",))
    with pytest.raises(UserError, match=r"ppo\.klcoef"):
        speed.measure_in(order, runs / "bench")
    assert list((runs / "bench").iterdir()) == []
    assert not (runs / "peers").exists()


def test_a_bench_that_is_stopped_leaves_nothing_half_written(runs, monkeypatch):
    def stop(order, work):
        (work / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "measure", stop)
    with pytest.raises(SystemExit) as ended:
        bench_page.main(["--shapes", "tiny-s:4:2"])
    assert ended.value.code == 130
    assert list((runs / "bench").iterdir()) == []
