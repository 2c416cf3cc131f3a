"""The house rules: the direction of imports, public docstrings, imports that do nothing.

A module imports only downwards: from lower ranks or from its own rank, where imports form no cycle.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("stages", "eval", "reports")

# From bottom to top: the folders of each rank.
RANKS = [
    ["stages.config"],
    ["stages.runs"],
    ["stages.data"],
    ["stages.models", "stages.training"],  # these two may import each other's modules
    ["stages.rl"],
    ["stages"],  # one file a stage
    ["stages.pipeline"],
    ["stages.planning"],
    ["eval.stats"],
    ["eval.judges"],
    ["eval.judges.openai"],
    ["eval"],
    ["reports"],  # typed results, formats, plots, and one file a page
    ["top"],  # the command line, which starts stages, judges and pages
]
# Modules whose rank is not that of their folder.
FOLDER_OF_RANK = {
    "stages.functional": "stages.config",
    "stages.rl.algorithms": "stages.config",
    "stages.__main__": "top",
}
# The modules of these folders never import each other.
SIBLINGS = ("stages",)
WITHOUT_TORCH = [
    "stages.config.*",
    "stages.runs.*",
    "stages.pipeline.*",
    "stages.planning.plan",
    "stages.data.builtin",
    "stages.data.readers",
    "eval.judge",
    "eval.win_rate",
    "eval.stats.*",
    "eval.judges.openai.budget",
    "eval.judges.openai.cache",
    "reports.*",
]

TOP_LEVEL = {
    "AGENTS.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "docs",
    "eval",
    "pyproject.toml",
    "reports",
    "stages",
    "tests",
}
UNTRACKED = {"runs", "build", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def find_modules() -> dict[str, Path]:
    """The path of every module of the three packages, by its name."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                modules[module_name(path)] = path
    return modules


MODULES = find_modules()


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it, by their full names."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its rank"
            assert node.module is not None
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in MODULES else node.module


def imports_of_this_project(name: str) -> set[str]:
    imported = set(imports_of(MODULES[name]))
    return {other for other in imported if other.split(".")[0] in (*PACKAGES, "tests")}


# -- ranks -----------------------------------------------------------------------------------------


def folder_of(name: str) -> str:
    """The folder whose rank a module has."""
    return FOLDER_OF_RANK.get(name, name.rpartition(".")[0])


def test_every_rank_has_a_module_and_every_module_a_rank():
    ranked = {folder for folders in RANKS for folder in folders}
    assert {folder_of(name) for name in MODULES} == ranked


def test_a_module_imports_only_downwards():
    heights = {}
    for height, folders in enumerate(RANKS):
        for folder in folders:
            heights[folder] = height

    for name in MODULES:
        height = heights[folder_of(name)]
        for imported in imports_of_this_project(name):
            assert imported in MODULES, f"{name} imports {imported}, which does not exist"
            assert heights[folder_of(imported)] <= height, f"{name} imports {imported}: upwards"


def test_stages_do_not_import_each_other():
    for name in MODULES:
        folder = folder_of(name)
        if folder in SIBLINGS:
            for imported in imports_of_this_project(name):
                assert folder_of(imported) != folder, f"{name} imports {imported}: a sibling"


def test_imports_form_no_cycle():
    order = TopologicalSorter({name: imports_of_this_project(name) for name in MODULES})
    assert set(order.static_order()) >= MODULES.keys()  # raises CycleError if there is a cycle


def test_the_formulas_import_only_torch():
    packages = {name.split(".")[0] for name in imports_of(MODULES["stages.functional"])}
    assert packages <= {"torch", "typing", "collections"}


def test_the_top_level_is_fixed():
    names = {path.name for path in ROOT.iterdir()}
    tracked = set()
    for name in names - UNTRACKED:
        if not name.startswith(".") and not name.endswith(".egg-info"):
            tracked.add(name)
    assert tracked <= TOP_LEVEL


# -- what a reader can rely on ---------------------------------------------------------------------


def public_definitions(node: ast.AST) -> Iterator[Function | ast.ClassDef]:
    """The public functions and classes of a module or class, with those in its classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child)


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name):
    tree = syntax_tree(MODULES[name])
    assert ast.get_docstring(tree), f"{name} has no docstring"
    for definition in public_definitions(tree):
        assert ast.get_docstring(definition), f"{name}: {definition.name} has no docstring"


DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def starts_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.dump(node.test)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_only_defines(name):
    statements = syntax_tree(MODULES[name]).body
    if starts_main(statements[-1]):
        statements = statements[:-1]
    for statement in statements:
        only_defines = isinstance(statement, DEFINITIONS)
        is_allowed = only_defines or is_docstring(statement) or is_for_types(statement)
        assert is_allowed, ast.unparse(statement)[:80]


# -- what an importer can rely on ------------------------------------------------------------------

IMPORT_WITHOUT_TORCH = """
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    for heavy in ("torch", "openai"):
        assert heavy not in sys.modules, name + " imports " + heavy
"""
# Libraries of the pages draw random numbers while they are imported, so these are imported first.
IMPORT_ALL = """
import importlib, random
for name in {without_torch!r}:
    importlib.import_module(name)
import torch
python_state = random.getstate()
torch_state = torch.get_rng_state().tolist()
default_dtype = torch.get_default_dtype()
for name in {names!r}:
    importlib.import_module(name)
    assert torch.get_rng_state().tolist() == torch_state, name + " draws random numbers"
assert random.getstate() == python_state
assert torch.get_default_dtype() == default_dtype
"""


def assert_runs_silently(code: str, folder: Path) -> None:
    """Run code in an empty folder; it must succeed, print nothing and write no files but caches."""
    process = subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "HOME": str(folder), "MPLCONFIGDIR": str(folder / "mpl")},
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    # On a slow machine matplotlib says that it writes its cache of fonts.
    errors = [line for line in process.stderr.splitlines() if "font cache" not in line]
    assert errors == []
    assert {path.name for path in folder.iterdir()} <= {"mpl", ".cache", ".config"}


def modules_without_torch() -> list[str]:
    names = []
    for name in MODULES:
        if any(fnmatchcase(name, pattern) for pattern in WITHOUT_TORCH):
            names.append(name)
    return names


def test_settings_judges_and_reports_need_no_torch(tmp_path):
    assert_runs_silently(IMPORT_WITHOUT_TORCH.format(names=modules_without_torch()), tmp_path)


def test_importing_does_nothing_visible(tmp_path):
    code = IMPORT_ALL.format(names=list(MODULES), without_torch=modules_without_torch())
    assert_runs_silently(code, tmp_path)


COMMANDS = [
    name for name in MODULES if '__name__ == "__main__"' in MODULES[name].read_text("utf-8")
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_main_that_takes_its_arguments(name):
    mains = []
    for node in ast.walk(syntax_tree(MODULES[name])):
        if isinstance(node, Function) and node.name == "main":
            mains.append(node)
    (main,) = mains
    assert ast.unparse(main.args).split(":")[0] == "argv"
