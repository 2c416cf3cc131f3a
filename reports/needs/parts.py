"""The parts of every stage: what each holds on a device at its worst moment.

A rehearsal measures what is planned here. Standard library only.
"""

from dataclasses import replace

from reports.needs.memory import (
    FULL,
    HALF,
    Batch,
    Bytes,
    Network,
    Setting,
    passing,
    sampling,
    training,
)
from reports.needs.shapes import rows_of

# Part -> its stage.
STAGE_OF_PART = {
    **dict.fromkeys(("sft step", "sft validation"), "sft"),
    **dict.fromkeys(("rm step", "rm validation"), "rm"),
    "references": "normalize",
    **dict.fromkeys(("ppo rollout", "ppo learn"), "ppo"),
    "summaries": "summaries",
}


def part_bytes(setting: Setting) -> dict[str, Bytes]:
    """The worst moment of every part, by the part's name."""
    config, data = setting.config, setting.config.data
    small, large = config.memory.microbatch_size, config.memory.forward_batch_size
    alone = replace(setting, sharded=False)  # what learns nothing is loaded whole by every process
    policy, scorer = (Network(shape=setting.shape, scalar=scalar) for scalar in (False, True))
    sft, rm = [_learner(setting, "sft", scalar=False)], [_learner(setting, "rm", scalar=True)]
    longest = data.max_query_summary_tokens
    positions = longest if config.sft.loss_on_query else data.max_summary_tokens
    sft_size = min(small, share_of(config.sft.batch_size, setting))
    # Rows of the reward model hold a query with both summaries, and have no logits.
    pair = data.max_query_comparison_tokens + data.max_comparison_tokens
    pairs = min(max(1, small // 2), share_of(config.rm.batch_size, setting))
    references = config.normalize.posts or rows_of(setting.config)["sft_train"] or large
    scored = (min(large, references), longest, 0)
    summaries = (large, data.max_query_tokens, data.max_summary_tokens)
    return {
        "sft step": training(setting, sft, (sft_size, longest, positions)),
        "sft validation": passing(setting, sft, (small, longest, positions)),
        "rm step": training(setting, rm, (pairs, pair, 0)),
        "rm validation": passing(setting, rm, (max(1, large // 2), pair, 0)),
        "references": passing(alone, [scorer], scored),
        "ppo rollout": _rollout(setting),
        "ppo learn": _ppo_learn(setting),
        "summaries": sampling(alone, [policy, scorer], summaries),
    }


def share_of(batch: int, setting: Setting) -> int:
    """Rows of a global batch that one device gets."""
    return max(1, batch // setting.devices)


def _learner(setting: Setting, stage: str, scalar: bool) -> Network:
    rank = setting.rank(stage)
    return Network(shape=setting.shape, scalar=scalar, adapter=rank, trained=True)


def _episode_rows(setting: Setting, size: int) -> Batch:
    """Rows of a pass over `size` of PPO's episodes, their tokens, and the positions of responses.

    A query stands once before its samples, which no pass parts.
    """
    query, response = setting.config.data.max_query_tokens, setting.config.data.max_summary_tokens
    group = setting.config.ppo.samples_per_query
    return max(1, size // group), query + group * response, group * response


def _ppo_networks(setting: Setting) -> list[Network]:
    """Policy and critic, which learn; the reward model and, without LoRA, the reference policy."""
    shape, each = setting.shape, HALF if setting.config.memory.frozen_dtype == "bf16" else FULL
    policy, critic = (_learner(setting, "ppo", scalar=scalar) for scalar in (False, True))
    scorer = Network(shape=shape, scalar=True, frozen=True, each=each)
    reference = Network(shape=shape, frozen=True, each=each)
    return [policy, critic, scorer] + ([] if setting.rank("ppo") else [reference])


def _rollout(setting: Setting) -> Bytes:
    """One autocast spans what measures: the copies of policy and critic stay until its end."""
    data, networks = setting.config.data, _ppo_networks(setting)
    large = setting.config.memory.forward_batch_size
    size = min(large, share_of(setting.config.ppo.batch_size, setting))
    sampled = sampling(setting, networks, (size, data.max_query_tokens, data.max_summary_tokens))
    batch = _episode_rows(setting, size)
    measured = passing(setting, networks, batch, together=True)
    critic = setting.half * networks[1].cast_bytes(recomputed=True)
    measured = replace(measured, copies=measured.copies + critic)
    return max(sampled, measured, key=lambda moment: moment.total)


def _ppo_learn(setting: Setting) -> Bytes:
    ppo = setting.config.ppo
    minibatch = max(1, share_of(ppo.batch_size, setting) // ppo.num_minibatches)
    batch = _episode_rows(setting, min(setting.config.memory.microbatch_size, minibatch))
    return training(setting, _ppo_networks(setting), batch)
