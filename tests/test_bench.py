"""The bench: an update measured whole, the same tokens for TRL, what is kept, and the page."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reports.needs import memory
from reports.needs.shapes import QUERY_TOKENS, parameters, shape_of
from reports.needs.work import STEPS, update_flops
from reports.parts import page
from reports.sharing import publish
from reports.sharing.publish import GENERATED
from reports.speed import bench_page, measure, speed
from reports.speed.speed import PEER, TRL, peer_interpreter, run_peer, task_of
from stages.running.files import write_json
from stages.settings import config as settings
from stages.settings.command_line import config_of, make_config
from stages.settings.config import UserError

ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / "runs" / "peers" / PEER / "bin" / "python"
MIB = 2**20
THREAD = ("memory.cpu_threads=1",)
CASES = {
    "ppo": speed.case_of("tiny-s:4:2", THREAD),
    "rloo": speed.case_of("tiny-s:8:4:rloo", THREAD),
}
RESPONSE = config_of(CASES["ppo"].request).data.max_summary_tokens
HIDDEN, LAYERS = 64, 2  # of tiny-s


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Weights and queries of the smallest preset."""
    work = tmp_path_factory.mktemp("bench")
    measure.main(["prepare", str(work / "prepare.json"), *CASES["rloo"].request.arguments])
    return work


# -- what is measured ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", CASES)
def test_a_whole_update_is_measured_with_its_steps_peak_tokens_and_least_memory(prepared, stage):
    case, result = CASES[stage], prepared / f"{stage}.json"
    measure.main([stage, str(result), *case.request.arguments])
    update, group = json.loads(result.read_text("utf-8")), 4 if stage == "rloo" else 1
    queries = json.loads((prepared / "queries.json").read_text("utf-8"))[: case.batch // group]
    lengths = [len(query) for query in queries]
    mean = sum(lengths) / len(lengths)
    assert update["queries"] == {"rows": len(lengths), "mean": mean, "longest": max(lengths)}
    assert group * sum(lengths) < update["tokens"] <= group * sum(lengths) + case.batch * RESPONSE
    steps = [update[step] for step in STEPS]
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) <= update["seconds"]
    assert min(update["peak"], update["matrix_rate"] - 1e8) > 0
    shape = shape_of(config_of(case.request).base)
    policy, scorer = parameters(shape), parameters(shape, scalar=True)
    learned, frozen = (
        (policy + scorer, policy + scorer) if group == 1 else (policy, policy + scorer)
    )
    fixed = 4 * frozen + (4 + 4 + 8) * learned  # weights; their gradients, Adam's moments
    tokens = case.microbatch // group * max(lengths) + case.microbatch * RESPONSE
    assert fixed < update["floor"] < fixed + tokens * LAYERS * 4 * 24 * HIDDEN
    config = config_of(case.request)
    task = task_of(prepared, config, stage)
    assert (task["queries"], task["samples_per_query"]) == (queries, group)
    assert (task["eos_id"], task["pad_id"], task["bf16"]) == (0, shape.vocabulary, False)
    assert (task["microbatch_size"], task["response_length"]) == (case.microbatch, RESPONSE)


def passed(tokens, attended, logits):
    matrices = 2 * LAYERS * 12 * HIDDEN**2 * tokens  # 3 + 1 + 4 + 4 squares of the width
    vocabulary = shape_of(config_of(CASES["ppo"].request).base).vocabulary
    return matrices + 4 * LAYERS * HIDDEN * attended + 2 * HIDDEN * vocabulary * logits


def test_the_work_of_an_update_is_what_a_hand_count_gives_row_by_row():
    sampled, expected = RESPONSE, dict.fromkeys(STEPS, 0.0)
    for query in (10, 100):
        whole = query + sampled
        with_logits, without = (passed(whole, whole**2, one) for one in (sampled, 0))
        expected["sample"] += passed(query, query**2, 0) + passed(sampled, sampled * query, sampled)
        expected["measure"] += 2 * with_logits
        expected["score"] += 2 * without
        expected["learn"] += 4 * 3 * (with_logits + without)  # epochs; forward and backward
    assert update_flops(setting_of("ppo"), (10, 100)) == pytest.approx(expected)


