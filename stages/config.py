"""Every setting of a run: frozen dataclasses whose defaults are the paper's.

Bad numbers are refused with one line. Presets and the command line are in `presets.py`. Standard
library only, so that `make` can read the settings before anything is installed.
"""

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

RUNS = Path("runs")
TRAIN_TOKENIZER = "train"
RANDOM = "random"
TOY = "toy"
HUB = "hub"


class UserError(Exception):
    """Something that the user can mend; its text is one line that says what and how."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """Where a preset starts from."""

    checkpoint: str = RANDOM
    """Hub id or folder of a causal LM; `random`: a GPT-NeoX of the shape below, new weights."""
    tokenizer: str = ""
    """Folder or hub id; empty: the checkpoint's own; `train`: a BPE trained on the posts."""
    vocab_size: int = 1024
    """Upper bound for the vocabulary of a trained tokenizer, tokens."""
    hidden_size: int = 128
    """Width of a random model."""
    num_layers: int = 4
    """Layers of a random model."""
    num_heads: int = 4
    """Attention heads of a random model."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads"):
            _positive(self, "base", name)
        _require(self.hidden_size % self.num_heads == 0, "base.hidden_size", "divide by num_heads")


@dataclass(frozen=True, kw_only=True)
class World:
    """Size of the built-in world."""

    seed: int = 1
    """Another seed is another world."""
    train_posts: int = 8000
    validation_posts: int = 600
    train_comparisons: int = 12000
    validation_comparisons: int = 2000

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "seed":
                _positive(self, "world", one.name)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Posts, comparisons and their length limits (P1 details 1 to 5)."""

    source: str = HUB
    """`hub`, `toy`, or a folder with sft_* and comparisons_* files (JSONL or Parquet)."""
    sft_dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    """Hub id in the schema of tldr_3_filtered, for source `hub`."""
    # The repository holds a loading script, which `datasets` 4 refuses; the branch holds its rows.
    comparisons_dataset: str = "openai/summarize_from_feedback:comparisons@refs/convert/parquet"
    """Hub id[:configuration][@revision] in the schema of comparisons, for source `hub`."""
    max_query_tokens: int = 512
    max_summary_tokens: int = 53
    """Longest reference with its leading space and EOS; also the length that PPO samples."""
    max_query_summary_tokens: int = 562
    max_comparison_tokens: int = 169
    """Longest compared summary with EOS."""
    max_query_comparison_tokens: int = 638

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name.startswith("max_"):
                _positive(self, "data", one.name)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW, alike in all stages (P1 section B.0)."""

    adam_eps: float = 1e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 0.01
    warmup_fraction: float = 0.0
    """Share of the updates in which the learning rate rises linearly from 0 (sft and rm)."""

    def __post_init__(self) -> None:
        _positive(self, "optimizer", "adam_eps")
        for name in ("adam_beta1", "adam_beta2", "weight_decay", "warmup_fraction"):
            _in_range(self, "optimizer", name, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Supervised fine-tuning on the reference summaries (P1 detail 9)."""

    learning_rate: float = 3e-6
    batch_size: int = 128
    """Sequences per update, over all devices."""
    epochs: int = 1
    loss_on_query: bool = True
    """Whether the query's tokens are learned too, as in P1; P2 learns the summary only."""
    evaluations: int = 4
    """How often the validation loss is measured on the way (and once before, once after)."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "batch_size", "epochs", "evaluations"):
            _positive(self, "sft", name)


@dataclass(frozen=True, kw_only=True)
class Rm:
    """Reward model from pairwise comparisons (P1 details 10 to 18)."""

    learning_rate: float = 3e-6
    batch_size: int = 64
    """Pairs per update, over all devices."""
    epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("learning_rate", "batch_size", "epochs"):
            _positive(self, "rm", name)


@dataclass(frozen=True, kw_only=True)
class Ppo:
    """PPO (P1 details 20 to 25 and section B.3); names as in TRL."""

    learning_rate: float = 3e-6
    """Decays linearly; the last of N updates still has learning_rate / N."""
    total_episodes: int = 1_000_000
    batch_size: int = 512
    """Episodes per update, over all devices."""
    num_ppo_epochs: int = 4
    num_minibatches: int = 1
    kl_coef: float = 0.05
    """Reward units per nat."""
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    """Reward units."""
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    temperature: float = 0.7
    missing_eos_penalty: float = -1.0
    """The score of a response without EOS, in reward units (it replaces the score)."""
    whiten_rewards: bool = False
    samples_every: int = 20
    """Updates between two tables of samples in samples.jsonl."""

    def __post_init__(self) -> None:
        for name in (
            "learning_rate batch_size num_ppo_epochs num_minibatches cliprange "
            "cliprange_value temperature samples_every"
        ).split():
            _positive(self, "ppo", name)
        for name in ("gamma", "lam"):
            _in_range(self, "ppo", name, 0, 1)
        for name in ("kl_coef", "vf_coef"):
            _require(getattr(self, name) >= 0, f"ppo.{name}", "be at least 0")
        _require(self.total_episodes >= self.batch_size, "ppo.total_episodes", "fill one batch")
        _require(
            self.batch_size % self.num_minibatches == 0, "ppo.batch_size", "divide by minibatches"
        )

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; episodes that do not fill a batch are left out, as in P1."""
        return self.total_episodes // self.batch_size


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Summaries of held-out posts (P1 section E.1)."""

    posts: int = 0
    """Held-out posts that are summarised and judged; 0: all of the validation split."""
    temperature: float = 0.01

    def __post_init__(self) -> None:
        _positive(self, "eval", "temperature")
        _require(self.posts >= 0, "eval.posts", "be at least 0")


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Who compares a summary with the reference."""

    kind: str = "openai"
    """`openai`: any OpenAI-compatible server; `facts`: offline, built-in world only;
    `reward_model`: the run's own reward model, an optimistic proxy."""
    model: str = "gpt-4o-mini-2024-07-18"
    """Model id asked of the server."""
    base_url: str = ""
    """Server; empty: the client's default or OPENAI_BASE_URL. The key is OPENAI_API_KEY."""
    temperature: float = 0.0
    max_tokens: int = 256
    """Longest reply, tokens."""
    concurrency: int = 8
    """Requests under way at once."""

    def __post_init__(self) -> None:
        kinds = ("openai", "facts", "reward_model")
        _require(self.kind in kinds, "judge.kind", f"be one of {', '.join(kinds)}")
        for name in ("max_tokens", "concurrency"):
            _positive(self, "judge", name)
        _in_range(self, "judge", "temperature", 0, 2)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Knobs that cost or save memory and change no result beyond rounding."""

    microbatch_size: int = 8
    """Sequences per forward and backward pass on one device (a pair counts as two)."""
    forward_batch_size: int = 32
    """Sequences per pass without gradients (sampling, scoring, evaluation) on one device."""
    mixed_precision: str = "bf16"
    """`bf16` on a GPU; `no`: float32."""
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("microbatch_size", "forward_batch_size"):
            _positive(self, "memory", name)
        choices = ("no", "bf16")
        _require(self.mixed_precision in choices, "memory.mixed_precision", "be no or bf16")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one run."""

    preset: str
    name: str
    """The run's folder; the preset's name unless something was overridden."""
    seed: int = 44413
    upstream: str = ""
    """Run whose base, sft, rm and normalize stages this one starts from; empty: its own."""
    overrides: tuple[str, ...] = ()
    """What was asked for by --set, so that a `make` command can repeat it."""
    base: Base = field(default_factory=Base)
    world: World = field(default_factory=World)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sft: Sft = field(default_factory=Sft)
    rm: Rm = field(default_factory=Rm)
    ppo: Ppo = field(default_factory=Ppo)
    eval: Eval = field(default_factory=Eval)
    judge: Judge = field(default_factory=Judge)
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        _require(self.seed >= 0, "seed", "be at least 0")
        one_folder = "/" not in self.name and self.name not in ("", ".", "..")
        _require(one_folder, "name", "be a folder name")


