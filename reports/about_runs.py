"""Pages about several runs: where they are, what they are called, and how they are written."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports import render
from reports.judging import judge_prompt
from reports.provenance import folders_of, made_from, provenance
from reports.results import RunResult
from stages.config import paths
from stages.config.errors import UserError
from stages.config.identity import hash_of

LONGEST_LIST = 40  # characters of the names in the name of a page


def folder() -> Path:
    """Return the folder of the pages about several runs."""
    return paths.RUNS / "reports"


def stem_about(kind: str, names: Sequence[str]) -> str:
    """Return the name of a page's files: the kind of page, then what it is about.

    Of a long list it has the first and the last name, and four digits of a hash of all of them.
    """
    listed = "-".join(names)
    if len(names) > 1 and len(listed) > LONGEST_LIST:
        listed = f"{names[0]}-to-{names[-1]}-{hash_of(list(names))[:4]}"
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{kind}-{listed}")


def write_page(
    template: str,
    stem: str,
    names: Sequence[str],
    runs: Sequence[RunResult],
    numbers: object,
    **values: Any,
) -> Path:
    """Write a page about several runs, and return the path of its HTML.

    `stem` begins with the kind of page, and `names` are the runs that the page was asked for. The
    template gets `values`, the runs, their provenance, the prompts of their judges, and
    `is_public`. If the texts are other people's, `public/` has the page without them. Raises
    UserError if a page about other runs has this name.
    """
    _check_names(stem, names)
    different = list({(run.name, run.seed): run for run in runs}.values())
    prompts = [judge_prompt(run.settings["judge"]) for run in different]
    values |= {
        "runs": different,
        "provenance": provenance(different),
        "judge_prompts": [prompt for prompt in dict.fromkeys(prompts) if prompt],
    }
    origin = made_from(stem.partition("-")[0], names, folders_of(different))
    if any(run.has_real_texts for run in different):
        public_page = render.fill(template, stem, **values, is_public=True)
        render.write(folder() / render.PUBLIC, public_page, numbers, origin)
    page = render.fill(template, stem, **values, is_public=False)
    return render.write(folder(), page, numbers, origin)


def _check_names(stem: str, names: Sequence[str]) -> None:
    if not (folder() / f"{stem}.json").exists():
        return
    before = render.read_page_record(folder(), stem)["made_from"]["names"]
    if set(before) != set(names):
        raise UserError(
            f"page {stem} in {folder()} is about {', '.join(before)}, not {', '.join(names)}:"
            " move it away first"
        )
