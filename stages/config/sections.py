"""The settings of data, SFT, reward model, DPO and memory. Defaults are the paper's.

The other settings are in `ppo.py` and `judge.py`. The docstring below a field describes it and
gives its unit; `make settings` prints these docstrings.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from stages.config.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

TRAIN_TOKENIZER = "train"
RANDOM = "random"
TOY = "toy"
HUB = "hub"
ALL_PAIRS = "all"
EOS, BEFORE_EOS = "eos", "before_eos"
EOS_TOKEN = "<|endoftext|>"  # of a tokenizer that is trained here, and of Pythia's
# A vocabulary of new weights is padded to it, as Pythia's: [PAD] fits without a resized embedding.
EMBEDDING_MULTIPLE = 64
# Logits of one chunk, by device. A GPU needs larger chunks to stay busy.
CHUNK = {"cpu": 2**24, "cuda": 2**27}
# References on which `normalize` checks the saved model. A wrong shift, or padding that affects
# scores, moves the score of every row, so a few rows are enough to notice it.
CHECKED_ROWS = 1024
# The splits of the data, by their names.
POSTS = ("sft_train", "sft_validation")
COMPARISONS = ("comparisons_train", "comparisons_validation")
PPO_TRAIN = "ppo_train"  # optional: posts without summaries, for PPO's queries
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
    """Raise ValueError unless a template has each field once and its prompts can be read back."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        parts = []
    names = sorted(name for _, name, _, _ in parts if name is not None)
    is_plain = not any(form or conversion for _, _, form, conversion in parts)

    if names != sorted(FIELDS) or not is_plain:
        raise ValueError(
            "data.prompt must contain {subreddit}, {title} and {post}, each once, and nothing else"
            " in braces"
        )
    if template != template.strip():
        raise ValueError("data.prompt must not begin or end with white space")
    if parse_post(format_post(SAMPLE, template), template) != SAMPLE:
        raise ValueError("data.prompt must have words or line breaks between its placeholders")


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
    """Fields end where the template's next text first occurs, and the post where it last occurs."""
    pattern = ""
    for text, name, _, _ in Formatter().parse(template):
        pattern += re.escape(text)
        if name is not None:
            pattern += f"(?P<{name}>.*)" if name == "post" else f"(?P<{name}>.*?)"
    return re.compile(pattern, re.DOTALL)


class Base(Section):
    """The model and the tokenizer that a run starts from."""

    checkpoint: str = RANDOM
    """Folder or hub id[@revision] of a causal LM. `random`: a new GPT-NeoX with the shape below."""
    tokenizer: str = ""
    """Folder or hub id[@revision]. Empty: the checkpoint's own. `train`: a BPE tokenizer trained on
    the posts."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether a query begins with BOS: `always`, `never`, or `auto`, the tokenizer's default."""
    vocab_size: int = Field(default=1024, gt=0, le=10_000_000)
    """Maximum vocabulary size of a trained tokenizer, tokens."""
    hidden_size: int = Field(default=128, gt=0, le=1_000_000)
    """Width of a random model."""
    num_layers: int = Field(default=4, gt=0, le=10_000)
    """Number of layers of a random model."""
    num_heads: int = Field(default=4, gt=0, le=100_000)
    """Number of attention heads of a random model."""

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):  # rotary positions rotate pairs
            raise ValueError("base.hidden_size must be an even multiple of base.num_heads")
        if self.tokenizer == TRAIN_TOKENIZER and self.checkpoint != RANDOM:
            raise ValueError(
                "base.tokenizer must be empty (the checkpoint's own) or name a tokenizer with"
                f" base.checkpoint={self.checkpoint}, not `train`"
            )
        return self


class World(Section):
    """Seed and number of the built-in posts and comparisons."""

    seed: int = Field(default=1, ge=0)
    """Seed of the built-in data: a different seed gives different posts."""
    train_posts: PositiveInt = 8000
    """Number of posts with a reference, for SFT and PPO."""
    validation_posts: PositiveInt = 600
    """Number of held-out posts with a reference."""
    train_comparisons: PositiveInt = 12_000
    """Number of pairs of summaries, for the reward model and DPO."""
    validation_comparisons: PositiveInt = 2000
    """Number of held-out pairs of summaries."""


