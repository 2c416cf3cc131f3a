"""The bench: an update measured whole, the same tokens for peers, what is asked, growth."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reports.needs import rehearsal_parts as parts
from reports.needs.lengths import lengths_of
from reports.needs.memory import Setting
from reports.needs.shapes import policy_parameters, scorer_parameters, shape_of
from reports.needs.work import update_flops
from reports.speed import bench_page, peers, speed
from reports.speed import figures as bench
from reports.speed.peers import TRL, Peer, cut_queries, interpreter_of, run_peer, task_of
from stages.settings import config as settings
from stages.settings.command_line import config_of, make_config
from stages.settings.config import UserError

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "runs" / "peers"
CASE = speed.Case(preset="tiny-s", batch=4, microbatch=2)
ORDER = speed.Order(shapes=(CASE,), runs=2, overrides=("memory.cpu_threads=1",))
ASKED = ORDER.asked(CASE)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Weights, texts and queries of the smallest preset."""
    work = tmp_path_factory.mktemp("bench")
    parts.main(["prepare-update", "--folder", str(work), *ASKED.arguments])
    return work


@pytest.fixture(scope="module")
def update(prepared):
    """What the part that measures a whole update finds."""
    parts.main(["update", "--folder", str(prepared), *ASKED.arguments])
    return json.loads((prepared / "update.json").read_text("utf-8"))["update"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "RUNS", Path("runs"))
    return tmp_path


# -- what is measured ------------------------------------------------------------------------------


def test_a_whole_update_is_measured_with_its_steps_peak_and_tokens(update, prepared):
    queries = json.loads((prepared / "queries.json").read_text("utf-8"))
    lengths = [len(one) for one in queries]
    assert update["queries"] == {"rows": 4, "mean": sum(lengths) / 4, "longest": max(lengths)}
    assert sum(lengths) < update["tokens"] <= sum(lengths) + 4 * 28
    steps = [update[step] for step in bench.STEPS]
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) <= update["seconds"]
    assert update["peak"] > 0
    assert update["matrix_rate"] > 1e8


def test_the_least_memory_is_weights_gradients_moments_and_one_networks_activations(update):
    shape = shape_of(config_of(ASKED).base)
    learned = policy_parameters(shape) + scorer_parameters(shape)
    fixed = 2 * learned * 4 + learned * 4 + learned * 8  # four networks, gradients, Adam's moments
    tokens = 2 * (update["queries"]["longest"] + 28)
    assert fixed < update["floor"] < fixed + 2 * tokens * shape.layers * 4 * 20 * shape.hidden


def test_the_work_of_an_update_is_what_a_hand_count_gives_row_by_row():
    config = config_of(ASKED)
    shape = shape_of(config.base)
    setting = Setting(config=config, shape=shape, lengths=lengths_of(config), on_gpu=False)
    hidden, layers, vocabulary, sampled = 64, 2, shape.vocabulary, 28

    def passed(tokens, attended, logits):
        matrices = 2 * layers * 12 * hidden**2 * tokens  # 3 + 1 + 4 + 4 squares of the width
        return matrices + 4 * layers * hidden * attended + 2 * hidden * vocabulary * logits

    expected = dict.fromkeys(bench.STEPS, 0.0)
    for query in (10, 100):
        whole = query + sampled
        with_logits, without = (passed(whole, whole**2, one) for one in (sampled, 0))
        expected["sample"] += passed(query, query**2, 0) + passed(sampled, sampled * query, sampled)
        expected["measure"] += 2 * with_logits
        expected["score"] += 2 * without
        expected["learn"] += 4 * 3 * (with_logits + without)  # epochs; forward and backward
    assert update_flops(setting, (10, 100)) == pytest.approx(expected)


def test_a_peer_gets_the_same_tokens_and_settings(prepared):
    config = config_of(ASKED)
    task = task_of(prepared, config)
    assert task["queries"] == json.loads((prepared / "queries.json").read_text("utf-8"))
    assert task["eos_id"] == 0
    assert task["pad_id"] == shape_of(config.base).vocabulary
    assert (task["response_length"], task["num_ppo_epochs"], task["bf16"]) == (28, 4, False)
    assert (task["microbatch_size"], task["forward_batch_size"], task["threads"]) == (2, 4, 1)


def test_an_update_that_grows_reads_the_ends_of_the_same_queries(prepared):
    changed = config_of(ORDER.asked(replace(CASE, changes=("data.max_query_tokens=20",))))
    whole, cut = (cut_queries(prepared, one) for one in (config_of(ASKED), changed))
    assert [row[-20:] for row in whole] == cut
    assert max(map(len, cut)) == 20


def test_an_update_grows_in_one_thing_at_a_time():
    case = speed.Case(preset="pythia-14m", batch=32, microbatch=8)
    small = speed.Case(preset="pythia-14m", batch=8, microbatch=8)
    points = speed.growing(speed.Order(shapes=(case,), runs=1), case, small)
    by_axis = {axis: [value for one, value, _ in points if one == axis] for axis, _, _ in points}
    assert by_axis == {
        speed.BATCH: [16, 32],
        speed.QUERY: [128, 256],
        speed.RESPONSE: [13, 106],
        speed.MODEL: [0, 0],
    }
    order = speed.Order(shapes=(case,), runs=1)
    widths = [shape_of(config_of(order.asked(one)).base).hidden for *_, one in points[-2:]]
    assert widths == [256, 512]  # Pythia-31m and -70m


