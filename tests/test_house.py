"""The house rules: ranks, sizes, docstrings, imports that do nothing.

A module imports only downwards: from lower ranks, or from its own, where imports form no circle.
"""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

from stages import functional

ROOT = Path(__file__).parents[1]
PACKAGES = ("stages", "eval", "reports")

# From bottom to top: packages, and modules that stand at another height than their folder.
RANKS = (
    "stages.settings",
    "stages.running",
    "stages.driving",
    "stages.posts",
    "stages.learning",
    "stages.rl",
    "stages",  # one file a stage
    "eval.rates",
    "eval.judges",
    "eval.judges.openai",
    "eval",
    "reports.parts",
    "reports.sections",
    "reports.scaling",
    "reports.sharing",
    "reports.needs",
    "reports.speed",
    "reports",  # one file a page
)
# The files of `stages/` that are no stage, and the folder of their height.
MARKED = {
    "stages.functional": "stages.settings",
    "stages.finished": "stages.running",
    "stages.runs": "stages.running",
    "stages.text_reward": "stages.running",
    "stages.taken": "stages.rl",
    "stages.goals": "stages.settings",
    "stages.__main__": "stages.driving",
    "stages.pipeline": "stages.driving",
}
# Here the modules of a rank are siblings that never import each other.
SIBLINGS = ("stages", "reports.sections", "reports")
WITHOUT_TORCH = """
    stages.settings.* stages.run* stages.driving.* stages.pipeline stages.finished
    stages.posts.toy stages.posts.readers eval.judge eval.win_rate eval.rates.*
    eval.judges.openai.* reports.*_page reports.parts.* reports.sections.* reports.scaling.*
    reports.sharing.* reports.needs.plan
""".split()

# Most modules of ours that may be loaded with one, and their lines: what kept growing.
# To be 35 and 8,000 for ppo.
CLOSURES = {"stages.rl.credit": (5, 1300), "stages.rl.loss": (13, 3000), "stages.ppo": (43, 9900)}
# Most lines of a folder's own files. Folders that are not named are still above their bounds.
FOLDER_LINES = {"stages/posts": 1550, "stages/learning": 2900, "stages/rl": 1800}
FOLDER_LINES |= {"reports/speed": 1000, "reports/sharing": 380}
MEDIAN_FILE = 190  # lines
MAKEFILE_LINES = 110
README_WORDS, ALL_WORDS = 900, 14_000
GENERATED_FILES, GENERATED_BYTES = 70, 3 * 2**20

FILE_LINES = 400
FUNCTION_LINES = 50  # without the docstring
PARAMETERS = 6  # without self; a test may ask for more fixtures
NESTING = 4
LINE_LENGTH = 100
# Functions that take more, and how many. This list only shrinks.
TOO_MANY_PARAMETERS = {
    "stages.learning.sampling.sample": 7,
    "tests.fabricated_runs.fabricate": 12,
    "tests.fabricated_runs.make_results": 8,
}
EMPTY_NAMES = set("one found said asked mine told made given theirs ours beside".split())
DRAWERS = ("utils", "helpers", "common", "misc", "util", "helper")
TOP_LEVEL = {"README.md", "pyproject.toml", "Makefile", "stages", "eval", "reports", "tests"}
TOP_LEVEL |= {"LICENSE", "constraints.txt", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"}
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
    "leave_one_out": "rewards group_size",
    "preference_loss": "chosen_scores rejected_scores center=0.0",
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
    assert {place_of(name) for name in MODULES} == set(RANKS)
    for name in MODULES:
        for imported in own_imports_of(name):
            assert imported in MODULES, f"{name} imports {imported}, which is no module of ours"
            place, its_place = place_of(name), place_of(imported)
            arrow = f"{name} imports {imported}"
            assert RANKS.index(its_place) <= RANKS.index(place), f"{arrow}: upwards"
            assert place != its_place or place not in SIBLINGS, f"{arrow}: a sibling"
            folder = name.rpartition(".")[0]
            assert folder != MARKED.get(imported), f"{arrow}: up, out of its folder"


def test_imports_form_no_circle():
    order = TopologicalSorter({name: own_imports_of(name) for name in MODULES})
    assert set(order.static_order()) >= MODULES.keys()  # raises CycleError where there is a circle


def closure_of(name: str) -> set[str]:
    """The modules that a module drags along, itself left out."""
    seen, todo = {name}, [name]
    while todo:
        new = own_imports_of(todo.pop()) - seen
        seen |= new
        todo += new
    return seen - {name}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("name", CLOSURES)
def test_arithmetic_imports_arithmetic_and_ppo_no_more_than_it_needs(name):
    closure, (modules, lines) = closure_of(name), CLOSURES[name]
    assert len(closure) <= modules, sorted(closure)
    assert sum(lines_of(MODULES[each]) for each in closure) <= lines


def test_folders_and_files_are_as_small_as_the_plan_says():
    for folder, most in FOLDER_LINES.items():
        assert sum(map(lines_of, (ROOT / folder).glob("*.py"))) <= most, folder
    assert median(lines_of(path) for path in FILES if path.parts[-2] != "tests") <= MEDIAN_FILE
    assert lines_of(ROOT / "Makefile") <= MAKEFILE_LINES


def test_documents_and_published_pages_are_few():
    published = [path for path in (ROOT / "reports/generated").rglob("*") if path.is_file()]
    assert len(published) <= GENERATED_FILES
    assert sum(path.stat().st_size for path in published) <= GENERATED_BYTES
    texts = [
        *ROOT.glob("*.md"),
        *(path for name in PACKAGES for path in (ROOT / name).rglob("*.md")),
    ]
    words = {path: len(path.read_text("utf-8").split()) for path in {*texts} - {*published}}
    assert words[ROOT / "README.md"] <= README_WORDS
    assert sum(words.values()) <= ALL_WORDS, words


def test_packages_hold_no_code_but_say_what_they_hold():
    for path in FILES:
        if path.name != "__init__.py":
            continue
        assert all(isinstance(node, ast.Expr) for node in tree_of(path).body), path
        words = (ast.get_docstring(tree_of(path)) or "").split()
        held = {module.stem for module in path.parent.glob("*.py")} - {"__init__"}
        held |= {inner.parent.name for inner in path.parent.glob("*/__init__.py")}
        assert held <= set(words), path


def test_the_formulas_import_only_torch():
    tops = {name.split(".")[0] for name in imports_of(MODULES["stages.functional"])}
    assert tops <= {"torch", "typing", "collections"}


def test_the_formulas_have_the_signatures_of_the_design():
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(functional, name)).parameters.values()
        found = [str(one.replace(annotation=inspect.Parameter.empty)) for one in parameters]
        assert " ".join(found) == expected, name


