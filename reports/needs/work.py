"""Work and hours, stage by stage. Standard library only.

Work is counted: multiplications of every pass. Hours are that work at an assumed share of the
GPU's peak, and no pass is faster than its layers can be launched. `make rehearse` measures both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reports.needs.gpus import Gpu
from reports.needs.memory import HALF, Network, Setting
from reports.needs.shapes import ARTICLE_TOKENS, block_weights
from stages.settings.config import with_changes
from stages.settings.sections import CHECKED_ROWS, CNNDM

# Share of the peak of dense bf16 products that large passes reach. ASSUMED, not measured by us:
# between a quarter and a half is usual for eager PyTorch with fused attention at these sizes, and
# autocast over float32 weights stands at the low end. MFU= changes it.
MFU = 0.30
# Sampling reads every weight once a token. ASSUMED: this share of the memory's bandwidth.
BANDWIDTH_SHARE = 0.6
# Eager PyTorch launches some 40 kernels a layer. ASSUMED, seconds for one layer, forward.
LAUNCH_SECONDS = 0.6e-3
# Validation passes of SFT beside those of `sft.evaluations`: before the first update, at the end.
MORE_EVALUATIONS = 2


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one device does in one part of a stage, over the whole run."""

    stage: str
    label: str
    tokens: float
    """Tokens that pass through a network, each pass counted; over all devices."""
    flops: float
    """Operations of matrix products, over all devices."""
    passes: float = 0
    """Forward passes on one device; a training pass counts as three (four with recomputation)."""
    steps: float = 0
    """Passes for one token of the sampler, on one device."""
    read: float = 0
    """Bytes that such a pass moves."""


def forward_flops(setting: Setting, tokens: float, length: float, logits: float) -> float:
    """Operations of a forward pass: two for each weight and token, attention over whole rows of
    `length` tokens (a kernel with a mask computes the upper triangle too), and the output layer at
    the positions that have logits.
    """
    shape = setting.shape
    layers = 2 * shape.layers * block_weights(shape) * tokens
    attention = 4 * shape.layers * shape.attention * length * tokens
    return layers + attention + 2 * shape.hidden * shape.vocabulary * logits


def training_factor(setting: Setting, stage: str) -> int:
    """Forward passes that one training pass costs: the backward pass is two, one under LoRA (no
    gradients of the frozen weights), and recomputed activations are one more.
    """
    backward = 1 if setting.rank(stage) else 2
    return 1 + backward + setting.recomputed


def updates_of(setting: Setting) -> dict[str, int]:
    """Updates of each training stage, as the stages count them."""
    config, rows = setting.config, setting.lengths.rows
    return {
        "sft": config.sft.epochs * rows["sft_train"] // config.sft.batch_size,
        "rm": config.rm.epochs * rows["comparisons_train"] // config.rm.batch_size,
        "ppo": config.ppo.num_updates,
    }


def work_of(setting: Setting) -> list[Work]:
    """Everything that a run does, in the order of its stages.

    Sampling stops when every row has its EOS; planned are all tokens, as at the start of PPO.
    """
    config, lengths, rows = setting.config, setting.lengths, setting.lengths.rows
    query, response, ppo = lengths.query, float(config.data.max_summary_tokens), config.ppo
    whole = query + lengths.summary
    # Mean tokens that a pass computes for one of the two summaries of a comparison, and for one of
    # the samples of a query.
    compared = query / 2 + lengths.compared
    episode = query / ppo.samples_per_query + response
    learned = whole if config.sft.loss_on_query else lengths.summary
    held_out, pairs = rows["sft_validation"], 2 * rows["comparisons_validation"]
    looks = held_out * (config.sft.evaluations + MORE_EVALUATIONS)
    sft, rm = (
        float(updates_of(setting)[stage] * getattr(config, stage).batch_size)
        for stage in ("sft", "rm")
    )
    scored = min(rows["sft_train"], config.normalize.posts or rows["sft_train"])
    scored += min(scored, CHECKED_ROWS)  # again, on the saved model
    episodes = float(ppo.num_updates * ppo.batch_size)
    of_policy = float((ppo.num_updates - ppo.critic_updates) * ppo.batch_size)
    posts, epochs = config.eval.posts or held_out, ppo.num_ppo_epochs
    # Stage and label, sequences, tokens of each, and positions with logits of each; of sampling,
    # tokens of a query and of a response.
    passes: list[tuple[str, str, float, float, float]] = [
        ("sft", "learn", sft, whole, learned),
        ("sft", "validate", looks, whole, learned),
        ("sft", "sample", held_out, query, response),
        ("rm", "learn", 2 * rm, compared, 0),
        ("rm", "validate", pairs, compared, 0),
        ("rm", "articles", 2 * rows[CNNDM], ARTICLE_TOKENS, 0),  # pairs about news are longer
        ("normalize", "score", scored, whole, 0),
        ("ppo", "sample", episodes, query, response),
        ("ppo", "measure", 2 * episodes, episode, response),
        ("ppo", "score", 2 * episodes, episode, 0),
        ("ppo", "learn policy", epochs * of_policy, episode, response),
        ("ppo", "learn critic", epochs * episodes, episode, 0),
        ("summaries", "sample", 2 * posts, query, response),
        ("summaries", "score", 3 * posts, whole, 0),
        # PPO's summaries by PPO and by SFT, for their KL.
        ("summaries", "measure", 2 * posts, whole, lengths.summary),
    ]
    return [(_sample if row[1] == "sample" else _pass)(setting, *row) for row in passes]


