"""Steps 1 to 3 of an update, for any stage that learns from its own episodes.

1. sample   responses of a fixed length for a batch of queries, cut after their first EOS
2. measure  their log-probabilities under policy and frozen ref_policy, the critic's values if any
3. score    each whole response with the reward model, read at EOS
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages import functional
from stages.config.errors import UserError
from stages.config.ppo import PolicyGradient
from stages.config.sections import PPO_TRAIN
from stages.data.ragged import Ragged, TokenizedSplit, load_split, pad_left, pad_right
from stages.models.forward import (
    ResponseBatch,
    response_logprobs,
    response_values,
    score_responses,
)
from stages.models.reward_function import Facts, TextReward
from stages.models.sampling import Noise, SamplingParams, sample
from stages.rl.episodes import Episodes, Measured, Sampled, concatenate, trim_left
from stages.rl.networks import PolicyLearner
from stages.training.memory import PassSize, chunks
from stages.training.processes import local_share
from stages.training.sharding import gathered, is_sharded

T = TypeVar("T")


def load_queries(data: Path) -> tuple[str, TokenizedSplit]:
    """The split that queries are drawn from, after its name: `ppo_train` where there is one.

    Stiennon et al. 2020 had other posts for PPO; Huang et al. 2024 reuse those of SFT (detail 21).
    """
    name = "sft_train"
    if (data / f"{PPO_TRAIN}.jsonl").exists():
        name = PPO_TRAIN
    return name, load_split(data, name)


@torch.no_grad()
def sample_responses(
    learner: PolicyLearner,
    queries: Sequence[Tensor],
    noise: Noise,
    settings: PolicyGradient,
    facts: Sequence[Facts] = (),
) -> Sampled:
    """Step 1: this process's share of responses to a global batch of queries, shortest query first.

    The responses to one query are neighbors. Neighbors in length share a forward pass, so that
    little of it is padding. `facts` are those of each query's row, for a reward function.
    """
    learner.trained.eval()
    networks = learner.networks
    accelerator = learner.accelerator
    samples_per_query = settings.samples_per_query
    params = SamplingParams(
        temperature=settings.temperature,
        eos_id=networks.eos_id,
        pad_id=networks.pad_id,
        logprob_dtype=settings.logprob_dtype,
    )

    # Draw noise for the whole batch, so that it does not depend on the number of processes.
    places = share_of_batch(accelerator, queries, samples_per_query)
    uniforms = noise.uniforms(len(queries) * samples_per_query)[places].to(accelerator.device)
    own_queries = [queries[place // samples_per_query] for place in places]
    own_facts = [facts[place // samples_per_query] for place in places] if facts else []
    padded_queries = pad_left(own_queries, networks.pad_id).to(accelerator.device)

    def sample_pass(queries_of_pass: Tensor, uniforms_of_pass: Tensor) -> Sampled:
        trimmed = trim_left(queries_of_pass, networks.pad_id)
        # Processes stop at different steps, so gather a sharded network first.
        with gathered(networks.policy), accelerator.autocast():
            responses, logprobs = sample(
                networks.policy,
                trimmed[::samples_per_query],
                uniforms=uniforms_of_pass,
                params=params,
            )
        return Sampled(
            queries=trimmed,
            responses=functional.truncate_after(responses, networks.eos_id, networks.pad_id),
            pad_id=networks.pad_id,
            samples_per_query=samples_per_query,
            sampled_logprobs=logprobs,
            uniforms=uniforms_of_pass,
        )

    def sample_all(size: int) -> Sampled:
        passes = zip(torch.split(padded_queries, size), torch.split(uniforms, size), strict=True)
        parts = [
            sample_pass(queries_of_pass, uniforms_of_pass)
            for queries_of_pass, uniforms_of_pass in passes
        ]
        return replace(concatenate(parts, padded_queries), facts=own_facts)

    return in_passes(learner, settings, sample_all)


def share_of_batch(
    accelerator: Accelerator, queries: Sequence[Tensor], samples_per_query: int
) -> list[int]:
    """This process's places in a global batch of responses, those of the shortest queries first.

    The noise depends on the place only, not on the order or the process.
    """
    own_queries = local_share(range(len(queries)), accelerator)
    own_queries.sort(key=lambda query: len(queries[query]))
    return [
        query * samples_per_query + sample
        for query in own_queries
        for sample in range(samples_per_query)
    ]


def in_passes(learner: PolicyLearner, settings: PolicyGradient, run: Callable[[int], T]) -> T:
    """Call `run` with the number of sequences that fit into memory, and return its result.

    The samples of a query are in one pass. Weights are cast once for all passes.
    """
    samples_per_query = settings.samples_per_query
    size = PassSize(
        rows=learner.budget.forward_batch_size,
        smallest=samples_per_query,
        is_collective=is_sharded(learner.trained),
    )
    networks = nn.ModuleList()
    for network in vars(learner.networks).values():
        if isinstance(network, nn.Module):
            networks.append(network)

    def run_with_weights_cast(rows: int) -> T:
        with learner.budget.weights_cast_once(networks):
            return run(rows // samples_per_query * samples_per_query)

    return learner.budget.fit(size, run_with_weights_cast)


@torch.no_grad()
def measure(learner: PolicyLearner, sampled: Sampled, settings: PolicyGradient) -> Measured:
    """Step 2: log-probabilities under policy and ref_policy, and the critic's values.

    The policy's log-probabilities are recomputed by the training forward pass, so that the first
    ratio is 1.
    differs: Huang et al. 2024 keeps the sampler's (`logprobs=sampled`).
    """
    networks = learner.networks

    def logprobs_under(policy: nn.Module, part: Sampled) -> Tensor:
        logprobs, _ = response_logprobs(
            policy,
            part,
            temperature=settings.temperature,
            logprob_dtype=settings.logprob_dtype,
        )
        return logprobs

    def measure_pass(part: Sampled) -> Measured:
        with learner.accelerator.autocast():
            logprobs = logprobs_under(networks.policy, part)
            ref_logprobs = logprobs_under(networks.ref_policy, part)
            values = None
            if networks.critic is not None:
                values = response_values(networks.critic, part)
        is_real = part.responses != networks.pad_id
        gaps = torch.where(is_real, (logprobs - part.sampled_logprobs).abs(), 0.0)
        if settings.logprobs == "sampled":
            logprobs = part.sampled_logprobs
        return Measured(
            **vars(part),
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
            sampler_gaps=gaps.sum(dim=1),
        )

    # Processes that share weights must make equally many passes, whatever their queries' lengths.
    is_small_on_cpu = not is_sharded(learner.trained)

    def measure_all(size: int) -> Measured:
        parts = [measure_pass(part) for part in sampled.passes(size, is_small_on_cpu)]
        return concatenate(parts, sampled.queries)

    return in_passes(learner, settings, measure_all)


@torch.no_grad()
def score(
    learner: PolicyLearner,
    measured: Measured,
    settings: PolicyGradient,
    in_float32: bool = False,
    reference_scores: Tensor | None = None,
) -> Episodes:
    """Step 3: the reward model's number for each whole response, and the EOS trick.

    `in_float32`: whatever the mixed precision is, for comparisons with saved scores.
    `reference_scores` [B] are those of `score_references`. If there are any, the scores are shaped
    by them, and the EOS trick is applied to the shaped scores too: a missing EOS still gets -1,
    which is below their range of 0 to 1.
    """
    reward_model = learner.networks.reward_model
    # A function of texts gets as many at once as the setting says. For shards, see `measure`.
    is_function = isinstance(reward_model, TextReward)
    is_small_on_cpu = not is_function and not is_sharded(learner.trained)

    def score_all(size: int) -> Tensor:
        scores = []
        for part in measured.passes(size, is_small_on_cpu):
            with nullcontext() if in_float32 else learner.accelerator.autocast():
                scores.append(score_responses(reward_model, part))
        return torch.cat(scores)

    eos_id = learner.networks.eos_id
    raw_scores = in_passes(learner, settings, score_all)
    shaped_scores = None
    if reference_scores is not None:
        preferences = functional.preference_over_reference(raw_scores, reference_scores)
        shaped_scores = eos_trick(preferences, measured.responses, eos_id, settings)
    return Episodes(
        **vars(measured),
        scores=eos_trick(raw_scores, measured.responses, eos_id, settings),
        shaped_scores=shaped_scores,
        reference_scores=reference_scores,
    )


def load_references(split: str, posts: TokenizedSplit, settings: PolicyGradient) -> Ragged | None:
    """The references of the queries, or None if the settings do not compare scores with them.

    `split` is the name of the posts. Raises UserError if these posts have no references.
    """
    if settings.score_shaping == "off":
        return None
    if "summaries" not in posts.columns:
        section = settings.section()
        raise UserError(
            f"{section}.score_shaping={settings.score_shaping} needs a reference for each query, "
            f"and the posts of {split} have none: set {section}.score_shaping=off, or remove "
            f"{split} from the data to take queries from sft_train"
        )
    return posts.columns["summaries"]


@torch.no_grad()
def score_references(
    learner: PolicyLearner,
    queries: Sequence[Tensor],
    references: Sequence[Tensor],
    settings: PolicyGradient,
    facts: Sequence[Facts] = (),
) -> Tensor:
    """The scores of the human references of this process's episodes, [B], reward units.

    The arguments are those of the global batch; the order is that of `sample_responses`. The
    samples of a query share its reference, which is scored once. The EOS trick is not applied.
    """
    samples_per_query = settings.samples_per_query
    pad_id = learner.networks.pad_id
    device = learner.accelerator.device
    places = share_of_batch(learner.accelerator, queries, samples_per_query)
    own_queries = [place // samples_per_query for place in places[::samples_per_query]]

    def score_all(size: int) -> Tensor:
        scores = []
        for rows in chunks(own_queries, size):
            batch = ResponseBatch(
                queries=pad_left([queries[row] for row in rows], pad_id).to(device),
                responses=pad_right([references[row] for row in rows], pad_id).to(device),
                pad_id=pad_id,
                facts=[facts[row] for row in rows] if facts else [],
            )
            with learner.accelerator.autocast():
                scores.append(score_responses(learner.networks.reward_model, batch))
        return torch.cat(scores)

    return in_passes(learner, settings, score_all).repeat_interleave(samples_per_query)


def eos_trick(scores: Tensor, responses: Tensor, eos_id: int, settings: PolicyGradient) -> Tensor:
    """Return scores [B] after the EOS trick.

    A missing EOS replaces the score by the penalty (detail 23), adds the penalty to it (TRL), or
    changes nothing. The penalty is negative, so adding it subtracts.
    """
    penalty = settings.missing_eos_penalty
    if settings.eos_trick == "replace":
        return functional.penalize_missing_eos(scores, responses, eos_id, penalty)
    if settings.eos_trick == "subtract":
        return functional.subtract_missing_eos(scores, responses, eos_id, penalty)
    return scores