# What each stage's result depends on, beside the stages before it. Memory knobs are not among it.
STAGE_SECTIONS = {
    "base": ("base", "world", "data"),
    "sft": ("optimizer", "sft"),
    "rm": ("optimizer", "rm"),
    "normalize": (),
    "ppo": ("optimizer", "ppo"),
    "summaries": ("eval",),
    "judge": ("judge",),
    "win_rate": (),
}
UPSTREAM_STAGES = ("base", "sft", "rm", "normalize")
SECTIONS = {one.name: one.type for one in fields(Config) if dataclasses.is_dataclass(one.type)}


def settings_of(config: Config, stage: str) -> dict[str, Any]:
    """What the result of one stage depends on, beside its inputs: sections and the seed."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in STAGE_SECTIONS[stage]}
    if stage == "base" and config.data.source != TOY:
        sections.pop("world")
    if stage == "base" and config.data.source != HUB:
        del sections["data"]["sft_dataset"], sections["data"]["comparisons_dataset"]
    return {"seed": config.seed, **sections}


def settings_hash(config: Config, stage: str) -> str:
    """Short name of `settings_of`, as manifests record it."""
    text = json.dumps(settings_of(config, stage), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fail(error: Exception) -> NoReturn:
    """End the process with the one line of a UserError."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _require(condition: bool, key: str, what: str) -> None:
    if not condition:
        raise UserError(f"{key} must {what}")


def _positive(section: Any, prefix: str, name: str) -> None:
    value = getattr(section, name)
    _require(value > 0, f"{prefix}.{name}", f"be above 0, not {value}")


def _in_range(section: Any, prefix: str, name: str, low: float, high: float) -> None:
    value = getattr(section, name)
    _require(low <= value <= high, f"{prefix}.{name}", f"lie in [{low}, {high}], not {value}")
