"""A rehearsal: its parts end to end on a small model, its lengths, its meter, and the plan."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reports.needs import rehearsal_parts as parts
from reports.needs import rehearse
from reports.needs.lengths import COMPARED_TOKENS, QUERY_TOKENS, SUMMARY_TOKENS, lengths_of
from reports.needs.memory import Setting
from reports.needs.meter import Meter
from reports.needs.rehearsal_table import MEASURED_BY, card_of_device, hours_of, planned_peaks
from reports.needs.shapes import policy_parameters, shape_of
from reports.needs.texts import (
    LIMIT_ROWS,
    ROWS,
    longest_rows,
    read_texts,
    typical_rows,
    write_texts,
)
from reports.needs.work import work_of
from stages.learning.models import save_model
from stages.settings.command_line import Request, config_of, make_config
from stages.settings.config import UserError
from stages.settings.presets import PRESETS

ROOT = Path(__file__).parents[1]
MIB = 2**20
SMALL = ("memory.microbatch_size=2", "memory.forward_batch_size=2", "memory.cpu_threads=1")
ASKED = Request(preset="tiny-s", overrides=SMALL)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What every part finds on the smallest preset, and what was prepared."""
    work = tmp_path_factory.mktemp("rehearsal")
    for part in ("prepare", *parts.REHEARSALS):
        parts.main([part, "--folder", str(work), *ASKED.arguments])
    found: dict[str, dict[str, Any]] = {}
    for part in parts.REHEARSALS:
        found |= json.loads((work / f"{part}.json").read_text("utf-8"))
    return json.loads((work / "prepare.json").read_text("utf-8")), found


def test_every_part_is_measured_by_the_pipelines_own_functions(measured):
    about, found = measured
    assert about["weights"] == "random, of the published shape"
    assert about["texts"] == "synthetic token ids with the lengths of real posts"
    names = {name for group in rehearse.PROCESSES.values() for name in group}
    assert names <= found.keys()
    for name in names:
        assert found[name]["seconds"] > 0, name
    for name in names - {"ppo rollout"}:
        assert found[name]["flops"] > 0, name
    assert found["start checks"]["said"] == "passed"
    parameters = 2 * policy_parameters(shape_of(config_of(ASKED).base))
    assert found["checkpoint"]["bytes"] > 0.7 * 12 * parameters  # weights and Adam of two networks


def test_the_steps_of_a_rollout_take_no_longer_than_the_rollout(measured):
    _, found = measured
    steps = [found[f"ppo {one}"]["seconds"] for one in ("sample", "measure", "score")]
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) <= found["ppo rollout"]["seconds"]


def test_the_page_says_all_of_it_in_80_columns(measured):
    about, found = measured
    lines = rehearse.page_lines(config_of(ASKED), about, found, price=2.0)
    assert [line for line in lines if len(line) > 80] == []
    text = "\n".join(lines)
    for said in ("ratio", "one update of PPO", "together", "start checks", "$", "checkpoint"):
        assert said in text
    failed = {**found, "rm step": {"failed": "out of memory"}, "start checks": {"said": "no " * 40}}
    lines = rehearse.page_lines(config_of(ASKED), about, failed, price=0)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "rm step        failed: out of memory" in text


def test_hours_follow_from_measured_speeds_by_counting(measured):
    _, found = measured
    config = config_of(ASKED)
    setting = Setting(config=config, shape=shape_of(config.base), lengths=lengths_of(config))
    hours = hours_of(setting, found)
    rate = found["references"]["flops"] / found["references"]["seconds"]
    work = next(one for one in work_of(setting) if one.stage == "normalize")
    assert hours["normalize"] == pytest.approx(work.flops / rate / 3600)
    slower = {**found, "references": {**found["references"], "seconds": 1e6}}
    assert hours_of(setting, slower)["normalize"] > hours["normalize"]
    assert "ppo" not in hours_of(setting, {**found, "ppo learn": {"failed": "x"}})


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name]().data.source])
def test_all_work_of_a_run_has_a_part_that_measures_it(preset):
    config = make_config(preset)
    setting = Setting(config=config, shape=shape_of(config.base), lengths=lengths_of(config))
    assert {(one.stage, one.label) for one in work_of(setting)} <= MEASURED_BY.keys()


# -- texts -----------------------------------------------------------------------------------------


