"""The question to an LLM judge: a template, the criteria of an axis, and the form of the reply.

The files are in `eval/judges/prompts`. `judge.prompt` replaces the template, and `judge.axis` names
the file with the criteria. Their hash is part of a judge's identity, so editing a file makes the
verdicts, the controls and the calibration stale.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.config.errors import UserError

PROMPTS = Path(__file__).parents[2] / "eval" / "judges" / "prompts"
DEFAULT_PROMPT = PROMPTS / "overall.md"
AXES = PROMPTS / "axes"
OVERALL = "overall"

PLACEHOLDER = re.compile(r"\{(\w+)\}")
CRITERIA = "criteria"
TEXTS = ("post", "summary_a", "summary_b")

# The form of the reply, which follows the template. The server decides which of the two is used.
REPLY_AS_LINES = """\
Answer in two lines: one sentence that compares the two, then the better one, or tie:
Comparison: <one sentence>
Preferred: <A, B or tie>"""

REPLY_AS_JSON = """\
Answer with one JSON object and nothing else: one sentence that compares the two, then the better
one, or tie: {"comparison": "<one sentence>", "preferred": "<A, B or tie>"}"""

RESPONSE_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "comparison": {"type": "string"},
                "preferred": {"type": "string", "enum": ["A", "B", "tie"]},
            },
            "required": ["comparison", "preferred"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class PromptTemplate:
    """A template with its criteria filled in; only the post and the summaries are missing."""

    text: str

    @property
    def parts(self) -> list[Any]:
        """Everything that decides what the judge is asked, apart from the texts."""
        return [self.text, REPLY_AS_LINES, REPLY_AS_JSON, RESPONSE_FORMAT]

    def fill(self, texts: dict[str, str]) -> str:
        """The template with its texts, in one pass: a text may contain `{post}` itself."""
        return PLACEHOLDER.sub(lambda match: texts[match[1]], self.text)


def read_prompt(prompt: str, axis: str) -> PromptTemplate:
    """The template in the file `prompt` (empty: the default), with the criteria of an axis.

    Raises UserError, which names the file, for a file that cannot be read, a placeholder that is
    missing or unknown, and an axis without criteria.
    """
    path = Path(prompt).expanduser() if prompt else DEFAULT_PROMPT
    template = read_text(path, "judge.prompt")
    check_placeholders(path, template, required=TEXTS, allowed=(*TEXTS, CRITERIA))

    # A prompt may contain its own criteria. Then there is nothing that an axis could change.
    has_criteria = f"{{{CRITERIA}}}" in template
    if not has_criteria and axis != OVERALL:
        raise UserError(
            f"{path} has no place for the criteria of judge.axis={axis}: add {{{CRITERIA}}} to it"
        )
    if not has_criteria:
        return PromptTemplate(template)

    criteria_file = find_axis(axis, path)
    criteria = read_text(criteria_file, "judge.axis")
    check_placeholders(criteria_file, criteria, required=(), allowed=())
    return PromptTemplate(template.replace(f"{{{CRITERIA}}}", criteria))


def find_axis(axis: str, prompt: Path) -> Path:
    """The file with the criteria of an axis: next to the prompt's file, or one of this project's.

    Raises UserError, which lists the existing axes, if there is no such file.
    """
    folders = (prompt.parent / "axes", prompt.parent, AXES)
    is_name = re.fullmatch(r"[\w-]+", axis) is not None
    for folder in folders:
        path = folder / f"{axis}.md"
        if is_name and path.is_file() and path != prompt:
            return path
    names = sorted({path.stem for folder in (folders[0], AXES) for path in folder.glob("*.md")})
    raise UserError(
        f"judge.axis={axis} has no criteria: choose one of {', '.join(names)},"
        f" or write {folders[0] / 'NAME.md'}"
    )


def read_text(path: Path, setting: str) -> str:
    """A file's text without the line breaks at its end. Raises UserError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8").rstrip("\n")
    except FileNotFoundError:
        raise UserError(f"{setting}: there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{setting}: {path} is not readable UTF-8 text ({error}): correct it"
        ) from None
    if not text.strip():
        raise UserError(f"{setting}: {path} is empty: write the text into it")
    return text


def check_placeholders(
    path: Path, text: str, *, required: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    """Raise UserError for a placeholder that a file lacks, and for one that is unknown."""
    found = PLACEHOLDER.findall(text)
    for name in required:
        if name not in found:
            raise UserError(f"{path} lacks the placeholder {{{name}}}: add it to the prompt")
    for name in found:
        if name not in allowed:
            known = ", ".join(f"{{{word}}}" for word in allowed) or "none in this file"
            raise UserError(
                f"{path} has the unknown placeholder {{{name}}}: remove it (known: {known})"
            )
