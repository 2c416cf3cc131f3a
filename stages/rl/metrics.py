"""Reports about an update: means over its episodes, samples, results and warnings."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages import functional
from stages.config.ppo import MANY_BELOW, PolicyGradient, Ppo
from stages.data.text_metrics import distinct, mean_copied, unshown_tokens
from stages.rl.advantages import global_batch
from stages.rl.algorithms import critic_advantages, critic_passes_gate, mean_return_advantages
from stages.rl.episodes import Rollout
from stages.rl.networks import PolicyLearner
from stages.runs.files import read_lines
from stages.training.compiling import COMPILER
from stages.training.processes import gather_rows, global_sum

SAMPLES_LOGGED = 8
DIGITS = 4  # significant digits of a token's numbers in samples.jsonl
MAX_TOKENS_PER_CHARACTER = 4  # a character has at most four bytes, and a token at least one
NOTHING_ENDS = "try more sft.epochs, or a larger data.max_summary_tokens"
"""What to do if no response of a policy ends."""
FINAL_SHARE = 0.05
"""The results are averages over this share of the updates, at the end of training."""
SUMMARIZED = (
    "objective/kl",
    "objective/scores",
    "policy/eos_rate",
    "policy/response_length",
    "text/copied_title_words",
    "text/distinct_2",
)
"""Metrics whose averages are the stage's results."""