def test_a_file_fits_a_reader():
    for path in FILES:
        lines = path.read_text(encoding="utf-8").split("\n")
        assert len(lines) - 1 <= FILE_LINES, f"{path} has {len(lines) - 1} lines"
        long = [number for number, line in enumerate(lines, start=1) if len(line) > LINE_LENGTH]
        assert not long, f"{path}: lines over {LINE_LENGTH}: {long}"


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


def test_a_function_is_short_and_flat():
    for path in FILES:
        for function in functions_of(path):
            assert length_of(function) <= FUNCTION_LINES, f"{path}: {function.name} is too long"
            assert depth_of(function) <= NESTING, f"{path}: {function.name} is nested too deeply"


def parameters_of(function: Function) -> int:
    """How many values a caller may pass, without self; `*args` and `**kwargs` count one each."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    names = [argument.arg for argument in arguments if argument is not None]
    return len([name for name in names if name not in ("self", "cls")])


def test_a_function_has_few_parameters():
    counts = {
        f"{name_of(path)}.{function.name}": parameters_of(function)
        for path in FILES
        for function in functions_of(path)
        if parameters_of(function) > PARAMETERS and not function.name.startswith("test_")
    }
    assert counts == TOO_MANY_PARAMETERS  # an entry that is no longer needed fails as well


def test_the_top_level_is_fixed():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    found -= {name for name in found if name in UNTRACKED or name.endswith(".egg-info")}
    assert found <= TOP_LEVEL
    assert not [path for path in FILES if path.stem in DRAWERS]


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


def test_every_formula_says_its_shapes_and_every_estimator_its_source():
    for name in SIGNATURES:
        text = inspect.getdoc(getattr(functional, name)) or ""
        assert "Shapes: " in text, name
        assert "Source: " in text or name == "masked_mean", name


def test_a_module_only_defines():
    defining = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.ClassDef)
    allowed = (*defining, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, path in MODULES.items():
        *body, last = tree_of(path).body
        for node in body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            # `TYPE_CHECKING` and other conditions at the top are work at import: none so far.
            assert isinstance(node, allowed) or is_text, f"{name}: {ast.unparse(node)[:80]}"
        is_main = isinstance(last, ast.If) and "__main__" in ast.dump(last.test)
        assert is_main or isinstance(last, allowed), name


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
    for name in [name for name, path in MODULES.items() if "__main__" in path.read_text("utf-8")]:
        mains = [each for each in functions_of(MODULES[name]) if each.name == "main"]
        assert [ast.unparse(main.args).split(":")[0] for main in mains] == ["argv"], name


def bindings_of(tree: ast.AST) -> Iterator[str]:
    """The variables and parameters of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_a_class_has_a_name_of_its_own():
    nodes = [node for path in MODULES.values() for node in tree_of(path).body]
    names = sorted(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert names == sorted(set(names))


def test_no_name_says_nothing():
    empty = {name: EMPTY_NAMES & {*bindings_of(tree_of(path))} for name, path in MODULES.items()}
    assert not {name: names for name, names in empty.items() if names}
