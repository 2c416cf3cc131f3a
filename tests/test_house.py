"""The house rules: the direction of imports, public docstrings, imports that do nothing.

A module imports only downwards: from lower ranks, or from its own, where imports form no circle.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("stages", "eval", "reports")

# From bottom to top: packages, and modules that stand at another height than their folder.
RANKS = (
    "stages.config",
    "stages.runs",
    "stages.data",
    "stages.models stages.training",  # these two may import each other's modules
    "stages.rl",
    "stages",  # one file a stage
    "stages.pipeline",
    "stages.planning",
    "eval.stats",
    "eval.judges",
    "eval.judges.openai",
    "eval",
    "reports",  # typed results, formats, plots, and one file a page
    "top",  # the command line, which starts stages, judges and pages
)
# The files of `stages/` that are no stage, and the folder of their height.
MARKED = {
    "stages.functional": "stages.config",
    "stages.rl.algorithms": "stages.config",
    "stages.__main__": "top",
}
# Here the modules of a rank are siblings that never import each other.
SIBLINGS = ("stages",)
WITHOUT_TORCH = """
    stages.config.* stages.runs.* stages.pipeline.* stages.planning.plan
    stages.data.builtin stages.data.readers eval.judge eval.win_rate eval.stats.*
    eval.judges.openai.budget eval.judges.openai.cache reports.*
""".split()

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


def place_of(name: str) -> str:
    """The rank of a module: its folder, or the one that a marked file belongs to."""
    return MARKED.get(name, name.rpartition(".")[0])


def own_imports_of(name: str) -> set[str]:
    ours = (*PACKAGES, "tests")
    return {imported for imported in imports_of(MODULES[name]) if imported.split(".")[0] in ours}


def test_a_module_imports_only_downwards_and_every_rank_has_a_module():
    heights = {place: height for height, places in enumerate(RANKS) for place in places.split()}
    assert {place_of(name) for name in MODULES} == heights.keys()
    for name in MODULES:
        for imported in own_imports_of(name):
            assert imported in MODULES, f"{name} imports {imported}, which is no module of ours"
            place, its_place = place_of(name), place_of(imported)
            arrow = f"{name} imports {imported}"
            assert heights[its_place] <= heights[place], f"{arrow}: upwards"
            assert place != its_place or place not in SIBLINGS, f"{arrow}: a sibling"


def test_imports_form_no_circle():
    order = TopologicalSorter({name: own_imports_of(name) for name in MODULES})
    assert set(order.static_order()) >= MODULES.keys()  # raises CycleError where there is a circle


def test_the_formulas_import_only_torch():
    tops = {name.split(".")[0] for name in imports_of(MODULES["stages.functional"])}
    assert tops <= {"torch", "typing", "collections"}


def test_the_top_level_is_fixed():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    found -= {name for name in found if name in UNTRACKED or name.endswith(".egg-info")}
    assert found <= TOP_LEVEL


# -- what a reader and an importer may count on ----------------------------------------------------


def test_everything_public_says_what_it_is():
    for name, path in MODULES.items():
        assert ast.get_docstring(tree_of(path)), f"{name} has no docstring"
    todo: list[ast.AST] = [tree_of(path) for path in MODULES.values()]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{node.name} has no docstring"
                todo += [node] if isinstance(node, ast.ClassDef) else []


def test_a_module_only_defines():
    defining = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.ClassDef)
    allowed = (*defining, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, path in MODULES.items():
        *body, last = tree_of(path).body
        for node in body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            is_allowed = isinstance(node, allowed) or is_text or is_for_types
            assert is_allowed, f"{name}: {ast.unparse(node)[:80]}"
        is_main = isinstance(last, ast.If) and "__main__" in ast.dump(last.test)
        is_text = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)
        assert is_main or is_text or isinstance(last, allowed), name


IMPORT_ALL = """
import importlib, random, sys, os
names, without_torch = {names!r}, {without_torch!r}
for name in without_torch:
    importlib.import_module(name)
    assert not {{"torch", "openai"}} & {{*sys.modules}}, name + " imports torch or openai"
import torch
before = random.getstate(), torch.get_rng_state().tolist(), torch.get_default_dtype()
environment = dict(os.environ)
for name in names:
    importlib.import_module(name)
    assert before[1] == torch.get_rng_state().tolist(), name + " draws random numbers"
assert before[0] == random.getstate() and before[2] == torch.get_default_dtype()
"""


def test_importing_does_nothing_visible_and_judges_and_reports_need_no_torch(tmp_path):
    without = [name for name in MODULES if any(fnmatchcase(name, kind) for kind in WITHOUT_TORCH)]
    code = IMPORT_ALL.format(names=list(MODULES), without_torch=without)
    found = subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "mpl")},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    # On a slow machine matplotlib says that it writes its cache of fonts; that is not ours.
    others = [line for line in found.stderr.splitlines() if "font cache" not in line]
    assert (found.stdout, others) == ("", [])
    assert {path.name for path in tmp_path.iterdir()} <= {"mpl", ".cache", ".config"}


def test_a_command_is_a_main_that_takes_its_arguments():
    for name in [
        name
        for name, path in MODULES.items()
        if '__name__ == "__main__"' in path.read_text("utf-8")
    ]:
        mains = [each for each in functions_of(MODULES[name]) if each.name == "main"]
        assert [ast.unparse(main.args).split(":")[0] for main in mains] == ["argv"], name
