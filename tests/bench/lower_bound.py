"""Operations of the matrix products that an update needs: a lower bound of its time.

They are counted row by row, so no padding is included. Every response is counted at its full
length.
"""

from collections.abc import Sequence

from stages.config.config import Config
from stages.config.ppo import PolicyGradient
from stages.planning.shapes import Shape, block_weights, shape_of


def update_operations(
    config: Config, settings: PolicyGradient, query_lengths: Sequence[int]
) -> float:
    """Return the operations of one update. The samples of a query share a row."""
    shape = shape_of(config.base)
    response = config.data.max_summary_tokens * settings.samples_per_query

    # A backward pass costs two forward passes. Recomputed activations cost one more.
    passes_per_step = 4 if config.memory.gradient_checkpointing else 3
    training_passes = settings.num_ppo_epochs * passes_per_step
    # Log-probabilities of policy and ref_policy, then training.
    policy_passes = 2 + training_passes
    # Scores of the reward model; values of the critic, then its training.
    scorer_passes = 2 + training_passes if settings.uses_critic else 1

    total = 0.0
    for query in query_lengths:
        row = query + response
        # Sampling reads the query once, then each token of the response.
        total += forward_operations(shape, tokens=query, attended=query, logits=0)
        total += forward_operations(shape, tokens=response, attended=query, logits=response)
        total += policy_passes * forward_operations(
            shape, tokens=row, attended=row, logits=response
        )
        total += scorer_passes * forward_operations(shape, tokens=row, attended=row, logits=0)
    return total


def forward_operations(shape: Shape, tokens: int, attended: int, logits: int) -> float:
    """Return the operations of a forward pass: two for each weight and token.

    Each token attends to `attended` tokens: with a mask, attention kernels compute the upper
    triangle too. `logits` is the number of positions that reach the output layer.
    """
    blocks = 2 * shape.layers * block_weights(shape) * tokens
    attention = 4 * shape.layers * shape.attention * attended * tokens
    return blocks + attention + 2 * shape.hidden * shape.vocabulary * logits
