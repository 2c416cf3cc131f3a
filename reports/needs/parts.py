"""The parts of every stage: what each holds on a device at its worst moment, and what fits.

The names of the parts are those of a rehearsal, which measures what is planned here. Standard
library only.
"""

from dataclasses import replace

from reports.needs.gpus import Gpu
from reports.needs.memory import (
    ENTROPY,
    FULL,
    HALF,
    LOSS_FORWARD,
    PLAIN_FORWARD,
    Batch,
    Bytes,
    Network,
    Setting,
    held,
    passing,
    sampling,
    saved_activations,
    training,
)
from stages.settings.command_line import with_changes
from stages.settings.config import changes_of
from stages.settings.families import SHARING

# Part -> its stage.
STAGE_OF_PART = {
    **dict.fromkeys(("sft step", "sft validation"), "sft"),
    **dict.fromkeys(("rm step", "rm validation"), "rm"),
    "references": "normalize",
    **dict.fromkeys(("ppo rollout", "ppo learn"), "ppo"),
    "dpo step": "dpo",
    "summaries": "summaries",
}


def part_bytes(setting: Setting) -> dict[str, Bytes]:
    """The worst moment of every part, by the part's name."""
    config, data = setting.config, setting.data
    small, large = config.memory.microbatch_size, config.memory.forward_batch_size
    alone = replace(setting, sharded=False)  # what learns nothing is loaded whole by every process
    policy, scorer = (Network(shape=setting.shape, scalar=scalar) for scalar in (False, True))
    sft, rm, dpo = ([_learner(setting, stage, stage == "rm")] for stage in ("sft", "rm", "dpo"))
    longest = data.max_query_summary_tokens
    positions = longest if config.sft.loss_on_query else data.max_summary_tokens
    sft_size = min(small, share_of(config.sft.batch_size, setting))
    rm_size = min(_pairs(small), 2 * share_of(config.rm.batch_size, setting))
    dpo_size = min(_pairs(small), 2 * share_of(config.dpo.batch_size, setting))
    references = config.normalize.posts or setting.lengths.rows["sft_train"] or large
    scored = (min(large, references), longest, 0)
    summaries = (large, data.max_query_tokens, data.max_summary_tokens)
    return {
        "sft step": training(setting, sft, (sft_size, longest, positions)),
        "sft validation": passing(setting, sft, (small, longest, positions)),
        "rm step": training(setting, rm, (*_pair_rows(setting, rm_size)[:2], 0)),
        "rm validation": passing(setting, rm, (*_pair_rows(setting, _pairs(large))[:2], 0)),
        "references": passing(alone, [scorer], scored),
        "ppo rollout": _rollout(setting),
        "ppo learn": _ppo_learn(setting),
        "dpo step": training(setting, dpo, _pair_rows(setting, dpo_size)),
        "summaries": sampling(alone, [policy, scorer], summaries),
    }


