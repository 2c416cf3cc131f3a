"""The page about planted errors gives each the verdict that fabricated runs bear out."""

import json
import shutil
from pathlib import Path

import pytest

from reports import planted_page
from reports.parts import page, watched
from reports.parts.collect import Record, find_runs
from reports.parts.run_report import where
from reports.sharing import publish
from stages.finished import stage_folder
from stages.running.files import file_hash
from stages.settings import config as settings
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from tests.fabricated_runs import fabricate, write_rows

SEEDS = (1, 2, 3)
POSTS = 20
REFUSAL = "step 0: the first ratio is not 1"
ERRORS = {
    "stopped": {"stage": "ppo", "what": "A check sees it."},
    "worse": {"stage": "ppo", "what": "It wins less."},
    "longer": {"stage": "ppo", "what": "It writes more."},
    "unpaired": {"stage": "rm", "what": "The reward model is wrong."},
    "harmless": {"stage": "ppo", "what": "Nothing sees it."},
}
KEYS = ("objective/kl", "policy/eos_rate", "objective/scores", "val/explained_variance")


def wins(count):
    return [1.0] * count + [0.0] * (POSTS - count)


def learn(config, length=(20.0,) * 10, ratio=1.0):
    """PPO's updates of a run: all numbers stand still but for the length of responses."""
    rows = [
        {"step": step, "policy/response_length": value + config.seed / 10, "val/ratio": ratio}
        | dict.fromkeys(KEYS, 0.5 + config.seed / 100)
        for step, value in enumerate(length, start=1)
    ]
    write_rows(stage_folder(config, "ppo") / "metrics.jsonl", rows)


def run(name="", seed=1, won=10, **changes):
    """A finished run that wins so many posts, with the name of its error; or other curves of it."""
    upstream = "tiny" if name and ERRORS[name]["stage"] == "ppo" else ""
    label = f"tiny-planted-{name}" if name else "tiny"
    config = make_config("tiny", name=label, seed=seed, upstream=upstream)
    curves = {key: changes.pop(key) for key in ("length", "ratio") if key in changes}
    if not stage_folder(config, "ppo").exists():
        fabricate(config, scores=wins(won), texts=[f"{name} {x}" for x in range(9)], **changes)
    learn(config, **curves)


@pytest.fixture
def places(runs):
    """Three seeds of the default and of five errors, one of which a check has refused."""
    for seed in SEEDS:
        run(seed=seed)
        run("worse", seed, won=5 - seed)
        run("longer", seed, won=9 + seed, length=(20.0,) * 3 + (26.0,) + (20.0,) * 2 + (24.0,) * 4)
        run("unpaired", seed, won=9 + seed, accuracy=0.6)
        run("harmless", seed, won=9 + seed, length=(20.0, 40.0, 20.0))
        folder = runs / f"tiny-planted-stopped/seed{seed}"
        folder.mkdir(parents=True)
        (folder / "refused.json").write_text(json.dumps({"stage": "ppo", "message": REFUSAL}))
    return runs


def collected(*names):
    return planted_page.collect("tiny", {name: ERRORS[name] for name in names or ERRORS})


def write_page(places):
    file = places / "tiny" / "planted-errors.json"
    file.write_text(json.dumps(ERRORS))
    planted_page.main(["--name", "tiny", "--errors", str(file)])


def text_of(*names):
    return page.to_markdown("planted", "x", planted_page.blocks(*collected(*names)))


