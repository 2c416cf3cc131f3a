"""Checks before the first update. If one fails, it names the likely causes.

RLHF fails silently: with a reward on the wrong token, or a policy that differs from its reference,
training still runs. These checks cost one small batch, and stop the run with a diagnosis before it
wastes a night. `checks.start` turns them into warnings, or off.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from stages.config.config import Config
from stages.config.errors import UserError, say_error
from stages.config.ppo import PolicyGradient, Ppo
from stages.config.sections import Memory
from stages.data.ragged import pad_left, pad_right
from stages.models.forward import (
    ResponseBatch,
    response_logits,
    score_responses,
    token_read_before,
)
from stages.models.reward_function import TextReward
from stages.rl.episodes import Episodes, Measured, Rollout
from stages.rl.networks import Origins, PolicyLearner
from stages.runs.files import write_json
from stages.training.memory import PassSize


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How far two ways to compute the same numbers may differ, in nats or reward units."""

    mean: float
    """Maximum mean of the absolute differences."""
    high: float
    """Maximum of their `quantile`."""
    quantile: float


# Float32 differs only by rounding. BF16 keeps three digits, and among thousands of tokens a few are
# always far off, so a high quantile is bounded instead of the largest difference. Measured at
# temperature 0.7 on healthy models, as the largest of three comparisons: one batch with one row at
# a time, sampler with whole pass, bf16 weights with autocast.
#     random GPT-NeoX 14M   mean 0.002  quantile 0.008  largest 0.008
#     random GPT-NeoX 70M   mean 0.005  quantile 0.016  largest 0.017
#     SmolLM2-135M          mean 0.047  quantile 0.209  largest 0.277
# The bounds are twice the last line's. Scores in bf16 move together, by up to 0.11 (70M), so scores
# that are compared with float32 have their own bounds. Draws are shares of probability. In float32
# all were exact; in bf16 SmolLM2's were off by 0.0008 (quantile 0.020, largest 0.032). If only the
# 50 likeliest tokens are drawn, they are off by 0.0013 (largest 0.054), and in bf16 by 0.0022.
BOUNDS = {
    "float32": Bounds(mean=1e-3, high=1e-3, quantile=1.0),
    "bf16": Bounds(mean=0.1, high=0.5, quantile=0.99),
    "bf16 scores": Bounds(mean=0.25, high=0.5, quantile=0.99),
    "float32 draws": Bounds(mean=1e-3, high=1e-3, quantile=1.0),
    "bf16 draws": Bounds(mean=0.01, high=0.1, quantile=0.99),
}
KNOWN_ANSWERS = "known_answers.json"
CHECKED = 8
"""Maximum number of episodes to compute again. Wrong padding or dropout shows in each of them."""
KNOWN = 20
"""Number of texts whose scores are saved with a reward model."""
GO_ON = "checks.start=warn continues anyway"


class StartCheckError(UserError):
    """A condition that must be true before the first update is not."""


def precision(settings: PolicyGradient, memory: Memory) -> str:
    """The key of BOUNDS for a run: bf16 if anything that is compared is in bf16."""
    dtypes = (memory.mixed_precision, memory.frozen_dtype, settings.logprob_dtype)
    return "bf16" if "bf16" in dtypes else "float32"


def check_start(
    learner: PolicyLearner,
    rollout: Rollout,
    origins: Origins,
    settings: PolicyGradient,
    config: Config,
    score: Callable[..., Episodes],
) -> None:
    """All checks before the first update, as `checks.start` says: stop, warn or off.

    `score` is step 3 as the stage takes it. With `stop`, raises a StartCheckError that says what is
    wrong, by how much, and which stages and settings would explain it. With `warn` the same is
    printed.
    """
    if config.checks.start == "off":
        return
    failures = gather_object(
        run_start_checks(learner, rollout, origins, settings, config.memory, score)
    )
    if not failures:
        return
    if config.checks.start == "stop":
        raise StartCheckError(failures[0])
    if learner.accelerator.is_main_process:
        say_error(f"warning: {failures[0]}")


