"""Known errors of RLHF code, planted to see which check catches them. The product has no switch.

Each error was seen in somebody's code. PLANTED is the list. A function in place of the right one
gets the right one first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages import functional, ppo
from stages.config.ppo import PolicyGradient
from stages.data.ragged import pad_right
from stages.models import forward, sampling
from stages.models.forward import ResponseBatch
from stages.models.heads import head_name
from stages.models.tokenizers import load_tokenizer
from stages.rl import advantages, loss, networks, rollout, update
from stages.rl.algorithms import Algorithm
from stages.rl.episodes import Measured, Rollout, Sampled, Shaped
from stages.rl.networks import PolicyLearner


def wrap(module: Any, name: str, wrong: Callable[..., Any], put: Any = setattr) -> None:
    """Replace a module's function by `wrong`, which gets the right one first."""
    right = getattr(module, name)
    put(module, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))


# -- where the score is read, and what it becomes --------------------------------------------------


def at_last_column(right: Callable[..., Tensor], model: nn.Module, batch: ResponseBatch) -> Tensor:
    """The score is read at the last column, after padding that counts as text."""
    # Where padding is masked, its column repeats EOS: token, position and text before it are equal.
    counted = batch.mask.clone()
    counted[:, batch.queries.shape[1] :] = True
    inputs = forward.model_inputs(batch.tokens.masked_fill(~batch.mask, 0), counted)
    return forward.head_scalars(model, inputs)[:, -1]


def query_one_short(right: Callable[..., Tensor], model: nn.Module, batch: ResponseBatch) -> Tensor:
    """The score is that of a query without its last token."""
    return right(model, replace(batch, queries=batch.queries[:, :-1]))


def without_leading_space(right: Callable[..., Tensor], model: Any, batch: ResponseBatch) -> Tensor:
    """The score is that of the stripped text, tokenized again: its first word is another token."""
    tokenizer = load_tokenizer(Path(model.config.name_or_path))
    texts = [tokenizer.decode(row[row != batch.pad_id]).lstrip() for row in batch.responses]
    stripped = pad_right([torch.tensor(tokenizer.encode(text)) for text in texts], batch.pad_id)
    return right(model, replace(batch, responses=stripped.to(batch.queries.device)))


