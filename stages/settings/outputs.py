"""The settings of a run that judges summaries which exist already. Standard library only."""

import hashlib
import re
import unicodedata
from dataclasses import dataclass, fields
from pathlib import Path

from stages.settings.checks import require

LONGEST_NAME = 100  # of a system or a run, in characters: file systems take 255 bytes


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Summaries in files that no run wrote, and what their columns are called."""

    file: str = ""
    """JSONL, CSV or Parquet; or a folder of such files; or the folder of a run. Empty: the run
    makes its own summaries."""
    summary: str = "summary"
    """Column of the summaries. With several, separated by commas, each is a system."""
    system: str = "system"
    """Column that names the system; where it is missing, each file is one."""
    id: str = "id"
    """Column that names the post; where it is missing, the text of the post does."""
    post: str = "post"
    """Column of the post. Columns `title` and `subreddit` are used where they are; where there is
    no post, the column `query` is shown as it is."""
    reference: str = "reference"
    """Column of the reference; or the name of the system that takes its place."""
    label: str = ""
    """Column that says whether people prefer the summary to the reference; empty: none."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            is_named = bool(getattr(self, name).strip(", "))
            require(is_named or name in ("file", "label"), f"outputs.{name}", "name a column")
        one_summary = len(self.summary_columns) == 1
        require(one_summary or not self.label, "outputs.label", "go with one column of summaries")

    @property
    def summary_columns(self) -> tuple[str, ...]:
        """The columns of summaries."""
        return tuple(column.strip() for column in self.summary.split(",") if column.strip())

    @property
    def run_name(self) -> str:
        """The run's folder if none is named: `judged-` and the last name of the file."""
        path = Path(self.file)
        last = path.stem if path.suffix else "-".join(path.parts[-2:])
        return "judged-" + file_name(last, "A-Za-z0-9._", "file")


def file_name(name: str, kept: str = "A-Za-z0-9._+-", otherwise: str = "system") -> str:
    """A name that every file system takes, with hyphens for what is not `kept`.

    Where letters or digits are lost, six digits of a hash follow, so that two names stay two; where
    nothing is left, they follow `otherwise`.
    """
    name = unicodedata.normalize("NFC", name)
    safe = re.sub(f"[^{kept}]+", "-", name).strip("-.")
    lost = any(letter.isalnum() and not letter.isascii() for letter in name)
    if safe and not lost and len(safe) <= LONGEST_NAME:
        return safe
    digits = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"{safe[: LONGEST_NAME - 7].rstrip('-.') or otherwise}-{digits}"


@dataclass(frozen=True, kw_only=True)
class Released:
    """A checkpoint that others trained, summarised and judged as it is."""

    policy: str = ""
    """Folder or hub id[@revision] of a causal LM; empty: the run trains its own policies."""
    reward_model: str = ""
    """Folder or hub id[@revision] of the reward model that scores its summaries, in our layout or
    in that of Huang et al. 2024; empty: no scores."""

    def __post_init__(self) -> None:
        together = bool(self.policy or not self.reward_model)
        require(together, "released.reward_model", "come with released.policy (make: POLICY=)")

    @property
    def run_name(self) -> str:
        """The run's folder if none is named: `released-` and the last name of the policy."""
        last = self.policy.rstrip("/").split("/")[-1]
        return "released-" + re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-.")
