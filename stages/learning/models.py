"""Models: load, save, run, sample. The policy is an `AutoModelForCausalLM`; the reward model and
the critic are an `AutoModelForTokenClassification` with one label, a scalar for every token, whose
head bias carries the reward normalization. Both open with plain transformers. Any causal family
that has both classes will do.

[PAD] is never embedded: padded slots hold id 0 and are masked out of attention (Huang et al. 2024,
detail 3). Position ids count real tokens only, so padding on either side changes rounding
at most.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from stages.functional import entropy, first_true_index, token_logprobs
from stages.learning.cache import sampler_cache
from stages.learning.heads import head_name, in_float32, reset_head
from stages.learning.vocabulary import (
    LEARNED,
    LogprobFormula,
    Reading,
    give_reading_head,
    reading,
    reading_head,
)
from stages.settings.config import UserError

PAD_TOKEN = "[PAD]"
# Rows that have ended leave the batch when they are this share of it: leaving copies the cache.
ENDED_SHARE = 0.25
LM_HEAD = {"lm_head.weight", "lm_head.bias", "embed_out.weight"}


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer with a [PAD] of our own as its last id, whatever pad it has had.

    Were the pad the EOS, as in many chat models, masking pads would hide every EOS from the loss
    and the model would never learn to stop. Were it another real token, sampling would leave out
    all ids above it. Raises UserError if the tokenizer does not load or has no EOS.
    Source: Huang et al. 2024, detail 3.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"tokenizer {source} does not load: {first_line}") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"tokenizer {source} is no fast one: save it with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {source} has no EOS token: set eos_token in its config")
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary.values())
    if tokenizer.pad_token_id == last and tokenizer.pad_token.startswith(PAD_TOKEN):
        return tokenizer  # saved by an earlier stage
    name = PAD_TOKEN
    while name in vocabulary:  # an encoder's own [PAD], which is a token among others here
        name += PAD_TOKEN
    tokenizer.add_special_tokens({"pad_token": name})
    if tokenizer.pad_token_id <= last:
        raise UserError(f"tokenizer {source} has gaps in its ids: no id is free for {PAD_TOKEN}")
    return tokenizer


def positions_of(model: nn.Module) -> int:
    """How many tokens a model can take; without bound if its config names no limit."""
    config: Any = model.config
    config = config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def require_room(model: nn.Module, query: int, response: int, setting: str) -> None:
    """Raise UserError unless a model has positions for so many tokens of query and response."""
    if query + response > positions_of(model):
        raise UserError(
            f"{setting} is {response}, after queries of up to {query} tokens, but the model has "
            f"{positions_of(model)} positions: lower it, or data.max_query_tokens"
        )


def with_dropout(config: PretrainedConfig, probability: float) -> PretrainedConfig:
    """The same configuration with every dropout probability as given.

    Source: Huang et al. 2024, detail 7 (probability 0).
    """
    for name in config.to_dict():
        if ("dropout" in name or "pdrop" in name) and isinstance(getattr(config, name), float):
            setattr(config, name, probability)
    # Where this is not set, most families put a dropout of 0.1 before a token-classification head.
    config.classifier_dropout = probability
    return config


def load_policy(source: str | Path, dropout: float = 0.0) -> PreTrainedModel:
    """A causal LM in float32; missing or unexpected weights are a UserError."""
    model, info = _load(AutoModelForCausalLM, source, dropout)
    _refuse_weights(source, set(info["missing_keys"]), set(info["unexpected_keys"]))
    give_reading_head(model)
    return model


def load_reward_model(source: str | Path, dropout: float = 0.0) -> PreTrainedModel:
    """A saved reward model or critic in float32; loading is strict."""
    model, info = _load(AutoModelForTokenClassification, source, dropout, num_labels=1)
    _refuse_weights(source, set(info["missing_keys"]), set(info["unexpected_keys"]))
    in_float32(model)
    return model


def new_reward_model(
    policy_folder: Path, generator: torch.Generator, dropout: float = 0.0
) -> PreTrainedModel:
    """A reward model on the policy's backbone, with a new head (`reset_head`)."""
    changes = {"num_labels": 1, "token_classification_bias": True}  # some families could omit it
    model, info = _load(AutoModelForTokenClassification, policy_folder, dropout, **changes)
    ours = {f"{head_name(model)}.{one}" for one in ("weight", "bias")}
    unexpected = set(info["unexpected_keys"]) - LM_HEAD
    _refuse_weights(policy_folder, set(info["missing_keys"]) - ours, unexpected)
    reset_head(model, generator)
    in_float32(model)
    return model


