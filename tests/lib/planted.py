"""Known errors of RLHF code, planted to see which number betrays them. The product has no switch.

Each error was seen in somebody's code. PLANTED is the list.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages import functional, ppo
from stages.data.ragged import pad_right
from stages.models import forward, sampling
from stages.models.tokenizers import load_tokenizer
from stages.rl import advantages, rollout
from stages.rl.episodes import Measured, Rollout


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
    again = pad_right([torch.tensor(tokenizer.encode(text)) for text in texts], batch.pad_id)
    return right(model, replace(batch, responses=again.to(batch.queries.device)))


def at_every_token(
    right: Callable[..., Tensor], kl: Tensor, scores: Tensor, mask: Tensor, *rest: Any
) -> Tensor:
    """The score stands at every token, so that a longer response earns it more often."""
    return right(kl, scores, mask, *rest) + torch.where(mask, scores.unsqueeze(1), 0.0)


def for_ended(
    right: Callable[..., Tensor], scores: Tensor, responses: Tensor, eos_id: int, penalty: float
) -> Tensor:
    """-1 for the responses that do end."""
    ended = (responses == eos_id).any(dim=-1)
    return torch.where(ended, torch.full_like(scores, penalty), scores)


# -- sampling, KL and log-probabilities ------------------------------------------------------------


def of_the_likeliest(right: Callable[..., Tensor], logits: Tensor, *rest: Any) -> Tensor:
    """Tokens are drawn from the 50 likeliest alone."""
    least = logits.topk(min(50, logits.shape[1]), dim=1).values[:, -1:]
    return right(logits.masked_fill(logits < least, -torch.inf), *rest)


def at_another_temperature(
    right: Callable[..., Measured], learner: Any, sampled: Any, settings: Any
) -> Measured:
    """Old log-probabilities at temperature 1, new ones at the temperature of sampling."""
    hot = right(learner, sampled, replace(settings, temperature=1.0))
    return replace(right(learner, sampled, settings), logprobs=hot.logprobs)


def one_ratio(
    right: Callable[..., Any],
    new: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float,
) -> Any:
    """All tokens of a response have one ratio, their geometric mean, which is never clipped."""
    log_ratio = torch.where(mask, new - logprobs, 0.0).sum(dim=1) / mask.sum(dim=1)
    return right(logprobs + log_ratio[:, None], logprobs, advantages, mask, cliprange)


def kl_rewarded(right: Callable[..., Tensor], kl: Tensor, *rest: Any) -> Tensor:
    """The KL penalty has the wrong sign: distance from the SFT model is rewarded."""
    return right(-kl, *rest)


def kl_left_out(right: Callable[..., Tensor], kl: Tensor, *rest: Any) -> Tensor:
    """No KL penalty at all."""
    return right(torch.zeros_like(kl), *rest)


# -- masks, advantages and returns -----------------------------------------------------------------


def padding_too(
    right: Callable[..., Tensor], accelerator: Any, x: Tensor, mask: Tensor, *rest: Any, **more: Any
) -> Tensor:
    """Whitening's mean and deviation are over padding too."""
    return right(accelerator, x, torch.ones_like(mask), *rest, **more)


def of_the_batch_before() -> Callable[..., Rollout]:
    """A wrong function that remembers."""
    kept: list[Rollout] = []

    def wrong(right: Callable[..., Rollout], *args: Any) -> Rollout:
        """Advantages and returns are those of the batch before."""
        now = right(*args)
        before, kept[:] = (kept or [now])[0], [now]
        return replace(now, advantages=before.advantages, returns=before.returns)

    return wrong


def from_whitened(right: Callable[..., Rollout], *args: Any) -> Rollout:
    """The critic's targets are whitened advantages plus values."""
    now = right(*args)
    assert now.values is not None
    return replace(now, returns=now.advantages + now.values)


def across_eos(
    right: Callable[..., Rollout], accelerator: Any, shaped: Any, settings: Any
) -> Rollout:
    """GAE goes on over the padding after EOS, with the critic's values of padding."""
    wide = replace(shaped, value_mask=torch.ones_like(shaped.value_mask))
    return replace(right(accelerator, wide, settings), value_mask=shaped.value_mask)


# -- networks and optimizer ------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """One error: the step of PPO in which it is, the function that is replaced, and by what."""

    step: int
    module: Any
    name: str
    wrong: Callable[..., Any]

    def plant(self, put: Any = setattr) -> None:
        """Put it there, in this process; `put` may be what takes it away again."""
        wrap(self.module, self.name, self.wrong, put)


PLANTED = {
    "score-at-padding": Planted(3, rollout, "score_responses", at_last_column),
    "query-one-short": Planted(3, rollout, "score_responses", query_one_short),
    "no-leading-space": Planted(3, rollout, "score_responses", without_leading_space),
    "score-at-every-token": Planted(4, functional, "shape_rewards", at_every_token),
    "penalty-for-ended": Planted(3, functional, "penalize_missing_eos", for_ended),
    "fifty-likeliest": Planted(1, sampling, "draw", of_the_likeliest),
    "other-temperature": Planted(2, ppo, "measure", at_another_temperature),
    "one-ratio": Planted(6, functional, "policy_losses", one_ratio),
    "kl-rewarded": Planted(4, functional, "shape_rewards", kl_rewarded),
    "kl-left-out": Planted(4, functional, "shape_rewards", kl_left_out),
    "padding-whitened": Planted(5, advantages, "whiten", padding_too),
    "batch-before": Planted(5, ppo, "credit", of_the_batch_before()),
    "whitened-targets": Planted(5, ppo, "credit", from_whitened),
    "gae-across-eos": Planted(5, ppo, "credit", across_eos),
}
