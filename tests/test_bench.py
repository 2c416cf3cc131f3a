"""The bench: an update measured whole, the same tokens for TRL, what is kept, and the page."""

import copy
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from reports import publish
from reports.needs import memory
from reports.needs.shapes import shape_of
from reports.parts import page, updates
from reports.parts.words import PEER, TRL, number, whole
from reports.publish import GENERATED
from reports.sections import card
from reports.speed import bench_page, measure, speed
from reports.speed.speed import peer_interpreter, run_peer, task_of
from stages.config import config as settings
from stages.config.command_line import config_of, make_config
from stages.config.config import UserError
from stages.config.sections import format_post
from stages.data.prompt import plain_encoder
from stages.models.tokenizers import load_tokenizer
from stages.runs.files import write_json
from stages.runs.signals import forget_signals
from tests.lib.asserts import refused_by

ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / "runs" / "peers" / PEER / "bin" / "python"
CASE = speed.case_of("tiny-s:4:2", ("memory.cpu_threads=1",))
CONFIG: Any = config_of(CASE.request)  # of a type that does not know its algorithms
RESPONSE = CONFIG.data.max_summary_tokens
HIDDEN, LAYERS = 64, 2  # of tiny-s


@pytest.mark.parametrize(("end", "samples"), [("", 1), (":rloo", 4)])
def test_a_whole_update_is_measured_with_its_peak_and_tokens(tmp_path, end, samples):
    case = speed.case_of(f"{CASE.text}{end}", CASE.overrides)
    for part in ("prepare", "update"):
        words = [part, str(tmp_path / f"{part}.json"), "--stage", case.stage]
        measure.main([*words, *case.request.arguments])
    update = json.loads((tmp_path / "update.json").read_text("utf-8"))
    queries = json.loads((tmp_path / "queries.json").read_text("utf-8"))
    lengths = [len(query) for query in queries]
    assert len(lengths) == 4 // samples
    assert update["queries"] == {"mean": sum(lengths) * samples / 4, "longest": max(lengths)}
    assert samples * sum(lengths) < update["tokens"] <= samples * sum(lengths) + 4 * RESPONSE
    assert min(update["seconds"], update["peak"], update["matrix_rate"] - 1e8) > 0


def passed(tokens, attended, logits):
    matrices = 2 * LAYERS * 12 * HIDDEN**2 * tokens  # 3 + 1 + 4 + 4 squares of the width
    vocabulary = shape_of(CONFIG.base).vocabulary
    return matrices + 4 * LAYERS * HIDDEN * attended + 2 * HIDDEN * vocabulary * logits


def test_the_work_of_an_update_is_what_a_hand_count_gives_row_by_row():
    setting = memory.setting_of(CONFIG, on_gpu=False)
    for settings_of_stage, sampled, epochs, scored in (
        (CONFIG.ppo, RESPONSE, 4, 2 + 4 * 3),
        (CONFIG.rloo, 4 * RESPONSE, 1, 1),  # four samples share a row; no critic
    ):
        expected = 0.0
        for query in (10, 100):
            whole = query + sampled
            with_logits, without = (passed(whole, whole**2, logits) for logits in (sampled, 0))
            sample = passed(query, query**2, 0) + passed(sampled, sampled * query, sampled)
            # Policy and reference; all epochs, forward and backward.
            expected += sample + (2 + 3 * epochs) * with_logits + scored * without
        counted = measure.update_flops(setting, settings_of_stage, (10, 100))
        assert counted == pytest.approx(expected)


def test_synthetic_queries_have_the_mean_length_of_real_ones_and_end_at_the_limit(shared):
    text = (shared / "tldr-human" / "sft_validation.jsonl").read_text(encoding="utf-8")
    posts = [format_post(json.loads(line)) for line in text.splitlines()]
    encode = plain_encoder(load_tokenizer(shared / "tokenizer"))
    mean = sum(map(len, encode(posts))) / len(posts)
    shape = shape_of(make_config("pythia-70m").base)
    queries = measure.synthetic_queries(shape, 512, 2048)
    lengths = [len(query) for query in queries]
    assert sum(lengths) / 2048 == pytest.approx(mean, rel=0.03)
    assert max(lengths) == 512
    assert min(map(min, queries)) >= 1  # no EOS
    assert max(map(max, queries)) < shape.vocabulary


def test_trl_makes_one_update_of_the_same_task(tmp_path, monkeypatch):
    if not TRL_PYTHON.is_file():
        pytest.skip("TRL has no environment here: `make bench` makes it")
    monkeypatch.chdir(ROOT)
    measure.prepare(CONFIG, CONFIG.ppo, tmp_path)
    task = task_of(tmp_path, CONFIG)
    assert (task["microbatch_size"], task["response_length"]) == (2, RESPONSE)
    write_json(tmp_path / "task.json", task)
    measured = run_peer(TRL_PYTHON, tmp_path / "task.json", tmp_path / "result.json")
    assert "failed" not in measured, measured
    assert measured["seconds"] > 0
    assert measured["tokens"] == sum(map(len, task["queries"])) + 4 * RESPONSE
    assert (measured["versions"]["trl"], measured["threads"]) == ("1.9.2", 1)


