"""Work and hours, stage by stage. Standard library only.

Work is counted: multiplications of every pass. Hours are that work at an assumed share of the
GPU's peak, and no pass is faster than its layers can be launched. `make rehearse` measures both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reports.needs.gpus import Gpu
from reports.needs.memory import HALF, Network, Setting
from reports.needs.parts import shares
from reports.needs.shapes import ARTICLE_TOKENS, block_weights
from stages.settings.families import CHECKED_ROWS, SHARING

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
STEPS = ("sample", "measure", "score", "learn")
"""The steps of an update that compute."""
OPTIONAL = "dpo"
"""A stage that a run may leave out: sums are without it."""


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

    @property
    def learns(self) -> bool:
        """Whether its passes are training passes."""
        return self.label.startswith("learn")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How fast a GPU is assumed to be."""

    gpu: Gpu
    mfu: float = MFU

    def seconds(self, work: Work, layers: int, devices: int) -> float:
        """Time of one part of a stage, all devices at work."""
        computing = work.flops / devices / (self.gpu.teraflops * 1e12 * self.mfu)
        launching = layers * LAUNCH_SECONDS
        step = max(work.read / (self.gpu.bandwidth * 1e9 * BANDWIDTH_SHARE), launching)
        return max(computing, work.passes * launching) + work.steps * step


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


def work_of(setting: Setting) -> list[Work]:
    """Everything that a run does, in the order of its stages; DPO is the optional one."""
    kinds = (_sft, _rm, _normalize, _ppo, _dpo, _summaries)
    return [work for kind in kinds for work in kind(setting)]


def updates_of(setting: Setting) -> dict[str, int]:
    """Updates of each training stage, as the stages count them."""
    config, rows = setting.config, setting.lengths.rows
    pairs = rows["comparisons_train"]
    return {
        "sft": config.sft.epochs * rows["sft_train"] // config.sft.batch_size,
        "rm": config.rm.epochs * pairs // config.rm.batch_size,
        "ppo": config.ppo.num_updates,
        "dpo": config.dpo.epochs * pairs // config.dpo.batch_size,
    }


def _pass(
    setting: Setting, name: tuple[str, str], rows: float, length: float, logits: float = 0
) -> Work:
    """A forward pass over so many sequences, `logits` positions each; training passes where the
    label begins with `learn`.
    """
    stage, label = name
    learns = label.startswith("learn")
    factor, size = training_factor(setting, stage) if learns else 1, shares(setting)[not learns]
    return Work(
        stage=stage,
        label=label,
        tokens=rows * length,
        flops=factor * forward_flops(setting, rows * length, length, rows * logits),
        passes=factor * rows / setting.devices / size,
    )


def _sample(setting: Setting, name: tuple[str, str], rows: float, response: float) -> Work:
    """Sampling: the prompt in one pass, then one token at a time for `forward_batch_size` rows.

    A pass for one token reads the bf16 copies of the weights, or, under LoRA, casts the frozen ones
    anew.
    """
    query = setting.lengths.query
    prompt = _pass(setting, name, rows, query)
    weights = Network(shape=setting.shape).matrices
    each = 4 * HALF if setting.rank(name[0]) and name[0] == "ppo" else HALF
    size = min(shares(setting)[1], max(1.0, rows / setting.devices))
    return replace(
        prompt,
        tokens=prompt.tokens + rows * response,
        flops=prompt.flops + forward_flops(setting, rows * response, query, rows * response),
        steps=rows / setting.devices / size * response,
        read=weights * (each if setting.half else 2 * HALF),
    )


def _sft(setting: Setting) -> list[Work]:
    config, lengths = setting.config.sft, setting.lengths
    length = lengths.query + lengths.summary
    logits = length if config.loss_on_query else lengths.summary
    rows = updates_of(setting)["sft"] * config.batch_size
    held_out = lengths.rows["sft_validation"]
    looks = held_out * (config.evaluations + MORE_EVALUATIONS)
    return [
        _pass(setting, ("sft", "learn"), rows, length, logits),
        _pass(setting, ("sft", "validate"), looks, length, logits),
        _sample(setting, ("sft", "sample"), held_out, lengths.longest_summary),
    ]


def _compared(setting: Setting) -> float:
    """Mean tokens that a pass computes for one of the two summaries of a comparison."""
    lengths = setting.lengths
    shared = 2 if setting.shape.family in SHARING else 1
    return lengths.query / shared + lengths.compared


def _rm(setting: Setting) -> list[Work]:
    lengths, length = setting.lengths, _compared(setting)
    pairs = updates_of(setting)["rm"] * setting.config.rm.batch_size
    articles = 2 * lengths.rows["comparisons_cnndm"]  # pairs about news, which are longer
    return [
        _pass(setting, ("rm", "learn"), 2 * pairs, length),
        _pass(setting, ("rm", "validate"), 2 * lengths.rows["comparisons_validation"], length),
        _pass(setting, ("rm", "articles"), articles, ARTICLE_TOKENS),
    ]