def test_the_work_of_a_rival_counts_a_query_once_and_no_critic():
    sampled = 4 * RESPONSE
    whole, attended = 10 + sampled, (10 + sampled) * (10 + RESPONSE)
    expected = {
        "sample": passed(10, 10**2, 4) + passed(sampled, sampled * 10, sampled),
        "measure": 2 * passed(whole, attended, sampled),
        "score": passed(whole, attended, 0),
        "learn": 2 * 3 * passed(whole, attended, sampled),
    }
    assert update_flops(setting_of("rloo"), (10,), "rloo") == pytest.approx(expected)


def setting_of(stage):
    return memory.setting_of(config_of(CASES[stage].request), on_gpu=False)


def test_synthetic_queries_have_the_mean_length_of_real_ones_and_end_at_the_limit():
    shape = shape_of(make_config("pythia-70m").base)
    queries = measure.synthetic_queries(shape, 512, 2048)
    lengths = [len(query) for query in queries]
    assert sum(lengths) / 2048 == pytest.approx(QUERY_TOKENS, rel=0.03)
    assert max(lengths) == 512
    assert min(map(min, queries)) >= 1  # no EOS
    assert max(map(max, queries)) < shape.vocabulary


HELD = """
import torch
from reports.speed.meter import Meter
meter = Meter(torch.device("cpu"))
kept = torch.ones(256 * 2**18)
_, first = meter.whole(lambda: torch.ones(384 * 2**18).sum())
_, second = meter.whole(lambda: None)
print(first["peak"], second["peak"])
"""


def test_the_meter_sees_what_is_held_and_what_was_held_for_a_moment():
    done = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, cwd=ROOT, check=True
    )
    first, second = map(int, done.stdout.split())
    # What the system counts as resident varies by some 10 MiB: libraries' pages come and go.
    assert first == pytest.approx((256 + 384) * MIB, rel=0.1)
    assert second == pytest.approx(256 * MIB, rel=0.1)


# -- TRL -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["ppo", "rloo", "grpo"])
def test_trl_makes_one_update_of_the_same_task(prepared, monkeypatch, stage):
    if not TRL_PYTHON.is_file():
        pytest.skip("TRL has no environment here: `make bench` makes it")
    monkeypatch.chdir(ROOT)
    case = replace(CASES["rloo"], batch=4, microbatch=4, stage=stage)
    task = task_of(prepared, config_of(case.request), stage)
    write_json(prepared / "task.json", task)
    found = run_peer(TRL_PYTHON, prepared / "task.json", prepared / "result.json")
    assert "failed" not in found, found
    steps = [found[step] for step in STEPS]
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) <= found["seconds"]
    query_tokens = sum(map(len, task["queries"]))
    assert found["tokens"] == 4 // len(task["queries"]) * query_tokens + 4 * RESPONSE
    assert (found["versions"]["trl"], found["threads"]) == ("1.9.2", 1)


