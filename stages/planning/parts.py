"""The memory of each part of each stage, and how many sequences of a pass fit.

A part is a stretch of a stage with its own peak, such as `ppo rollout` and `ppo learn`.
"""

from dataclasses import replace
from typing import Any

from stages.planning.memory import (
    BF16,
    FLOAT32,
    Batch,
    Bytes,
    Network,
    Setting,
    passing,
    sampling,
    training,
    worst,
)
from stages.planning.rows import split_rows
from stages.rl.algorithms import ALGORITHMS

PAPER_MICROBATCH = 16  # at 1B
# The sequences of a pass that are tried first. On a CPU larger passes are not faster.
MOST_ROWS_GPU = {"microbatch_size": 64, "forward_batch_size": 512}
MOST_ROWS_CPU = {"microbatch_size": 8, "forward_batch_size": 32}


# -- memory of the parts ---------------------------------------------------------------------------


def part_bytes(setting: Setting) -> dict[str, Bytes]:
    """The worst moment of every part. A part's name begins with its stage's."""
    return {
        **_sft_parts(setting),
        **_rm_parts(setting),
        "normalize": _normalize(setting),
        "ppo rollout": _rollout(setting),
        "ppo learn": _ppo_learn(setting),
        "summaries": _summaries(setting),
    }


def most_bytes(setting: Setting, stage: str = "") -> float:
    """The memory of a stage's largest part; of the largest part of all if the stage has none."""
    parts = part_bytes(setting)
    of_stage = [held.total for part, held in parts.items() if part.split()[0] == stage]
    return max(of_stage or [held.total for held in parts.values()])


