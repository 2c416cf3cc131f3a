"""The settings of data, SFT, RM, DPO and memory; defaults are the paper's.

The others are in `ppo.py` and `judge.py`. A field's docstring stands under it, with its unit.
Standard library only.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import ClassVar

from stages.config.checks import Section, require

TRAIN_TOKENIZER = "train"
RANDOM = "random"
TOY = "toy"
HUB = "hub"
ALL_PAIRS = "all"
EOS, BEFORE_EOS = "eos", "before_eos"
EOS_TOKEN = "<|endoftext|>"  # of a tokenizer that is trained here, and of Pythia's
# A vocabulary of new weights is padded to it, as Pythia's: [PAD] fits without a resized embedding.
EMBEDDING_MULTIPLE = 64
# Logits of one chunk, by device. A GPU needs more to be busy.
CHUNK = {"cpu": 2**24, "cuda": 2**27}
# References on which `normalize` checks the saved model. A wrong shift, or padding that is read,
# moves the score of every row, so some rows show it.
CHECKED_ROWS = 1024
# The splits of the data, by their names.
POSTS = ("sft_train", "sft_validation")
COMPARISONS = ("comparisons_train", "comparisons_validation")
PPO_TRAIN = "ppo_train"  # optional: posts without a summary, for PPO's queries
# Split -> the setting of section `data` that says how many of its rows are used.
USED_ROWS = {
    "sft_train": "train_posts",
    "sft_validation": "validation_posts",
    "ppo_train": "ppo_posts",
    "comparisons_train": "train_comparisons",
    "comparisons_validation": "validation_comparisons",
}
CNNDM = "comparisons_cnndm"  # pairs about news articles, kept apart
# Huang et al. 2024, detail 2.
PROMPT = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
FIELDS = ("subreddit", "title", "post")
SAMPLE = {"subreddit": "tifu", "title": "My title: two words", "post": "One line.\n\nAnother: it."}


def check_prompt(template: str) -> None:
    """Raise UserError unless a template holds each field once and can be read back."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        parts = []
    names = sorted(name for _, name, _, _ in parts if name is not None)
    plain = not any(form or conversion for _, _, form, conversion in parts)
    places = "hold {subreddit}, {title} and {post}, each once, and nothing else in braces"
    require(names == sorted(FIELDS) and plain, "data.prompt", places)
    require(template == template.strip(), "data.prompt", "not begin or end with white space")
    again = parse_post(format_post(SAMPLE, template), template)
    require(again == SAMPLE, "data.prompt", "have words or line breaks between its places")


def format_post(row: Mapping[str, str], template: str = PROMPT) -> str:
    """The prompt of one post, without truncation; a post that is a whole prompt stays as it is."""
    if row.get("whole"):
        return row["post"]
    return template.format(**{name: row[name] for name in FIELDS})