def _load(
    auto: Any, source: str | Path, dropout: float, **changes: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    quiet_loading()
    try:
        config = with_dropout(AutoConfig.from_pretrained(str(source), **changes), dropout)
        model, info = auto.from_pretrained(
            str(source), config=config, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model {source} does not load: {str(error).splitlines()[0]}") from None
    return model, info


def quiet_loading() -> None:
    """Have transformers show no bars and no load report; what is wrong is said in one line."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _refuse_weights(source: str | Path, missing: set[str], unexpected: set[str]) -> None:
    for kind, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise UserError(f"model {source} {kind} {len(names)} weights ({some}): wrong folder?")


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer in the plain transformers layout.

    `weights` by name, if the model does not hold them whole itself.
    """
    quiet_loading()
    model.save_pretrained(folder, state_dict=weights)
    # Whether the hub could be asked is no part of a tokenizer.
    tokenizer.init_kwargs.pop("local_files_only", None)
    tokenizer.save_pretrained(folder)


class PolicyAndCritic(nn.Module):
    """Both networks in one module, so that one optimizer and one engine serve both (Huang et al.
    2024, detail 22).
    """

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(self, network: str, *row: Any) -> Any:
        """`response_statistics` of the "policy", or `response_values` of the "critic".

        One network a call: the other's activations need not be alive beside it.
        """
        if network == "policy":
            return response_statistics(self.policy, *row)
        return response_values(self.critic, *row)


def model_inputs(tokens: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass.

    Shapes: tokens, attention_mask (True = real) [B, L]. Padded slots get id 0, never [PAD].
    """
    positions = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return {
        "input_ids": tokens.masked_fill(~attention_mask, 0),
        "attention_mask": attention_mask.long(),
        "position_ids": positions,
    }


def response_statistics(
    policy: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_length: int,
    how: Reading,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token, and the entropy of what might have stood there.

    Shapes: query_responses, attention_mask [B, Q+T] -> both [B, T] nats.
    """
    length = query_responses.shape[1]
    before = torch.arange(length - response_length, length, device=query_responses.device) - 1
    inputs = model_inputs(query_responses, attention_mask)
    return read_logits(policy, inputs, before, query_responses[:, -response_length:], how)


def response_logprobs(
    policy: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_length: int,
    temperature: float,
    formula: LogprobFormula = token_logprobs,
) -> Tensor:
    """Log-probability of each response token, [B, T] nats."""
    how = Reading(temperature=temperature, formula=formula)
    return response_statistics(policy, query_responses, attention_mask, response_length, how)[0]


def read_logits(
    policy: nn.Module, inputs: dict[str, Tensor], columns: Tensor, targets: Tensor, how: Reading
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy at some columns of a forward pass.

    Shapes: columns [T], which may repeat; targets [B, T] -> both [B, T] nats. There are logits at
    no other columns, and where output layer and formula allow it, a chunk of them at a time.
    """
    head = reading_head(policy)
    if head is not None and how.formula is token_logprobs:
        with reading(head, targets, how):
            output = policy(**inputs, logits_to_keep=columns, use_cache=False)
        logprobs, entropies = output.logits.unbind(-1)
        return logprobs, entropies if how.entropy == LEARNED else entropies.detach()
    logits = policy(**inputs, logits_to_keep=columns, use_cache=False).logits
    logprobs = how.formula(logits, targets, how.temperature)
    if not how.entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.set_grad_enabled(how.entropy == LEARNED and torch.is_grad_enabled()):
        return logprobs, entropy(logits / how.temperature)


def head_scalars(reward_model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The reward model's scalar at every token of a forward pass, [B, L], at least float32."""
    scalars = reward_model(**inputs, use_cache=False).logits.squeeze(-1)
    return scalars.to(torch.promote_types(scalars.dtype, torch.float32))


def token_scalars(reward_model: nn.Module, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """The same for padded rows: [B, L] -> [B, L]. Only at EOS is it a score."""
    return head_scalars(reward_model, model_inputs(tokens, attention_mask))


def response_values(
    critic: nn.Module, query_responses: Tensor, attention_mask: Tensor, response_length: int
) -> Tensor:
    """The critic at the positions that predict each response token: [B, Q+T] -> [B, T]."""
    scalars = token_scalars(critic, query_responses, attention_mask)
    return scalars[:, -response_length - 1 : -1]


def score_responses(
    reward_model: nn.Module, queries: Tensor, responses: Tensor, pad_id: int
) -> Tensor:
    """Scores read at the last real token of each response, which is its EOS if it has one.

    Shapes: queries [B, Q] left-padded, responses [B, T] right-padded -> [B], reward units.
    Source: Huang et al. 2024, detail 12.
    """
    query_responses = torch.cat([queries, responses], dim=1)
    scalars = token_scalars(reward_model, query_responses, query_responses != pad_id)
    last = queries.shape[1] + first_true_index(responses == pad_id) - 1
    return scalars.gather(1, last.unsqueeze(1)).squeeze(1)


@torch.no_grad()
def sample(
    policy: nn.Module,
    queries: Tensor,
    uniforms: Tensor,
    temperature: float,
    eos_id: int,
    pad_id: int,
    formula: LogprobFormula = token_logprobs,
) -> tuple[Tensor, Tensor]:
    """Responses drawn from softmax(logits / temperature), one given uniform number per token.

    Token t of row b is where the cumulative distribution passes uniforms[b, t]. So a row does not
    depend on the other rows of the batch, and a row that has its EOS need not be sampled further:
    the tokens up to EOS are the same as without stopping. Ids from [PAD] up are no tokens and are
    never drawn.

    Shapes: queries [B, Q] left-padded, uniforms [B, T] in [0, 1) -> responses [B, T] and their
    log-probabilities in nats; [PAD] and 0 after a row's EOS.
    Source: Huang et al. 2024, detail 23 (fixed length, no stopping).
    """
    attention_mask = queries != pad_id
    inputs = model_inputs(queries, attention_mask)
    cache = sampler_cache(policy.config, uniforms.shape[1])
    responses = torch.full_like(uniforms, pad_id, dtype=torch.long)
    logprobs = torch.zeros_like(uniforms, dtype=torch.float32)
    rows = torch.arange(len(queries), device=queries.device)  # those that the cache holds
    going = torch.ones_like(rows, dtype=torch.bool)
    for step in range(uniforms.shape[1]):
        output = policy(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = draw(output.logits[:, -1, :pad_id], uniforms[rows, step], temperature)
        read = formula(output.logits, tokens.unsqueeze(1), temperature).squeeze(1)
        responses[rows, step] = torch.where(going, tokens, pad_id)
        logprobs[rows, step] = torch.where(going, read, 0.0).float()
        going &= tokens != eos_id
        count = int(going.sum())
        if count == 0:
            break
        positions = inputs["position_ids"][:, -1:] + 1
        if count <= len(rows) * (1 - ENDED_SHARE):
            cache.batch_select_indices(going.nonzero().squeeze(1))
            rows, tokens, positions, attention_mask = (
                x[going] for x in (rows, tokens, positions, attention_mask)
            )
            going = torch.ones_like(rows, dtype=torch.bool)
        attention_mask = F.pad(attention_mask, (0, 1), value=True)
        inputs = {
            "input_ids": tokens.unsqueeze(1),
            "attention_mask": attention_mask.long(),
            "position_ids": positions,
        }
    return responses, logprobs


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Tokens at the given quantiles of softmax(logits / temperature), by inverting the cumulative
    distribution in float64. Shapes: logits [B, V], uniforms [B] in [0, 1) -> [B] int64.
    """
    cumulative = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    targets = uniforms.double().unsqueeze(1) * cumulative[:, -1:]
    return (
        torch.searchsorted(cumulative, targets, right=True)
        .squeeze(1)
        .clamp(max=logits.shape[1] - 1)
    )