class Data(Section):
    """Posts, comparisons and their length limits (Huang et al. 2024, details 1 to 5)."""

    source: str = HUB
    """`hub`, `toy`, or a folder with sft_* and comparisons_* files (JSONL or Parquet)."""
    sft_dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    """Hub id[:configuration][@revision] of posts in the schema of tldr_3_filtered, for source
    `hub`."""
    # The main branch has a loading script, which `datasets` 4 refuses; this branch has the rows.
    comparisons_dataset: str = "openai/summarize_from_feedback:comparisons@refs/convert/parquet"
    """Hub id[:configuration][@revision] of pairs in the schema of comparisons, for source `hub`."""
    prompt: str = PROMPT
    """Template of a query, with {subreddit}, {title} and {post} once each. Write a line break as
    \\n."""
    chat_template: bool = False
    """Whether the tokenizer's chat template formats prompts and answers: for a base checkpoint that
    is a chat model, and for rows of messages."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What happens at a row that cannot be used: `stop` ends the stage, `skip` leaves the row out
    and lists it."""
    max_post_characters: NonNegativeInt = 0
    """Maximum length of a post, characters. Longer posts are left out, but their pairs are kept. 0:
    no limit."""
    train_posts: NonNegativeInt = 0
    """Number of training posts to use, the same ones for every seed. 0: all."""
    validation_posts: NonNegativeInt = 0
    """Number of held-out posts to use, the same ones for every seed. 0: all."""
    ppo_posts: NonNegativeInt = 0
    """Number of posts without summaries to use, the same ones for every seed. 0: all."""
    train_comparisons: NonNegativeInt = 0
    """Number of training pairs to use, the same ones for every seed. 0: all."""
    validation_comparisons: NonNegativeInt = 0
    """Number of held-out pairs to use, the same ones for every seed. 0: all."""
    max_query_tokens: PositiveInt = 512
    """Maximum length of a query, tokens. Longer posts are cut."""
    max_summary_tokens: PositiveInt = 53
    """Maximum length of a reference with its leading space and EOS, tokens; also the number of
    tokens that PPO samples. References of up to twice this length are kept and counted."""
    max_query_summary_tokens: PositiveInt = 562
    """Maximum length of query and reference together, tokens. Longer ones are kept and counted."""
    max_comparison_tokens: PositiveInt = 169
    """Maximum length of a compared summary with EOS, tokens. Summaries of up to twice this length
    are kept and counted."""
    max_query_comparison_tokens: PositiveInt = 638
    """Maximum length of query and compared summary together, tokens. Longer ones are kept and
    counted."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, template: str) -> str:
        check_prompt(template)
        return template

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows to use of each split. 0: all."""
        return {split: getattr(self, name) for split, name in USED_ROWS.items()}


class Optimizer(Section):
    """AdamW, the same in all stages (Huang et al. 2024)."""

    adam_eps: float = Field(default=1e-5, gt=0, le=1)
    """Epsilon, added to the denominator of a step."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the mean gradient, per step."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the mean squared gradient, per step."""
    weight_decay: Fraction = 0.01
    """Each step shrinks the weights by this fraction times the learning rate."""
    warmup_fraction: Fraction = 0.0
    """Fraction of the updates over which the learning rate rises linearly from 0 (sft, rm, dpo)."""


class Supervised(Section):
    """Settings that SFT, reward model and DPO have in common."""

    learning_rate: PositiveFloat = 3e-6
    """Peak of the cosine schedule."""
    batch_size: PositiveInt = 64
    """Sequences (sft) or pairs (rm, dpo) per update, over all devices."""
    epochs: PositiveInt = 1
    """Passes over the training posts or pairs."""