def _pass(
    setting: Setting, stage: str, label: str, rows: float, length: float, logits: float
) -> Work:
    """A forward pass over so many sequences, `logits` positions each; training passes where the
    label begins with `learn`.
    """
    learns = label.startswith("learn")
    factor, memory = training_factor(setting, stage) if learns else 1, setting.config.memory
    size = memory.microbatch_size if learns else memory.forward_batch_size
    return Work(
        stage=stage,
        label=label,
        tokens=rows * length,
        flops=factor * forward_flops(setting, rows * length, length, rows * logits),
        passes=factor * rows / setting.devices / size,
    )


def _sample(
    setting: Setting, stage: str, label: str, rows: float, query: float, response: float
) -> Work:
    """Sampling: the prompt in one pass, then one token at a time for `forward_batch_size` rows.

    A pass for one token reads the bf16 copies of the weights, or, under LoRA, casts the frozen ones
    anew.
    """
    prompt = _pass(setting, stage, label, rows, query, 0)
    each = 4 * HALF if setting.rank(stage) and stage == "ppo" else HALF
    size = min(setting.config.memory.forward_batch_size, max(1.0, rows / setting.devices))
    return replace(
        prompt,
        tokens=prompt.tokens + rows * response,
        flops=prompt.flops + forward_flops(setting, rows * response, query, rows * response),
        steps=rows / setting.devices / size * response,
        read=Network(shape=setting.shape).matrices * (each if setting.half else 2 * HALF),
    )


def update_flops(setting: Setting, queries: Sequence[int]) -> float:
    """Operations of one update of PPO that must be done, for queries of so many tokens each:
    counted row by row, so no padding is in it, and all tokens are sampled.
    """
    counts = dict.fromkeys(("total_episodes", "batch_size", "num_minibatches"), 1)
    counts |= {"samples_per_query": 1, "critic_updates": 0}
    single = replace(setting, config=with_changes(setting.config, {"ppo": counts}))
    lengths = (replace(setting.lengths, query=float(tokens)) for tokens in queries)
    works = (work for each in lengths for work in work_of(replace(single, lengths=each)))
    return sum(work.flops for work in works if work.stage == "ppo")


def totals(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of the numbers of each name, in the order in which the names come first."""
    sums: dict[str, float] = {}
    for name, number in parts:
        sums[name] = sums.get(name, 0.0) + number
    return sums


def hours_by_stage(setting: Setting, gpu: Gpu, mfu: float) -> dict[str, float]:
    """Hours of every stage, all devices at work, at this share of a GPU's peak."""
    launching = setting.shape.layers * LAUNCH_SECONDS

    def seconds(work: Work) -> float:
        computing = work.flops / setting.devices / (gpu.teraflops * 1e12 * mfu)
        step = max(work.read / (gpu.bandwidth * 1e9 * BANDWIDTH_SHARE), launching)
        return max(computing, work.passes * launching) + work.steps * step

    return totals((work.stage, seconds(work) / 3600) for work in work_of(setting))