def share_of(batch: int, setting: Setting) -> int:
    """Rows of a global batch that one device gets."""
    return max(1, batch // setting.devices)


def _learner(setting: Setting, stage: str, scalar: bool) -> Network:
    rank = setting.rank(stage)
    return Network(shape=setting.shape, scalar=scalar, adapter=rank, trained=True)


def _pairs(size: int) -> int:
    """Sequences of a pass over pairs that may hold `size`: always an even number."""
    return 2 * max(1, size // 2)


def _pair_rows(setting: Setting, sequences: int) -> Batch:
    """Rows of a pass over pairs, their tokens, and the positions of compared summaries."""
    longest, compared = setting.data.max_query_comparison_tokens, setting.data.max_comparison_tokens
    if setting.shape.family in SHARING:
        return sequences // 2, longest + compared, 2 * compared
    return sequences, longest, compared


def _episode_rows(setting: Setting, size: int) -> Batch:
    """Rows of a pass over `size` of PPO's episodes, their tokens, and the positions of responses.

    A query stands once before its samples, which no pass parts.
    """
    query, response = setting.data.max_query_tokens, setting.data.max_summary_tokens
    if setting.shape.family not in SHARING:
        return size, query + response, response
    group = setting.config.ppo.samples_per_query
    return max(1, size // group), query + group * response, group * response


def ppo_networks(setting: Setting) -> list[Network]:
    """Policy and critic, which learn; the reward model and, without LoRA, the reference policy."""
    shape, each = setting.shape, HALF if setting.config.memory.frozen_dtype == "bf16" else FULL
    policy, critic = (_learner(setting, "ppo", scalar=scalar) for scalar in (False, True))
    scorer = Network(shape=shape, scalar=True, frozen=True, each=each)
    reference = Network(shape=shape, frozen=True, each=each)
    return [policy, critic, scorer] + ([] if setting.rank("ppo") else [reference])


def _rollout(setting: Setting) -> Bytes:
    """One autocast spans what measures: the copies of policy and critic stay until its end."""
    data, networks = setting.data, ppo_networks(setting)
    large = setting.config.memory.forward_batch_size
    size = min(large, share_of(setting.config.ppo.batch_size, setting))
    sampled = sampling(setting, networks, (size, data.max_query_tokens, data.max_summary_tokens))
    batch = _episode_rows(setting, size)
    per_logit = PLAIN_FORWARD if setting.half else LOSS_FORWARD
    measured = passing(setting, networks, batch, per_logit, together=True)
    critic = setting.half * networks[1].cast_bytes(recomputed=True)
    measured = replace(measured, copies=measured.copies + critic)
    return max(sampled, measured, key=lambda moment: moment.total)


def _ppo_learn(setting: Setting) -> Bytes:
    ppo = setting.config.ppo
    minibatch = max(1, share_of(ppo.batch_size, setting) // ppo.num_minibatches)
    batch = _episode_rows(setting, min(setting.config.memory.microbatch_size, minibatch))
    return training(setting, ppo_networks(setting), batch, per_logit=ENTROPY)


def update_floor(setting: Setting, query: int, response: int, stage: str) -> float:
    """The least bytes with which a policy-gradient stage learns a microbatch of its longest rows:
    weights, gradients, the optimizer's moments, and one network's activations without logits.
    """
    policy, critic, *frozen = ppo_networks(setting)
    networks = [policy, *([critic] if stage == "ppo" else []), *frozen]
    least = held(setting, networks, gradients=True)
    section = getattr(setting.config, stage)
    size = min(setting.config.memory.microbatch_size, share_of(section.batch_size, setting))
    group = section.samples_per_query
    return least.total + saved_activations(setting, size // group, query + group * response)


# -- does it fit -----------------------------------------------------------------------------------


def too_large(parts: dict[str, Bytes], gpu: Gpu) -> list[str]:
    """The parts that need more than a GPU has for tensors."""
    return [name for name, held in parts.items() if held.total > gpu.usable]


def mends(setting: Setting, gpu: Gpu) -> list[str]:
    """The fewest memory knobs, as SET takes them, with which everything fits; none if nothing does.

    Knobs are tried from the one that changes least to the one that changes most: smaller batches,
    frozen networks in bf16, activations computed again, and at last adapters in place of all
    weights, which is another way of learning.
    """
    small = max(1, setting.config.memory.microbatch_size // 4)
    knobs = [f"memory.microbatch_size={small}", "memory.microbatch_size=2"]
    knobs += ["memory.forward_batch_size=16", "memory.frozen_dtype=bf16"]
    knobs += ["memory.gradient_checkpointing=true", "memory.microbatch_size=1"]
    knobs += ["lora.rank=16 lora.stages=ppo", "lora.rank=16 lora.stages=sft,rm,ppo,dpo"]
    tried: list[str] = []
    for knob in knobs:
        tried = [*(other for other in tried if other.split("=")[0] != knob.split("=")[0]), knob]
        if _fits(setting, gpu, tried):
            for cheapest in list(tried):  # the knobs that are not needed, the cheapest first
                rest = [other for other in tried if other != cheapest]
                tried = rest if _fits(setting, gpu, rest) else tried
            return tried
    return []


def _fits(setting: Setting, gpu: Gpu, knobs: list[str]) -> bool:
    """Whether everything fits with these knobs."""
    config = with_changes(setting.config, changes_of(" ".join(knobs).split()))
    return not too_large(part_bytes(replace(setting, config=config)), gpu)
