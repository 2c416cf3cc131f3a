"""Edited code makes no stage stale: it is recorded in manifests and named in warnings."""

from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.pipeline.plan import code_warnings
from stages.runs import code
from stages.runs.code import code_of
from stages.runs.files import read_json
from stages.runs.manifest import stage_folder
from stages.runs.run import open_stage
from stages.runs.staleness import changed_code
from tests.lib.fake_stages import finish, interrupt, run_stages, status_lines
from tests.lib.pipeline import Recorder, make, planned

ROOT = Path(__file__).parents[2]
TINY = make_config("tiny")
FORMULAS = "stages/functional.py"
ADVANTAGES = "stages/rl/advantages.py"


@pytest.fixture
def edit(monkeypatch):
    """Makes a file look as if it had another hash; an empty hash undoes it."""
    real = code._hash_and_imports
    edited: dict[Path, str] = {}

    def hash_and_imports(path: Path) -> tuple[str, list[str]]:
        digest, imported = real(path)
        return edited.get(path) or digest, imported

    monkeypatch.setattr(code, "_hash_and_imports", hash_and_imports)

    def set_hash(name: str, digest: str) -> None:
        edited[ROOT / name] = digest

    return set_hash


# -- what is recorded ------------------------------------------------------------------------------


def test_the_code_of_a_stage_is_what_its_module_reaches_by_imports():
    files = code_of("stages.ppo")

    assert {"stages/ppo.py", FORMULAS, ADVANTAGES, "stages/runs/run.py"} <= set(files)
    assert "stages/dpo.py" not in files
    for name in files:
        assert (ROOT / name).is_file()
        assert not name.startswith(("eval/", "reports/"))


def write_project(root: Path, *, text_of_c: str, unused_text: str = "") -> None:
    """Write a project of which `stages.a` imports `stages.b` and `stages.c`."""
    (root / "stages").mkdir(parents=True)
    (root / "stages/a.py").write_text("import json\nfrom stages import b\nfrom stages.c import d\n")
    (root / "stages/b.py").write_text("x = 1\n")
    (root / "stages/c.py").write_text(text_of_c)
    (root / "stages/unused.py").write_text(unused_text)


@pytest.mark.parametrize(
    ("text_of_c", "is_same"),
    [("x = 1\n", True), ("x = 2\n", False), ("x = 1  # a comment\n", False)],
    ids=["unchanged", "other code", "a comment"],
)
def test_the_hashes_depend_on_every_byte_of_the_files(tmp_path, monkeypatch, text_of_c, is_same):
    write_project(tmp_path / "before", text_of_c="x = 1\n")
    write_project(tmp_path / "after", text_of_c=text_of_c, unused_text="# edited")

    monkeypatch.setattr(code, "ROOT", tmp_path / "before")
    hashes_before = code_of("stages.a")
    monkeypatch.setattr(code, "ROOT", tmp_path / "after")
    hashes_after = code_of("stages.a")

    assert list(hashes_before) == ["stages/a.py", "stages/b.py", "stages/c.py"]
    assert (hashes_before == hashes_after) == is_same


# -- edited code -----------------------------------------------------------------------------------


def test_edited_code_makes_nothing_stale(runs, edit):
    run_stages(TINY, "ppo", "eval")
    edit(ADVANTAGES, "edited")
    assert changed_code(TINY, "ppo") == [ADVANTAGES]
    assert run_stages(TINY, "ppo", "eval") == []


def test_a_warning_names_edited_code_and_the_way_to_rerun(runs, edit):
    run_stages(TINY, "ppo")
    edit(ADVANTAGES, "edited")
    warning = f"ppo ran with different code: {ADVANTAGES}. To rerun: REPLACE=ppo"
    assert warning in code_warnings(TINY, ["sft", "ppo"])


def test_status_names_edited_code(runs, edit):
    run_stages(TINY, "ppo", "eval")
    edit(ADVANTAGES, "edited")

    lines = status_lines()

    assert f"  done, code changed  ppo: {ADVANTAGES}" in lines
    assert max(len(line) for line in lines) <= 80


def test_stages_with_the_same_edited_files_share_a_warning(runs, edit):
    run_stages(TINY, "rm")
    edit(FORMULAS, "edited")
    assert code_warnings(TINY, ["sft", "rm"]) == [
        f"sft, rm ran with different code: {FORMULAS}. To rerun: REPLACE='sft rm'"
    ]


def test_a_stage_of_an_upstream_is_named_without_a_way_to_rerun_it(runs, edit):
    run_stages(TINY, "rm")
    ablation = make_config("tiny", name="mine", upstream="tiny", overrides=("ppo.lam=0.5",))
    edit(FORMULAS, "edited")
    assert code_warnings(ablation, ["sft"]) == [f"sft ran with different code: {FORMULAS}."]


def test_replace_1_after_an_edit_reruns_only_the_stages_of_the_targets(runs, edit):
    run_stages(TINY, "ppo", "eval")
    edit(FORMULAS, "edited")
    assert run_stages(TINY, "ppo", replace="1") == ["ppo"]


# -- code that is edited while a stage is interrupted ----------------------------------------------


@pytest.fixture
def interrupted_then_edited(runs, edit, monkeypatch):
    """The hash of the formulas with which SFT began, before they were edited and committed."""
    run_stages(TINY, "data")
    monkeypatch.setattr("stages.runs.run.code_version", lambda: "first commit")
    partial = interrupt(TINY, "sft", update=3)
    attempt = read_json(partial / "attempt.json")
    edit(FORMULAS, "edited")
    monkeypatch.setattr("stages.runs.run.code_version", lambda: "second commit")
    return attempt["code"]["files"][FORMULAS]


def test_resuming_with_edited_code_warns(interrupted_then_edited, capsys):
    finish(TINY, "sft")
    assert (
        f"sft resumes with different code than it began with: {FORMULAS}. "
        "REPLACE=sft starts it over.\n"
    ) in capsys.readouterr().err


def test_the_manifest_of_a_resumed_stage_records_both_versions(interrupted_then_edited):
    finish(TINY, "sft")

    manifest = read_json(stage_folder(TINY, "sft") / "manifest.json")
    assert manifest["code_version"] == "second commit"
    assert manifest["code"]["files"][FORMULAS] == "edited"
    assert manifest["code"]["earlier"] == [
        {"code_version": "first commit", "files": {FORMULAS: interrupted_then_edited}}
    ]


def test_a_stage_that_two_versions_trained_stays_marked_whichever_runs_now(
    interrupted_then_edited, edit
):
    interrupt(TINY, "sft", update=5)
    with open_stage(TINY, "sft") as run:
        run.require("base")
        run.finish({})
    assert changed_code(TINY, "sft") == [FORMULAS]

    edit(FORMULAS, "")
    assert changed_code(TINY, "sft") == [FORMULAS]


# -- commands --------------------------------------------------------------------------------------

WARNING = (
    f"tiny seed 44413: base, sft ran with different code: {FORMULAS}. To rerun: REPLACE='base sft'"
)


def test_a_command_that_finds_nothing_to_do_names_the_edited_file(runs, edit, capsys):
    make(TINY, "sft")
    edit(FORMULAS, "edited")
    capsys.readouterr()

    assert make(TINY, "sft") == []
    assert WARNING in capsys.readouterr().err.splitlines()


def test_a_dry_command_names_the_edited_file(runs, edit, capsys):
    make(TINY, "sft")
    edit(FORMULAS, "edited")
    capsys.readouterr()

    Recorder().show(planned(TINY, "sft"))
    assert WARNING in capsys.readouterr().err.splitlines()