def _normalize(setting: Setting) -> list[Work]:
    lengths = setting.lengths
    rows = lengths.rows["sft_train"]
    rows = min(rows, setting.config.normalize.posts or rows)
    rows += min(rows, CHECKED_ROWS)  # again, on the saved model
    return [_pass(setting, ("normalize", "score"), rows, lengths.query + lengths.summary)]


def _ppo(setting: Setting) -> list[Work]:
    """Sampling stops when every row has its EOS; planned are all tokens, as at its start."""
    ppo, lengths = setting.config.ppo, setting.lengths
    episodes = float(ppo.num_updates * ppo.batch_size)
    of_policy = float((ppo.num_updates - ppo.critic_updates) * ppo.batch_size)
    response, epochs = float(lengths.longest_summary), ppo.num_ppo_epochs
    length = lengths.query + response
    return [
        _sample(setting, ("ppo", "sample"), episodes, response),
        _pass(setting, ("ppo", "measure"), 2 * episodes, length, response),
        _pass(setting, ("ppo", "score"), 2 * episodes, length),
        _pass(setting, ("ppo", "learn policy"), epochs * of_policy, length, response),
        _pass(setting, ("ppo", "learn critic"), epochs * episodes, length),
    ]


def update_flops(setting: Setting, queries: Sequence[int], stage: str = "ppo") -> dict[str, float]:
    """Operations of one update of a policy-gradient stage that must be done, by its steps, for
    queries of so many tokens each: counted row by row, so no padding is in it, all tokens are
    sampled, and samples of one query compute it once. All networks learn.
    """
    small = {"total_episodes": 1, "batch_size": 1, "num_minibatches": 1, "critic_updates": 0}
    single = replace(setting.config, ppo=replace(setting.config.ppo, **small))
    flops: list[tuple[str, float]] = []
    for tokens in queries:
        lengths = replace(setting.lengths, query=float(tokens))
        asking = replace(setting, lengths=lengths, config=single)
        if stage == "ppo":
            flops += [(work.label.split()[0], work.flops) for work in _ppo(asking)]
        else:
            flops += _grouped_flops(asking, stage).items()
    return totals(flops)


def _grouped_flops(setting: Setting, stage: str) -> dict[str, float]:
    """Of one query and all its samples, without a critic."""
    section, query = getattr(setting.config, stage), setting.lengths.query
    response = float(setting.lengths.longest_summary)
    sampled = section.samples_per_query * response
    length = query + response  # that a token attends to
    policy, scorer = (
        forward_flops(setting, query + sampled, length, logits) for logits in (sampled, 0.0)
    )
    prompt = forward_flops(setting, query, query, section.samples_per_query)
    return {
        "sample": prompt + forward_flops(setting, sampled, query, sampled),
        "measure": 2 * policy,
        "score": scorer,
        "learn": section.num_ppo_epochs * training_factor(setting, stage) * policy,
    }


def _dpo(setting: Setting) -> list[Work]:
    lengths, length = setting.lengths, _compared(setting)
    pairs = updates_of(setting)["dpo"] * setting.config.dpo.batch_size
    # The reference of every pair, and the held-out pairs once more after training.
    passed = lengths.rows["comparisons_train"] + 2 * lengths.rows["comparisons_validation"]
    return [
        _pass(setting, ("dpo", "learn"), 2 * pairs, length, lengths.compared),
        _pass(setting, ("dpo", "reference"), 2 * passed, length, lengths.compared),
    ]


def _summaries(setting: Setting) -> list[Work]:
    lengths = setting.lengths
    posts = setting.config.eval.posts or lengths.rows["sft_validation"]
    length = lengths.query + lengths.summary
    return [
        _sample(setting, ("summaries", "sample"), 2 * posts, lengths.longest_summary),
        _pass(setting, ("summaries", "score"), 3 * posts, length),
        # PPO's summaries by PPO and by SFT, for their KL.
        _pass(setting, ("summaries", "measure"), 2 * posts, length, lengths.summary),
    ]


def totals(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of the numbers of each name, in the order in which the names come first."""
    sums: dict[str, float] = {}
    for name, number in parts:
        sums[name] = sums.get(name, 0.0) + number
    return sums


def hours_by_stage(setting: Setting, rate: Rate) -> dict[str, float]:
    """Hours of every stage."""
    layers, devices = setting.shape.layers, setting.devices
    return totals(
        (work.stage, rate.seconds(work, layers, devices) / 3600) for work in work_of(setting)
    )


def loop_seconds(setting: Setting, rate: Rate) -> dict[str, float]:
    """Seconds of sampling, scoring and learning in one update of PPO."""
    layers, devices = setting.shape.layers, setting.devices
    names = {"measure": "score", "learn policy": "learn", "learn critic": "learn"}
    return totals(
        (
            names.get(work.label, work.label),
            rate.seconds(work, layers, devices) / setting.config.ppo.num_updates,
        )
        for work in _ppo(setting)
    )
