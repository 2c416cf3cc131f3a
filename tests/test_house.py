"""The house rules: ranks, sizes, docstrings, imports that do nothing.

A module imports only from a strictly lower rank, so siblings never import each other and there is
never a circle. A new module is given its rank here; raising a limit is a line that a reader sees.
"""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from stages import functional

ROOT = Path(__file__).parents[1]
PACKAGES = ("stages", "eval", "reports")

RANKS = {
    "stages.errors": 0,
    "stages.files": 0,
    "stages.machine": 0,
    "stages.progress": 0,
    "stages.stage_table": 0,
    "stages.locks": 1,
    "stages.functional": 0,
    "stages.intervals": 0,
    "stages.stopping": 0,
    "stages.text_metrics": 0,
    "stages.toy": 0,
    "stages.sections": 1,
    "stages.ppo_settings": 1,
    "stages.judge_settings": 1,
    "stages.config": 2,
    "stages.ablations": 3,
    "stages.presets": 3,
    "stages.runs": 3,
    "stages.models": 3,
    "stages.status": 4,
    "stages.pipeline": 5,
    "stages.command_line": 4,
    "stages.kept": 4,
    "stages.readers": 4,
    "stages.world": 4,
    "stages.data": 5,
    "stages.likelihood": 6,
    "stages.training": 6,
    "stages.lora": 7,
    "stages.preferences": 7,
    "stages.checkpoints": 7,
    "stages.episodes": 7,
    "stages.state": 8,
    "stages.credit": 8,
    "stages.ppo_models": 8,
    "stages.rollout": 9,
    "stages.invariants": 9,
    "stages.ppo_loss": 9,
    "stages.base": 10,
    "stages.sft": 10,
    "stages.reward": 10,
    "stages.normalize": 10,
    "stages.ppo": 10,
    "stages.dpo": 10,
    "eval.verdicts": 3,
    "eval.statistics": 3,
    "eval.length_control": 4,
    "eval.prompt": 4,
    "eval.reply_parser": 4,
    "eval.reply_cache": 4,
    "eval.offline_judges": 4,
    "eval.analysis": 5,
    "eval.verdict_analysis": 6,
    "eval.budget": 4,
    "eval.pace": 4,
    "eval.chat": 5,
    "eval.batches": 6,
    "eval.openai_judge": 7,
    "eval.local_judge": 7,
    "eval.smollm": 8,
    "eval.summaries": 10,
    "eval.judge": 10,
    "eval.win_rate": 10,
    "eval.both_orders": 11,
    "eval.controls": 12,
    "eval.calibration": 13,
    "eval.versus": 13,
    "reports.paper": 20,
    "reports.page": 20,
    "reports.plots": 20,
    "reports.verdict": 20,
    "reports.collect": 21,
    "reports.readme_blocks": 21,
    "reports.made_with": 22,
    "reports.judge_section": 22,
    "reports.dpo_section": 22,
    "reports.compared": 22,
    "reports.run_page": 23,
    "reports.calibration_page": 23,
    "reports.versus_page": 23,
    "reports.scaling": 23,
    "reports.ablations": 23,
    "reports.publish": 24,
}
WHERE_SETTINGS_LIVE = ["stages.config", "stages.sections"]
WHERE_SETTINGS_LIVE += ["stages.ppo_settings", "stages.judge_settings"]
WITHOUT_TORCH = [
    "stages.config",
    "stages.ablations",
    "stages.presets",
    "stages.runs",
    "stages.pipeline",
    "stages.toy",
    "eval.judge",
]
WITHOUT_TORCH += ["eval.win_rate", "eval.verdict_analysis"]
WITHOUT_TORCH += [name for name in RANKS if name.startswith("reports.")]

FILE_LINES = 400
FUNCTION_LINES = 50  # without the docstring
NESTING = 4
LINE_LENGTH = 100
DRAWERS = ("utils", "helpers", "common", "misc", "util", "helper")
TOP_LEVEL = {"README.md", "pyproject.toml", "Makefile", "stages", "eval", "reports", "tests"}
TOP_LEVEL |= {"LICENSE", "constraints.txt"}
UNTRACKED = {"runs", "build", "__pycache__"}