def at_every_token(
    right: Callable[..., Tensor],
    kl: Tensor,
    scores: Tensor,
    mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The score is added at every token, so that a longer response earns it more often."""
    return right(kl, scores, mask, *args, **kwargs) + torch.where(mask, scores.unsqueeze(1), 0.0)


def penalty_for_ended(
    right: Callable[..., Tensor], scores: Tensor, responses: Tensor, eos_id: int, penalty: float
) -> Tensor:
    """-1 for the responses that do emit EOS."""
    has_eos = (responses == eos_id).any(dim=-1)
    return torch.where(has_eos, torch.full_like(scores, penalty), scores)


def dropping(right: Callable[..., Any], model: nn.Module, dtype: str) -> Any:
    """Dropout is on in the reward model."""
    frozen = right(model, dtype)
    if not head_name(model):
        return frozen  # the ref_policy
    for module in frozen.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return frozen.train()


# -- sampling, KL and log-probabilities ------------------------------------------------------------


def of_the_likeliest(right: Callable[..., Tensor], logits: Tensor, *others: Any) -> Tensor:
    """Tokens are drawn from the 50 likeliest only."""
    least = logits.topk(min(50, logits.shape[1]), dim=1).values[:, -1:]
    return right(logits.masked_fill(logits < least, -torch.inf), *others)


def queries_padded_right(right: Callable[..., Sampled], *args: Any, **options: Any) -> Sampled:
    """The queries' padding is on the right, between a query and its response."""
    sampled = right(*args, **options)
    queries = [row[row != sampled.pad_id] for row in sampled.queries]
    return replace(sampled, queries=pad_right(queries, sampled.pad_id))


def at_another_temperature(
    right: Callable[..., Measured],
    learner: PolicyLearner,
    sampled: Sampled,
    settings: PolicyGradient,
) -> Measured:
    """Old log-probabilities at temperature 1, new ones at the temperature of sampling."""
    hot = right(learner, sampled, settings.changed(temperature=1.0))
    return replace(right(learner, sampled, settings), logprobs=hot.logprobs)


def one_ratio(
    right: Callable[..., Any],
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float,
) -> Any:
    """All tokens of a response have one ratio, their geometric mean, which is never clipped."""
    log_ratio = torch.where(mask, new_logprobs - logprobs, 0.0).sum(dim=1) / mask.sum(dim=1)
    return right(logprobs + log_ratio[:, None], logprobs, advantages, mask, cliprange)


def recomputed_at_each_step(right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The old log-probabilities are those of the policy that takes the step: every ratio is 1."""

    def of_this_step(
        right_loss: Callable[..., Any],
        new_logprobs: Tensor,
        entropies: Tensor,
        part: Rollout,
        *others: Any,
    ) -> Any:
        follows = replace(part, logprobs=new_logprobs.detach())
        return right_loss(new_logprobs, entropies, follows, *others)

    with pytest.MonkeyPatch.context() as patch:
        wrap(loss, "policy_loss", of_this_step, patch.setattr)
        return right(*args, **kwargs)


def kl_rewarded(right: Callable[..., Tensor], kl: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The KL penalty has the wrong sign: distance from the SFT model is rewarded."""
    return right(-kl, *args, **kwargs)


def kl_left_out(right: Callable[..., Tensor], kl: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """No KL penalty at all."""
    return right(torch.zeros_like(kl), *args, **kwargs)


# -- masks, advantages and returns -----------------------------------------------------------------


def padding_too(
    right: Callable[..., Tensor],
    accelerator: Any,
    x: Tensor,
    mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Whitening's mean and deviation are over padding too."""
    return right(accelerator, x, torch.ones_like(mask), *args, **kwargs)


def shifted_too(
    right: Callable[..., Tensor],
    accelerator: Any,
    x: Tensor,
    mask: Tensor,
    settings: PolicyGradient,
    shift_mean: bool = True,
) -> Tensor:
    """Rewards are whitened to mean 0, as advantages are."""
    return right(accelerator, x, mask, settings, shift_mean=True)


class OfTheBatchBefore:
    """A wrong function that remembers the batch before."""

    def __init__(self) -> None:
        self.before: Rollout | None = None

    def __call__(self, right: Callable[..., Rollout], *args: Any) -> Rollout:
        """Advantages and returns are those of the batch before."""
        now = right(*args)
        before = self.before or now
        self.before = now
        return replace(now, advantages=before.advantages, returns=before.returns)


def from_whitened(right: Callable[..., Rollout], *args: Any) -> Rollout:
    """The critic's targets are whitened advantages plus values."""
    now = right(*args)
    assert now.values is not None
    return replace(now, returns=now.advantages + now.values)


def across_eos(
    right: Callable[..., Rollout],
    accelerator: Any,
    shaped: Shaped,
    algorithm: Algorithm,
    settings: PolicyGradient,
) -> Rollout:
    """GAE continues over the padding after EOS, with the critic's values of padding."""
    wide = replace(shaped, value_mask=torch.ones_like(shaped.value_mask))
    return replace(right(accelerator, wide, algorithm, settings), value_mask=shaped.value_mask)


def of_another_query(right: Callable[..., Tensor], rewards: Tensor, group_size: int) -> Tensor:
    """Each query gets the advantages of the query before."""
    return right(rewards, group_size).roll(group_size)


# -- the list --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One error: the step of an update in which it is, the function that is replaced, by what."""

    step: int
    module: Any
    name: str
    wrong: Callable[..., Any]
    stage: str = "ppo"
    """The algorithm whose run shows it."""
    settings: tuple[str, ...] = ()
    """Settings without which the run does not show it."""

    def plant(self, put: Any = setattr) -> None:
        """Put it there, in this process; `put` may be what takes it away again."""
        wrap(self.module, self.name, self.wrong, put)


SHORT_RLOO = ("rloo.total_episodes=48", "rloo.batch_size=16")
PLANTED = {
    "fifty-likeliest": Planted(step=1, module=sampling, name="draw", wrong=of_the_likeliest),
    "queries-padded-right": Planted(
        step=1, module=ppo, name="sample_responses", wrong=queries_padded_right
    ),
    "other-temperature": Planted(step=2, module=ppo, name="measure", wrong=at_another_temperature),
    "score-at-padding": Planted(
        step=3, module=rollout, name="score_responses", wrong=at_last_column
    ),
    "query-one-short": Planted(
        step=3, module=rollout, name="score_responses", wrong=query_one_short
    ),
    "no-leading-space": Planted(
        step=3, module=rollout, name="score_responses", wrong=without_leading_space
    ),
    "penalty-for-ended": Planted(
        step=3, module=functional, name="penalize_missing_eos", wrong=penalty_for_ended
    ),
    "reward-dropout": Planted(step=3, module=networks, name="freeze", wrong=dropping),
    "score-at-every-token": Planted(
        step=4, module=functional, name="shape_rewards", wrong=at_every_token
    ),
    "kl-rewarded": Planted(step=4, module=functional, name="shape_rewards", wrong=kl_rewarded),
    "kl-left-out": Planted(step=4, module=functional, name="shape_rewards", wrong=kl_left_out),
    "padding-whitened": Planted(step=5, module=advantages, name="whiten", wrong=padding_too),
    "rewards-shifted": Planted(
        step=5,
        module=advantages,
        name="whiten",
        wrong=shifted_too,
        settings=("ppo.whiten_rewards=true",),
    ),
    "batch-before": Planted(
        step=5, module=ppo, name="compute_advantages", wrong=OfTheBatchBefore()
    ),
    "whitened-targets": Planted(step=5, module=ppo, name="compute_advantages", wrong=from_whitened),
    "gae-across-eos": Planted(step=5, module=ppo, name="compute_advantages", wrong=across_eos),
    "other-query": Planted(
        step=5,
        module=functional,
        name="leave_one_out",
        wrong=of_another_query,
        stage="rloo",
        settings=SHORT_RLOO,
    ),
    "one-ratio": Planted(step=6, module=functional, name="policy_losses", wrong=one_ratio),
    "old-logprobs-recomputed": Planted(
        step=6, module=update, name="take_step", wrong=recomputed_at_each_step
    ),
}
