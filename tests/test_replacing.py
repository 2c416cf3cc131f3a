"""Other code makes nothing stale, and status says so; REPLACE makes anew, and goes on."""

import json
import time
from contextlib import suppress
from dataclasses import replace as replaced
from pathlib import Path

import pytest

from reports.sharing.status import status
from stages.config.command_line import make_config
from stages.config.config import UserError
from stages.pipeline.runner import StageFailedError
from stages.runs import machine as code
from stages.runs import run as runs_module
from stages.runs.machine import code_of
from stages.runs.manifest import changed_code, lock_of, partial_of, stage_folder, why_not
from stages.runs.run import open_stage
from tests.lib.asserts import refusal_of
from tests.lib.pipeline import EVALUATED, Recorder, make, named, planned

ROOT = Path(__file__).parents[1]
TINY = make_config("tiny")
ALL_GOALS = ("sft", "rm", "ppo", "eval")
GAE = "stages/functional.py"
AFTER_PPO = EVALUATED[EVALUATED.index("ppo") :]


@pytest.fixture
def edit(monkeypatch):
    """Makes a file look as if its code had another hash; an empty hash undoes it."""
    parsed = code._parsed
    edited: dict[Path, str] = {}

    def parsed_now(path: Path) -> tuple[str, list[str]]:
        return edited.get(path) or parsed(path)[0], parsed(path)[1]

    monkeypatch.setattr(code, "_parsed", parsed_now)
    return lambda name, other: edited.update({ROOT / name: other})


def interrupt(stage: str) -> None:
    """A stage of the preset that a Ctrl-C ends; it can go on."""
    with suppress(KeyboardInterrupt), open_stage(TINY, stage) as run:
        run.resume.mkdir()
        raise KeyboardInterrupt


def test_the_code_of_a_stage_is_its_import_closure_and_nothing_above_it():
    files = set(code_of("stages.ppo"))
    assert {"stages/ppo.py", GAE, "stages/runs/run.py", "stages/rl/advantages.py"} <= files
    assert not any(name.startswith(("eval/", "reports/")) for name in files)
    assert "stages/dpo.py" not in files
    assert all((ROOT / name).is_file() for name in files)
    assert "eval/judge.py" not in code_of("stages.base")


def test_comments_docstrings_and_layout_change_no_hash_and_a_formula_does(tmp_path, monkeypatch):
    formula = "delta + gamma * lam * running"
    hashes = []
    for number, (old, new) in enumerate(
        (
            ("", ""),
            ("\ndef ", "\n# A comment.\n\n\n\ndef "),
            ('"""', '"""Other words. '),
            (formula, f"({formula.replace(' ', '  ')})"),
            (formula, formula.replace("lam", "(0.5 * lam)")),
        )
    ):
        root = tmp_path / str(number)
        (root / "stages").mkdir(parents=True)
        (root / GAE).write_text((ROOT / GAE).read_text().replace(old, new, 1 if old else 0))
        monkeypatch.setattr(code, "ROOT", root)
        hashes.append(code_of("stages.functional"))
    assert hashes[0] == hashes[1] == hashes[2] == hashes[3] != hashes[4]
    assert list(hashes[0]) == [GAE]


def test_a_broken_formula_makes_nothing_stale_and_status_says_who_was_made_without_it(runs, edit):
    make(TINY, *ALL_GOALS)
    assert all("ok*" not in line for line in status()[:2])
    edit(GAE, "broken")
    assert make(TINY, *ALL_GOALS) == []
    assert all(why_not(TINY, stage) is None for stage in EVALUATED)
    assert changed_code(TINY, "ppo") == [GAE]
    lines = status()
    assert all(len(line) <= 80 for line in lines)
    assert "ok*" in lines[1]
    text = " ".join(line.strip() for line in lines)
    assert f"ppo was made with other code ({GAE})" in text.replace("ppo: was", "ppo was")


def test_a_stage_that_goes_on_with_other_code_says_so_then_and_when_it_has_finished(
    runs, edit, capsys
):
    interrupt("sft")
    edit(GAE, "broken")
    with open_stage(TINY, "sft") as run:
        assert run.resume.is_dir()
        assert capsys.readouterr().err == (
            f"sft goes on with other code than it began with ({GAE}): REPLACE=sft begins it anew\n"
        )
        run.finish({})
    assert changed_code(TINY, "sft") == [GAE]
    edit(GAE, "")  # neither version made all of it
    assert changed_code(TINY, "sft") == [GAE]


