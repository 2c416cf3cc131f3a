"""What is reported of an update: means over its episodes, samples by token, results, oddities."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages import functional
from stages.data.text_metrics import distinct, mean_copied, unshown_tokens
from stages.rl.advantages import by_mean, counted_values, explained_by_critic, uses_critic
from stages.rl.episodes import Rollout
from stages.rl.networks import PolicyLearner
from stages.running.files import read_lines
from stages.settings.ppo import MANY_BELOW, PolicyGradient, Ppo
from stages.training.compiling import COMPILER
from stages.training.processes import gather_rows, global_sum

SAMPLES_LOGGED = 8
DIGITS = 4  # of a token's numbers in samples.jsonl
LONGEST_PIECE = 4  # bytes of a character, so at most as many tokens spell one
NOTHING_ENDS = "more sft.epochs, or a larger data.max_summary_tokens"
"""What mends a policy of which no response ends."""
FINAL_SHARE = 0.05  # the results average over this share of the updates, the last ones


@torch.no_grad()
def describe(
    learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient
) -> dict[str, float]:
    """What the rollout looked like: means over all episodes of the batch; names as in TRL.

    KL and entropy are in nats per episode; only real tokens enter a sum. `objective/kl` is the
    estimate that is trained on (kl_estimator). `val/sampler_mismatch` is in nats per token.
    `compilations`, where torch compiles: graphs up to now.
    """
    accelerator = learner.accelerator

    def per_episode(x: Tensor) -> Tensor:
        return torch.where(rollout.response_mask, x, 0.0).sum(dim=1)

    def kl(kind: str) -> Tensor:
        return per_episode(functional.kl_estimate(rollout.logprobs, rollout.ref_logprobs, kind))

    trained_on = kl(settings.kl_estimator)
    ended = (rollout.responses == learner.networks.eos_id).any(dim=1)
    in_reward = settings.kl_in == "reward"
    penalty = -settings.kl_coef * trained_on if in_reward else torch.zeros_like(trained_on)
    columns = {
        "objective/kl": trained_on,
        "objective/kl_k1": kl("k1"),
        "objective/kl_k3": kl("k3"),
        "objective/entropy": per_episode(-rollout.logprobs),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": rollout.scores + penalty,
        "objective/scores": rollout.scores,
        "policy/eos_rate": ended,
        "policy/below_penalty": ended & (rollout.scores < settings.missing_eos_penalty),
        "policy/response_length": rollout.response_mask.sum(dim=1),
        "val/sampler_mismatch": rollout.sampler_gaps,
    }
    sums = global_sum(accelerator, *(column.sum() for column in columns.values()))
    means = {key: value / settings.batch_size for key, value in zip(columns, sums, strict=True)}
    means["val/sampler_mismatch"] /= means["policy/response_length"]
    means["val/num_eos_tokens"] = means["policy/eos_rate"] * settings.batch_size
    if isinstance(settings, Ppo):
        means["val/explained_variance"] = explained_by_critic(accelerator, rollout)
        means |= describe_baselines(accelerator, rollout, settings)
        means |= describe_advantages(learner, rollout, settings.samples_per_query)
    return means | compilations()


def compilations() -> dict[str, int]:
    """How many graphs torch has compiled in this process, if it compiles."""
    stats = torch._dynamo.utils.counters["stats"] if COMPILER.is_on else None
    return {} if stats is None else {"compilations": stats["unique_graphs"]}


def describe_baselines(accelerator: Accelerator, rollout: Rollout, ppo: Ppo) -> dict[str, float]:
    """Whether the critic is the baseline, and the advantages' variance under critic and mean.

    Over response tokens, before whitening, reward units squared.
    Source: diagnostics of our own, after Pan et al. 2026 (arXiv 2604.19485).
    """
    by_critic, _ = functional.gae(rollout.rewards, counted_values(rollout), ppo.gamma, ppo.lam)
    mask = accelerator.gather(rollout.response_mask)

    def variance(advantages: Tensor) -> float:
        return accelerator.gather(advantages)[mask].var(correction=0).item()

    return {
        "policy/critic_used": float(uses_critic(accelerator, rollout, ppo)),
        "val/advantage_variance_critic": variance(by_critic),
        "val/advantage_variance_mean": variance(by_mean(accelerator, rollout, ppo.gamma)),
    }


def describe_advantages(learner: PolicyLearner, rollout: Rollout, group: int) -> dict[str, float]:
    """Whether a critic's advantages follow the scores, and what they say of ending.

    `val/advantage_score_correlation`: Pearson's, over response tokens, between the advantage and
    the episode's score less the mean of its query's `group` samples (of the batch, where a query
    has one sample); 1 - 1/group times the leave-one-out score, so its correlation is that one's.
    `policy/advantage_at_eos`: the mean at sampled EOS tokens, after whitening; without any, absent.
    Source: diagnostics of our own, not in Huang et al. 2024.
    """
    everything = (rollout.advantages, rollout.scores, rollout.response_mask, rollout.responses)
    gathered = (learner.accelerator.gather(x) for x in everything)
    advantages, scores, mask, responses = gathered
    of_query = scores.view(-1, group if group > 1 else len(scores))
    above = (of_query - of_query.mean(dim=1, keepdim=True)).view(-1, 1).expand_as(advantages)
    pairs = torch.stack([advantages[mask], above[mask]]).double()
    means = {}
    if (pairs.std(dim=1) > 0).all():
        means["val/advantage_score_correlation"] = torch.corrcoef(pairs)[0, 1].item()
    at_eos = advantages[mask & (responses == learner.networks.eos_id)]
    if len(at_eos):
        means["policy/advantage_at_eos"] = at_eos.mean().item()
    return means


def describe_texts(
    learner: PolicyLearner, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """What the batch's texts look like: words copied from titles, and how varied they are.

    Where no query shows a title, nothing is said of copied words.
    """
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    pairs = list(zip(decode(rollout.queries), decode(rollout.responses), strict=True))
    everything = gather_rows(learner.accelerator, pairs)
    texts = [response for _, response in everything]
    copied = mean_copied(everything)
    return {
        **({} if copied is None else {"text/copied_title_words": copied}),
        "text/distinct_1": distinct(texts, 1),
        "text/distinct_2": distinct(texts, 2),
        **describe_special(learner, rollout, tokenizer),
    }


def describe_special(
    learner: PolicyLearner, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """The share of responses that hold a special token beside the EOS, `text/special_tokens`.

    Nothing is said where there are no others (`unshown_tokens`).
    Source: a diagnostic of our own, not in Huang et al. 2024.
    """
    others = unshown_tokens(tokenizer)
    if not others:
        return {}
    special = torch.isin(rollout.responses, rollout.responses.new_tensor(others)).any(dim=1)
    return {"text/special_tokens": learner.accelerator.gather(special.float()).mean().item()}


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
    """The text of each token; a character that several tokens spell stands with the last."""
    texts, start = [], 0
    for end in range(1, len(tokens) + 1):
        piece: str = tokenizer.decode(tokens[start:end])
        if "\ufffd" in piece and end - start < LONGEST_PIECE and end < len(tokens):
            texts.append("")
        else:
            texts.append(piece)
            start = end
    return texts


def token_numbers(rollout: Rollout, row: int) -> dict[str, list[float]]:
    """An episode's numbers by token, rounded.

    `log_ratios` (nats, policy - ref_policy) and `advantages` have one number a token. `values` (the
    critic on the text before the token, if there is one) and `rewards`, in reward units, have one
    more if the score stands after EOS and the response ends before the limit.
    """
    counted, valued = rollout.response_mask[row], rollout.value_mask[row]
    numbers = {
        "log_ratios": (rollout.logprobs - rollout.ref_logprobs)[row][counted],
        "values": None if rollout.values is None else rollout.values[row][valued],
        "advantages": rollout.advantages[row][counted],
        "rewards": rollout.rewards[row][valued],
    }
    return {
        name: [float(f"{value:.{DIGITS}g}") for value in column.tolist()]
        for name, column in numbers.items()
        if column is not None
    }


def summarize(history: Sequence[dict[str, Any]], settings: PolicyGradient) -> dict[str, float]:
    """The stage's results: means over the last updates, of what they logged."""
    last = history[-max(1, round(FINAL_SHARE * len(history))) :]
    keys = "objective/kl objective/kl_k1 objective/scores policy/eos_rate policy/response_length"
    keys += " text/copied_title_words text/distinct_2"
    logged = {key: [row[key] for row in last if key in row] for key in keys.split()}
    means = {key: sum(values) / len(values) for key, values in logged.items() if values}
    return means | {"updates": len(history), "episodes": len(history) * settings.batch_size}