@torch.no_grad()
def describe(
    learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient, kl_coef: float
) -> dict[str, float]:
    """Metrics of the rollout: means over all episodes of the batch; names as in TRL.

    KL and entropy are in nats per episode and sum over real tokens only. `objective/kl` is the k1
    estimate, whichever estimator the training uses. `val/sampler_mismatch` is in nats per token.
    `compilations`, if torch compiles: the number of graphs so far.
    """
    accelerator = learner.accelerator

    def per_episode(x: Tensor) -> Tensor:
        return torch.where(rollout.response_mask, x, 0.0).sum(dim=1)

    kl = per_episode(functional.kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k1"))
    k3 = per_episode(functional.kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k3"))
    penalty = -kl_coef * kl if settings.kl_in == "reward" else torch.zeros_like(kl)
    has_eos = (rollout.responses == learner.networks.eos_id).any(dim=1)

    columns = {
        "objective/kl": kl,
        "objective/kl_k3": k3,
        "objective/entropy": per_episode(-rollout.logprobs),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": rollout.rewarded_scores + penalty,
        "objective/scores": rollout.scores,
        "policy/eos_rate": has_eos,
        "policy/below_penalty": has_eos & (rollout.rewarded_scores < settings.missing_eos_penalty),
        "policy/response_length": rollout.response_mask.sum(dim=1),
        "val/sampler_mismatch": rollout.sampler_gaps,
    }
    if rollout.shaped_scores is not None and rollout.reference_scores is not None:
        columns["objective/shaped_scores"] = rollout.shaped_scores
        columns["objective/reference_scores"] = rollout.reference_scores
    sums = global_sum(accelerator, *(column.sum() for column in columns.values()))
    means = {key: value / settings.batch_size for key, value in zip(columns, sums, strict=True)}

    means["val/sampler_mismatch"] /= means["policy/response_length"]
    means["val/num_eos_tokens"] = means["policy/eos_rate"] * settings.batch_size
    means["objective/kl_coef"] = kl_coef
    if isinstance(settings, Ppo) and settings.uses_critic:
        means |= describe_critic(accelerator, rollout, settings)
        means |= describe_advantages(learner, rollout)
    return means | compilations()


def compilations() -> dict[str, int]:
    """How many graphs torch has compiled in this process, if it compiles."""
    if not COMPILER.is_on:
        return {}
    return {"compilations": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def describe_critic(accelerator: Accelerator, rollout: Rollout, ppo: Ppo) -> dict[str, float]:
    """How good the critic is, if it is used, and how noisy advantages are with and without it.

    The variances are those of the advantages of response tokens before whitening, reward units
    squared, once with the critic and once with the batch's mean return in its place.
    `val/explained_variance` is that of the critic's targets, which contain its own values where
    their lambda is below 1; `val/explained_variance_realized` that of the sums of rewards that
    followed. `val/returns_outside_range`: share of those sums that lie outside the range of bounded
    values. `policy/lambda`: mean lambda of the episodes, where it depends on their lengths.
    Source: our own diagnostics, after Pan et al. 2026 (arXiv 2604.19485).
    """
    batch = global_batch(accelerator, rollout, rollout.rewards)
    with_critic, returns = critic_advantages(batch, ppo)
    with_mean = mean_return_advantages(batch, ppo)

    def variance(advantages: Tensor) -> float:
        return advantages[batch.response_mask].var(correction=0).item()

    def explained(targets: Tensor) -> float:
        share = functional.explained_variance(batch.counted_values(), targets, batch.value_mask)
        return share.item()

    realized = functional.returns_to_go(batch.rewards, ppo.gamma)
    metrics = {
        "val/explained_variance": explained(returns),
        "val/explained_variance_realized": explained(realized),
        "policy/critic_used": float(critic_passes_gate(batch, returns, ppo)),
        "val/advantage_variance_critic": variance(with_critic),
        "val/advantage_variance_mean": variance(with_mean),
    }
    if ppo.lam_length_alpha:
        lengths = batch.response_mask.sum(dim=1)
        lambdas = functional.length_adaptive_lambda(lengths, ppo.lam_length_alpha)
        metrics["policy/lambda"] = lambdas.mean().item()
    if rollout.value_range is not None:
        low = rollout.value_range.low
        high = rollout.value_range.high
        is_outside = (realized < low) | (realized > high)
        metrics["val/value_low"] = low
        metrics["val/value_high"] = high
        share_outside = functional.masked_mean(is_outside.float(), batch.value_mask)
        metrics["val/returns_outside_range"] = share_outside.item()
    return metrics


def describe_advantages(learner: PolicyLearner, rollout: Rollout) -> dict[str, float]:
    """Whether advantages follow the scores, and whether they reward ending.

    `val/advantage_score_correlation`: Pearson correlation, over response tokens, between the
    advantage and the episode's score minus the mean score of its query's K samples (of the batch,
    where K is 1). That is 1 - 1/K times the leave-one-out score, so the correlation is the same.
    `policy/advantage_at_eos`: the mean at sampled EOS tokens, after whitening. A number that is
    undefined is left out.
    Source: our own diagnostics, not in Huang et al. 2024.
    """
    accelerator = learner.accelerator
    advantages = accelerator.gather(rollout.advantages)
    scores = accelerator.gather(rollout.scores)
    mask = accelerator.gather(rollout.response_mask)
    responses = accelerator.gather(rollout.responses)

    group_size = rollout.samples_per_query if rollout.samples_per_query > 1 else len(scores)
    groups = scores.view(-1, group_size)
    relative_scores = (groups - groups.mean(dim=1, keepdim=True)).view(-1, 1).expand_as(advantages)

    means = {}
    pairs = torch.stack([advantages[mask], relative_scores[mask]]).double()  # [2, tokens]
    if (pairs.std(dim=1) > 0).all():
        means["val/advantage_score_correlation"] = torch.corrcoef(pairs)[0, 1].item()
    at_eos = advantages[mask & (responses == learner.networks.eos_id)]
    if len(at_eos):
        means["policy/advantage_at_eos"] = at_eos.mean().item()
    return means


def describe_texts(
    learner: PolicyLearner, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Metrics of the batch's texts: words copied from titles, and diversity.

    `text/copied_title_words` is left out if no query has a title.
    """
    queries = tokenizer.batch_decode(rollout.queries, skip_special_tokens=True)
    responses = tokenizer.batch_decode(rollout.responses, skip_special_tokens=True)
    pairs = gather_rows(learner.accelerator, list(zip(queries, responses, strict=True)))

    measures = {}
    copied = mean_copied(pairs)
    if copied is not None:
        measures["text/copied_title_words"] = copied
    texts = [response for _, response in pairs]
    measures["text/distinct_1"] = distinct(texts, 1)
    measures["text/distinct_2"] = distinct(texts, 2)
    return measures | describe_special(learner, rollout, tokenizer)


def describe_special(
    learner: PolicyLearner, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """The share of responses with a special token other than EOS, `text/special_tokens`.

    Left out if the tokenizer has no other special tokens (`unshown_tokens`).
    Source: our own diagnostic, not in Huang et al. 2024.
    """
    other_tokens = unshown_tokens(tokenizer)
    if not other_tokens:
        return {}
    is_special = torch.isin(rollout.responses, rollout.responses.new_tensor(other_tokens))
    has_special = is_special.any(dim=1).float()
    return {"text/special_tokens": learner.accelerator.gather(has_special).mean().item()}


def samples(
    rollout: Rollout, tokenizer: PreTrainedTokenizerBase, update: int
) -> Iterator[dict[str, Any]]:
    """A few episodes of an update, spread over the query lengths, as rows of samples.jsonl."""
    count = min(SAMPLES_LOGGED, len(rollout.queries))
    kl = functional.kl_estimate(rollout.logprobs, rollout.ref_logprobs)
    episode_kl = torch.where(rollout.response_mask, kl, 0.0).sum(dim=1)
    for row in torch.linspace(0, len(rollout.queries) - 1, count).long().tolist():
        response = rollout.responses[row][rollout.response_mask[row]]
        yield {
            "step": update,
            "query": tokenizer.decode(rollout.queries[row], skip_special_tokens=True),
            "response": tokenizer.decode(response),
            "score": rollout.scores[row].item(),
            "kl": episode_kl[row].item(),
            "tokens": token_texts(tokenizer, response.tolist()),
            **token_numbers(rollout, row),
        }


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text of each token; a character of several tokens belongs to the last one."""
    texts = []
    start = 0
    for end in range(1, len(tokens) + 1):
        piece: str = tokenizer.decode(tokens[start:end])
        is_part_of_character = "\ufffd" in piece
        if is_part_of_character and end - start < MAX_TOKENS_PER_CHARACTER and end < len(tokens):
            texts.append("")
        else:
            texts.append(piece)
            start = end
    return texts


def token_numbers(rollout: Rollout, row: int) -> dict[str, list[float]]:
    """An episode's numbers by token, rounded.

    `log_ratios` (nats, policy - ref_policy) and `advantages` have one number per token. `values`
    (the critic on the text before the token, if there is one) and `rewards`, in reward units, have
    one more if the score comes after EOS and the response ends before the limit.
    """
    response_mask = rollout.response_mask[row]
    value_mask = rollout.value_mask[row]
    numbers = {
        "log_ratios": (rollout.logprobs - rollout.ref_logprobs)[row][response_mask],
        "advantages": rollout.advantages[row][response_mask],
        "rewards": rollout.rewards[row][value_mask],
    }
    if rollout.values is not None:
        numbers["values"] = rollout.values[row][value_mask]
    return {
        name: [float(f"{value:.{DIGITS}g}") for value in column.tolist()]
        for name, column in numbers.items()
    }


def summarize(history: Sequence[dict[str, Any]], settings: PolicyGradient) -> dict[str, float]:
    """The stage's results: means of the logged metrics over the last updates."""
    last_rows = history[-max(1, round(FINAL_SHARE * len(history))) :]
    results = {}
    for key in SUMMARIZED:
        values = [row[key] for row in last_rows if key in row]
        if values:
            results[key] = sum(values) / len(values)
    results["updates"] = len(history)
    results["episodes"] = len(history) * settings.batch_size
    return results


def say_what_is_odd(
    learner: PolicyLearner, metrics_file: Path, metrics: dict[str, float], settings: PolicyGradient
) -> None:
    """Print warnings on stderr about an update from which little will be learned.

    - No response ends: the EOS trick gives all of them the same score (Huang et al. 2024, detail
      23).
    - Many responses end and score below the score without an EOS. Comparisons determine a post's
      scores only up to a constant, so all may be below it, and then not ending is rewarded.
    - The critic, if it is the only baseline, explains less of the returns than a constant when the
      policy starts to learn: advantages hardly follow scores. This is common for the reward model,
      the paper's critic, because its scalar before EOS is meaningless (detail 13).
    - After a quarter of the policy's updates the mean score is not above the SFT model's, which is
      measured in the policy's first update and those before. Not checked with fewer than eight
      updates.

    metrics_file: metrics.jsonl with the earlier updates. metrics: those of this update.
    """
    update = learner.update
    lines = []
    if update == 0 and settings.eos_trick == "replace":
        lines += odd_endings(metrics, settings)

    warm_up_updates = sum(
        not settings.policy_learns(earlier) for earlier in range(settings.num_updates)
    )
    is_policys_first = update == warm_up_updates
    if isinstance(settings, Ppo) and settings.baseline == "critic" and is_policys_first:
        explained = metrics["val/explained_variance"]
        if explained < 0:
            lines.append(
                f"the critic is worse than a constant (explained variance {explained:.2g}): see "
                "ppo.baseline=gated or ppo.critic_init=zero"
            )

    quarter = (settings.num_updates - warm_up_updates) // 4
    if quarter >= 2 and update == warm_up_updates + quarter:
        scores = [row["objective/scores"] for row in read_lines(metrics_file)]
        scores.append(metrics["objective/scores"])
        sft_score = fmean(scores[: warm_up_updates + 1])
        score = fmean(scores[warm_up_updates + 1 :])
        if score <= sft_score:
            ways = "learning_rate, critic" if settings.uses_critic else "learning_rate"
            lines.append(
                f"after a quarter of the updates the score has not risen ({sft_score:.2f}, "
                f"{score:.2f}): see {ways}"
            )

    if learner.accelerator.is_main_process:
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def odd_endings(metrics: dict[str, float], settings: PolicyGradient) -> list[str]:
    """Lines about responses whose scores the EOS trick turns into nonsense."""
    lines = []
    below = metrics["policy/below_penalty"]
    if below > MANY_BELOW:
        lines.append(
            f"{below:.0%} of the responses end and score below {settings.missing_eos_penalty:g}, "
            f"the score without an EOS: see {settings.section()}.eos_trick=subtract"
        )
    if not metrics["policy/eos_rate"]:
        lines.append(f"no response ends: {NOTHING_ENDS}")
    return lines
