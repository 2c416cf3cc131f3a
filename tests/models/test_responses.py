"""Responses to a split: independent of batches and processes, cut after EOS."""

from types import SimpleNamespace
from typing import Any

import pytest

from stages.data.ragged import Ragged, make_ragged
from stages.models.policy import PolicyModel
from stages.models.sampling import Sampling, respond_often
from stages.training.memory import MemoryBudget
from tests.lib.processes import Process


@pytest.fixture
def queries() -> Ragged:
    return make_ragged([[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16, 17, 18], [19]])


def answer(
    policy: Any, tokenizer: Any, queries: Ragged, process: Process, forward: int = 2
) -> list[list[int]]:
    hot = 1.0  # so that the noise matters
    sampling = Sampling(
        seed=44413, purpose="test", length=6, temperature=hot, forward_batch_size=forward
    )
    budget = MemoryBudget(forward_batch_size=forward, microbatch_size=1)
    share = respond_often(process, budget, PolicyModel(policy), queries, tokenizer, sampling, None)
    return [response for (response,) in share]


def test_responses_depend_on_neither_batches_nor_processes(policy, tokenizer, queries):
    alone = answer(policy, tokenizer, queries, Process())
    assert len({tuple(response) for response in alone}) == len(queries)
    assert all(1 <= len(response) <= 6 for response in alone)
    for forward in (1, 4, 100):
        assert answer(policy, tokenizer, queries, Process(), forward) == alone
    for index in (0, 1):
        assert answer(policy, tokenizer, queries, Process(index, 2)) == alone[index::2]


def test_responses_are_cut_after_their_eos_and_hold_no_padding(policy, tokenizer, queries):
    whole = answer(policy, tokenizer, queries, Process())
    stop = whole[0][2]  # a token that does occur now becomes the end
    tokens = SimpleNamespace(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    found = answer(policy, tokens, queries, Process())
    for before, response in zip(whole, found, strict=True):
        if stop in before:
            assert response == before[: before.index(stop) + 1]
        assert tokens.pad_token_id not in response
    assert found[0][-1] == stop
