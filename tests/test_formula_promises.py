"""No formula changes its arguments, and each refuses unknown choices and empty masks."""

import copy
import inspect
from typing import Any

import pytest
import torch

from stages import functional
from stages.functional import kl_estimate, kl_penalty, loss_weights, shape_rewards

X = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, -0.2]])
MASK = torch.tensor([[True, True, False], [True, True, True]])
TOKENS = torch.tensor([[1, 0, 2], [1, 2, 1]])
LOGITS = torch.linspace(-1, 1, 18).view(2, 3, 3)
CALLS: dict[str, tuple[Any, ...]] = {
    "first_true_index": (MASK,),
    "truncate_after": (TOKENS, 0, 9),
    "response_masks": (TOKENS, 2),
    "penalize_missing_eos": (X[:, 0], TOKENS, 0, -1.0),
    "subtract_missing_eos": (X[:, 0], TOKENS, 0, -1.0),
    "token_logprobs": (LOGITS, TOKENS, 0.7),
    "paper_token_logprobs": (LOGITS, TOKENS, 0.7),
    "entropy": (LOGITS,),
    "kl_estimate": (X, X.flip(0)),
    "kl_penalty": (X, X.flip(0), X.flip(1), MASK, "k3", "sequence"),
    "adapt_kl_coef": (0.05, 7.0, 6.0, 64, 10_000),
    "shape_rewards": (X, X[:, 0], MASK, 0.1),
    "explained_variance": (X, X.flip(0), MASK),
    "critic_beats_constant": (X, X.flip(0), MASK),
    "masked_mean": (X, MASK),
    "masked_whiten": (X, MASK),
    "sequence_logprobs": (X, MASK),
    "gae": (X, X.flip(0), 0.9, 0.9),
    "length_adaptive_lambda": (torch.tensor([3, 20]), 0.4),
    "bound_values": (X, -1.0, 2.0),
    "preference_over_reference": (X[:, 0], X[:, 1]),
    "returns_to_go": (X, 0.9),
    "minus_mean_return": (X, 0.9),
    "policy_loss": (X, X.flip(0), X.flip(1), MASK, 0.2),
    "policy_losses": (X, X.flip(0), X.flip(1), MASK, 0.2),
    "value_loss": (X, X.flip(0), X.flip(1), MASK, 0.2),
    "value_losses": (X, X.flip(0), X.flip(1), MASK, 0.2),
    "leave_one_out": (X[:, 0], 2),
    "minus_group_mean": (X[:, 0], 2),
    "loss_weights": (MASK, "sequences"),
    "weighted_sum": (X, X.abs()),
    "preference_loss": (X[:, 0], X[:, 1]),
    "implicit_rewards": (X, X.flip(0), 0.05),
    "dpo_loss": (X, X.flip(0), X.flip(1), X, 0.05),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_is_changed(name):
    arguments = CALLS[name]
    originals = copy.deepcopy(arguments)

    getattr(functional, name)(*arguments)

    for argument, original in zip(arguments, originals, strict=True):
        if isinstance(argument, torch.Tensor):
            assert torch.equal(argument, original)
        else:
            assert argument == original


def test_every_public_formula_is_among_these_tests():
    functions = [name for name, _ in inspect.getmembers(functional, inspect.isfunction)]
    public = {name for name in functions if not name.startswith("_")}
    assert public == set(CALLS)


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(X, X, "k4")
    with pytest.raises(ValueError, match="correction is off, token or sequence, not 'both'"):
        kl_penalty(X, X, X, MASK, "k3", "both")
    with pytest.raises(ValueError, match="before"):
        shape_rewards(X, X[:, 0], MASK, 0.1, "before")
    with pytest.raises(ValueError, match="batches"):
        loss_weights(MASK, "batches")


@pytest.mark.parametrize(
    "name",
    [
        "masked_mean",
        "masked_whiten",
        "policy_loss",
        "value_loss",
        "explained_variance",
        "critic_beats_constant",
    ],
)
def test_a_mean_over_no_position_is_refused(name):
    arguments = list(CALLS[name])
    (place,) = [index for index, argument in enumerate(arguments) if argument is MASK]
    arguments[place] = torch.zeros_like(MASK)
    with pytest.raises(ValueError, match="no position"):
        getattr(functional, name)(*arguments)
