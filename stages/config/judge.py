"""Evaluation, its judge, and what is judged without training: summaries, released policies.

Standard library only; prices are in `judge_models.py`.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from stages.config.checks import Section, UserError, address_fault, require
from stages.config.judge_prompt import OVERALL, read_prompt

LONGEST_NAME = 100  # of a system or a run, in characters: file systems take 255 bytes
KINDS = ("openai", "facts", "reward_model")
MOST_UNJUDGED = 0.02  # share of a policy's posts above which its win rate is no headline
OPENAI_MODEL = "gpt-6-luna"
# `none` asks a model not to reason; `default` says nothing, so that the server decides.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "default")
# The settings that verdicts of a server depend on, in addition to the text of the prompt.
OF_VERDICTS = (
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
    """Raise UserError, which repeats neither, for what is no address, or for one that tells a key:
    both reach configs, manifests, the cache and pages.
    """
    whose, mend = "judge.base_url (or OPENAI_BASE_URL)", "give the key as OPENAI_API_KEY"
    if "@" in url:
        raise UserError(f"{whose} holds a user or a password: leave it out, and {mend}")
    if url and address_fault(url):
        raise UserError(f"{whose} is no address: give one such as http://127.0.0.1:8000/v1")
    if "?" in url or "#" in url or any(map(looks_like_a_key, url.split("/"))):
        raise UserError(f"{whose} holds a query or a key: leave it out, and {mend}")
    if looks_like_a_key(model):
        raise UserError(f"judge.model looks like a key: give a model's name, and {mend}")


def looks_like_a_key(word: str) -> bool:
    """Whether a word is OPENAI_API_KEY, begins as keys do, or is as long and mixed as they are."""
    own, long = os.environ.get("OPENAI_API_KEY", "").strip(), re.fullmatch(r"\w{32,}", word)
    mixed = long and all(re.search(kind, word) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    begins = re.match(r"(sk-|rk-|gsk_|xai-|hf_|pplx-|AIza)[\w-]{16,}$", word)
    return bool(mixed or begins or (word == own and len(own) >= 16))


BEST_OF = "best-of-"  # begins the name of such a policy


@dataclass(frozen=True, kw_only=True)
class Eval(Section):
    """Summaries of held-out posts as Huang et al. 2024 make them."""

    posts: int = 0
    """Held-out posts that are summarised and judged; 0: all of the validation split."""
    temperature: float = 0.01
    """Of sampling the summaries."""
    dpo_summary_tokens: int = 128
    """Longest summary by DPO, tokens (Huang et al. 2024); others get data.max_summary_tokens."""
    best_of: str = ""
    """Best-of-n beside the policies, with commas: of n samples of SFT at ppo.temperature the one
    that the reward model likes best (Stiennon et al. 2020, appendix G.3). Empty: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        each = self.best_of.split(",") if self.best_of else []
        known = all(n.isdecimal() and 1 <= int(n) <= 1000 for n in each)
        require(known, "eval.best_of", "be numbers from 1 to 1000 with commas, such as 1,4,16")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of `best_of`, each once, the smallest first."""
        return tuple(sorted({int(n) for n in self.best_of.split(",") if n}))


@dataclass(frozen=True, kw_only=True)
class Checks(Section):
    """Checks of a run's set-up and updates, and of its judge."""

    choices: ClassVar = {"start": ("stop", "warn", "off"), "updates": ("warn", "stop", "off")}

    start: str = "stop"
    """What a failed check before the first update does (ratio 1, KL 0, padding, known answers):
    `stop`, `warn`, or `off` to skip the checks."""
    updates: str = "warn"
    """What a failed check of the first updates does, which computes rewards, advantages and
    gradients a second way: `warn`, `stop`, or `off`."""
    control_posts: int = 50
    """Posts whose reference is judged against texts that must lose to it."""
    calibration_pairs: int = 0
    """Labelled comparisons that `make judge-calibration` asks about, drawn by the seed; 0: all."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Section):
    """Who compares a summary with the reference."""

    choices: ClassVar = {
        "kind": KINDS,
        "structured": ("auto", "on", "off"),
        "reasoning_effort": EFFORTS,
    }
    ranges: ClassVar = {"temperature": (0, 2)}
    may_be_0 = ("max_retries", "reasoning_tokens")

    kind: str = "openai"
    """`openai`: any OpenAI-compatible server; `facts`: offline, built-in world only;
    `reward_model`: the run's own, an optimistic proxy, or the gold one that `judge.model` names."""
    model: str = OPENAI_MODEL
    """Model id asked of the server; for `reward_model` a run (`name` or `name/seed1`) or a folder
    with a reward model (the default: the run's own)."""
    base_url: str = ""
    """Server; empty: what OPENAI_BASE_URL names, or the client's. The key is OPENAI_API_KEY."""
    temperature: float = 0.0
    """Of the judge's replies. If the model refuses it, it is left out, and the manifest says so."""
    reasoning_effort: str = "none"
    """How long the judge may reason: `none`, `minimal` to `max`, or the server's `default`."""
    max_tokens: int = 256
    """Longest reply, tokens, without its reasoning."""
    reasoning_tokens: int = 4096
    """Room for reasoning in addition to `max_tokens`, if the judge is asked to reason or is seen to
    do so."""
    accept_model: str = ""
    """Other names under which the server may answer, with commas, `*` and `?`. Empty: `model`
    alone, also with a date or revision."""
    structured: str = "auto"
    """Whether replies follow a JSON schema: `on`, `off`, or `auto` (unless the server refuses)."""
    prompt: str = ""
    """File with the question, in place of `eval/judges/prompts/overall.md`."""
    axis: str = OVERALL
    """What is compared: `overall`, or `accuracy`, `coverage` or `coherence` alone, or any `NAME`
    whose criteria are in `axes/NAME.md` next to the file of `judge.prompt`."""

    # The settings below say how the judge is asked. No verdict depends on them.
    concurrency: int = 8
    """Requests under way at once."""
    requests_per_minute: float = 0
    """Most requests per minute; 0: no limit."""
    request_seconds: float = 120.0
    """Longest wait for a whole reply, seconds, from the request to its last byte."""
    max_retries: int = 8
    """Further tries after a rate limit, a server error or a broken reply; then the judge stops."""
    input_price: float = -1
    """USD per million tokens read; -1: as in `judge_models.py`."""
    output_price: float = -1
    """USD per million tokens written; -1: as in `judge_models.py`."""
    max_cost: float = 0
    """The most that replies may cost, with those of interrupted tries, USD; 0: no limit."""

    def __post_init__(self) -> None:
        check_address(self.base_url, self.model)
        super().__post_init__()
        is_asked = self.kind == "openai" or self.axis == OVERALL
        require(is_asked, "judge.axis", f"be overall: judge.kind={self.kind} is asked no question")
        for name in ("input_price", "output_price"):
            price = getattr(self, name)
            require(price >= 0 or price == -1, f"judge.{name}", f"be at least 0 or -1, not {price}")

    @property
    def identity(self) -> dict[str, Any]:
        """What verdicts depend on: kind, wording and some settings; no price, pace or cap.

        Raises UserError where the prompt cannot be read.
        """
        if self.kind != "openai":
            return {"kind": self.kind} | ({"model": self.gold} if self.gold else {})
        read = {name: getattr(self, name) for name in OF_VERDICTS}
        return {"kind": self.kind, **read, "wording": self.wording}

    @property
    def wording(self) -> str:
        """A hash of all that an LLM is asked, apart from the texts."""
        parts = read_prompt(self.prompt, self.axis).parts
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def check_read(self, names: Iterable[str]) -> None:
        """Raise UserError for a setting that only verdicts of another kind depend on."""
        of_an_llm = (*OF_VERDICTS, "prompt")
        own = {"openai": of_an_llm, "reward_model": ("model",)}.get(self.kind, ())
        for name in sorted(set(of_an_llm).difference(own).intersection(names)):
            reads_not = f"judge.kind={self.kind} judges and does not read it"
            raise UserError(f"judge.{name}: {reads_not}: choose another kind, or leave it out")

    @property
    def label(self) -> str:
        """The model, its prompt if that is not ours, and the axis if it is only one."""
        prompt = f", prompt {Path(self.prompt).stem}" if self.prompt else ""
        axis = f", {self.axis} alone" if self.axis != OVERALL else ""
        return f"{self.model}{prompt}{axis}"

    @property
    def gold(self) -> str:
        """The run or folder whose reward model judges in place of the run's own; else empty."""
        named = "" if self.model == OPENAI_MODEL else self.model
        return named.rstrip("/") if self.kind == "reward_model" else ""

    @property
    def folder(self) -> str:
        """The name of this judge's folders below a run: the model's with six digits of the
        identity, or the kind if that says everything.
        """
        if self.kind != "openai" and not self.gold:
            return self.kind
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        is_run = self.gold and not self.gold.startswith(("/", ".", "~"))
        last = f"gold-{self.gold}" if is_run else self.model.rstrip("/").split("/")[-1]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", last).strip("-.")
        return f"{name[:40] or self.kind}-{digest[:6]}"


