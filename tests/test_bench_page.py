"""The page of the bench: figures, the check of ratios, publishing; and what `make` installs."""

import copy
import shlex
import subprocess
from pathlib import Path

import pytest

from reports.parts import page
from reports.sharing import publish
from reports.sharing.publish import GENERATED
from reports.speed import bench_page, speed
from stages.settings import config as settings
from stages.settings.config import UserError

ROOT = Path(__file__).parents[1]


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
    shape |= {"stage": "ppo", "samples_per_query": 1, "parameters": 200_000, "measured": measured}
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
            "matrix_rate": 1e9,
        },
        "shapes": {NAME: shape},
    }


def test_figures_are_the_fastest_run_its_spread_and_its_distance_from_the_bound():
    ours, peer = bench_page.figures(found_of(), NAME)
    assert (ours.seconds, ours.episodes, ours.tokens) == (20.0, 0.2, 20.0)
    assert ours.spread == pytest.approx(0.1)
    assert (ours.above, ours.learning_above) == (2.0, 2.0)  # 20 s of 10 s, 12 s of 6 s
    assert (peer.label, peer.seconds, peer.above) == ("TRL 1.9.2", 40.0, 4.0)
    assert (ours.peak, peer.peak) == (3e6, 6e6)


def worse_than_published(**changes):
    return bench_page.compare(found_of(), found_of(**changes))[1]


def test_the_check_fails_beyond_15_percent_of_time_and_2_of_memory():
    lines, worse = bench_page.compare(found_of(), found_of())
    assert len(lines) == 4  # bound and TRL: time; bound: learning; TRL: memory
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
    assert bench_page.compare(found_of(), slower)[1] == []
    alone = found_of()
    alone["shapes"][NAME]["measured"]["trl"] = [{"failed": "no memory"}]
    worse = bench_page.compare(found_of(), alone)[1]
    assert [line.split(": ")[1] for line in worse] == [
        "time over TRL 1.9.2",
        "memory over TRL 1.9.2",
    ]
    assert all("not measured now" in line for line in worse)
    assert bench_page.failures(alone) == [f"TRL 1.9.2 at {NAME}: no memory"]


# -- the page --------------------------------------------------------------------------------------


def test_the_page_says_who_is_faster_and_by_how_much(place):
    path = bench_page.write(found_of(), settings.RUNS / "bench")
    markdown = path.with_suffix(".md").read_text("utf-8")
    first = markdown.split("\n\n")[1]
    assert first.startswith("Ours makes 2.00 times the episodes a second of TRL 1.9.2, in 0.50 of")
    assert "Ours takes 2.00 times the seconds of the matrix products that" in first
    assert first.endswith("Measured on: CPU, 2 cores, threads: 2.")
    assert "| PPO, tiny-s | 0.20 | 0.10 | 2.00 | 0.50 | 2.00 | 2.00 |" in markdown
    rows = [line.split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    cells = {row[0].strip("| "): row[1:] for row in rows}
    assert cells["ours"][:4] == ["0.20", "20", "20.00", "10.0%"]
    assert cells["lower bound"][2] == "10.00"
    assert cells["ours / TRL 1.9.2"][2] == "0.50"
    for words in ("episodes", "sampled tokens", "a processor"):
        assert words in markdown
    assert page.record_of(path.parent, "bench")["made_from"]["measured"] == found_of()


def test_a_page_without_peers_says_why(place):
    found = found_of()
    found["about"] |= {"peers": {}, "left_out": ["TRL 1.9.2 cannot be installed: no index"]}
    del found["shapes"][NAME]["measured"]["trl"]
    markdown = bench_page.write(found, place / "bench").with_suffix(".md").read_text("utf-8")
    assert "> **Note.** TRL 1.9.2 cannot be installed: no index" in markdown


def test_the_bench_is_published_from_a_commit_alone(place, capsys):
    dirty = found_of()
    dirty["about"]["code_version"] = "abc-dirty"
    for found, said in ((dirty, "not committed"), (found_of(), "")):
        bench_page.write(found, settings.RUNS / "bench")
        if said:
            with pytest.raises(SystemExit):
                publish.main(["--pages", "bench"])
            assert said in capsys.readouterr().err
            with pytest.raises(SystemExit):
                bench_page.main(["--check"])
            assert "no bench is published" in capsys.readouterr().err
        else:
            publish.main(["--pages", "bench"])
    assert page.record_of(GENERATED, "bench")["made_from"]["measured"] == found_of()


@pytest.mark.parametrize(("seconds", "code"), [(20.0, None), (24.0, 2)])
def test_a_check_measures_what_is_published_and_ends_with_an_error_where_it_is_worse(
    place, capsys, monkeypatch, seconds, code
):
    bench_page.write(found_of(), GENERATED)
    orders = []

    def measured(order, folder):
        orders.append(order)
        return copy.deepcopy(found_of(ours=(seconds,)))

    monkeypatch.setattr(speed, "measure_in", measured)
    if code is None:
        bench_page.main(["--check"])
    else:
        with pytest.raises(SystemExit) as ended:
            bench_page.main(["--check"])
        assert ended.value.code == code
        assert "3 of 4 ratios are worse" in capsys.readouterr().err
    assert [case.text for case in orders[0].cases] == [NAME]


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
        assert says(goal).index("isolation . ") < says(goal).index("[dev]"), goal


def test_make_bench_and_publish_start_the_page(tmp_path):
    makefile = ["make", "-n", "-f", str(ROOT / "Makefile"), "VENV="]
    for words, said in (
        (["bench", "SHAPES=a:4:2 b:4:2"], "reports.speed.bench_page --shapes a:4:2 b:4:2 --runs=2"),
        (["bench", "CHECK=1", "SHAPES=tiny-s:4:2"], "--shapes tiny-s:4:2 --runs=2   "),
        (["bench", "CHECK=1"], "--check"),
        (["publish", "PAGES=tiny bench"], "reports.sharing.publish --pages tiny bench"),
    ):
        made = subprocess.run([*makefile, *words], cwd=ROOT, capture_output=True, text=True)
        typed = " ".join(shlex.split(made.stdout.replace("\\\n", " ")))
        assert said.strip() in typed, words


# -- what fails ------------------------------------------------------------------------------------


def test_a_shape_that_fails_is_left_out_and_the_others_are_kept(tmp_path, monkeypatch):
    bad, good = speed.case_of("tiny:4:2"), speed.case_of("tiny:8:4")

    def measured(order, case, *_):
        if case == bad:
            raise UserError("no memory")
        return {"measured": {"ours": [{"device": "cpu", "threads": 1, "matrix_rate": 2.0}]}}

    monkeypatch.setattr(speed, "_measure_shape", measured)
    monkeypatch.setattr(speed, "peer_interpreter", lambda: None)
    bench = speed.measure(speed.BenchRequest(cases=(bad, good), runs=1), tmp_path)
    assert list(bench["shapes"]) == ["tiny:8:4"]
    assert bench["about"]["left_out"] == ["tiny:4:2: no memory"]
    with pytest.raises(UserError, match=r"^tiny:4:2: no memory$"):
        speed.measure(speed.BenchRequest(cases=(bad,), runs=1), tmp_path)
