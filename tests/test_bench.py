"""The bench: an update measured whole, the same tokens for peers, figures, check, page."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reports import bench, bench_page
from reports.publish import GENERATED, RECORD
from stages.planning.lengths import lengths_of
from stages.planning.memory import Setting
from stages.planning.shapes import policy_parameters, scorer_parameters, shape_of
from stages.planning.work import update_flops
from stages.rehearsal import parts, speed
from stages.rehearsal.peers import TRL, Peer, cut_queries, interpreter_of, run_peer, task_of
from stages.settings import config as settings
from stages.settings.command_line import config_of, make_config
from stages.settings.config import UserError
from stages.system.files import file_hash

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
    peer = Peer(name="gone", label="Gone 1", packages=(), module="stages.rehearsal.no_such_module")
    found = run_peer(peer, Path(sys.executable), prepared, config_of(ASKED))
    assert "no_such_module" in found["failed"]
    assert "\n" not in found["failed"]


def test_a_peer_that_cannot_be_installed_is_left_out_with_the_reason(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "constraints.txt").write_text("")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UserError, match=r"TRL 1\.9\.2 cannot be installed: .*torch"):
        interpreter_of(TRL)
    assert not (runs / "peers" / "trl" / "installed").exists()


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


# -- figures and the check -------------------------------------------------------------------------

NAME = "tiny-s:4:2"
FLOPS = {"sample": 1e9, "measure": 2e9, "score": 1e9, "learn": 6e9}


def one_run(seconds, learn, peak):
    return {
        "seconds": seconds,
        "sample": 1.0,
        "measure": 0.5,
        "score": 0.5,
        "learn": learn,
        "peak": peak,
        "tokens": 400,
        "flops": FLOPS,
        "floor": 1e6,
        "queries": {"rows": 4, "mean": 72.0, "longest": 90},
    }


def found_of(ours=(20.0, 22.0), peer=(50.0, 40.0), peak=3e6):
    """A bench at 1 Gflop/s: an update of 10 Gflop needs 10 s, learning 6 s."""
    measured = {
        "ours": [one_run(one, 0.6 * one, peak) for one in ours],
        "trl": [one_run(one, 0.9 * one, 6e6) for one in peer],
    }
    shape = {"preset": "tiny-s", "batch": 4, "microbatch": 2, "response": 28, "epochs": 4}
    shape |= {"parameters": 200_000, "texts": "synthetic token ids", "measured": measured}
    step = {"seconds": 3.0, "tokens": 300, "flops": 1.5e9, "peak": 1e6}
    start = {"axis": "", "value": 200_000, "update": one_run(5.0, 3.0, 1e6)}
    points = [(speed.BATCH, 8), (speed.QUERY, 28), (speed.RESPONSE, 7), (speed.MODEL, 900_000)]
    return {
        "about": {
            "date": "2026-11-22T00:00:00+00:00",
            "code_version": "abc",
            "machine": "a processor",
            "device": "CPU, 2 cores, threads: 2",
            "threads": 2,
            "versions": {"torch": "2.13.0"},
            "peers": {"trl": "TRL 1.9.2"},
            "left_out": [],
            "runs": 2,
            "overrides": [],
            "texts": "synthetic token ids",
            "matrix_rate": 1e9,
        },
        "shapes": {NAME: shape},
        "stages": {NAME: {step_name: [step, step] for step_name in speed.STAGES.values()}},
        "growth": [start, *(start | {"axis": axis, "value": value} for axis, value in points)],
    }


def test_figures_are_the_fastest_run_its_spread_and_its_distance_from_the_bound():
    ours, peer = bench.figures(found_of(), NAME)
    assert (ours.seconds, ours.episodes, ours.tokens) == (20.0, 0.2, 20.0)
    assert ours.spread == pytest.approx(0.1)
    assert (ours.above, ours.learning_above) == (2.0, 2.0)  # 20 s of 10 s, 12 s of 6 s
    assert (peer.label, peer.seconds, peer.above) == ("TRL 1.9.2", 40.0, 4.0)
    assert (ours.peak, peer.peak) == (3e6, 6e6)


def worse_than_published(**changes):
    return bench.compare(found_of(), found_of(**changes))[1]


def test_the_check_fails_beyond_15_percent_of_time_and_2_of_memory():
    lines, worse = bench.compare(found_of(), found_of())
    assert len(lines) == 7  # bound and TRL: time; bound: learning; TRL: memory; three stages
    assert worse == []
    assert worse_than_published(ours=(22.8,)) == []
    slow = worse_than_published(ours=(23.2,))
    assert [line.split(": ")[1] for line in slow] == [
        "time over the bound",
        "learning over the bound",
        "time over TRL 1.9.2",
    ]
    assert worse_than_published(peak=3.05e6) == []
    (line,) = worse_than_published(peak=3.07e6)
    assert line == f"{NAME}: memory over TRL 1.9.2: 0.50 published, 0.51 now (+2%, allowed +2%)"
    assert worse_than_published(ours=(10.0,), peak=1e6) == []  # better is no failure


def test_a_slower_machine_is_no_failure_but_a_missing_peer_is():
    slower = found_of(ours=(40.0,), peer=(80.0,))
    slower["about"]["matrix_rate"] = 0.5e9
    slower["stages"] = {
        NAME: {k: [v[0] | {"seconds": 6.0}] for k, v in slower["stages"][NAME].items()}
    }
    assert bench.compare(found_of(), slower)[1] == []
    alone = found_of()
    alone["shapes"][NAME]["measured"]["trl"] = [{"failed": "no memory"}]
    worse = bench.compare(found_of(), alone)[1]
    assert [line.split(": ")[1] for line in worse] == [
        "time over TRL 1.9.2",
        "memory over TRL 1.9.2",
    ]
    assert all("not measured now" in line for line in worse)
    assert bench.failures(alone) == [f"TRL 1.9.2 at {NAME}: no memory"]


# -- the page --------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "RUNS", Path("runs"))
    return tmp_path


def test_the_page_says_who_is_faster_and_by_how_much(place):
    path = bench_page.write(found_of(), settings.RUNS / "bench")
    markdown = path.with_suffix(".md").read_text("utf-8")
    assert "2.00 times the episodes a second of TRL 1.9.2, in 0.50 of its memory" in markdown
    assert "2.00 times the seconds that counting gives (learning alone 2.00)" in markdown
    rows = [line.split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    cells = {row[0].strip("| "): row[1:] for row in rows}
    assert cells["ours"][:4] == ["0.20", "20", "20.00", "10.0%"]
    assert cells["lower bound"][2] == "10.00"
    assert cells["ours / TRL 1.9.2"][2] == "0.50"
    assert cells["dpo step"][-1].strip(" |") == "2.00"
    for said in ("episodes", "longest query", "sampled tokens", "parameters", "a processor"):
        assert said in markdown
    assert json.loads((path.parent / "bench.json").read_text("utf-8")) == found_of()


def test_a_page_without_peers_says_why(place):
    found = found_of()
    found["about"] |= {"peers": {}, "left_out": ["TRL 1.9.2 cannot be installed: no index"]}
    del found["shapes"][NAME]["measured"]["trl"]
    markdown = bench_page.write(found, place / "bench").with_suffix(".md").read_text("utf-8")
    assert "> **Note.** TRL 1.9.2 cannot be installed: no index" in markdown


def test_publishing_copies_page_and_numbers_with_true_hashes(place, capsys):
    bench_page.write(found_of(), settings.RUNS / "bench")
    bench_page.main(["--publish"])
    entry = json.loads((GENERATED / RECORD).read_text())["pages"]["bench"]
    assert set(entry["files"]) == {"bench.md", "bench.html", "bench.json"}
    for name, hash_ in entry["files"].items():
        assert file_hash(GENERATED / name) == hash_
        assert (GENERATED / name).read_bytes() == (settings.RUNS / "bench" / name).read_bytes()
    assert entry["code_versions"] == ["abc"]
    assert entry["devices"] == ["a processor: CPU, 2 cores, threads: 2"]


def test_what_may_not_be_published_or_checked_is_refused_in_one_line(place, capsys):
    for words, said in (
        (["--publish"], "run `make bench`"),
        (["--check"], "no bench is published"),
    ):
        with pytest.raises(SystemExit):
            bench_page.main([words])
        assert said in capsys.readouterr().err
    dirty = found_of()
    dirty["about"]["code_version"] = "abc-dirty"
    bench_page.write(dirty, settings.RUNS / "bench")
    with pytest.raises(SystemExit):
        bench_page.main(["--publish"])
    assert "not committed" in capsys.readouterr().err
    assert not GENERATED.exists()


@pytest.mark.parametrize(("seconds", "code"), [(20.0, None), (24.0, 2)])
def test_a_check_measures_what_is_published_and_ends_with_an_error_where_it_is_worse(
    place, capsys, monkeypatch, seconds, code
):
    bench_page.write(found_of(), GENERATED)
    asked = []

    def measured(order, folder):
        asked.append(order)
        return copy.deepcopy(found_of(ours=(seconds,)))

    monkeypatch.setattr(speed, "measure_in", measured)
    if code is None:
        bench_page.main(["--check"])
    else:
        with pytest.raises(SystemExit) as ended:
            bench_page.main(["--check"])
        assert ended.value.code == code
        assert "3 of 7 ratios are worse" in capsys.readouterr().err
    assert [case.text for case in asked[0].shapes] == [NAME]
    assert not asked[0].growth


# -- installing ------------------------------------------------------------------------------------


def test_tools_for_developers_are_installed_by_the_goals_that_use_them_alone():
    def says(*words):
        made = subprocess.run(
            ["make", "-n", "VENV=no-such-folder", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout

    for goal in ("install", "rehearse", "bench", "scaling", "smollm"):
        assert "pip install" in says(goal), goal
        assert "[dev]" not in says(goal), goal
    for goal in ("check", "test", "chaos"):
        assert says(goal).index("isolation .\n") < says(goal).index("[dev]"), goal


def test_make_bench_and_publish_start_the_page(tmp_path):
    makefile = ["make", "-n", "-f", str(ROOT / "Makefile"), "VENV="]
    for words, said in (
        (["bench"], "reports.bench_page --shapes pythia-14m:32:8 pythia-70m:16:4 --runs 2"),
        (["bench", "CHECK=1", "SHAPES=tiny-s:4:2"], "--shapes tiny-s:4:2 --runs 2   "),
        (["bench", "CHECK=1"], "--check"),
        (["publish", "NAME=bench"], "reports.bench_page --publish"),
        (["publish"], "reports.publish"),
        (["publish", "NAME=tiny bench"], "reports.publish --names tiny"),
    ):
        made = subprocess.run([*makefile, *words], cwd=ROOT, capture_output=True, text=True)
        assert said.strip() in " ".join(made.stdout.replace("\\\n", " ").split()), words
    alone = subprocess.run([*makefile, "publish", "NAME=bench"], cwd=ROOT, capture_output=True)
    assert b"reports.publish" not in alone.stdout


def test_a_preset_of_the_bench_has_larger_models_of_its_family():
    for preset, changes in speed.LARGER.items():
        sizes = [policy_parameters(shape_of(make_config(preset).base))]
        for one in changes:
            made = make_config(preset, name="bench", overrides=(one,))
            sizes.append(policy_parameters(shape_of(made.base)))
        assert sizes == sorted(sizes)
        assert sizes[0] < sizes[-1]
