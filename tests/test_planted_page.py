"""The page about planted errors gives each the verdict that fabricated runs bear out."""

import json

import pytest

from reports import planted_page
from reports.parts import page, watched
from reports.parts.collect import Record, find_runs
from stages.finished import stage_folder
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


def text_of(*names):
    return page.to_markdown("planted", "x", planted_page.blocks(*collected(*names)))


def cells(text, error):
    line = next(line for line in text.splitlines() if line.startswith(f"| {error} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_each_error_has_its_verdict_and_the_first_sentence_counts_them(places):
    _, planted, left_out = collected()
    assert left_out == []
    assert {wrong.name: wrong.verdict for wrong in planted} == {
        "stopped": "refused by a check",
        "worse": "found by the win rate",
        "longer": "betrayed by response length from update 7",
        "unpaired": "betrayed by held-out accuracy before PPO",
        "harmless": "not found",
    }
    assert planted_page.summary(planted) == (
        "2 of 5 are found by the win rate or refused by a check; betrayed by a number alone:"
        " longer, unpaired; not found: harmless."
    )


def test_a_row_says_the_difference_the_seeds_and_the_first_number_beside_the_defaults(places):
    text = text_of()
    _, rate, over, each, first, seen, _, _, stage, what = cells(text, "worse")
    assert (rate, each) == ("-35.0", "-30.0, -35.0, -40.0")
    assert over == "[-47.4, -22.6]"  # 4.303 * 5 / sqrt(3) on either side
    assert (first, seen, stage, what) == ("–", "–", "ppo", "It wins less.")
    *_, first, seen, value, default, _, _ = cells(text, "longer")
    assert (first, seen) == ("response length", "from update 7")
    assert (value, default) == ("24.20", "20.20")
    assert cells(text, "unpaired")[4:8] == ["held-out accuracy", "before PPO", "60.0%", "78.1%"]
    assert cells(text, "stopped")[1:4] == ["–"] * 3
    assert f"| stopped | 2 | {REFUSAL} |" in text


def test_the_page_says_whose_runs_the_rule_and_its_false_alarms(places):
    text = text_of("worse", "harmless")
    assert "Run tiny, preset tiny, seeds 1, 2, 3. Computed on: CPU, 2 cores" in text
    assert "widened on either side by half its width or by a floor" in text
    assert "each held alone against the others, these leave their range: none of them does" in text
    assert "What checks said" not in text
    run(seed=3, length=(29.0,) * 10)  # a default that is unlike the others
    assert "these leave their range: seed 3 (response length)" in text_of("worse")


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
        run("harmless", seed, ratio=1.2)
    # In the six updates before, the critic learns alone.
    assert collected("harmless")[1][0].verdict == "betrayed by first ratio from update 7"


def test_an_error_that_a_check_refuses_in_some_seeds_only_says_in_how_many(places):
    run("stopped", 2, won=10)
    (places / "tiny-planted-stopped/seed2/refused.json").unlink()
    _, planted, left_out = collected("stopped")
    assert planted[0].verdict == "refused by a check in 2 of 3 seeds"
    assert left_out == []


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
    file = places / "reports" / "planted-errors.json"
    file.parent.mkdir()
    file.write_text(json.dumps(ERRORS))
    planted_page.main(["--name", "tiny", "--errors", str(file)])
    said = capsys.readouterr().out
    assert said.startswith("2 of 5 are found by the win rate or refused by a check;")
    assert "worse: found by the win rate (-35.0 points of win rate" in said
    written = {path.name for path in (settings.RUNS / "reports").iterdir()}
    assert {"planted.html", "planted.md", "planted.json", "planted-numbers"} <= written
