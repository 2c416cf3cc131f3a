"""Changed code makes nothing stale: it is recorded, and named in warnings."""

from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.config.stages import STAGES
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
REQUIRED = [name for name, row in STAGES.items() if not row.optional]
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
    assert {"stages/ppo.py", FORMULAS, ADVANTAGES, "stages/runs/run.py"} <= {*files}
    assert not any(name.startswith(("eval/", "reports/")) for name in files)
    assert "stages/dpo.py" not in files
    assert all((ROOT / name).is_file() for name in files)


@pytest.mark.parametrize(
    ("new_text", "is_same"),
    [("x = 1\n", True), ("x = 2\n", False), ("x = 1  # a comment\n", False)],
)
def test_a_hash_depends_on_every_byte_of_the_files(tmp_path, monkeypatch, new_text, is_same):
    hashes = []
    for folder, text in (("before", "x = 1\n"), ("after", new_text)):
        root = tmp_path / folder
        (root / "stages").mkdir(parents=True)
        (root / "stages/a.py").write_text(
            "import json\nfrom stages import b\nfrom stages.c import d\n"
        )
        (root / "stages/b.py").write_text("x = 1\n")
        (root / "stages/c.py").write_text(text)
        (root / "stages/unused.py").write_text(folder)
        monkeypatch.setattr(code, "ROOT", root)
        hashes.append(code_of("stages.a"))
    assert [*hashes[0]] == ["stages/a.py", "stages/b.py", "stages/c.py"]
    assert (hashes[0] == hashes[1]) == is_same


# -- edited code -----------------------------------------------------------------------------------


def test_edited_code_makes_nothing_stale_and_is_named_with_the_way_to_rerun(runs, edit):
    run_stages(TINY, "ppo", "eval")
    edit(ADVANTAGES, "edited")
    assert run_stages(TINY, "ppo", "eval") == []
    assert changed_code(TINY, "ppo") == [ADVANTAGES]
    assert f"ppo ran with different code: {ADVANTAGES}. To rerun: REPLACE=ppo" in code_warnings(
        TINY, ["sft", "ppo"]
    )
    lines = status_lines()
    assert f"  done, code changed  ppo: {ADVANTAGES}" in lines
    assert all(len(line) <= 80 for line in lines)


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


def test_resuming_with_edited_code_warns_and_the_manifest_records_both_versions(
    runs, edit, capsys, monkeypatch
):
    run_stages(TINY, "data")
    monkeypatch.setattr("stages.runs.run.code_version", lambda: "first commit")
    partial = interrupt(TINY, "sft", update=3)
    before = read_json(partial / "attempt.json")["code"]["files"][FORMULAS]

    edit(FORMULAS, "edited")
    monkeypatch.setattr("stages.runs.run.code_version", lambda: "second commit")
    finish(TINY, "sft")
    assert (
        f"sft resumes with different code than it began with: {FORMULAS}. "
        "REPLACE=sft starts it over.\n"
    ) in capsys.readouterr().err
    manifest = read_json(stage_folder(TINY, "sft") / "manifest.json")
    assert manifest["code_version"] == "second commit"
    assert manifest["code"]["files"][FORMULAS] == "edited"
    assert manifest["code"]["earlier"] == [
        {"code_version": "first commit", "files": {FORMULAS: before}}
    ]


def test_a_stage_that_two_versions_trained_stays_marked_whichever_runs_now(runs, edit):
    run_stages(TINY, "data")
    interrupt(TINY, "sft", update=3)
    edit(FORMULAS, "edited")
    interrupt(TINY, "sft", update=5)
    with open_stage(TINY, "sft") as run:
        run.require("base")
        run.finish({})
    assert changed_code(TINY, "sft") == [FORMULAS]
    edit(FORMULAS, "")
    assert changed_code(TINY, "sft") == [FORMULAS]


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_command_names_the_edited_file_whether_it_runs_or_only_looks(runs, edit, capsys, is_dry):
    make(TINY, "sft")
    edit(FORMULAS, "edited")
    capsys.readouterr()

    if is_dry:
        Recorder().show(planned(TINY, "sft"))
    else:
        assert make(TINY, "sft") == []
    warning = (
        f"tiny seed 44413: base, sft ran with different code: {FORMULAS}. "
        "To rerun: REPLACE='base sft'"
    )
    assert warning in capsys.readouterr().err.splitlines()