def rows_per_device(batch_size: int, setting: Setting) -> int:
    """Number of rows of a global batch that one device gets."""
    return max(1, batch_size // setting.devices)


def _trained_network(setting: Setting, stage: str, is_scalar: bool) -> Network:
    return Network(
        shape=setting.shape,
        is_scalar=is_scalar,
        lora_rank=setting.lora_rank(stage),
        is_trained=True,
    )


def _sft_parts(setting: Setting) -> dict[str, Bytes]:
    config = setting.config
    networks = [_trained_network(setting, "sft", is_scalar=False)]
    tokens = config.data.max_query_summary_tokens
    logits = tokens if config.sft.loss_on_query else config.data.max_summary_tokens
    microbatch = config.memory.microbatch_size
    step_rows = min(microbatch, rows_per_device(config.sft.batch_size, setting))
    step = Batch(sequences=step_rows, tokens=tokens, logits=logits)
    validation = Batch(sequences=microbatch, tokens=tokens, logits=logits)
    return {
        "sft step": training(setting, networks, step),
        "sft validation": passing(setting, networks, validation),
    }


def _rm_parts(setting: Setting) -> dict[str, Bytes]:
    config = setting.config
    networks = [_trained_network(setting, "rm", is_scalar=True)]
    # A row is a query with both summaries, and counts as two sequences.
    tokens = config.data.max_query_comparison_tokens + config.data.max_comparison_tokens
    pairs = max(1, config.memory.microbatch_size // 2)
    step_pairs = min(pairs, rows_per_device(config.rm.batch_size, setting))
    validation_pairs = max(1, config.memory.forward_batch_size // 2)
    return {
        "rm step": training(setting, networks, Batch(sequences=step_pairs, tokens=tokens)),
        "rm validation": passing(
            setting, networks, Batch(sequences=validation_pairs, tokens=tokens)
        ),
    }


def _normalize(setting: Setting) -> Bytes:
    config = setting.config
    forward_batch = config.memory.forward_batch_size
    references = config.normalize.posts or split_rows(config)["sft_train"] or forward_batch
    batch = Batch(
        sequences=min(forward_batch, references),
        tokens=config.data.max_query_summary_tokens,
    )
    scorer = Network(shape=setting.shape, is_scalar=True)
    return passing(_unsharded(setting), [scorer], batch)


def _summaries(setting: Setting) -> Bytes:
    config = setting.config
    networks = [Network(shape=setting.shape), Network(shape=setting.shape, is_scalar=True)]
    return sampling(
        _unsharded(setting),
        networks,
        sequences=config.memory.forward_batch_size,
        query=config.data.max_query_tokens,
        response=config.data.max_summary_tokens,
    )


def _unsharded(setting: Setting) -> Setting:
    """A network that is not trained is loaded whole by every process."""
    return replace(setting, sharded=False)


def _ppo_networks(setting: Setting) -> list[Network]:
    """Policy and critic, which are trained; the reward model, and the reference policy.

    With LoRA the reference is the policy without its adapter.
    """
    shape = setting.shape
    frozen_size = BF16 if setting.config.memory.frozen_dtype == "bf16" else FLOAT32
    networks = [
        _trained_network(setting, "ppo", is_scalar=False),
        _trained_network(setting, "ppo", is_scalar=True),
        Network(shape=shape, is_scalar=True, is_frozen=True, weight_size=frozen_size),
    ]
    if not setting.lora_rank("ppo"):
        networks.append(Network(shape=shape, is_frozen=True, weight_size=frozen_size))
    return networks


def _episode_batch(setting: Setting, episodes: int) -> Batch:
    """A pass over episodes: the samples of a query share one row, and no pass separates them."""
    data = setting.config.data
    samples = setting.config.ppo.samples_per_query
    return Batch(
        sequences=max(1, episodes // samples),
        tokens=data.max_query_tokens + samples * data.max_summary_tokens,
        logits=samples * data.max_summary_tokens,
    )


def _rollout(setting: Setting) -> Bytes:
    """Sampling, or measuring log-probabilities, values and scores of the samples."""
    config = setting.config
    networks = _ppo_networks(setting)
    episodes = min(
        config.memory.forward_batch_size, rows_per_device(config.ppo.batch_size, setting)
    )
    sampled = sampling(
        setting,
        networks,
        sequences=episodes,
        query=config.data.max_query_tokens,
        response=config.data.max_summary_tokens,
    )

    # The policy's pass, while bf16 copies of the critic are there, and of the reference policy if
    # copies are kept.
    measured = passing(setting, networks, _episode_batch(setting, episodes), in_rollout=True)
    _, critic, _, *ref_policy = networks
    others = [critic, *ref_policy] if setting.keeps_casts else [critic]
    if setting.half:
        casts = sum(network.cast_bytes(setting.keeps_casts) for network in others)
        measured = replace(measured, copies=measured.copies + casts)
    return worst([sampled, measured])


def _ppo_learn(setting: Setting) -> Bytes:
    ppo = setting.config.ppo
    minibatch = max(1, rows_per_device(ppo.batch_size, setting) // ppo.num_minibatches)
    episodes = min(setting.config.memory.microbatch_size, minibatch)
    return training(setting, _ppo_networks(setting), _episode_batch(setting, episodes))


# -- automatic batch sizes -------------------------------------------------------------------------


def sized(setting: Setting, usable: float, stage: str = "") -> Setting:
    """The setting with a number in place of each `auto` in memory.*.

    It is the largest power of two with which every part of the stage (of all stages, if none is
    named) fits into `usable` bytes; 1 if none does. With `loss_mean=microbatches` the size of the
    microbatch affects what is learned, so it is the paper's at 1B.
    """
    config = setting.config
    if not config.memory.microbatch_size and _microbatch_changes_result(setting):
        setting = _with_rows(setting, {"microbatch_size": PAPER_MICROBATCH})

    most_rows = MOST_ROWS_GPU if setting.on_gpu else MOST_ROWS_CPU
    memory = setting.config.memory
    automatic = [name for name in most_rows if not getattr(memory, name)]
    rows = dict.fromkeys(automatic, 1)
    for name in automatic:
        rows[name] = most_rows[name]
        while rows[name] > 1 and most_bytes(_with_rows(setting, rows), stage) > usable:
            rows[name] //= 2
    return _with_rows(setting, rows)


def _microbatch_changes_result(setting: Setting) -> bool:
    sections: list[Any] = [getattr(setting.config, name) for name in ALGORITHMS]
    return any(section.loss_mean == "microbatches" for section in sections)


def _with_rows(setting: Setting, rows: dict[str, int]) -> Setting:
    values: dict[str, Any] = dict(rows)
    memory = setting.config.memory.changed(**values)
    return replace(setting, config=setting.config.changed(memory=memory))