def parse_post(query: str, template: str = PROMPT) -> dict[str, str] | None:
    """Subreddit, title and post of a prompt that `format_post` wrote; None for another text."""
    match = _pattern(template).fullmatch(query)
    return match.groupdict() if match else None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """Fields end at the first text that follows them in the template, the post at the last."""
    pattern = ""
    for text, name, _, _ in Formatter().parse(template):
        pattern += re.escape(text)
        if name is not None:
            pattern += f"(?P<{name}>.*)" if name == "post" else f"(?P<{name}>.*?)"
    return re.compile(pattern, re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Base(Section):
    """Where a preset starts from."""

    choices: ClassVar = {"bos": ("auto", "always", "never")}

    checkpoint: str = RANDOM
    """Folder or hub id[@revision] of a causal LM; `random`: a new GPT-NeoX of the shape below."""
    tokenizer: str = ""
    """Folder or hub id[@revision]; empty: the checkpoint's own; `train`: a BPE of the posts."""
    bos: str = "auto"
    """What begins each query: BOS `always` or `never`, or `auto`, as the tokenizer does."""
    vocab_size: int = 1024
    """Upper bound for the vocabulary of a trained tokenizer, tokens."""
    hidden_size: int = 128
    """Width of a random model."""
    num_layers: int = 4
    """Layers of a random model."""
    num_heads: int = 4
    """Attention heads of a random model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.hidden_size % (2 * self.num_heads) == 0  # rotary positions turn pairs
        require(even, "base.hidden_size", "be an even multiple of num_heads")
        reads = self.checkpoint == RANDOM or self.tokenizer != TRAIN_TOKENIZER
        own = f"be empty (its own) or name one with base.checkpoint={self.checkpoint}, not `train`"
        require(reads, "base.tokenizer", own)


@dataclass(frozen=True, kw_only=True)
class World(Section):
    """Seed and size of the built-in world."""

    may_be_0 = ("seed",)

    seed: int = 1
    """Another seed is another world."""
    train_posts: int = 8000
    """Posts with a reference, for SFT and PPO."""
    validation_posts: int = 600
    """Held-out posts with a reference."""
    train_comparisons: int = 12_000
    """Pairs of summaries, for the reward model and DPO."""
    validation_comparisons: int = 2000
    """Held-out pairs of summaries."""


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Posts, comparisons and their length limits (Huang et al. 2024, details 1 to 5)."""

    choices: ClassVar = {"on_bad_row": ("stop", "skip")}

    source: str = HUB
    """`hub`, `toy`, or a folder with sft_* and comparisons_* files (JSONL or Parquet)."""
    sft_dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    """Hub id[:configuration][@revision] in the schema of tldr_3_filtered, for source `hub`."""
    # The repository holds a loading script, which `datasets` 4 refuses; the branch holds its rows.
    comparisons_dataset: str = "openai/summarize_from_feedback:comparisons@refs/convert/parquet"
    """Hub id[:configuration][@revision] in the schema of comparisons, for source `hub`."""
    prompt: str = PROMPT
    """What a policy reads of a post: a text with {subreddit}, {title} and {post}, each once."""
    chat_template: bool = False
    """Whether prompts and answers are formatted by the tokenizer's own chat template: for a base
    checkpoint that is a chat model, and for rows of messages."""
    on_bad_row: str = "stop"
    """What a row that cannot be used does: `stop`, or `skip`: it is listed and left out."""
    max_post_characters: int = 0
    """Posts with a longer text are left out, and pairs stay; 0: all are used."""
    train_posts: int = 0
    """Training posts that are used, drawn alike for every seed; 0: all."""
    validation_posts: int = 0
    """Held-out posts that are used, drawn alike for every seed; 0: all."""
    ppo_posts: int = 0
    """Posts without a summary that are used, drawn alike for every seed; 0: all."""
    train_comparisons: int = 0
    """Training pairs that are used, drawn alike for every seed; 0: all."""
    validation_comparisons: int = 0
    """Held-out pairs that are used, drawn alike for every seed; 0: all."""
    max_query_tokens: int = 512
    """Longest query, tokens; a longer post is cut."""
    max_summary_tokens: int = 53
    """Longest reference with its leading space and EOS, tokens; PPO samples as many. Up to twice
    as many are kept and counted."""
    max_query_summary_tokens: int = 562
    """Longest query and reference together, tokens; more are kept and counted."""
    max_comparison_tokens: int = 169
    """Longest compared summary with EOS, tokens; up to twice as many are kept and counted."""
    max_query_comparison_tokens: int = 638
    """Longest query and compared summary together, tokens; more are kept and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prompt(self.prompt)

    @property
    def rows(self) -> dict[str, int]:
        """The most rows that are used of each split; 0: all."""
        return {split: getattr(self, name) for split, name in USED_ROWS.items()}


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW, the same in all stages (Huang et al. 2024)."""

    ranges: ClassVar = dict.fromkeys(
        ("adam_beta1", "adam_beta2", "weight_decay", "warmup_fraction"), (0, 1)
    )

    adam_eps: float = 1e-5
    """Added to the denominator of a step."""
    adam_beta1: float = 0.9
    """Decay of the mean gradient, per step."""
    adam_beta2: float = 0.999
    """Decay of the mean squared gradient, per step."""
    weight_decay: float = 0.01
    """Share of a weight that a step takes off, times the learning rate."""
    warmup_fraction: float = 0.0
    """Share of the updates in which the learning rate rises linearly from 0 (sft, rm, dpo)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("adam_beta1", "adam_beta2"):
            require(getattr(self, name) < 1, f"optimizer.{name}", "be below 1: at 1 nothing decays")


@dataclass(frozen=True, kw_only=True)
class Supervised(Section):
    """What SFT, reward model and DPO have in common."""

    learning_rate: float = 3e-6
    """Peak of the cosine schedule."""
    batch_size: int = 64
    """Sequences (sft) or pairs (rm, dpo) per update, over all devices."""
    epochs: int = 1
    """Passes over the training posts or pairs."""


@dataclass(frozen=True, kw_only=True)
class Sft(Supervised):
    """Supervised fine-tuning on the reference summaries (Huang et al. 2024, detail 9)."""

    ranges: ClassVar = {"dropout": (0, 0.9)}
    batch_size: int = 128
    loss_on_query: bool = True
    """Whether the query is learned too (Huang et al. 2024; not in Stiennon et al. 2020)."""
    dropout: float = 0.0
    """Probability while learning; Huang et al. 2024, detail 7: off."""
    evaluations: int = 4
    """How often, about, the validation loss is measured between the start and the end."""


@dataclass(frozen=True, kw_only=True)
class Rm(Supervised):
    """Reward model from pairwise comparisons (Huang et al. 2024, details 10 to 18)."""

    ranges: ClassVar = {"dropout": (0, 0.9)}
    choices: ClassVar = {"pairs": (ALL_PAIRS, "even", "odd"), "read_at": (EOS, BEFORE_EOS)}
    dropout: float = 0.0
    """Probability while learning; Huang et al. 2024, detail 7: off."""
    pairs: str = ALL_PAIRS
    """The pairs that are learned, by DPO too: `all`, or those of posts whose id has an `even` or
    an `odd` hash. The halves share no post, so one can train a gold reward model."""
    by_post: bool = False
    """Whether a post's pairs are learned together, by DPO too, so that each of its texts is
    computed once (Ouyang et al. 2022, section 3.5). The paper shuffles pairs."""
    read_at: str = EOS
    """Where its scalar is read, in training and in scoring (the saved model records it): `eos`, or
    `before_eos`, the text's last token. Without an EOS it is the last token in both."""
    center: float = 0.0
    """Weight of (chosen + rejected)^2 in the loss. Comparisons of one post leave its scores free up
    to a constant, which this brings to 0; the paper has no such term (0)."""


@dataclass(frozen=True, kw_only=True)
class Reward(Section):
    """What policies are rewarded for, where it is no reward model."""

    function: str = ""
    """`module:function`, which gives a number for each response, in place of a reward model: it
    gets lists of queries, responses and rows. The module lies in the working folder."""

    def __post_init__(self) -> None:
        plain = not self.function or all(self.function.partition(":"))
        require(plain, "reward.function", "be module:function, or empty")

    @property
    def module(self) -> Path | None:
        """The module's file, from the working folder."""
        name = self.function.partition(":")[0]
        return Path(*name.split(".")).with_suffix(".py") if name else None


@dataclass(frozen=True, kw_only=True)
class Normalize(Section):
    """Reward normalization (Huang et al. 2024, detail 15)."""

    posts: int = 0
    """References, evenly spaced over the SFT train split, whose mean score becomes 0; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.posts != 1, "normalize.posts", "be 2 or more, or 0 for all")


@dataclass(frozen=True, kw_only=True)
class Dpo(Supervised):
    """Direct preference optimization (Rafailov et al. 2023, as Huang et al. 2024 run it)."""

    beta: float = 0.05
    """Reward units per nat. A smaller beta lets the policy move further from the SFT model."""


@dataclass(frozen=True, kw_only=True)
class Memory(Section):
    """How a run fits its machine.

    How batches are cut changes no number beyond rounding (unless ppo.loss_mean is `microbatches`).
    mixed_precision and cpu_threads change the rounding of every sum: a result depends on them.
    """

    may_be_0 = ("save_minutes", "microbatch_size", "forward_batch_size")
    choices: ClassVar = {"mixed_precision": ("no", "bf16"), "frozen_dtype": ("float32", "bf16")}
    microbatch_size: int = 8
    """Sequences per forward and backward pass on one device (a pair counts as two); `auto` (0):
    as many as the plan says fit into what is free when a stage begins."""
    forward_batch_size: int = 32
    """Sequences per pass without gradients (sampling, scoring, evaluation), as above; or `auto`.
    At most: on a CPU, PPO measures and scores fewer at once, so that less is padding."""
    mixed_precision: str = "bf16"
    """`bf16`: matrix products in bf16; weights, heads, softmax, losses and statistics in float32;
    `no`: all in float32."""
    frozen_dtype: str = "float32"
    """What PPO's ref_policy and reward model are held in: `bf16` halves their memory."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass: less memory, more time."""
    cpu_threads: int = 0
    """Threads of one process on a CPU; 0: torch's choice. Their number changes rounding, and PPO
    amplifies it: treat it like another seed. A run repeats to the digit only with its own."""
    save_minutes: float = 5.0
    """Minutes between two checkpoints, or more if they would cost over 5 % of the time; 0: after
    every update."""