def test_replace_makes_all_stages_of_the_goals_anew_though_nothing_differs(runs):
    make(TINY, *ALL_GOALS)
    assert make(TINY, *ALL_GOALS, replace="1") == EVALUATED[1:]  # all but base
    aside = {path.name for path in (runs / "tiny/seed44413/aside").iterdir()}
    assert {"sft-1", "ppo-1", "judge-facts-1"} <= aside
    time.sleep(1)  # a manifest names the second in which it finished
    assert make(TINY, "ppo", replace="1") == ["ppo"]
    assert make(TINY, *ALL_GOALS) == ["report"]  # PPO came out the same, at another time


def test_replace_makes_all_anew_that_was_made_with_other_code(runs, edit):
    make(TINY, *ALL_GOALS)
    edit(GAE, "broken")
    of_base = changed_code(TINY, "base")
    made = make(TINY, "eval", replace="1")
    assert {"sft", "rm", "ppo", "summaries"} <= set(made)
    assert ("base" in made) == bool(of_base)
    assert not any(changed_code(TINY, stage) for stage in EVALUATED)
    assert make(TINY, *ALL_GOALS) == []


def test_replace_takes_several_stages_and_what_follows_from_any(runs):
    make(TINY, *ALL_GOALS, "rloo")
    after = [stage for stage in AFTER_PPO if stage != "ppo"]
    assert make(TINY, *ALL_GOALS, "rloo", replace="rloo ppo") == ["ppo", "rloo", *after]
    for goals, replace, message in (
        (ALL_GOALS, "ppo poo", "unknown stage 'poo': did you mean ppo or dpo?"),
        (("sft",), "ppo", "REPLACE=ppo: no goal here makes it: add ppo"),
    ):
        assert refusal_of(make, TINY, *goals, replace=replace) == message


def test_other_settings_are_replaced_and_nothing_is_lost(runs):
    make(named("ppo.lam=0.9"))
    assert make(named("ppo.lam=0.5"), "ppo", replace="1") == ["ppo"]
    recorded = runs / "mine/seed44413/aside/ppo-1/config.json"
    assert json.loads(recorded.read_text())["ppo"]["lam"] == 0.9
    assert make(named("ppo.lam=0.5")) == ["report"]
    with pytest.raises(UserError, match="stage sft was made with other settings"):
        make(named("ppo.lam=0.5", "sft.epochs=3"), replace="ppo")


def test_replace_leaves_the_stages_of_an_upstream_alone(runs):
    make(TINY, *ALL_GOALS)
    ablation = named("ppo.lam=0.5", upstream="tiny")
    make(ablation)
    assert make(ablation, *ALL_GOALS, replace="1") == AFTER_PPO
    assert not (runs / "tiny/seed44413/aside").exists()
    of_rm = replaced(named("rm.epochs=3", upstream="tiny"), name="other")
    for config in (ablation, of_rm):
        make(config)
        with pytest.raises(UserError, match="REPLACE=sft: no goal here makes it: leave out UP"):
            make(config, *ALL_GOALS, replace="sft")
    assert make(of_rm, replace="rm")[:3] == ["rm", "normalize", "ppo"]


def test_an_interrupted_replace_goes_on_without_it(runs):
    make(TINY, *ALL_GOALS)
    with pytest.raises(StageFailedError):
        Recorder(replace="sft", fails="ppo").run(planned(TINY, *ALL_GOALS))
    interrupt("ppo")
    assert make(TINY, *ALL_GOALS) == AFTER_PPO
    assert not partial_of(stage_folder(TINY, "ppo")).exists()


def test_a_replace_moves_nothing_while_another_process_makes_one_of_its_stages(runs):
    make(TINY, *ALL_GOALS)
    summaries = stage_folder(TINY, "summaries")
    with (
        runs_module.held(lock_of(summaries), "summaries"),
        pytest.raises(UserError, match="stage summaries is already under way"),
    ):
        make(TINY, "eval", replace="ppo")
    assert not (runs / "tiny/seed44413/aside").exists()
    assert make(TINY, *ALL_GOALS) == []
    assert make(TINY, "eval", replace="ppo") == AFTER_PPO