def test_synthetic_texts_have_the_mean_lengths_of_real_ones_and_reach_the_limits(tmp_path):
    config = make_config("pythia-70m")
    write_texts(config, shape_of(config.base), tmp_path / "base")
    posts = read_texts(tmp_path / "base", "sft_train")
    pairs = read_texts(tmp_path / "base", "comparisons_train")
    assert len(posts) == ROWS + LIMIT_ROWS
    for split, column, mean in (
        (posts, "queries", QUERY_TOKENS),
        (posts, "summaries", SUMMARY_TOKENS),
        (pairs, "chosen", COMPARED_TOKENS),
    ):
        lengths = split.columns[column].lengths()[:ROWS].double()
        assert lengths.mean().item() == pytest.approx(mean, rel=0.03), column
    queries, summaries = (posts.columns[one].lengths() for one in ("queries", "summaries"))
    assert (int(queries.max()), int((queries + summaries).max())) == (512, 562)
    queries, chosen = (pairs.columns[one].lengths() for one in ("queries", "chosen"))
    assert (int(chosen.max()), int((queries + chosen).max())) == (169, 638)
    assert all(int(posts.columns["summaries"][row][-1]) == 0 for row in range(9))  # EOS


def test_typical_rows_are_whole_microbatches_spread_over_the_lengths():
    lengths = [10 * row for row in range(12)]
    assert typical_rows(lengths, size=2, parts=3) == [2, 3, 6, 7, 10, 11]
    assert longest_rows(lengths, 2) == [11, 10]


# -- meter -----------------------------------------------------------------------------------------

HELD = """
import torch
from reports.needs.meter import Meter
meter = Meter(torch.device("cpu"))
kept = torch.ones(64 * 2**18)
_, one = meter.peak(lambda: torch.ones(96 * 2**18).sum())
_, two = meter.peak(lambda: None)
print(one, two)
"""


def test_the_meter_sees_what_is_held_and_what_was_held_for_a_moment():
    found = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, cwd=ROOT, check=True
    )
    one, two = map(int, found.stdout.split())
    assert one == pytest.approx((64 + 96) * MIB, rel=0.05)
    assert two == pytest.approx(64 * MIB, rel=0.1)


def test_a_meter_times_what_it_runs():
    result, seconds = Meter(torch.device("cpu")).timed(lambda: 7)
    assert result == 7
    assert 0 <= seconds < 1


def test_the_plan_is_within_15_percent_of_a_measured_training_step(tmp_path, tokenizer):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        bos_token_id=0,
        eos_token_id=0,
    )
    save_model(GPTNeoXForCausalLM(config), tokenizer, tmp_path / "model")
    settings = (f"base.checkpoint={tmp_path / 'model'}", "memory.mixed_precision=no", *SMALL)
    request = Request(preset="pythia-70m", name="measured", overrides=settings)
    work = tmp_path / "work"
    parts.main(["prepare", "--folder", str(work), *request.arguments])
    assert rehearse.run_part("sft", request, work) == ""
    found = json.loads((work / "sft.json").read_text("utf-8"))
    run = config_of(request)
    setting = Setting(config=run, shape=shape_of(run.base), lengths=lengths_of(run), on_gpu=False)
    for name, planned in planned_peaks(setting, found).items():
        assert planned == pytest.approx(found[name]["peak"], rel=0.15), name


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_part_that_fails_says_so_in_one_line(tmp_path):
    said = rehearse.run_part("sft", ASKED, tmp_path)
    assert "ids.json" in said
    assert "\n" not in said


def test_a_rehearsal_that_is_stopped_leaves_nothing_half_written(runs, monkeypatch):
    def stop(name: str, request: Request, work: Path) -> str:
        (work / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearse, "run_part", stop)
    with pytest.raises(SystemExit) as ended:
        rehearse.main(["--preset", "tiny-s"])
    assert ended.value.code == 130
    assert list((runs / "tiny-s" / "rehearsal").iterdir()) == []


def test_a_rehearsal_that_cannot_be_prepared_is_one_line(runs, monkeypatch):
    monkeypatch.setattr(rehearse, "run_part", lambda *_: "no space left on device")
    with pytest.raises(UserError, match="could not be prepared: no space left"):
        rehearse.rehearse(Request(preset="tiny-s"), 0.0)


def test_a_device_name_leads_to_its_card():
    for name, card in (
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ):
        found = card_of_device(name)
        assert found is not None
        assert found[0] == card
    assert card_of_device("NVIDIA Something") is None
