"""The two schemas of the real data: what each field must be, and how fields are read.

Posts have the schema of `tldr_3_filtered` (id, subreddit, title, post, summary), comparisons that
of `openai/summarize_from_feedback` (info, summaries, choice, worker, batch, split, extra).
Source: Huang et al. 2024, details 1 and 10, and the pages of the data sets.
"""

from typing import Any

from stages.config.sections import FIELDS
from stages.data.bad_rows import BadRowError
from stages.data.tables import Row
from stages.data.text_metrics import normalize_whitespace

CNNDM_BATCHES = ("batch0_cnndm", "cnndm0", "cnndm2")
COMPARISON_FIELDS = ("info", "summaries", "choice", "batch", "split")
COLUMNS = "columns"
"""Field of a row, in the data and next to its tokens: the user's own columns, by their names."""
TIE = 5  # the middle of OpenAI's confidence, which runs from 1 to 9


def check_post(where: str, row: Row, needs_summary: bool = True) -> None:
    """Raise BadRowError unless the row has the schema of `tldr_3_filtered`.

    Posts of the split `ppo_train` need no summary.
    """
    for name in ("id", *FIELDS):
        _require_type(where, row, name, str)
    if needs_summary:
        _require_type(where, row, "summary", str)
        if not row["summary"].strip():
            raise BadRowError(where, "field summary is empty: drop the row or fill it")
    elif row.get("summary") is not None:
        _require_type(where, row, "summary", str)
    _require_utf8(where, row)


def check_comparison(where: str, row: Row) -> None:
    """Raise BadRowError unless the row has the schema of `comparisons`.

    A summary may be empty, and the two may be equal: the published data contain such rows, because
    some policies wrote nothing, and people compared the result.
    """
    # All missing fields are named together, because a row of a different kind lacks several.
    info_fields = ("id", "article") if is_cnndm(row) else ("id", *FIELDS)
    missing = [name for name in COMPARISON_FIELDS if row.get(name) is None]
    info = row.get("info")
    if isinstance(info, dict):
        missing += [f"info.{name}" for name in info_fields if info.get(name) is None]
    if missing:
        raise BadRowError(where, f"no field {', '.join(missing)}")

    _require_type(where, row, "info", dict)
    _require_type(where, row, "summaries", list)
    _require_type(where, row, "batch", str)
    _require_type(where, row, "split", str)
    for name in info_fields:
        _require_type(where, row["info"], name, str, prefix="info.")

    if len(row["summaries"]) != 2:
        raise BadRowError(where, f"field summaries has {len(row['summaries'])} entries, not 2")
    for index, summary in enumerate(row["summaries"]):
        if not isinstance(summary, dict):
            raise BadRowError(where, f"field summaries[{index}] is not an object")
        _require_type(where, summary, "text", str, prefix=f"summaries[{index}].")
        _require_type(where, summary, "policy", str, prefix=f"summaries[{index}].")

    # `type(...) is int`, because True and 1.0 also equal 1.
    if type(row["choice"]) is not int or row["choice"] not in (0, 1):
        raise BadRowError(where, f"field choice is {row['choice']!r}: it must be 0 or 1")

    extra = row.get("extra") or {}
    if not isinstance(extra, dict):
        raise BadRowError(where, f"field extra is {extra!r}: it must be an object or null")
    confidence = extra.get("confidence")
    if confidence is not None and (type(confidence) is not int or not 1 <= confidence <= 9):
        raise BadRowError(
            where,
            f"field extra.confidence is {confidence!r}: it must be 1 to 9 (5 is a tie) or null",
        )
    _require_utf8(where, row)


def _require_type(where: str, row: Row, name: str, kind: type, prefix: str = "") -> None:
    """Raise BadRowError unless the field is of a type.

    `prefix` comes before the name in a message: `info.` for a field inside `info`.
    """
    value = row.get(name)
    if value is None:
        raise BadRowError(where, f"no field {prefix}{name}")
    if not isinstance(value, kind):
        actual = type(value).__name__
        raise BadRowError(where, f"field {prefix}{name} is of type {actual}, not {kind.__name__}")


def _require_utf8(where: str, value: Any, name: str = "") -> None:
    """Raise BadRowError if any text in a row is one that UTF-8 cannot encode.

    JSON may contain half of a surrogate pair, as in `"\\ud800"`, but no file or tokenizer can.
    `name` is the field of the value; empty for the row itself.
    """
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRowError(where, f"field {name} has an unpaired surrogate") from None
    elif isinstance(value, dict):
        for key, part in value.items():
            _require_utf8(where, key, name=f"{name}.{key!a}".lstrip("."))
            _require_utf8(where, part, name=f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _require_utf8(where, part, name=f"{name}[{index}]")


def is_cnndm(row: Row) -> bool:
    """Whether a comparison is about a news article: those batches are kept apart."""
    return row.get("batch") in CNNDM_BATCHES


def confidence_of(row: Row) -> int | None:
    """The labeler's confidence, from 1 (sure of the first summary) to 9 (sure of the second).

    5 is a tie. None if the row has no confidence.
    """
    extra: Row = row.get("extra") or {}
    return extra.get("confidence")


def label_strength(row: Row) -> int | None:
    """How sure the labeler of a comparison was: 1 (slightly better) to 4 (far better).

    0 is a tie; None means unknown. OpenAI's 9 points run from 1, "the first is far better", to 9,
    "the second is far better", with the tie in the middle. So the strength is the distance from 5,
    whichever summary was chosen.
    differs: Huang et al. 2024 group by the point itself.
    """
    confidence = confidence_of(row)
    if confidence is None:
        return None
    return abs(confidence - TIE)


def info_of(row: Row) -> Row:
    """What a row says about its post: the field `info` of a comparison, or the post itself."""
    info: Row = row.get("info", row)
    return info


def chosen_text(row: Row) -> str:
    """The chosen summary of a comparison, unchanged."""
    text: str = row["summaries"][row["choice"]]["text"]
    return text


def rejected_text(row: Row) -> str:
    """The rejected summary of a comparison, unchanged."""
    text: str = row["summaries"][1 - row["choice"]]["text"]
    return text


def post_text(row: Row) -> str:
    """What a post or an article says, with its title but without its id and subreddit."""
    info = info_of(row)
    parts = [str(info.get(field) or "") for field in ("title", "post", "article")]
    return normalize_whitespace(" ".join(parts))