def at_server(judge: JudgeSettings) -> JudgeSettings:
    """The settings with the server that OPENAI_BASE_URL names, where they ask one and name none:
    so two servers have two folders. Raises UserError as `check_address` does.
    """
    address = os.environ.get("OPENAI_BASE_URL", "")
    is_named = judge.kind != "openai" or judge.base_url or not address
    return judge if is_named else replace(judge, base_url=address)


@dataclass(frozen=True, kw_only=True)
class Outputs(Section):
    """Summaries in files that no run wrote, and what their columns are called."""

    file: str = ""
    """JSONL, CSV or Parquet; a folder of such files, or of a run. Empty: the run writes its own."""
    summary: str = "summary"
    """Column of the summaries. With several, separated by commas, each is a system."""
    system: str = "system"
    """Column that names the system; where it is missing, each file is one."""
    id: str = "id"
    """Column that names the post; where it is missing, the text of the post does."""
    post: str = "post"
    """Column of the post, beside `title` and `subreddit`; without it `query` is shown as it is."""
    reference: str = "reference"
    """Column of the reference."""
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
        return f"judged-{file_name(last)}"


def file_name(name: str) -> str:
    """A name that every file system takes, with hyphens for other characters. Where letters are
    lost, six digits of a hash follow, so that two names stay two.
    """
    name = unicodedata.normalize("NFC", name)
    safe = re.sub("[^A-Za-z0-9._+-]+", "-", name).strip("-.")
    lost = any(letter.isalnum() and not letter.isascii() for letter in name)
    if safe and not lost and len(safe) <= LONGEST_NAME:
        return safe
    digits = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"{safe[: LONGEST_NAME - 7].rstrip('-.')}-{digits}".lstrip("-")


@dataclass(frozen=True, kw_only=True)
class Released(Section):
    """What others trained: a policy that is judged as it is, a reward model in place of ours."""

    policy: str = ""
    """Folder or hub id[@revision] of a causal LM; empty: the run trains its own policies."""
    reward_model: str = ""
    """Folder or hub id[@revision] of a reward model with one label and the policy's tokenizer. It
    scores a released policy's summaries; without one, `make rm` takes it and trains none."""

    @property
    def run_name(self) -> str:
        """The run's folder if none is named: `released-` and the last name of the policy."""
        return f"released-{file_name(Path(self.policy).name)}"