def test_trl_that_fails_or_cannot_be_installed_is_one_line(place, monkeypatch):
    write_json(place / "task.json", {})
    failed = run_peer(Path(sys.executable), place / "task.json", place / "result.json")["failed"]
    assert failed
    assert "\n" not in failed
    broken = place / "python"
    broken.write_text("#!/bin/sh\necho 'WARNING: x\nERROR: No matching distribution' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    (place / "constraints.txt").write_text("")
    with pytest.raises(UserError, match=r"^TRL 1.9.2 cannot be installed: No matching distrib"):
        peer_interpreter()


def test_a_shape_is_typed_as_preset_batch_and_microbatch():
    case = speed.case_of("pythia-14m:32:8")
    assert (case.preset, case.batch, case.microbatch, case.stage) == ("pythia-14m", 32, 8, "ppo")
    assert speed.case_of("pythia-14m:32:8:rloo").stage == "rloo"
    with pytest.raises(UserError, match="must divide"):
        speed.case_of("tiny-s:7:2")
    for wrong in ("pythia-14m:32", "pythia-14m:32:0", "pythia-14m:32:8:grpo"):
        with pytest.raises(UserError, match="preset:batch:microbatch"):
            speed.case_of(wrong)
    # TRL has no adapters, and no post is read.
    config = config_of(speed.case_of("smollm2:8:4").request)
    assert (config.lora.rank, config.ppo.batch_size) == (0, 8)
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
    *_, bench = speed.measured([bad, good], 2, tmp_path / "work", {})
    assert [*bench["shapes"]] == ["tiny:8:4"]
    assert bench["about"]["left_out"] == ["tiny:4:2: no memory"]
    with pytest.raises(UserError, match=r"^tiny:4:2: no memory$"):
        [*speed.measured([bad], 1, tmp_path / "work", {})]
    # The next call goes on after the first run; not with other settings, nor after all runs.
    other = speed.case_of("tiny:8:4", ("ppo.kl_coef=0.1",))
    first = copy.deepcopy(next(speed.measured([good], 2, tmp_path / "work", {})))
    for case, before, more in ((good, first, 1), (other, first, 2), (good, bench, 2)):
        *steps, bench = speed.measured([case], 2, tmp_path / "work", before)
        assert (len(steps), len(bench["shapes"]["tiny:8:4"]["measured"]["ours"])) == (more, 2)


NAME = "tiny-s:4:2"


def run_of(seconds, peak):
    about = {"matrix_rate": 1e9, "device": "CPU, 2 cores, threads: 2"}
    return {"seconds": seconds, **about, "peak": peak, "flops": 1e10, "tokens": 800}


def bench_of(commit="abc", **runs):
    """A bench at 1 Gflop/s: an update of 10 Gflop needs 10 s."""
    runs_of_ours = [run_of(seconds, 3e6) for seconds in (20.0, 22.0)]
    runs_of_trl = [run_of(seconds, 6e6) for seconds in (50.0, 40.0)]
    about = {"date": "2026-11-22T00:00:00+00:00", "code_version": commit, "machine": "a processor"}
    lists = {"versions": {"torch": "2.13.0"}, "peers": {"trl": TRL}, "left_out": [], "card": ""}
    measured = {"ours": runs_of_ours, "trl": runs_of_trl} | runs
    shape = {"preset": "tiny-s", "stage": "ppo", "batch": 4, "measured": measured}
    return {"about": {**about, **lists, "runs": 2, "overrides": []}, "shapes": {NAME: shape}}


def test_without_trl_ours_stands_alone_and_the_reason_is_said():
    alone = bench_of(trl=[{"failed": "no memory"}])
    assert bench_page.failures(alone) == [f"TRL 1.9.2 at {NAME}: no memory"]
    assert bench_page.figures(alone)["speedup"].isna().all()
    assert bench_page.title(alone) == "An update takes 2.00 (tiny-s) times its lower bound"
    assert "Nothing stands beside it" in bench_page.answer(alone)
    assert [
        str(x) for x in updates.shapes_table(alone, bench_page.figures(alone)).rows[0][1:4]
    ] == ["–", "–", "20.00"]


def test_the_page_has_a_row_for_everybody_and_is_published_from_a_commit_alone(place, capsys):
    bench_page.write(bench_of(commit="abc-dirty"), settings.RUNS / "bench")
    with pytest.raises(SystemExit):
        publish.main(["--pages", "bench"])
    assert "not committed" in capsys.readouterr().err
    assert not GENERATED.exists()
    (row,) = updates.shapes_table(bench_of(), bench_page.figures(bench_of())).rows
    assert row == ["PPO, tiny-s", *map(number, (2.0, 0.5, 20.0, 40.0, 2.0))]
    ours, peer = bench_page.updates_table(bench_of()).rows
    assert peer[2:7] == [number(40.0), whole(20.0), *map(number, (1.0, 1.0, 4.0))]
    assert [*map(str, ours[7:])] == ["0.00", "10.0%"]  # GB, spread
    bench_page.write(bench_of(), settings.RUNS / "bench")
    publish.main(["--pages", "bench"])
    assert page.record_of(GENERATED, "bench")["made_from"]["measured"] == bench_of()


def test_a_bench_that_is_stopped_keeps_what_it_measured(place, monkeypatch, capsys):
    def stopped_after_one(cases, runs, work, before):
        work.mkdir(parents=True)
        yield bench_of()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(speed, "measured", stopped_after_one)
    with pytest.raises(SystemExit) as ended:
        bench_page.main(["--shapes", NAME])
    forget_signals()
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err.startswith("stopped: runs/bench/bench.json holds what was")
    assert page.record_of(Path("runs/bench"), "bench")["made_from"]["measured"] == bench_of()
    assert not Path("runs/bench/work").exists()


def test_make_card_needs_a_card_and_a_part_that_fails_or_is_late_is_one_line(tmp_path, capsys):
    assert refused_by(capsys, card.main).endswith("needs a card, and torch sees none here")
    late, failed = (
        card.run_part(f"reports.speed.bench_page --shapes {shapes}", seconds, tmp_path / "none")
        for shapes, seconds in (("tiny:4:2", 1), ("tiny", 60))
    )
    assert late["failed"].startswith("stopped after ")
    assert late["result"] == {}
    assert failed["failed"].startswith("error: SHAPES takes preset:batch:microbatch")