@torch.no_grad()
def run_start_checks(
    learner: PolicyLearner,
    rollout: Rollout,
    origins: Origins,
    settings: PolicyGradient,
    memory: Memory,
    score: Callable[..., Episodes],
) -> list[str]:
    """Run all checks on the first episodes of the first rollout; return this process's failures.

    A failed check does not stop the others, because the passes of sharded networks wait for all
    processes.
    """
    networks = learner.networks
    budget = learner.budget
    computed_in = precision(settings, memory)
    bounds = BOUNDS[computed_in]
    draw_bounds = BOUNDS[f"{computed_in} draws"]
    # Scores that were saved in float32 are computed again in float32, by weights that may be bf16.
    frozen_in_bf16 = memory.frozen_dtype == "bf16"
    saved_score_bounds = BOUNDS["bf16 scores" if frozen_in_bf16 else "float32"]

    # The first episodes, and fewer of them for what needs a pass: each in its own row, which is
    # another way to compute them than the rollout's.
    count = min(memory.forward_batch_size, len(rollout.queries))
    episodes = rollout.rows(torch.arange(count, device=rollout.queries.device))
    reread = next(replace(episodes, samples_per_query=1).passes(CHECKED))
    size = PassSize(rows=CHECKED, is_collective=learner.accelerator.num_processes > 1)

    failures: list[str] = []

    known_answers = origins.reward_model.parent / KNOWN_ANSWERS
    if known_answers.exists():  # a reward model from elsewhere has none
        with collected(failures):
            replay_known_answers(
                learner, score, known_answers, origins.score_shift, settings, saved_score_bounds
            )

    with learner.accelerator.autocast():
        with collected(failures):
            budget.fit(
                size, lambda rows: check_padding(networks.reward_model, reread, bounds, rows)
            )
        with collected(failures):
            check_scores_at_eos(episodes, networks.eos_id, learner.stage)
        with collected(failures):
            check_kl(episodes, bounds, learner.stage)

        # Unless dropout is on, the ratio is 1 in training mode, too.
        learner.trained.train(mode=not settings.dropout)
        temperature = settings.temperature
        with collected(failures):
            budget.fit(
                size,
                lambda rows: check_ratio(learner, list(reread.passes(rows)), temperature, bounds),
            )
        with collected(failures):
            budget.fit(
                size,
                lambda rows: check_draws(
                    learner, list(reread.passes(rows)), temperature, draw_bounds
                ),
            )

        if networks.critic is not None and starts_as_reward_model(settings):
            with collected(failures):
                check_critic(
                    episodes,
                    networks.eos_id,
                    saved_score_bounds if frozen_in_bf16 else bounds,
                    before_eos=token_read_before(networks.reward_model) is not None,
                )
    return failures


@contextmanager
def collected(failures: list[str]) -> Iterator[None]:
    """Add the text of a StartCheckError to the failures, and continue after the block."""
    try:
        yield
    except StartCheckError as error:
        failures.append(str(error))


def starts_as_reward_model(settings: PolicyGradient) -> bool:
    """Whether the critic starts as a copy of the reward model."""
    return isinstance(settings, Ppo) and settings.critic_init == "reward_model"


def check_ratio(
    learner: PolicyLearner, parts: Sequence[Rollout], temperature: float, bounds: Bounds
) -> None:
    """The training pass must give the rollout's log-probabilities: every ratio is 1."""
    differences = []
    for part in parts:
        logprobs, _ = learner.trained("policy", part, temperature=temperature)
        differences.append((logprobs - part.logprobs)[part.response_mask])
    _require_small(
        torch.cat(differences),
        bounds,
        "the first ratio is not 1",
        f"{learner.stage} (step 6 has another dropout, temperature or precision than step 2, or "
        "step 1 pads queries on the right)",
    )


