"""`make bench` measures an update of ours and of TRL on the same work, and writes a page."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stages.config.errors import UserError
from stages.config.sections import format_post
from stages.data.prompt import plain_encoder
from stages.models.tokenizers import load_tokenizer
from stages.planning.shapes import shape_of
from stages.runs.files import read_json, write_json
from tests.bench import __main__ as command
from tests.bench import compare, environment, ours, page, results
from tests.bench.case import parse_case
from tests.bench.lower_bound import update_operations
from tests.bench.meter import Update
from tests.bench.results import Bench, Comparison, OurUpdate
from tests.lib.asserts import refusal_of, refused_by
from tests.lib.places import ROOT

CASE = parse_case("tiny-s:4:2", ("memory.cpu_threads=1",))
CONFIG: Any = CASE.make_config()  # of a type that does not know its algorithms
RESPONSE = CONFIG.data.max_summary_tokens
HIDDEN = 64  # of tiny-s
LAYERS = 2


# -- measuring -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "algorithm", "samples_per_query"),
    [("tiny-s:4:2", "ppo", 1), ("tiny-s:4:2:rloo", "rloo", 4)],
    ids=["ppo", "rloo"],
)
def test_an_update_is_measured_with_its_peak_and_tokens(
    tmp_path, shape, algorithm, samples_per_query
):
    config = parse_case(shape, CASE.overrides).make_config()
    settings = getattr(config, algorithm)

    ours.prepare(config, settings, tmp_path)
    update = ours.measure_update(config, settings, tmp_path)

    lengths = [len(query) for query in read_json(tmp_path / "queries.json")]
    assert len(lengths) == 4 // samples_per_query
    query_tokens = samples_per_query * sum(lengths)
    assert query_tokens < update.tokens <= query_tokens + 4 * RESPONSE
    assert update.seconds > 0
    assert update.peak > 0
    assert update.matrix_rate > 1e8


def test_trl_measures_an_update_of_the_same_task(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if not environment.trl_python().is_file():
        pytest.skip("TRL is not installed: `make bench` installs it")
    ours.prepare(CONFIG, CONFIG.ppo, tmp_path)

    update = compare.measure_trl(environment.trl_python(), tmp_path)

    task = read_json(tmp_path / "task.json")
    assert task["microbatch_size"] == 2
    assert task["response_length"] == RESPONSE
    assert update.seconds > 0
    assert update.tokens == sum(len(query) for query in task["queries"]) + 4 * RESPONSE
    assert update.threads == 1


def test_random_queries_have_the_lengths_of_real_posts(shared):
    text = (shared / "tldr-human" / "sft_validation.jsonl").read_text(encoding="utf-8")
    posts = [format_post(json.loads(line)) for line in text.splitlines()]
    encode = plain_encoder(load_tokenizer(shared / "tokenizer"))
    real_mean = sum(len(tokens) for tokens in encode(posts)) / len(posts)

    queries = ours.draw_queries(count=2048, limit=512, vocabulary=50_304)

    lengths = [len(query) for query in queries]
    assert sum(lengths) / 2048 == pytest.approx(real_mean, rel=0.03)
    assert max(lengths) == 512
    assert min(min(query) for query in queries) >= 1  # no EOS
    assert max(max(query) for query in queries) < 50_304


# -- the lower bound -------------------------------------------------------------------------------


def forward_by_hand(tokens, attended, logits):
    matrices = 2 * LAYERS * 12 * HIDDEN**2 * tokens  # 3 + 1 + 4 + 4 squares of the width
    attention = 4 * LAYERS * HIDDEN * attended  # attended: pairs of tokens
    vocabulary = shape_of(CONFIG.base).vocabulary
    return matrices + attention + 2 * HIDDEN * vocabulary * logits


@pytest.mark.parametrize(
    ("settings", "response", "policy_passes", "scorer_passes"),
    [
        # Two passes for log-probabilities, and 4 epochs of a forward and a backward pass, which
        # costs two; as many of critic and reward model.
        (CONFIG.ppo, RESPONSE, 2 + 4 * 3, 2 + 4 * 3),
        # Four samples share a row. One epoch; only the reward model scores.
        (CONFIG.rloo, 4 * RESPONSE, 2 + 1 * 3, 1),
    ],
)
def test_the_operations_of_an_update_are_those_of_a_hand_count(
    settings, response, policy_passes, scorer_passes
):
    expected = 0.0
    for query in (10, 100):
        row = query + response
        expected += forward_by_hand(query, query**2, 0)
        expected += forward_by_hand(response, response * query, response)
        expected += policy_passes * forward_by_hand(row, row**2, response)
        expected += scorer_passes * forward_by_hand(row, row**2, 0)
    assert update_operations(CONFIG, settings, [10, 100]) == pytest.approx(expected)


# -- the command -----------------------------------------------------------------------------------


def test_a_shape_is_preset_batch_and_microbatch():
    case = parse_case("pythia-14m:32:8")
    assert case.preset == "pythia-14m"
    assert case.batch == 32
    assert case.microbatch == 8
    assert case.algorithm == "ppo"


def test_a_shape_may_name_rloo():
    case = parse_case("pythia-14m:32:8:rloo")
    assert case.algorithm == "rloo"
    assert case.name == "pythia-14m:32:8:rloo"


@pytest.mark.parametrize(
    "text", ["pythia-14m:32", "pythia-14m:32:0", "pythia-14m:32:8:grpo", "tiny"]
)
def test_another_text_is_no_shape(text):
    assert f"SHAPES={text}: give preset:batch:microbatch" in refusal_of(parse_case, text)


def test_the_batch_must_be_divisible_by_the_microbatch():
    assert "must be divisible by the microbatch" in refusal_of(parse_case, "tiny-s:7:2")


def test_all_weights_are_trained_and_no_posts_are_needed():
    config = parse_case("smollm2:8:4").make_config()
    assert config.lora.rank == 0
    assert config.ppo.batch_size == 8
    assert config.ppo.policy_learns(0)


def test_the_command_reads_the_variables_of_make(monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", r" -- SHAPES=tiny:4:2\ tiny-s:4:2 RUNS=3 SET=ppo.kl_coef=0.1")
    args = command.parse_arguments([])
    assert args.shapes == ["tiny:4:2", "tiny-s:4:2"]
    assert args.runs == 3
    assert args.overrides == ["ppo.kl_coef=0.1"]


def test_a_wrong_shape_or_setting_is_one_line(capsys):
    assert "SHAPES=tiny: give preset" in refused_by(capsys, command.main, "SHAPES=tiny")
    assert "RUNS=0" in refused_by(capsys, command.main, "RUNS=0")


# -- what fails ------------------------------------------------------------------------------------


def test_trl_that_cannot_be_installed_is_one_line(place, monkeypatch):
    pip = place / "python"
    pip.write_text("#!/bin/sh\necho 'WARNING: x\nERROR: No matching distribution' >&2; exit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    (place / "constraints.txt").write_text("")
    line = "TRL 1.9.2 cannot be installed: No matching distribution"
    assert refusal_of(environment.install_trl) == line


def test_trl_that_fails_is_one_line(tmp_path):
    write_json(tmp_path / "task.json", {})
    assert "missing" in refusal_of(compare.measure_trl, Path(sys.executable), tmp_path)


def fail_if_words_contain(word, monkeypatch):
    """Measuring takes one second, but a process with this word in its command fails."""

    def run_process(words, result):
        if word in words:
            raise UserError("no memory")
        if "prepare" in words:
            return {}
        return asdict(our_update(seconds=1.0, peak=1))

    monkeypatch.setattr(compare, "run_process", run_process)
    monkeypatch.setattr(compare, "install_trl", lambda: None)


def test_a_shape_that_fails_is_left_out_and_the_others_are_kept(tmp_path, monkeypatch):
    fail_if_words_contain("tiny:4:2", monkeypatch)
    bench = bench_of()

    compare.measure_cases(bench, [parse_case("tiny:4:2"), parse_case("tiny:8:4")], tmp_path)

    assert [comparison.case.name for comparison in bench.comparisons] == ["tiny:8:4"]
    assert bench.notes == ["tiny:4:2: no memory"]
    assert not (tmp_path / "work").exists()


def test_if_all_shapes_fail_the_command_fails(tmp_path, monkeypatch):
    fail_if_words_contain("tiny:4:2", monkeypatch)
    line = refusal_of(compare.measure_cases, bench_of(), [parse_case("tiny:4:2")], tmp_path)
    assert line == "tiny:4:2: no memory"


def test_trl_that_fails_is_a_note_and_ours_is_measured(tmp_path, monkeypatch):
    fail_if_words_contain("tests.bench.trl_update", monkeypatch)
    bench = bench_of()

    comparison = compare.measure_case(bench, CASE, tmp_path, Path("python"))

    assert len(comparison.ours) == 2
    assert comparison.trl == []
    assert bench.notes == ["TRL 1.9.2 at tiny-s:4:2: no memory"]


# -- the table and the page ------------------------------------------------------------------------


def our_update(seconds, peak):
    """An update that needs 10 s for 10 Gflop at 1 Gflop/s."""
    return OurUpdate(
        seconds=seconds,
        peak=peak,
        tokens=800,
        threads=2,
        operations=1e10,
        matrix_rate=1e9,
        device="CPU, 2 cores, threads: 2",
    )


def bench_of(*comparisons):
    return Bench(
        date="2026-11-22T00:00:00+00:00",
        code_version="abc",
        versions={"torch": "2.13.0"},
        machine="a processor",
        runs=2,
        overrides=[],
        comparisons=list(comparisons),
    )


def measured_both():
    """Two runs of ours and two of TRL."""
    return Comparison(
        case=CASE,
        ours=[our_update(seconds=20.0, peak=3_000_000), our_update(seconds=22.0, peak=2_000_000)],
        trl=[
            Update(seconds=50.0, peak=6_000_000, tokens=800, threads=2),
            Update(seconds=40.0, peak=5_000_000, tokens=800, threads=2),
        ],
    )


def test_the_fastest_run_and_the_highest_peak_count():
    comparison = measured_both()
    assert comparison.speed_over_trl == 2  # 40 s over 20 s
    assert comparison.memory_over_trl == 0.5  # 3 MB over 6 MB
    assert bench_of(comparison).lower_bound(comparison) == 10
    assert results.spread(comparison.ours) == pytest.approx(0.1)


def test_without_trl_there_are_no_ratios():
    comparison = Comparison(case=CASE, ours=[our_update(seconds=20.0, peak=1)], trl=[])
    assert comparison.speed_over_trl is None
    assert comparison.memory_over_trl is None
    row = page.cells(bench_of(comparison), comparison)
    assert row == ["PPO, tiny-s", "20.00", "–", "–", "0.00", "–", "2.00", "–"]


def test_the_table_fits_a_terminal_and_the_page_has_the_same_row(tmp_path, capsys):
    bench = bench_of(measured_both())

    page.print_table(bench)
    written = page.write_page(bench, tmp_path)

    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80
    assert written == tmp_path / "bench.html"
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.html",
        "bench.json",
        "bench.md",
        "bench-seconds.svg",
    }
    row = "| PPO, tiny-s | 20.00 | 40.00 | 2.00 | 0.00 | 0.50 | 2.00 | 25.0% |"
    assert row in (tmp_path / "bench.md").read_text(encoding="utf-8")
