"""The settings of evaluation, of the judge, and of what is judged without training.

Prices of the models that judge are in `judge_models.py`.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from typing_extensions import Self

from stages.config.errors import UserError
from stages.config.judge_prompt import OVERALL, read_prompt
from stages.config.section import NonNegativeInt, PositiveInt, Section

BEST_OF = "best-of-"  # prefix of best-of-n policies, such as best-of-4
LONGEST_NAME = 100  # of a system or a run, in characters: file systems take 255 bytes
MOST_UNJUDGED = 0.02  # above this share of a policy's posts, its win rate is not a headline
OPENAI_MODEL = "gpt-6-luna"
# The settings that verdicts of a server depend on, in addition to the text of the prompt.
VERDICT_SETTINGS = (
    "model",
    "base_url",
    "temperature",
    "max_tokens",
    "structured",
    "reasoning_effort",
    "reasoning_tokens",
    "accept_model",
    "axis",
)


def check_address(url: str, model: str) -> None:
    """Raise UserError if the server is not an address, or if a setting contains a key.

    The message does not repeat the value: a key in a setting would reach configs, manifests, the
    cache and pages.
    """
    name = "judge.base_url (or OPENAI_BASE_URL)"
    key_belongs = "put the key into OPENAI_API_KEY"
    if "@" in url:
        raise UserError(f"{name} contains a user name or a password: remove it, and {key_belongs}")
    if url and not is_server_address(url):
        raise UserError(f"{name} is not an address: use one such as http://127.0.0.1:8000/v1")
    if "?" in url or "#" in url or any(looks_like_a_key(part) for part in url.split("/")):
        raise UserError(f"{name} contains a query or a key: remove it, and {key_belongs}")
    if looks_like_a_key(model):
        raise UserError(
            f"judge.model looks like a key: set it to a model's name, and {key_belongs}"
        )


def is_server_address(address: str) -> bool:
    """Return whether a text can be the address of a server."""
    try:
        parts = urlsplit(address)
        has_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or of brackets
        return False
    is_printable = all("!" <= letter <= "~" for letter in address)
    return has_server and is_printable


def looks_like_a_key(word: str) -> bool:
    """Whether a word is OPENAI_API_KEY, starts like a key, or is as long and random as one."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if len(key) >= 16 and word == key:
        return True
    if re.match(r"(sk-|rk-|gsk_|xai-|hf_|pplx-|AIza)[\w-]{16,}$", word):
        return True
    is_long = re.fullmatch(r"\w{32,}", word) is not None
    return is_long and all(re.search(kind, word) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


class Eval(Section):
    """Summaries of held-out posts, sampled as in Huang et al. 2024."""

    posts: NonNegativeInt = 0
    """Number of held-out posts to summarize and judge. 0: the whole validation split."""
    temperature: float = Field(default=0.01, ge=1e-6, le=100)
    """Temperature at which summaries are sampled."""
    dpo_summary_tokens: PositiveInt = 128
    """Maximum length of DPO's summaries, tokens (Huang et al. 2024). Other policies get
    data.max_summary_tokens."""
    best_of: str = ""
    """Values of n for best-of-n, separated by commas: of n SFT samples at ppo.temperature, the one
    with the highest reward is judged too (Stiennon et al. 2020, appendix G.3). Empty: no
    best-of-n."""

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        texts = self.best_of.split(",") if self.best_of else []
        if not all(text.isdecimal() and 1 <= int(text) <= 1000 for text in texts):
            raise ValueError(
                "eval.best_of must be numbers from 1 to 1000, separated by commas, such as 1,4,16"
            )
        return self

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of `best_of`, each once, the smallest first."""
        return tuple(sorted({int(text) for text in self.best_of.split(",") if text}))


class Checks(Section):
    """Checks of a run's setup, of its first updates, and of its judge."""

    start: Literal["stop", "warn", "off"] = "stop"
    """What happens if a check before the first update fails (ratio 1, KL 0, padding, known scores):
    `stop` ends the run, `warn` prints a warning. `off` skips the checks."""
    updates: Literal["warn", "stop", "off"] = "warn"
    """What happens if a check of the first updates fails: `warn` prints a warning, `stop` ends the
    run. These checks compute rewards, advantages and gradients a second way. `off` skips them."""
    control_posts: PositiveInt = 50
    """Number of posts for which the reference is compared with negative controls."""
    calibration_pairs: NonNegativeInt = 0
    """Number of labeled comparisons that `make judge-calibration` asks about, drawn with the run's
    seed. 0: all."""


class JudgeSettings(Section):
    """Who compares a summary with the reference."""

    kind: Literal["openai", "facts", "reward_model"] = "openai"
    """`openai`: any OpenAI-compatible server. `facts`: an offline rule for the built-in posts only.
    `reward_model`: the run's own, which is an optimistic proxy, or a gold reward model named by
    judge.model."""
    model: str = OPENAI_MODEL
    """Model id that is sent to the server. For `reward_model`, a run (`name` or `name/seed1`) or a
    folder with a reward model; the default is the run's own."""
    base_url: str = ""
    """Address of the server. Empty: OPENAI_BASE_URL, or the client's default. Set the key only in
    OPENAI_API_KEY."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Temperature of the judge's replies. If the model refuses the parameter, it is not sent, and
    the manifest says so."""
    reasoning_effort: Literal[
        "none", "minimal", "low", "medium", "high", "xhigh", "max", "default"
    ] = "none"
    """Reasoning effort of the judge. `none` turns reasoning off; `default` leaves it to the
    server."""
    max_tokens: int = Field(default=256, gt=0, le=10_000_000)
    """Maximum length of a reply without its reasoning, tokens."""
    reasoning_tokens: int = Field(default=4096, ge=0, le=10_000_000)
    """Tokens for reasoning, in addition to max_tokens, if the judge is asked to reason or does so
    unasked."""
    accept_model: str = ""
    """Other model names that are accepted in replies, separated by commas; `*` and `?` are
    wildcards. Empty: only judge.model, with or without a date or a revision."""
    structured: Literal["auto", "on", "off"] = "auto"
    """Whether replies must follow a JSON schema: `on`, `off`, or `auto` (on unless the server
    refuses it)."""
    prompt: str = ""
    """File with the judge's prompt. Empty: `eval/judges/prompts/overall.md`."""
    axis: str = OVERALL
    """What the judge compares: the summaries `overall`; one axis of Stiennon et al. 2020
    (`accuracy`, `coverage` or `coherence`); or any NAME whose criteria are in `axes/NAME.md` next
    to the file of judge.prompt."""

    # The settings below say how requests are sent. No verdict depends on them.
    concurrency: int = Field(default=8, gt=0, le=1000)
    """Requests in flight at once."""
    requests_per_minute: float = Field(default=0, ge=0, le=1_000_000)
    """Maximum number of requests per minute. 0: no limit."""
    request_seconds: float = Field(default=120.0, ge=0.001, le=86_400)
    """Timeout of a request, seconds, from sending it to the last byte of its reply."""
    max_retries: int = Field(default=8, ge=0, le=1000)
    """Retries after a rate limit, a server error or a broken reply, before the judge stops."""
    input_price: float = Field(default=-1, ge=-1, le=1_000_000)
    """Price of input tokens, USD per million. -1: the price in `judge_models.py`."""
    output_price: float = Field(default=-1, ge=-1, le=1_000_000)
    """Price of output tokens, USD per million. -1: the price in `judge_models.py`."""
    max_cost: float = Field(default=0, ge=0, le=1_000_000_000)
    """Maximum cost of all replies, including those of interrupted attempts, USD. 0: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _check_secrets(cls, values: Any) -> Any:
        """Before the other checks, whose messages repeat a value."""
        check_address(str(values.get("base_url", "")), str(values.get("model", "")))
        return values

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        if self.kind != "openai" and self.axis != OVERALL:
            raise ValueError(
                f"judge.axis must be {OVERALL} with judge.kind={self.kind}, which reads no prompt"
            )
        if 0 < self.requests_per_minute < 0.01:
            raise ValueError("judge.requests_per_minute must be at least 0.01, or 0 for no limit")
        for name in ("input_price", "output_price"):
            price = getattr(self, name)
            if price < 0 and price != -1:
                raise ValueError(f"judge.{name} must be at least 0 or -1, not {price}")
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """What verdicts depend on: kind, wording and some settings, but not price, pace or cap.

        Raises UserError where the prompt cannot be read.
        """
        if self.kind != "openai":
            identity: dict[str, Any] = {"kind": self.kind}
            if self.gold:
                identity["model"] = self.gold
            return identity
        settings = {name: getattr(self, name) for name in VERDICT_SETTINGS}
        return {"kind": self.kind, **settings, "wording": self._wording()}

    def _wording(self) -> str:
        """A hash of everything that an LLM is asked, apart from the texts."""
        parts = read_prompt(self.prompt, self.axis).parts
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def check_used_by_kind(self, names: Iterable[str]) -> None:
        """Raise UserError for a setting that only verdicts of another kind depend on."""
        server_settings = {*VERDICT_SETTINGS, "prompt"}
        used = {"openai": server_settings, "reward_model": {"model"}, "facts": set[str]()}
        unused = server_settings - used[self.kind]
        useless = sorted(unused.intersection(names))
        if useless:
            raise UserError(
                f"judge.{useless[0]} has no effect with judge.kind={self.kind}: leave it out, or"
                " choose another kind"
            )

    @property
    def label(self) -> str:
        """The model, its prompt if that is not ours, and the axis if it is only one."""
        label = self.model
        if self.prompt:
            label += f", prompt {Path(self.prompt).stem}"
        if self.axis != OVERALL:
            label += f", only {self.axis}"
        return label

    @property
    def gold(self) -> str:
        """The run or folder whose reward model judges in place of the run's own; else empty."""
        if self.kind != "reward_model" or self.model == OPENAI_MODEL:
            return ""
        return self.model.rstrip("/")

    @property
    def folder(self) -> str:
        """The name of this judge's folders below a run: the model's with six digits of the
        identity, or the kind if that says everything.
        """
        if self.kind != "openai" and not self.gold:
            return self.kind
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        if self.gold and not self.gold.startswith(("/", ".", "~")):  # a run
            last = f"gold-{self.gold}"
        else:
            last = self.model.rstrip("/").split("/")[-1]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", last).strip("-.")
        return f"{name[:40] or self.kind}-{digest[:6]}"


def at_server(judge: JudgeSettings) -> JudgeSettings:
    """The settings with OPENAI_BASE_URL as the server, if they need a server and name none.

    So two servers have two folders. Raises UserError if it is not an address.
    """
    address = os.environ.get("OPENAI_BASE_URL", "")
    if judge.kind == "openai" and address and not judge.base_url:
        return judge.changed(base_url=address)
    return judge


class Outputs(Section):
    """Existing summaries in files, and the names of their columns."""

    file: str = ""
    """JSONL, CSV or Parquet file; a folder of such files; or the folder of a run. Empty: the run
    writes its own summaries."""
    summary: str = "summary"
    """Column of the summaries. With several, separated by commas, each column is a system of its
    own, and so is each name in the column of systems."""
    system: str = "system"
    """Column of the system's name. If it does not exist, each file is a system."""
    id: str = "id"
    """Column of the post's id. If it does not exist, the text of the post identifies it."""
    post: str = "post"
    """Column of the post, next to `title` and `subreddit`. If it does not exist, the column `query`
    is shown to the judge as it is."""
    reference: str = "reference"
    """Column of the reference."""
    label: str = ""
    """Column that says whether people prefer the summary to the reference. Empty: no labels."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for name in ("summary", "system", "id", "post", "reference"):
            if not getattr(self, name).strip(", "):
                raise ValueError(f"outputs.{name} must name a column")
        if self.label and len(self.summary_columns) != 1:
            raise ValueError("outputs.label must be empty with several columns of summaries")
        return self

    @property
    def summary_columns(self) -> tuple[str, ...]:
        """The columns of summaries."""
        return tuple(column.strip() for column in self.summary.split(",") if column.strip())

    @property
    def run_name(self) -> str:
        """The run's folder if none is named: `judged-` and the last name of the file."""
        path = Path(self.file)
        last = path.stem if path.suffix else "-".join(path.parts[-2:])
        return f"judged-{file_name(last)}"


def file_name(name: str) -> str:
    """A name that every file system accepts, with hyphens in place of other characters.

    If characters are lost, six digits of a hash follow, so that different names stay different.
    """
    name = unicodedata.normalize("NFC", name)
    safe = re.sub("[^A-Za-z0-9._+-]+", "-", name).strip("-.")
    loses_letters = any(letter.isalnum() and not letter.isascii() for letter in name)
    if safe and not loses_letters and len(safe) <= LONGEST_NAME:
        return safe
    digits = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"{safe[: LONGEST_NAME - 7].rstrip('-.')}-{digits}".lstrip("-")


class Released(Section):
    """Models that others have trained: a policy to judge, a reward model to use."""

    policy: str = ""
    """Folder or hub id[@revision] of a causal LM to judge without training. Empty: the run trains
    its own policies."""
    reward_model: str = ""
    """Folder or hub id[@revision] of a reward model with one label and the policy's tokenizer. It
    scores the summaries of a released policy. Without one, `make rm` uses it and trains none."""

    @property
    def run_name(self) -> str:
        """The run's folder if none is named: `released-` and the last name of the policy."""
        return f"released-{file_name(Path(self.policy).name)}"