def check_draws(
    learner: PolicyLearner, parts: Sequence[Rollout], temperature: float, bounds: Bounds
) -> None:
    """Each token must be the one at which the cumulative distribution passes its uniform number.

    Then every token is drawn exactly as often as the policy says. `bounds` are in probability.
    """
    distances = []
    for part in parts:
        if part.uniforms is None:
            raise ValueError("these episodes were not sampled")
        logits = response_logits(learner.networks.policy, part)[:, :, : part.pad_id]
        # One episode at a time, because in float64 the logits of all would be large.
        for row in range(len(part.queries)):
            distance = distance_from_quantile(
                logits[row], part.responses[row], part.uniforms[row], temperature
            )
            distances.append(distance[part.response_mask[row]])
    _require_small(
        torch.cat(distances),
        bounds,
        "tokens are not drawn from the policy's whole distribution",
        f"{learner.stage} (step 1 leaves tokens out, or has another temperature, text or weights)",
    )


def distance_from_quantile(
    logits: Tensor, tokens: Tensor, uniforms: Tensor, temperature: float
) -> Tensor:
    """How far each uniform number is from its token's part of the cumulative distribution, [T].

    Shapes: logits [T, V], tokens, uniforms [T]. 0 where the number lies within the token's part.
    Tokens beyond the logits are padding, where the distance means nothing.
    """
    chosen = tokens.clamp(max=logits.shape[1] - 1).unsqueeze(1)
    shares = (logits.double() / temperature).softmax(dim=1)
    upper = shares.cumsum(dim=1).gather(1, chosen).squeeze(1)
    lower = upper - shares.gather(1, chosen).squeeze(1)
    return torch.maximum(lower - uniforms, uniforms - upper).clamp(min=0)


def check_kl(rollout: Rollout, bounds: Bounds, stage: str) -> None:
    """Policy and ref_policy must be the same before the first update."""
    _require_small(
        (rollout.logprobs - rollout.ref_logprobs)[rollout.response_mask],
        bounds,
        "KL(policy, ref_policy) is not 0",
        f"{stage} (step 2 measures one at another temperature, dropout, logprobs or frozen_dtype)"
        " or sft (they were not loaded from the same weights)",
    )


def check_critic(rollout: Rollout, eos_id: int, bounds: Bounds, before_eos: bool = False) -> None:
    """A critic that starts as the reward model must give the same number as the reward model.

    Compared at the EOS token, or one token earlier if the reward model is read there. With
    `ppo.bound_values` it must say the score bounded to the range of the values.
    """
    if rollout.values is None:
        raise ValueError("these episodes have no critic's values")
    lengths = rollout.response_mask.sum(dim=1)
    last_tokens = rollout.responses.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
    # Of a response that fills all T positions, no column has the value at EOS.
    has_value_at_eos = (last_tokens == eos_id) & (lengths < rollout.responses.shape[1])

    # Column t has the value that predicts token t, so the value at EOS is one column after it.
    columns = lengths.clamp(max=rollout.values.shape[1] - 1)
    if before_eos:
        columns = columns - 1
    values = rollout.values.gather(1, columns.unsqueeze(1)).squeeze(1)
    _require_small(
        (values - rollout.values_of(rollout.scores))[has_value_at_eos],
        bounds,
        "the critic differs from the reward model",
        "ppo (step 3 scores another text than the critic reads, or gives the penalty where EOS is)"
        " or normalize (the critic was not loaded from its weights)",
    )


def score_in_passes(reward_model: nn.Module, batch: ResponseBatch, size: int) -> Tensor:
    """`score_responses` in passes of at most `size` texts, each in a row of its own."""
    scores = []
    for start in range(0, len(batch.queries), size):
        rows = slice(start, start + size)
        part = ResponseBatch(
            queries=batch.queries[rows],
            responses=batch.responses[rows],
            pad_id=batch.pad_id,
            facts=batch.facts[rows],
        )
        scores.append(score_responses(reward_model, part))
    return torch.cat(scores)