def test_trl_that_fails_or_cannot_be_installed_is_one_line(place, monkeypatch):
    write_json(place / "task.json", {})
    found = run_peer(Path(sys.executable), place / "task.json", place / "result.json")
    assert "\n" not in found["failed"]
    assert found["failed"]
    broken = place / "python"
    broken.write_text("#!/bin/sh\necho 'WARNING: x\nERROR: No matching distribution' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    (place / "constraints.txt").write_text("")
    with pytest.raises(UserError, match=r"^TRL 1.9.2 cannot be installed: No matching distrib"):
        peer_interpreter()


# -- what is asked, and what is kept ---------------------------------------------------------------


def test_a_shape_is_typed_as_preset_batch_and_microbatch():
    case = speed.case_of("pythia-14m:32:8")
    assert (case.preset, case.batch, case.microbatch) == ("pythia-14m", 32, 8)
    assert speed.case_of("pythia-14m:32:8:rloo").text == "pythia-14m:32:8:rloo"
    for wrong, said in {
        "pythia-14m:32:8:rlo": "did you mean rloo",
        "pythia-14m:32:2:grpo": "4 samples of a query",
        "tiny-s:7:2": "must divide",
        **dict.fromkeys(("pythia-14m:32", "pythia-14m:32:0", "a:1:2:3:4"), "preset:batch:microb"),
    }.items():
        with pytest.raises(UserError, match=said):
            speed.case_of(wrong)
    # TRL has no adapters, and no post is read.
    config = config_of(speed.case_of("smollm2:8:4:rloo").request)
    assert (config.lora.rank, config.rloo.batch_size) == (0, 8)
    assert config.ppo.policy_learns(0)


def test_a_shape_that_fails_is_left_out_and_the_others_are_kept(tmp_path, monkeypatch):
    def run(words, result):
        if "ppo.batch_size=4" in words:
            raise UserError("no memory")
        return {} if "prepare" in words else {"matrix_rate": 2.0}

    monkeypatch.setattr(speed, "run_process", run)
    monkeypatch.setattr(speed, "peer_interpreter", lambda: None)
    monkeypatch.setattr(speed, "task_of", lambda *_: {})
    bad, good = speed.case_of("tiny:4:2"), speed.case_of("tiny:8:4")
    *_, bench = speed.measured([bad, good], 2, tmp_path / "work")
    assert {name: len(shape["measured"]["ours"]) for name, shape in bench["shapes"].items()} == {
        "tiny:8:4": 2
    }
    assert bench["about"]["left_out"] == ["tiny:4:2: no memory"]
    with pytest.raises(UserError, match=r"^tiny:4:2: no memory$"):
        [*speed.measured([bad], 1, tmp_path / "work")]


STOPPED = """
import json, sys, time
from pathlib import Path
from reports.speed import bench_page, speed
run = json.loads(sys.argv[1])
counted = []
def run_process(words, result):
    if "prepare" in words:
        return {"parameters": 1}
    counted.append(words)
    if len(counted) == 2:
        print("measuring", flush=True)
        time.sleep(60)
    return run
speed.run_process, speed.task_of = run_process, lambda *_: {}
speed.peer_interpreter = lambda: Path("python")
bench_page.main(["--shapes", "tiny-s:4:2"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_stopped_keeps_what_it_measured(tmp_path, number):
    words = [sys.executable, "-c", STOPPED, json.dumps(one_run(20.0, 12.0, 3e6))]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "measuring\n":
        assert process.poll() is None
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert errors.startswith("stopped: runs/bench/bench.json holds what was measured; the same")
    assert process.returncode == 128 + number
    (kept,) = page.record_of(tmp_path / "runs/bench", "bench")["made_from"]["measured"][
        "shapes"
    ].values()
    assert [run["seconds"] for run in kept["measured"]["ours"]] == [20.0]
    assert {path.suffix for path in (tmp_path / "runs/bench").iterdir() if path.is_file()} == {
        *(".json", ".md", ".html")
    }
    assert not (tmp_path / "runs/bench/work").exists()


# -- the page and the check ------------------------------------------------------------------------

NAME = "tiny-s:4:2"


def one_run(seconds, learn, peak):
    run = {"seconds": seconds, "sample": 1.0, "measure": 0.5, "score": 0.5, "learn": learn}
    flops = {"sample": 1e9, "measure": 2e9, "score": 1e9, "learn": 6e9}
    about = {"matrix_rate": 1e9, "device": "CPU, 2 cores, threads: 2", "floor": 1e6}
    return run | about | {"peak": peak, "flops": flops}


def found_of(ours=(20.0, 22.0), peer=(50.0, 40.0), peak=3e6):
    """A bench at 1 Gflop/s: an update of 10 Gflop needs 10 s, learning 6 s."""
    measured = {
        "ours": [one_run(seconds, 0.6 * seconds, peak) for seconds in ours],
        "trl": [one_run(seconds, 0.9 * seconds, 6e6) for seconds in peer],
    }
    about = {"date": "2026-11-22T00:00:00+00:00", "code_version": "abc", "machine": "a processor"}
    lists = {"versions": {"torch": "2.13.0"}, "peers": {"trl": TRL}, "left_out": []}
    shape = {"preset": "tiny-s", "batch": 4, "stage": "ppo", "measured": measured}
    return {"about": {**about, **lists, "runs": 2, "overrides": []}, "shapes": {NAME: shape}}


def test_figures_are_the_fastest_run_its_spread_and_its_distance_from_the_bound_and_from_trl():
    found = bench_page.figures(found_of()).loc[NAME]
    ours, trl, bound = (found.loc[who] for who in ("ours", "trl", bench_page.BOUND))
    assert (ours["seconds"], ours["episodes"], ours["peak"]) == (20.0, 0.2, 3e6)
    assert ours["spread"] == pytest.approx(0.1)
    assert (trl["seconds"], bound["seconds"], bound["learn"]) == (40.0, 10.0, 6.0)
    assert {name: ours[name] for name in bench_page.RATIOS} == {
        "time over the bound": 2.0,
        "learning over the bound": 2.0,  # 12 s of 6 s
        f"time over {TRL}": 0.5,
        f"memory over {TRL}": 0.5,
    }


def worse_than_published(now):
    return [line.split(": ")[1] for line in bench_page.compare(found_of(), now)[1]]


def test_the_check_fails_beyond_15_percent_of_time_and_2_of_memory_or_without_trl():
    assert worse_than_published(found_of(ours=(22.8,))) == []
    assert worse_than_published(found_of(ours=(10.0,), peak=1e6)) == []  # better is no failure
    assert worse_than_published(found_of(ours=(23.2,))) == [*bench_page.RATIOS][:3]
    assert worse_than_published(found_of(peak=3.05e6)) == []
    (line,) = bench_page.compare(found_of(), found_of(peak=3.07e6))[1]
    assert line == f"{NAME}: memory over TRL 1.9.2: 0.50 published, 0.51 now (+2%, allowed +2%)"
    slower = found_of(ours=(40.0,), peer=(80.0,))
    for run in slower["shapes"][NAME]["measured"]["ours"]:
        run["matrix_rate"] = 0.5e9
    assert worse_than_published(slower) == []  # the machine is slower
    alone = found_of()
    alone["shapes"][NAME]["measured"]["trl"] = [{"failed": "no memory"}]
    assert worse_than_published(alone) == [*bench_page.RATIOS][2:]
    assert bench_page.failures(alone) == [f"TRL 1.9.2 at {NAME}: no memory"]
    assert "nothing stands beside it" in bench_page.answer(alone)


def test_the_page_has_a_row_for_everybody_and_is_published_from_a_commit_alone(place, capsys):
    dirty = found_of()
    dirty["about"]["code_version"] = "abc-dirty"
    bench_page.write(dirty, settings.RUNS / "bench")
    for module, words, said in (
        (bench_page, ["--shapes", "tiny-s:4:2", "--set", "ppo.klcoef=1"], "ppo.klcoef"),
        (publish, ["--pages", "bench"], "not committed"),
        (bench_page, ["--check"], "no bench is published"),
    ):
        with pytest.raises(SystemExit):
            module.main(words)
        assert said in capsys.readouterr().err
    assert not GENERATED.exists()
    path = bench_page.write(found_of(), settings.RUNS / "bench")
    markdown = path.with_suffix(".md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if "tiny-s" in line]
    assert [row[:7] for row in rows] == [
        ["PPO, tiny-s, 4 episodes", "ours", "0.20", "2.00", "0.50", "2.00", "2.00"],
        ["PPO, tiny-s, 4 episodes", "TRL 1.9.2", "0.10", "1.00", "1.00", "4.00", "6.00"],
        ["PPO, tiny-s, 4 episodes", "lower bound", "0.40", "4.00", "0.17", "1.00", "1.00"],
    ]
    publish.main(["--pages", "bench"])
    assert page.record_of(GENERATED, "bench")["made_from"]["measured"] == found_of()


def test_a_check_measures_what_is_published_and_ends_with_an_error_where_it_is_worse(
    place, capsys, monkeypatch
):
    bench_page.write(found_of(), GENERATED)
    asked: list[str] = []
    seconds = iter([20.0, 24.0])

    def measured(cases, runs, work):
        asked.extend(case.text for case in cases)
        work.mkdir(parents=True, exist_ok=True)
        yield found_of(ours=(next(seconds),))

    monkeypatch.setattr(speed, "measured", measured)
    bench_page.main(["--check"])
    with pytest.raises(SystemExit) as ended:
        bench_page.main(["--check"])
    assert ended.value.code == 2
    assert "3 of 4 ratios are worse" in capsys.readouterr().err
    assert asked == [NAME, NAME]