# Fixed by the design, because others check against them.
SIGNATURES = {
    "first_true_index": "x",
    "truncate_after": "responses stop_id pad_id",
    "response_masks": "postprocessed_responses pad_id",
    "penalize_missing_eos": "scores postprocessed_responses eos_id penalty",
    "token_logprobs": "logits tokens temperature",
    "kl_estimate": "logprobs ref_logprobs kind='k1'",
    "shape_rewards": "kl scores response_mask kl_coef score_at='after_eos'",
    "masked_mean": "x mask",
    "masked_whiten": "x mask shift_mean=True",
    "gae": "rewards values gamma lam",
    "policy_loss": "new_logprobs logprobs advantages response_mask cliprange",
    "value_loss": "new_values values returns value_mask cliprange_value",
    "entropy": "logits",
    "preference_loss": "chosen_scores rejected_scores",
    "sequence_logprobs": "logprobs mask",
    "implicit_rewards": "logprobs ref_logprobs beta",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {
    name_of(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
}
FILES = [
    path for package in (*PACKAGES, "tests") for path in sorted((ROOT / package).rglob("*.py"))
]
each_module = pytest.mark.parametrize("name", MODULES)
each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it, by their full names."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its rank"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in whole)


def functions_of(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


# -- ranks -----------------------------------------------------------------------------------------


def test_every_module_has_a_rank_and_every_rank_a_module():
    assert set(RANKS) == set(MODULES)


@each_module
def test_a_module_imports_only_from_a_strictly_lower_rank(name):
    for imported in imports_of(MODULES[name]):
        if imported.split(".")[0] in PACKAGES:
            assert imported in RANKS, f"{name} imports {imported}, which has no rank"
            assert RANKS[imported] < RANKS[name], f"{name} must not import {imported}"
        assert imported.split(".")[0] != "tests"


def test_packages_hold_no_code_of_their_own():
    for package in PACKAGES:
        body = tree_of(ROOT / package / "__init__.py").body
        assert all(isinstance(node, ast.Expr) for node in body), package


def test_the_formulas_import_only_torch():
    tops = {name.split(".")[0] for name in imports_of(MODULES["stages.functional"])}
    assert tops <= {"torch", "typing", "collections"}


def test_the_formulas_have_the_signatures_of_the_design():
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(functional, name)).parameters.values()
        found = [str(one.replace(annotation=inspect.Parameter.empty)) for one in parameters]
        assert " ".join(found) == expected, name


# -- sizes -----------------------------------------------------------------------------------------


@each_file
def test_a_file_fits_a_reader(path):
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) - 1 <= FILE_LINES
    long = [number for number, line in enumerate(lines, start=1) if len(line) > LINE_LENGTH]
    assert not long, f"lines over {LINE_LENGTH}: {long}"


def length_of(function: Function) -> int:
    """Lines of a function, from its `def`, without its docstring."""
    whole = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is None:
        return whole
    return whole - ((first.end_lineno or 0) - first.lineno + 1)


def depth_of(node: ast.AST, depth: int = 0) -> int:
    """How deeply blocks stand in one another below a node; `elif` is no deeper than its `if`."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue  # a function of its own
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and [child] == node.orelse
        deeper = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, depth_of(child, depth + deeper))
    return deepest


@each_file
def test_a_function_is_short_and_flat(path):
    for function in functions_of(path):
        assert length_of(function) <= FUNCTION_LINES, f"{function.name} is too long"
        assert depth_of(function) <= NESTING, f"{function.name} is nested too deeply"


def test_lengths_and_depths_are_counted_as_said():
    code = '''
def one(x):
    """Two
    lines."""
    for a in x:
        if a:
            with a:
                pass
        elif x:
            try:
                pass
            finally:
                while a:
                    pass
'''
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert (length_of(function), depth_of(function)) == (11, 4)


def test_the_top_level_is_fixed():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    found -= {name for name in found if name in UNTRACKED or name.endswith(".egg-info")}
    assert found <= TOP_LEVEL


def test_there_are_no_drawers():
    assert not [path for path in FILES if path.stem in DRAWERS]


# -- what a reader and an importer may count on ----------------------------------------------------


@each_module
def test_everything_public_says_what_it_is(name):
    assert ast.get_docstring(tree_of(MODULES[name])), "the module has no docstring"
    todo: list[ast.AST] = [tree_of(MODULES[name])]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{node.name} has no docstring"
                todo += [node] if isinstance(node, ast.ClassDef) else []


def test_every_formula_says_its_shapes_and_every_estimator_its_source():
    for name in SIGNATURES:
        text = inspect.getdoc(getattr(functional, name)) or ""
        assert "Shapes: " in text, name
        assert "Source: " in text or name == "masked_mean", name


@each_module
def test_a_module_only_defines(name):
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.ClassDef)
    *body, last = tree_of(MODULES[name]).body
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        # `TYPE_CHECKING` and other conditions at the top are work at import: none so far.
        assert isinstance(node, (*allowed, *Function.__args__)) or is_text, ast.dump(node)[:80]
    is_main = isinstance(last, ast.If) and "__main__" in ast.dump(last.test)
    assert is_main or isinstance(last, (*allowed, *Function.__args__))


IMPORT_ALL = """
import importlib, random, sys, os
names, without_torch = {names!r}, {without_torch!r}
for name in without_torch:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name + " imports torch"
import torch
before = random.getstate(), torch.get_rng_state().tolist(), torch.get_default_dtype()
environment = dict(os.environ)
for name in names:
    importlib.import_module(name)
    assert before[1] == torch.get_rng_state().tolist(), name + " draws random numbers"
assert before[0] == random.getstate() and before[2] == torch.get_default_dtype()
"""


def test_importing_does_nothing_visible_and_judges_and_reports_need_no_torch(tmp_path):
    code = IMPORT_ALL.format(names=list(MODULES), without_torch=WITHOUT_TORCH)
    found = subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "mpl")},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert (found.stdout, found.stderr) == ("", "")
    assert {path.name for path in tmp_path.iterdir()} <= {"mpl", ".cache", ".config"}


@pytest.mark.parametrize(
    "name", [name for name, path in MODULES.items() if "__main__" in path.read_text("utf-8")]
)
def test_a_command_is_a_main_that_takes_its_arguments(name):
    mains = [one for one in functions_of(MODULES[name]) if one.name == "main"]
    assert [ast.unparse(one.args).split(":")[0] for one in mains] == ["argv"]
