"""The paper's formulas once more, in numpy and float64, written from the paper's text alone.

No line is shared with `stages`, and nothing of it is imported. `python -m tests.lib.paper_numbers`
writes `paper_numbers.json` beside this file: inputs drawn from a seed, and what the paper makes of
them. Notation is the paper's: a padding mask is True where nothing counts.
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
EOS, PAD, INVALID_LOGPROB = 0, 99, 1.0
PLAIN: Case = {"kl_coef": 0.05, "gamma": 1.0, "lam": 0.95, "whiten_rewards": False}
PLAIN |= {"non_eos_penalty": -1.0, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1}
CASES = {"ppo_plain": PLAIN, "ppo_whiten_rewards": PLAIN | {"whiten_rewards": True}}
CASES |= {"ppo_gamma_lam": PLAIN | {"kl_coef": 0.1, "gamma": 0.9, "lam": 0.7}}
NEOX = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48}
NEOX |= {"num_hidden_layers": 2, "num_attention_heads": 2}


def query_tokens(encode: Callable[[str], Any], fields: dict[str, str], limit: int) -> Any:
    """Detail 2: the post loses its last line, or a character, until it fits; None: refused."""
    title, post = f"SUBREDDIT: r/{fields['subreddit']}\n\nTITLE: {fields['title']}", fields["post"]
    while len(tokens := encode(f"{title}\n\nPOST: {post}\n\nTL;DR:")) > limit:
        if not post:
            return None
        post = post[: post.rindex("\n")] if "\n" in post else post[:-1]
    return tokens


def cut_and_scored(case: Case) -> Case:
    """Detail 23: what follows the first EOS is padding; without EOS the score is replaced."""
    cut, last, ended = case["responses"].copy(), [], np.any(case["responses"] == EOS, axis=1)
    for row, tokens in enumerate(cut):
        last.append(list(tokens).index(EOS) if ended[row] else len(tokens) - 1)
        tokens[last[row] + 1 :] = PAD
    index = np.array(last)
    beyond = np.arange(cut.shape[1]) - index[:, None]
    masks = {"padding_mask": beyond > 0, "padding_mask_p1": beyond > 1}
    scores = np.where(ended, case["scores"], case["non_eos_penalty"])
    texts = {"truncated_responses": cut, "last_index": index, "contains_eos": ended}
    return texts | masks | {"penalized_scores": scores}


def whiten(x: Array, padding: Array, shift_mean: bool) -> Array:
    """Details 24 (rewards, not shifted) and 25 (advantages)."""
    mean, variance = np.mean(x[~padding]), np.var(x[~padding])
    white = (x - mean) / np.sqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
    return np.where(padding, 0.0, white)


def advantages_of(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    values, advantages = (np.pad(x, ((0, 0), (0, 1))) for x in (values, np.zeros_like(values)))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        advantages[:, t] = delta + gamma * lam * advantages[:, t + 1]
    return advantages[:, :-1]


def ppo_outputs(case: Case) -> Case:
    """From sampled responses to the loss of one microbatch ("Masking and GAE, exactly")."""
    outputs = cut_and_scored(case)
    padding, padding_p1 = outputs["padding_mask"], outputs["padding_mask_p1"]
    names = ("logprobs", "ref_logprobs", "new_logprobs")
    old, ref, new = (np.where(padding, INVALID_LOGPROB, case[name]) for name in names)
    values, vpred = np.where(padding_p1, 0.0, case["values"]), case["vpred"]
    rewards = -case["kl_coef"] * (old - ref)
    for row, last in enumerate(outputs["last_index"]):
        after = last + 1 if last + 1 < rewards.shape[1] else last
        rewards[row, after] += outputs["penalized_scores"][row]
    if case["whiten_rewards"]:
        rewards = whiten(rewards, padding_p1, shift_mean=False)
    raw = advantages_of(rewards, values, case["gamma"], case["lam"])
    returns, advantages = raw + values, whiten(raw, padding, shift_mean=True)
    ratio, clip, near = np.exp(new - old), case["cliprange"], case["cliprange_value"]
    losses = -advantages * ratio, -advantages * np.clip(ratio, 1 - clip, 1 + clip)
    squares = [(v - returns) ** 2 for v in (vpred, np.clip(vpred, values - near, values + near))]
    policy_loss = np.mean(np.maximum(*losses)[~padding])
    value_loss = 0.5 * np.mean(np.maximum(*squares)[~padding_p1])
    outputs |= {"masked_values": values, "kl": old - ref, "rewards": rewards}
    outputs |= {"advantages": advantages, "returns": returns}
    outputs["pg_clipfrac"] = np.mean((losses[1] > losses[0])[~padding])
    outputs["vf_clipfrac"] = np.mean((squares[1] > squares[0])[~padding_p1])
    total = policy_loss + case["vf_coef"] * value_loss
    return outputs | {"pg_loss": policy_loss, "vf_loss": value_loss, "total_loss": total}


def ppo_inputs(draw: RandomState) -> Case:
    """EOS first, last, nowhere, twice, last but one, and in the middle."""
    responses = draw.randint(1, PAD, (6, 8))
    for row, places in enumerate([[0], [7], [], [2, 5], [6], [3]]):
        responses[row, places] = EOS
    old, ref, new, values, vpred = np.round(draw.normal(size=(5, 6, 8)), 3)
    old = -np.abs(old) - 0.1
    case = {"responses": responses, "logprobs": old, "ref_logprobs": old + np.round(ref / 2, 3)}
    case |= {"new_logprobs": old + np.round(new / 5, 3), "values": values, "vpred": vpred}
    return case | {"scores": np.round(2 * draw.normal(size=6), 3)}


def log_softmax(logits: Array) -> Array:
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def logprobs_of(logits: Array, tokens: Array, temperature: float) -> Array:
    everything = log_softmax(logits / (temperature + 1e-7))
    return np.take_along_axis(everything, tokens[..., None], axis=-1)[..., 0]


def tiny_neox() -> dict[str, Array]:
    """Weights by the names of transformers, exact in float32. Shapes: [outputs, inputs]."""
    draw, hidden, inner = RandomState(10), NEOX["hidden_size"], NEOX["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"final_layer_norm": (hidden,)}
    for layer in ("layers.0", "layers.1"):
        shapes[f"{layer}.input_layernorm"] = shapes[f"{layer}.post_attention_layernorm"] = (hidden,)
        shapes[f"{layer}.attention.query_key_value"] = 3 * hidden, hidden
        shapes[f"{layer}.attention.dense"] = hidden, hidden
        shapes[f"{layer}.mlp.dense_h_to_4h"] = inner, hidden
        shapes[f"{layer}.mlp.dense_4h_to_h"] = hidden, inner
    embeddings = draw.normal(size=(2, NEOX["vocab_size"], hidden)) / 4
    weights = dict(zip(("embed_out.weight", "gpt_neox.embed_in.weight"), embeddings, strict=True))
    for name, shape in shapes.items():
        weights[f"gpt_neox.{name}.weight"] = draw.normal(size=shape) / 4 + (len(shape) == 1)
        weights[f"gpt_neox.{name}.bias"] = draw.normal(size=shape[0]) / 4
    return {name: array.astype(np.float32).astype(float) for name, array in weights.items()}


def rotated(x: Array) -> Array:
    """The first quarter of each head, turned by its position. Shapes: [heads, length, size]."""
    half = x.shape[-1] // 8
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    turned = first * np.cos(angle) - second * np.sin(angle)
    return np.concatenate([turned, second * np.cos(angle) + first * np.sin(angle), rest], axis=-1)


def hidden_states(tokens: Array, weights: dict[str, Array], heads: int) -> Array:
    """GPT-NeoX up to its final layer norm. Shapes: tokens [length] -> [length, hidden]."""

    def linear(name: str, x: Array) -> Array:
        return x @ weights[f"gpt_neox.{name}.weight"].T + weights[f"gpt_neox.{name}.bias"]

    def norm(name: str, x: Array) -> Array:
        white = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return white * weights[f"gpt_neox.{name}.weight"] + weights[f"gpt_neox.{name}.bias"]

    x, length = weights["gpt_neox.embed_in.weight"][tokens], len(tokens)
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
    rewards, values, logprobs = [], *(np.zeros(case["responses"].shape) for _ in range(2))
    for row, pair in enumerate(zip(case["queries"], case["responses"], strict=True)):
        query, response = (tokens[tokens != case["pad_token_id"]] for tokens in pair)
        hidden = hidden_states(np.concatenate([query, response]), weights, heads)
        scalars = hidden @ case["head_weight"][0] + case["head_bias"] - case["reward_bias"]
        rewards.append(scalars[-1])  # at EOS
        logits = hidden[len(query) - 1 : -1] @ weights["embed_out.weight"].T
        logprobs[row, : len(response)] = logprobs_of(logits, response, case["temperature"])
        values[row, : len(response) + 1] = scalars[len(query) - 1 :][: values.shape[1]]
    return {"rewards": np.array(rewards), "values": values, "logprobs": logprobs}


def reward_case(draw: RandomState) -> Case:
    """Rows of several lengths; the bias is their mean reward, as if they were the references."""
    queries, responses = (draw.randint(1, NEOX["vocab_size"], (5, length)) for length in (7, 5))
    for row, (absent, length) in enumerate([(0, 5), (2, 1), (6, 3), (3, 4), (1, 5)]):
        queries[row, :absent] = responses[row, length:] = PAD
        responses[row, length - 1] = EOS
    head = np.round(draw.normal(size=(1, NEOX["hidden_size"])) / 33**0.5, 3)  # detail 11
    case: Case = {"queries": queries, "responses": responses, "head_weight": head}
    case |= {"head_bias": np.zeros(1), "reward_bias": 0.0, "pad_token_id": PAD, "temperature": 0.7}
    weights, heads = tiny_neox(), NEOX["num_attention_heads"]
    case["reward_bias"] = np.mean(reward_outputs(case, weights, heads)["rewards"])
    return case | reward_outputs(case, weights, heads)


def small_case(draw: RandomState) -> Case:
    logits, tokens = np.round(2 * draw.normal(size=(2, 3, 5)), 3), draw.randint(0, 5, (2, 3))
    chosen, rejected = np.round(draw.normal(size=(2, 6)), 3)
    case = {"logits": logits, "tokens": tokens, "chosen": chosen, "rejected": rejected}
    case["logprobs"] = logprobs_of(logits, tokens, 0.7)
    case["entropy"] = -np.sum(np.exp(log_softmax(logits)) * log_softmax(logits), axis=-1)
    return case | {"loss": np.mean(-np.log(1 / (1 + np.exp(rejected - chosen))))}  # detail 10


def main(argv: list[str]) -> None:
    """Write every case, eight decimals, to the file named, or to NUMBERS."""
    cases = {"reward_tiny": reward_case(RandomState(11)), "small": small_case(RandomState(12))}
    for seed, name in enumerate(CASES):
        inputs = CASES[name] | ppo_inputs(RandomState(seed))
        cases[name] = inputs | ppo_outputs(inputs)
    text = json.dumps(cases, default=lambda x: (np.round(x, 8) if x.dtype == float else x).tolist())
    text = text.replace('], "', '],\n"').replace('}, "', '},\n"')  # an array a line
    Path(argv[0] if argv else NUMBERS).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
