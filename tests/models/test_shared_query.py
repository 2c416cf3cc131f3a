"""Rows that hold several summaries of one post, against each summary in a row of its own.

By hand: the plain model, one row at a time, no padding, no mask, no position ids.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BloomConfig,
    Gemma3TextConfig,
    PreTrainedConfig,
    Qwen2Config,
    Starcoder2Config,
)

from stages.data.ragged import pad_left, pad_right
from stages.models.forward import (
    SHARING,
    ResponseBatch,
    response_values,
    shared_rows,
    shares_query,
    summary_logprobs,
    summary_scores,
)
from stages.models.heads import register_head_class
from stages.models.policy import PolicyModel
from tests.lib.asserts import close
from tests.lib.families import CONFIGS, GROUPED

CPU = torch.device("cpu")
VOCABULARY = 50
LENGTHS = {"queries": (7, 3, 5), "chosen": (2, 6, 1), "rejected": (5, 1, 4), "third": (1, 1, 8)}


def tokens_of(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(1, VOCABULARY, (length,)) for length in lengths]


@pytest.fixture
def texts() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Three queries of different lengths, with three summaries each."""
    torch.manual_seed(3)
    queries, *summaries = (tokens_of(*lengths) for lengths in LENGTHS.values())
    return queries, summaries


def first(count: int, texts):
    """The queries with only the first summaries of each."""
    return texts[0], texts[1][:count]


def made(auto, family: PreTrainedConfig, dtype: torch.dtype = torch.float64, **chosen):
    config = copy.deepcopy(family)
    config.vocab_size, config.initializer_range, config.num_labels = VOCABULARY, 0.3, 1
    register_head_class(config, "made")  # Gemma 3 has no class of a scalar head
    torch.manual_seed(5)
    return auto.from_config(config, dtype=dtype, **chosen).eval()


def by_hand(model, queries, summaries, read) -> torch.Tensor:
    """[K, B]: what `read` makes of the outputs, the query's length and the summary of each row."""
    rows = []
    for each in summaries:
        for query, summary in zip(queries, each, strict=True):
            output = model(torch.cat([query, summary]).unsqueeze(0)).logits[0]
            rows.append(read(output, len(query), summary))
    return torch.stack(rows).view(len(summaries), len(queries))


def score(output, start, summary):
    return output[start + len(summary) - 1, 0]


def log_probability(output, start, summary):
    logits = output[start - 1 : start - 1 + len(summary)]
    return -F.cross_entropy(logits, summary, reduction="sum")


def values(output, start, summary):
    return output[start - 1 : start - 1 + len(summary), 0].sum()


def summed_values(model, queries, summaries, device):
    """Of each text in a row of its own, [K, B]."""
    padded_queries = pad_left(queries, -1)
    sums = []
    for column in summaries:
        batch = ResponseBatch(queries=padded_queries, responses=pad_right(column, -1), pad_id=-1)
        found = response_values(model, batch)
        sums.append(torch.where(batch.responses != -1, found, 0.0).sum(dim=1))
    return torch.stack(sums)


def summed_logprobs(model, queries, summaries, device):
    return summary_logprobs(PolicyModel(model), queries, summaries, device)


WAYS = {
    "scores": (AutoModelForTokenClassification, summary_scores, score),
    "values": (AutoModelForTokenClassification, summed_values, values),
    "log-probabilities": (AutoModelForCausalLM, summed_logprobs, log_probability),
}
WINDOWS = Starcoder2Config(**GROUPED, sliding_window=3, attention_dropout=0.0)
FAMILIES = {name: CONFIGS[name] for name in sorted(SHARING)} | {"starcoder2": WINDOWS}
IN_FLOAT64 = ("gpt_neox", "gpt2", "starcoder2")  # others compute their norms in float32


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_rows_of_their_own(family, way, count, texts):
    auto, ours, read = WAYS[way]
    queries, summaries = first(count, texts)
    weights = torch.randn(count, len(queries), dtype=torch.float64)
    shared, apart = (made(auto, FAMILIES[family]) for _ in range(2))
    assert shares_query(shared, LONGEST) == (family in SHARING)
    tolerance = 1e-12 if family in IN_FLOAT64 else 1e-6
    found = ours(shared, queries, summaries, CPU)
    expected = by_hand(apart, queries, summaries, read)
    close(found.detach().double(), expected.detach(), tolerance)
    (found * weights).mean().backward()
    (expected * weights).mean().backward()
    for one, other in zip(shared.parameters(), apart.parameters(), strict=True):
        if other.grad is not None:
            close(one.grad, other.grad, tolerance)


LONGEST = 13  # tokens of the longest query with one of its summaries; with padding it would be 15
AT_THE_LIMIT: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": LONGEST},
    "llama": {
        "max_position_embeddings": LONGEST,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", AT_THE_LIMIT)
def test_padding_takes_no_position_beyond_the_models_last_one(family, way, texts):
    auto, ours, read = WAYS[way]
    config = copy.deepcopy(CONFIGS[family])
    for key, value in AT_THE_LIMIT[family].items():
        setattr(config, key, value)
    model = made(auto, config)
    queries, summaries = texts
    found = ours(model, queries, summaries, CPU)
    expected = by_hand(model, queries, summaries, read)
    close(found.detach().double(), expected.detach(), 1e-6)


def test_a_query_stands_once_in_a_row(texts):
    queries, summaries = texts
    rows = shared_rows(queries, summaries[:2], CPU)
    assert rows.tokens.shape == (3, 7 + 6 + 5)
    assert rows.starts.tolist() == [7, 13]
    assert (rows.tokens != -1).sum(1).tolist() == [14, 10, 10]


def test_samples_of_a_query_share_its_row_and_get_the_values_of_rows_of_their_own():
    model = made(AutoModelForTokenClassification, CONFIGS["llama"])
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(len(inputs["input_ids"])), with_kwargs=True
    )
    queries = pad_left(tokens_of(4, 2), -1).repeat_interleave(2, dim=0)
    responses = pad_right(tokens_of(3, 1, 2, 5), -1)
    separate = ResponseBatch(queries=queries, responses=responses, pad_id=-1)
    shared = ResponseBatch(queries=queries, responses=responses, pad_id=-1, samples_per_query=2)
    is_real = responses != -1
    expected = response_values(model, separate).detach()[is_real]
    close(response_values(model, shared).detach()[is_real], expected, 1e-6)
    assert seen == [4, 2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reason", ["family", "attention", "window", "its window"])
def test_a_model_that_cannot_share_gets_rows_of_their_own(reason, way, texts):
    auto, ours, read = WAYS[way]
    config, chosen = {
        "family": (BloomConfig(hidden_size=32, n_layer=2, n_head=4), {}),
        "attention": (CONFIGS["llama"], {"attn_implementation": "eager"}),
        "window": (
            Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=2, max_window_layers=0),
            {},
        ),
        "its window": (Gemma3TextConfig(**GROUPED, sliding_window=LONGEST - 1), {}),
    }[reason]
    model = made(auto, config, torch.float32, **chosen)
    assert not shares_query(model, LONGEST)
    queries, summaries = first(2, texts)
    found = ours(model, queries, summaries, CPU)
    close(found.detach(), by_hand(model, queries, summaries, read).detach(), 1e-4)