def test_everything_that_was_ordered_is_measured_and_stands_on_the_page(place, monkeypatch):
    def in_this_process(part, asked, folder):
        parts.main([part, "--folder", str(folder), *asked.arguments])
        return ""

    monkeypatch.setattr(speed, "run_part", in_this_process)
    monkeypatch.setattr(speed, "PEERS", {})
    overrides = ("memory.cpu_threads=1", "data.max_summary_tokens=4")
    order = speed.Order(shapes=(CASE,), runs=2, overrides=overrides)
    found = speed.measure_in(order, settings.RUNS / "bench")
    assert list((settings.RUNS / "bench").iterdir()) == []  # what it worked with is gone
    assert len(found["shapes"][CASE.text]["measured"]["ours"]) == 2
    steps = found["stages"][CASE.text]
    assert {name: len(runs) for name, runs in steps.items()} == dict.fromkeys(steps, 2)
    values = [(one["axis"], one["value"]) for one in found["growth"]]
    sizes = [value for axis, value in values if axis in ("", speed.MODEL)]
    assert sizes == sorted(set(sizes))
    assert values[1:6] == [
        (speed.BATCH, 4),
        (speed.QUERY, 28),
        (speed.QUERY, 56),
        (speed.RESPONSE, 1),
        (speed.RESPONSE, 8),
    ]
    queries = [one["update"]["queries"] for one in found["growth"]]
    assert [one["rows"] for one in queries] == [2, 4, 2, 2, 2, 2, 2, 2]
    assert queries[2]["longest"] == 28
    markdown = bench_page.write(found, place / "page").with_suffix(".md").read_text("utf-8")
    for step in steps:
        assert f"| {step} | " in markdown


# -- peers -----------------------------------------------------------------------------------------


def test_trl_makes_one_update_of_the_same_task(prepared, monkeypatch):
    python = PEERS / TRL.name / "bin" / "python"
    if not (PEERS / TRL.name / "installed").is_file():
        pytest.skip("TRL has no environment here: `make bench` makes it")
    monkeypatch.chdir(ROOT)
    found = run_peer(TRL, python, prepared, config_of(ASKED))
    assert "failed" not in found, found
    steps = [found[step] for step in bench.STEPS]
    assert all(seconds > 0 for seconds in steps)
    assert sum(steps) <= found["seconds"]
    queries = json.loads((prepared / "queries.json").read_text("utf-8"))
    assert found["tokens"] == sum(map(len, queries)) + 4 * 28
    assert found["versions"]["trl"] == "1.9.2"
    assert found["threads"] == 1


def test_a_peer_that_fails_says_why_in_one_line(prepared, monkeypatch):
    monkeypatch.chdir(ROOT)
    peer = Peer(name="gone", label="Gone 1", packages=(), module="reports.speed.no_such_module")
    found = run_peer(peer, Path(sys.executable), prepared, config_of(ASKED))
    assert "no_such_module" in found["failed"]
    assert "\n" not in found["failed"]


def test_a_peer_that_cannot_be_installed_is_left_out_with_the_reason(place, monkeypatch):
    broken = place / "python"
    broken.write_text("#!/bin/sh\necho 'WARNING: x\nERROR: No matching distribution' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    (place / "constraints.txt").write_text("")
    with pytest.raises(UserError) as refused:
        interpreter_of(TRL)
    assert str(refused.value) == "TRL 1.9.2 cannot be installed: No matching distribution"
    assert not (settings.RUNS / "peers" / "trl" / "installed").exists()


def test_an_environment_is_made_anew_only_if_its_pins_have_changed(place, monkeypatch):
    made = []
    monkeypatch.setattr(peers, "_call", lambda peer, words: made.append(words))
    monkeypatch.setattr(peers, "write_text", lambda path, text: put(path, text))

    def put(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    (place / "constraints.txt").write_text("torch==1")
    for _ in range(2):
        python = interpreter_of(TRL)
    assert python == (settings.RUNS / "peers" / "trl" / "bin" / "python").absolute()
    assert [words[-1] for words in made[1:]] == ["torch", "trl==1.9.2"]
    (place / "constraints.txt").write_text("torch==2")
    interpreter_of(TRL)
    assert len(made) == 6


# -- what is asked ---------------------------------------------------------------------------------


def test_a_shape_is_typed_as_preset_batch_and_microbatch():
    case = speed.case_of("pythia-14m:32:8")
    assert (case.preset, case.batch, case.microbatch) == ("pythia-14m", 32, 8)
    assert case.text == "pythia-14m:32:8"
    for wrong in ("pythia-14m", "pythia-14m:32", "pythia-14m:32:x", "pythia-14m:32:0", "a:1:2:3"):
        with pytest.raises(UserError, match="preset:batch:microbatch"):
            speed.case_of(wrong)
    with pytest.raises(UserError, match="must divide"):
        speed.case_of("tiny-s:7:2")


def test_a_wrong_setting_is_refused_before_anything_is_made(runs):
    order = speed.Order(shapes=(CASE,), runs=1, overrides=("ppo.klcoef=1",))
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


def test_a_preset_of_the_bench_has_larger_models_of_its_family():
    for preset, changes in speed.LARGER.items():
        sizes = [policy_parameters(shape_of(make_config(preset).base))]
        for one in changes:
            made = make_config(preset, name="bench", overrides=(one,))
            sizes.append(policy_parameters(shape_of(made.base)))
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1]
