"""The paper's formulas once more, in numpy and float64, written from the paper's text alone.

No line is shared with `stages`, and nothing of it is imported. `python -m tests.lib.paper_numbers`
writes `paper_numbers.json` next to this file: inputs drawn from a seed, and the outputs of the
paper's formulas. Notation is the paper's: a padding mask is True where nothing counts.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState  # draws the same with every version of numpy

Array = np.ndarray
Case = dict[str, Any]
NUMBERS = Path(__file__).with_suffix(".json")
EOS = 0
PAD = 99
INVALID_LOGPROB = 1.0
PLAIN: Case = {
    "kl_coef": 0.05,
    "gamma": 1.0,
    "lam": 0.95,
    "whiten_rewards": False,
    "non_eos_penalty": -1.0,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
}
CASES = {
    "ppo_plain": PLAIN,
    "ppo_whiten_rewards": PLAIN | {"whiten_rewards": True},
    "ppo_gamma_lam": PLAIN | {"kl_coef": 0.1, "gamma": 0.9, "lam": 0.7},
}
NEOX = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def query_tokens(encode: Callable[[str], Any], fields: dict[str, str], limit: int) -> Any:
    """Detail 2: tokens of the query; the post loses its last line, or a character, until it fits.

    None: no part of the post is left, and the query still does not fit.
    """
    heading = f"SUBREDDIT: r/{fields['subreddit']}\n\nTITLE: {fields['title']}"
    post = fields["post"]
    while True:
        tokens = encode(f"{heading}\n\nPOST: {post}\n\nTL;DR:")
        if len(tokens) <= limit:
            return tokens
        if not post:
            return None
        post = post[: post.rindex("\n")] if "\n" in post else post[:-1]


def cut_and_scored(case: Case) -> Case:
    """Detail 23: what follows the first EOS is padding; without EOS the score is replaced."""
    cut = case["responses"].copy()
    contains_eos = np.any(cut == EOS, axis=1)
    last_index = np.full(len(cut), cut.shape[1] - 1)
    for row, tokens in enumerate(cut):
        if contains_eos[row]:
            last_index[row] = list(tokens).index(EOS)
        tokens[last_index[row] + 1 :] = PAD

    beyond_last = np.arange(cut.shape[1]) - last_index[:, None]
    return {
        "truncated_responses": cut,
        "last_index": last_index,
        "contains_eos": contains_eos,
        "padding_mask": beyond_last > 0,
        "padding_mask_p1": beyond_last > 1,
        "penalized_scores": np.where(contains_eos, case["scores"], case["non_eos_penalty"]),
    }


def whiten(x: Array, padding: Array, shift_mean: bool) -> Array:
    """Details 24 (rewards, not shifted) and 25 (advantages)."""
    mean = np.mean(x[~padding])
    variance = np.var(x[~padding])
    white = (x - mean) / np.sqrt(variance + 1e-8)
    if not shift_mean:
        white = white + mean
    return np.where(padding, 0.0, white)


def advantages_of(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """Generalized advantage estimation, from the last token to the first."""
    rows, length = rewards.shape
    advantages = np.zeros((rows, length))
    next_value = np.zeros(rows)
    next_advantage = np.zeros(rows)
    for t in reversed(range(length)):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_value = values[:, t]
        next_advantage = advantages[:, t]
    return advantages


def ppo_outputs(case: Case) -> Case:
    """From sampled responses to the loss of one microbatch ("Masking and GAE, exactly")."""
    outputs = cut_and_scored(case)
    padding = outputs["padding_mask"]
    padding_p1 = outputs["padding_mask_p1"]
    old = np.where(padding, INVALID_LOGPROB, case["logprobs"])
    ref = np.where(padding, INVALID_LOGPROB, case["ref_logprobs"])
    new = np.where(padding, INVALID_LOGPROB, case["new_logprobs"])
    values = np.where(padding_p1, 0.0, case["values"])

    # The KL penalty at each token, and the score after the last one.
    kl = old - ref
    rewards = -case["kl_coef"] * kl
    for row, last in enumerate(outputs["last_index"]):
        after_last = min(last + 1, rewards.shape[1] - 1)
        rewards[row, after_last] += outputs["penalized_scores"][row]
    if case["whiten_rewards"]:
        rewards = whiten(rewards, padding_p1, shift_mean=False)

    raw_advantages = advantages_of(rewards, values, case["gamma"], case["lam"])
    returns = raw_advantages + values
    advantages = whiten(raw_advantages, padding, shift_mean=True)

    # The loss of the policy: the larger of the plain and the clipped one.
    cliprange = case["cliprange"]
    ratio = np.exp(new - old)
    plain = -advantages * ratio
    clipped = -advantages * np.clip(ratio, 1 - cliprange, 1 + cliprange)
    policy_loss = np.mean(np.maximum(plain, clipped)[~padding])
    policy_clipfrac = np.mean((clipped > plain)[~padding])

    # The loss of the critic likewise.
    near = case["cliprange_value"]
    clipped_values = np.clip(case["vpred"], values - near, values + near)
    square = (case["vpred"] - returns) ** 2
    clipped_square = (clipped_values - returns) ** 2
    value_loss = 0.5 * np.mean(np.maximum(square, clipped_square)[~padding_p1])
    value_clipfrac = np.mean((clipped_square > square)[~padding_p1])

    return outputs | {
        "masked_values": values,
        "kl": kl,
        "rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "pg_clipfrac": policy_clipfrac,
        "vf_clipfrac": value_clipfrac,
        "pg_loss": policy_loss,
        "vf_loss": value_loss,
        "total_loss": policy_loss + case["vf_coef"] * value_loss,
    }


def ppo_inputs(draw: RandomState) -> Case:
    """EOS first, last, nowhere, twice, last but one, and in the middle."""
    responses = draw.randint(1, PAD, (6, 8))
    for row, places in enumerate([[0], [7], [], [2, 5], [6], [3]]):
        responses[row, places] = EOS
    old, ref, new, values, vpred = np.round(draw.normal(size=(5, 6, 8)), 3)
    scores = np.round(2 * draw.normal(size=6), 3)
    logprobs = -np.abs(old) - 0.1
    return {
        "responses": responses,
        "logprobs": logprobs,
        "ref_logprobs": logprobs + np.round(ref / 2, 3),
        "new_logprobs": logprobs + np.round(new / 5, 3),
        "values": values,
        "vpred": vpred,
        "scores": scores,
    }


def log_softmax(logits: Array) -> Array:
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def logprobs_of(logits: Array, tokens: Array, temperature: float) -> Array:
    logprobs = log_softmax(logits / (temperature + 1e-7))
    return np.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def tiny_neox() -> dict[str, Array]:
    """Weights by the names of transformers, exact in float32. Shapes: [outputs, inputs]."""
    draw = RandomState(10)
    hidden = NEOX["hidden_size"]
    inner = NEOX["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"final_layer_norm": (hidden,)}
    for layer in ("layers.0", "layers.1"):
        shapes[f"{layer}.input_layernorm"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm"] = (hidden,)
        shapes[f"{layer}.attention.query_key_value"] = (3 * hidden, hidden)
        shapes[f"{layer}.attention.dense"] = (hidden, hidden)
        shapes[f"{layer}.mlp.dense_h_to_4h"] = (inner, hidden)
        shapes[f"{layer}.mlp.dense_4h_to_h"] = (hidden, inner)

    embed_out, embed_in = draw.normal(size=(2, NEOX["vocab_size"], hidden)) / 4
    weights = {"embed_out.weight": embed_out, "gpt_neox.embed_in.weight": embed_in}
    for name, shape in shapes.items():
        weight = draw.normal(size=shape) / 4
        if len(shape) == 1:  # of a norm
            weight = weight + 1
        weights[f"gpt_neox.{name}.weight"] = weight
        weights[f"gpt_neox.{name}.bias"] = draw.normal(size=shape[0]) / 4
    return {name: array.astype(np.float32).astype(float) for name, array in weights.items()}


def rotated(x: Array) -> Array:
    """Rotates the first quarter of each head by its position. Shapes: [heads, length, size]."""
    half = x.shape[-1] // 8
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second, unrotated = np.split(x, [half, 2 * half], axis=-1)
    rotated_first = first * np.cos(angle) - second * np.sin(angle)
    rotated_second = second * np.cos(angle) + first * np.sin(angle)
    return np.concatenate([rotated_first, rotated_second, unrotated], axis=-1)


def hidden_states(tokens: Array, weights: dict[str, Array], heads: int) -> Array:
    """GPT-NeoX up to its final layer norm. Shapes: tokens [length] -> [length, hidden]."""

    def linear(name: str, x: Array) -> Array:
        return x @ weights[f"gpt_neox.{name}.weight"].T + weights[f"gpt_neox.{name}.bias"]

    def norm(name: str, x: Array) -> Array:
        white = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return white * weights[f"gpt_neox.{name}.weight"] + weights[f"gpt_neox.{name}.bias"]

    length = len(tokens)
    x = weights["gpt_neox.embed_in.weight"][tokens]
    future = np.triu(np.full((length, length), -np.inf), 1)
    for layer in ("layers.0", "layers.1"):
        mixed = linear(f"{layer}.attention.query_key_value", norm(f"{layer}.input_layernorm", x))
        query, key, value = np.split(mixed.reshape(length, heads, -1).swapaxes(0, 1), 3, axis=-1)
        scaled = rotated(query) @ rotated(key).swapaxes(1, 2) / math.sqrt(query.shape[-1])
        heard = np.exp(log_softmax(scaled + future)) @ value
        attention = linear(f"{layer}.attention.dense", heard.swapaxes(0, 1).reshape(length, -1))
        inner = linear(f"{layer}.mlp.dense_h_to_4h", norm(f"{layer}.post_attention_layernorm", x))
        gelu = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        x = x + attention + linear(f"{layer}.mlp.dense_4h_to_h", gelu)  # both from the same x
    return norm("final_layer_norm", x)


def reward_outputs(case: Case, weights: dict[str, Array], heads: int) -> Case:
    """Details 12 and 15, for each row without its padding; 0 where nothing counts."""
    rows, length = case["responses"].shape
    rewards = np.zeros(rows)
    values = np.zeros((rows, length))
    logprobs = np.zeros((rows, length))
    for row in range(rows):
        query = without_padding(case["queries"][row], case["pad_token_id"])
        response = without_padding(case["responses"][row], case["pad_token_id"])
        hidden = hidden_states(np.concatenate([query, response]), weights, heads)
        scalars = hidden @ case["head_weight"][0] + case["head_bias"] - case["reward_bias"]
        rewards[row] = scalars[-1]  # at EOS
        logits = hidden[len(query) - 1 : -1] @ weights["embed_out.weight"].T
        logprobs[row, : len(response)] = logprobs_of(logits, response, case["temperature"])
        values[row, : len(response) + 1] = scalars[len(query) - 1 :][:length]
    return {"rewards": rewards, "values": values, "logprobs": logprobs}


def without_padding(tokens: Array, pad: int) -> Array:
    return tokens[tokens != pad]


def reward_case(draw: RandomState) -> Case:
    """Rows of several lengths; the bias is their mean reward, as if they were the references."""
    queries = draw.randint(1, NEOX["vocab_size"], (5, 7))
    responses = draw.randint(1, NEOX["vocab_size"], (5, 5))
    padding_and_length = [(0, 5), (2, 1), (6, 3), (3, 4), (1, 5)]
    for row, (padding, length) in enumerate(padding_and_length):
        queries[row, :padding] = PAD
        responses[row, length:] = PAD
        responses[row, length - 1] = EOS

    head = draw.normal(size=(1, NEOX["hidden_size"])) / 33**0.5  # detail 11
    case: Case = {
        "queries": queries,
        "responses": responses,
        "head_weight": np.round(head, 3),
        "head_bias": np.zeros(1),
        "reward_bias": 0.0,
        "pad_token_id": PAD,
        "temperature": 0.7,
    }
    weights = tiny_neox()
    heads = NEOX["num_attention_heads"]
    case["reward_bias"] = np.mean(reward_outputs(case, weights, heads)["rewards"])
    return case | reward_outputs(case, weights, heads)


def small_case(draw: RandomState) -> Case:
    """Log-probabilities, entropy and the loss of the reward model (detail 10)."""
    logits = np.round(2 * draw.normal(size=(2, 3, 5)), 3)
    tokens = draw.randint(0, 5, (2, 3))
    chosen, rejected = np.round(draw.normal(size=(2, 6)), 3)
    logprobs = log_softmax(logits)
    return {
        "logits": logits,
        "tokens": tokens,
        "chosen": chosen,
        "rejected": rejected,
        "logprobs": logprobs_of(logits, tokens, 0.7),
        "entropy": -np.sum(np.exp(logprobs) * logprobs, axis=-1),
        "loss": np.mean(-np.log(1 / (1 + np.exp(rejected - chosen)))),
    }


def as_list(x: Array) -> Any:
    """An array for JSON; floats have eight decimals."""
    if x.dtype == float:
        x = np.round(x, 8)
    return x.tolist()


def main(argv: list[str]) -> None:
    """Write every case to the file named, or to NUMBERS."""
    cases = {"reward_tiny": reward_case(RandomState(11)), "small": small_case(RandomState(12))}
    for seed, name in enumerate(CASES):
        inputs = CASES[name] | ppo_inputs(RandomState(seed))
        cases[name] = inputs | ppo_outputs(inputs)

    text = json.dumps(cases, default=as_list)
    text = text.replace('], "', '],\n"').replace('}, "', '},\n"')  # an array a line
    path = Path(argv[0]) if argv else NUMBERS
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