class Sft(Supervised):
    """Supervised fine-tuning on the reference summaries (Huang et al. 2024, detail 9)."""

    batch_size: int = 128
    loss_on_query: bool = True
    """Whether the loss includes the tokens of the query (Huang et al. 2024; not in Stiennon et al.
    2020)."""
    dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Dropout during training. Huang et al. 2024, detail 7: off."""
    evaluations: PositiveInt = 4
    """Approximate number of validations between the first and the last update."""


class Rm(Supervised):
    """Reward model from pairwise comparisons (Huang et al. 2024, details 10 to 18)."""

    dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Dropout during training. Huang et al. 2024, detail 7: off."""
    pairs: Literal["all", "even", "odd"] = "all"
    """Pairs that the reward model and DPO learn from: `all`, or only those of posts whose id has an
    `even` or an `odd` hash. The halves have no post in common, so one of them can train a gold
    reward model."""
    by_post: bool = False
    """Whether all pairs of a post are in the same batch, for DPO too, so that each of its texts is
    computed once (Ouyang et al. 2022, section 3.5). The paper shuffles pairs."""
    read_at: Literal["eos", "before_eos"] = "eos"
    """Token at which the score is read, in training and in scoring: `eos`, or `before_eos`, the
    last token of the text. The saved model records it. Without an EOS, both mean the last token."""
    center: NonNegativeFloat = 0.0
    """Weight of (chosen + rejected)^2 in the loss. Comparisons determine a post's scores only up to
    a constant; this term pulls that constant to 0. 0 in the paper, which has no such term."""


class Reward(Section):
    """A reward function in place of a reward model."""

    function: str = ""
    """`module:function` that returns a number for each response, in place of a reward model. It
    receives lists of queries, responses and rows. The module is a file in the working folder."""

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        if self.function and not all(self.function.partition(":")):
            raise ValueError("reward.function must be module:function, or empty")
        return self

    @property
    def module(self) -> Path | None:
        """The module's file, from the working folder."""
        name = self.function.partition(":")[0]
        return Path(*name.split(".")).with_suffix(".py") if name else None


class Normalize(Section):
    """Reward normalization (Huang et al. 2024, detail 15)."""

    posts: NonNegativeInt = 0
    """Number of references, evenly spaced over the SFT training split, whose mean score is shifted
    to 0. 0: all."""

    @model_validator(mode="after")
    def _check_posts(self) -> Self:
        if self.posts == 1:
            raise ValueError("normalize.posts must be 2 or more, or 0 for all")
        return self


class Dpo(Supervised):
    """Direct preference optimization (Rafailov et al. 2023, as Huang et al. 2024 run it)."""

    beta: PositiveFloat = 0.05
    """DPO's beta, reward units per nat. A smaller beta lets the policy move further from the SFT
    model."""


class Memory(Section):
    """How a run fits its machine.

    How batches are split changes no number beyond rounding (unless ppo.loss_mean is
    `microbatches`). mixed_precision and cpu_threads change the rounding of every sum, so a result
    depends on them.
    """

    microbatch_size: NonNegativeInt = 8
    """Sequences per forward and backward pass on one device (a pair counts as two). `auto` (0): as
    many as fit into the memory that is free when a stage begins, according to the memory plan."""
    forward_batch_size: NonNegativeInt = 32
    """Maximum number of sequences per pass without gradients (sampling, scoring, evaluation), or
    `auto`. On a CPU, PPO measures and scores fewer at once to save padding."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """`bf16`: matrix products in bf16, but weights, heads, softmax, losses and statistics in
    float32. `no`: everything in float32."""
    frozen_dtype: Literal["float32", "bf16"] = "float32"
    """Precision of PPO's ref_policy and reward model. `bf16` halves their memory."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass, which saves memory, not time."""
    cpu_threads: int = Field(default=0, ge=0, le=1024)
    """Number of threads of one process on a CPU. 0: torch's choice. It changes rounding, which PPO
    amplifies, so treat a different number like a different seed. A run repeats exactly only with
    the same number."""
    save_minutes: float = Field(default=5.0, ge=0, le=1_000_000)
    """Minutes between two checkpoints, or longer if saving would take over 5% of the time. 0: a
    checkpoint after every update."""