def cells(text, error):
    line = next(line for line in text.splitlines() if line.startswith(f"| {error} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_each_error_has_its_verdict_and_the_first_sentence_counts_them(places):
    _, planted, left_out = collected()
    assert left_out == []
    assert {wrong.name: wrong.verdict for wrong in planted} == {
        "stopped": "refused by a check, step 0",
        "worse": "found by the win rate",
        "longer": "betrayed by response length from update 7",
        "unpaired": "betrayed by held-out accuracy before PPO",
        "harmless": "not found",
    }
    assert planted_page.summary(planted) == (
        "2 of 5 are found by the win rate or refused by a check; betrayed by a number alone:"
        " longer, unpaired; not found: harmless."
    )


def test_errors_that_cost_win_rate_are_counted_again_among_all_of_them(places):
    _, planted, _ = collected("worse", "harmless")  # -30, -35, -40: p = 0.0067, twice that 0.013
    said = (
        "With no check in the way 1 of 2 lowers the win rate reliably. After Holm's correction for"
    )
    assert planted_page.summary(planted).startswith("1 of 2 is found by the win rate or refused")
    assert planted_page.summary(planted).endswith(f"{said} all 2 errors, 1 of 1 remains.")


def test_a_row_says_the_difference_the_seeds_and_the_first_number_beside_the_defaults(places):
    text = text_of()
    what, stage, _, rate, over, each, first = cells(text, "worse")
    assert (rate, each) == ("-35.0", "-30.0, -35.0, -40.0")
    assert over == "[-47.4, -22.6]"  # 4.303 * 5 / sqrt(3) on either side
    assert (first, stage, what) == ("–", "ppo", "It wins less.")
    assert cells(text, "longer")[-1] == "response length from update 7: 24.20, default's 20.20"
    assert cells(text, "unpaired")[-1] == "held-out accuracy before PPO: 60.0%, default's 78.1%"
    assert cells(text, "stopped")[3:6] == ["–"] * 3
    assert f"| stopped | 2 | {REFUSAL} |" in text


def test_the_page_says_whose_runs_the_rule_and_its_false_alarms(places):
    text = text_of("worse", "harmless")
    assert "Run tiny, preset tiny, seeds 1, 2, 3." in text
    assert "widened on either side by half its width or by a floor" in text
    said = "of the 3 ways to hold 1 of the default's 3 seeds against the other 2, as if with an"
    assert f"{said} error, 0 raise one. The rule asks more" in text
    assert "What checks said" not in text
    run(seed=3, length=(29.0,) * 10)  # a default that is unlike the others
    assert f"{said} error, 1 raise one (response length). The rule asks more" in text_of("worse")
    run(seed=4)
    assert "would have seen, over 3 seeds, of errors" in text_of("worse")  # the errors have three


def test_false_alarms_are_counted_with_as_many_seeds_as_the_errors_have(places):
    for seed in (4, 5, 6):
        run(seed=seed, length=(30.0,) * 10)
    # Of the 20 ways to take 3 seeds of 6, the 3 long ones and the 3 short ones stand apart. None
    # of the six does alone, and an error has 3.
    default = find_runs("tiny")[0]
    assert [names for names in watched.false_alarms(default, 1) if names] == []
    said = "of the 20 ways to hold 3 of the default's 6 seeds against the other 3, as if with an"
    for error in ("worse", "stopped"):
        assert f"{said} error, 2 raise one (response length)." in text_of(error)
    shutil.rmtree(places / "tiny-planted-harmless/seed3")
    said = "of the 15 ways to hold 2 of the default's 6 seeds against the other 4"
    assert said in text_of("worse", "harmless")


@pytest.mark.parametrize(
    ("default", "floor", "own", "outside"),
    [
        ((20, 24), 1.0, (26.1, 27), True),  # the range of 4 is widened by 2 on either side
        ((20, 24), 1.0, (26, 27), False),
        ((20, 24), 1.0, (17.9, 17), True),
        ((20, 24), 1.0, (17.9, 26.1), False),  # not on one side
        ((20, 24), 3.0, (26.9, 28), False),  # the floor is more than half the width
        ((20, 24), 3.0, (27.1, 28), True),
        ((20,), 1.0, (21.5, 22), True),
    ],
)
def test_the_range_is_widened_by_half_its_width_or_by_the_floor(default, floor, own, outside):
    def twice(value):
        return {1: value, 2: value}

    signal = watched.Signal(name="x", series=twice, floor=floor)
    seen = watched.betrayal(signal, own, default)
    assert (seen is not None) == outside


def test_the_processors_of_the_runs_with_errors_are_named_too(places):
    path = places / "tiny-planted-worse/seed2/ppo/manifest.json"
    path.write_text(path.read_text().replace("AVX2", "AVX512"))
    named = "Computed on: CPU, 2 cores (AMD EPYC, AVX2) / CPU, 2 cores (AMD EPYC, AVX512);"
    for error, is_named in (("worse", True), ("harmless", False)):
        default, planted, _ = collected(error)
        assert (named in where([*default, *planted_page.finished(planted)])) == is_named


def test_a_number_must_lie_outside_in_all_seeds_on_one_side_and_twice(places):
    default = find_runs("tiny")[0]
    length = next(signal for signal in watched.SIGNALS if signal.name == "response length")
    runs = find_runs("tiny-planted-longer")[0]
    seen = watched.betrayal(length, runs, default)
    assert seen is not None
    assert seen.update == 7  # update 4 stood alone
    assert seen.value == pytest.approx(24.2)
    run("longer", 2, length=(20.0,) * 10)
    assert watched.betrayal(length, find_runs("tiny-planted-longer")[0], default) is None


def test_the_first_ratio_is_that_of_the_policys_first_update_alone(places):
    for seed in SEEDS:
        run(seed=seed, length=(20.0,) * 18)
        run("harmless", seed, length=(20.0,) * 18, ratio=1.2)
    # In the sixteen updates before, the critic learns alone.
    assert collected("harmless")[1][0].verdict == "betrayed by first ratio from update 17"


def test_an_error_that_a_check_refuses_shows_what_it_does_and_in_how_many_seeds(places):
    for seed in SEEDS:
        run("stopped", seed, won=5)
    _, planted, left_out = collected("stopped")
    assert planted[0].verdict == "refused by a check, step 0"
    assert planted_page.win_rate_cells(planted[0])[0] == "-25.0"
    assert left_out == []
    said = planted_page.summary(collected()[1])
    assert "harmless. With no check in the way 1 of 5 lowers the win rate reliably. After" in said
    (places / "tiny-planted-stopped/seed2/refused.json").unlink()
    assert collected("stopped")[1][0].verdict == "refused by a check in 2 of 3 seeds, step 0"


def test_what_is_missing_or_not_the_same_run_is_said(places):
    errors = {"worse": ERRORS["worse"], "unheard": {"stage": "ppo", "what": "?"}}
    _, planted, left_out = planted_page.collect("tiny", errors)
    assert [wrong.name for wrong in planted] == ["worse"]
    assert left_out[0].startswith("unheard is left out: ")
    with pytest.raises(UserError, match="no error has a finished run"):
        planted_page.collect("tiny", {"unheard": errors["unheard"]})
    path = places / "tiny-planted-unpaired/seed2/sft/manifest.json"
    path.write_text(path.read_text().replace('"content": "', '"content": "x'))
    notes = planted_page.oddities(
        "unpaired",
        ERRORS["unpaired"],
        Record("n", "tiny", 2, {}, {"sft": json.loads(path.read_text())}, {}),
        find_runs("tiny")[0][1],
    )
    assert notes == ["unpaired, seed 2: stage sft is not the default's."]


def test_the_command_writes_the_page_and_prints_its_sentences(places, capsys):
    write_page(places)
    said = capsys.readouterr().out
    assert said.startswith("2 of 5 are found by the win rate or refused by a check;")
    assert "worse: found by the win rate (-35.0 points of win rate" in said
    written = {path.name for path in (settings.RUNS / "reports").iterdir()}
    ends = (".html", ".md", ".json", "-numbers", "-errors.svg")
    files = {f"planted-tiny{ending}" for ending in ends}
    assert written == files


def test_the_page_is_published_with_its_run_and_with_what_refused_an_error(
    places, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_page(places)
    publish.main(["--kinds", "planted"])
    (entry,) = json.loads((publish.GENERATED / publish.RECORD).read_text())["pages"].values()
    assert (entry["kind"], entry["about"]) == ("planted", ["tiny"])
    assert entry["runs"]["tiny-planted-stopped"] == list(SEEDS)
    assert entry["runs"]["tiny-planted-unpaired"] == list(SEEDS)
    for file, hash_ in entry["manifests"].items():
        assert file_hash(places / file) == hash_
    assert {Path(file).parts[0] for file in entry["files"]} == {
        "planted-tiny.md",
        "planted-tiny.html",
        "planted-tiny-numbers",
        "planted-tiny-errors.svg",
    }
    refusal = places / "tiny-planted-stopped/seed2/refused.json"
    before = refusal.read_text()
    for change in (refusal.unlink, lambda: refusal.write_text(before.replace("0", "1"))):
        change()
        with pytest.raises(SystemExit):
            publish.main(["--kinds", "planted"])
        assert (
            "planted-tiny was made from an earlier tiny-planted-stopped/seed2/refused.json:"
            " run `make planted PRESET=tiny NAME=tiny`"
        ) in capsys.readouterr().err
    refusal.write_text(before)
    manifest = places / "tiny-planted-worse/seed3/ppo/manifest.json"
    manifest.write_text(f"{manifest.read_text()} ")
    with pytest.raises(SystemExit):
        publish.main(["--kinds", "planted"])
    assert "made from an earlier tiny-planted-worse/seed3/ppo: run" in capsys.readouterr().err