def check_padding(
    reward_model: nn.Module, batch: ResponseBatch, bounds: Bounds, size: int = CHECKED
) -> None:
    """A score must not depend on the padding that longer texts in the same pass cause."""
    _require_small(
        score_in_passes(reward_model, batch, size) - score_in_passes(reward_model, batch, 1),
        bounds,
        "padding changes a score",
        "rm (the model has dropout on, or reads tokens to the right of the scored one) or base "
        "(PAD and EOS are one token)",
    )


def check_scores_at_eos(rollout: Rollout, eos_id: int, stage: str) -> None:
    """If a response has an EOS, it must be its last real token, where the score is read."""
    last = rollout.response_mask.sum(dim=1, keepdim=True) - 1
    last_tokens = rollout.responses.gather(1, last).squeeze(1)
    has_eos = (rollout.responses == eos_id).any(dim=1)
    if bool((has_eos & (last_tokens != eos_id)).any()):
        raise StartCheckError(
            f"update 1: a reward is not read at EOS. Likely causes: {stage} (step 1 does not cut "
            f"responses after it, or step 4 masks other tokens). {GO_ON}"
        )


def save_known_answers(
    path: Path, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Tensor
) -> None:
    """Write a few texts with the scores that the saved reward model gives them."""
    answers = []
    for query, response, score in zip(queries, responses, scores.tolist(), strict=True):
        answers.append({"query": query.tolist(), "response": response.tolist(), "score": score})
    write_json(path, answers)


@torch.no_grad()
def replay_known_answers(
    learner: PolicyLearner,
    score: Callable[..., Episodes],
    known_answers: Path,
    shift: float,
    settings: PolicyGradient,
    bounds: Bounds,
) -> None:
    """Step 3 must give the saved texts the scores that were saved with the reward model.

    `shift` is added to the saved scores. Texts without EOS are left out. With a reward function
    nothing is compared, because the saved scores may be those of another function.
    """
    networks = learner.networks
    saved = json.loads(known_answers.read_text(encoding="utf-8"))
    answers = [answer for answer in saved if answer["response"][-1:] == [networks.eos_id]]
    if not answers or isinstance(networks.reward_model, TextReward):
        return

    # As many copies of each text as the stage has samples of a query.
    device = learner.accelerator.device
    copies = settings.samples_per_query
    queries = pad_left([torch.tensor(answer["query"]) for answer in answers], networks.pad_id)
    responses = pad_right([torch.tensor(answer["response"]) for answer in answers], networks.pad_id)
    queries = queries.to(device).repeat_interleave(copies, dim=0)
    responses = responses.to(device).repeat_interleave(copies, dim=0)
    scores = torch.tensor([answer["score"] for answer in answers], device=device) + shift

    not_measured = torch.zeros(responses.shape, device=device)
    texts = Measured(
        queries=queries,
        responses=responses,
        pad_id=networks.pad_id,
        samples_per_query=copies,
        sampled_logprobs=not_measured,
        logprobs=not_measured,
        ref_logprobs=not_measured,
        sampler_gaps=not_measured,
        values=None,
    )
    found = score(learner, texts, settings, in_float32=True).scores
    _require_small(
        found - scores.repeat_interleave(copies),
        bounds,
        "step 3 does not give the scores that the reward model was saved with",
        f"{settings.section()} (step 3 scores another text, reads another token, has dropout on or "
        "gives the penalty where EOS is), normalize (other weights) or a library (other numerics)",
    )


def _require_small(difference: Tensor, bounds: Bounds, what: str, causes: str) -> None:
    distances = difference.abs().double()
    if not len(distances):
        return
    mean = distances.mean().item()
    high = distances.quantile(bounds.quantile).item()
    is_small = mean <= bounds.mean and high <= bounds.high  # NaN is not
    if not is_small:
        raise StartCheckError(
            f"update 1: {what} (by {mean:.3g} on average, at most {bounds.mean}; by {high:.3g} at "
            f"quantile {bounds.quantile}, at most {bounds.high}). Likely causes: {causes}. {GO_ON}"
        )