def say_what_is_odd(
    learner: PolicyLearner, history: Path, metrics: dict[str, float], settings: PolicyGradient
) -> None:
    """Lines on stderr about an update from which little will be learned. They stop nothing.

    - No response ends: the EOS trick gives all the same score (Huang et al. 2024, detail 23).
    - Many responses end and score below what a missing EOS is given. Pairs of one post leave its
      scores free up to a constant: all may lie below it, and then what does not end is rewarded.
    - The critic, if it alone is the baseline, explains less of the returns than a constant when the
      policy begins to learn: advantages hardly follow scores. The reward model, the paper's critic,
      often does: its scalar before EOS means nothing (detail 13).
    - After a quarter of the policy's updates the mean score is not above the SFT model's, which is
      that of the policy's first update and of those before. With fewer than eight none is said.

    history: metrics.jsonl with the updates before. metrics: this update's.
    """
    update, lines = learner.update, []
    waits = sum(not settings.policy_learns(before) for before in range(settings.num_updates))
    quarter = (settings.num_updates - waits) // 4
    if update == 0 and settings.eos_trick == "replace":
        below = metrics["policy/below_penalty"]
        if below > MANY_BELOW:
            of_missing = f"{settings.missing_eos_penalty:g}, the score without an EOS"
            lines.append(f"{below:.0%} end and score below {of_missing}: eos_trick=subtract")
        if not metrics["policy/eos_rate"]:
            lines.append(f"no response ends: {NOTHING_ENDS}")
    if isinstance(settings, Ppo) and update == waits and settings.baseline == "critic":
        explained = metrics["val/explained_variance"]
        if explained < 0:
            ways = "ppo.baseline=gated or critic_init=zero"
            lines.append(f"critic worse than a constant ({explained:.2g}): {ways}")
    if quarter >= 2 and update == waits + quarter:
        scores = [row["objective/scores"] for row in (*read_lines(history), metrics)]
        before, after = fmean(scores[: waits + 1]), fmean(scores[waits + 1 :])
        if after <= before:
            ways = "learning_rate, critic" if isinstance(settings, Ppo) else "learning_rate"
            line = f"after a quarter the score has not risen ({before:.2f}, {after:.2f})"
            lines.append(f"{line}: see {ways}")
    for line in lines if learner.accelerator.is_main_process else ():
        print(line, file=sys.stderr, flush=True)
