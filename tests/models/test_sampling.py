"""The sampler's cache, and rows that leave the batch when they have ended."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from stages.functional import truncate_after
from stages.models import sampling
from stages.models.forward import ResponseBatch, response_logprobs
from stages.models.policy import PolicyModel
from stages.models.sampling import (
    ENDED_SHARE,
    Decoding,
    ReservedLayer,
    SamplingParams,
    sample,
    sampler_cache,
)
from tests.lib.asserts import close
from tests.lib.families import CONFIGS

VOCABULARY, EOS, PAD = 20, 0, 20
ROWS, LENGTH = 12, 9


def policy_of(family: str):
    config = copy.deepcopy(CONFIGS[family])
    config.vocab_size, config.initializer_range = VOCABULARY, 0.3
    torch.manual_seed(2)
    return PolicyModel(AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval())


def drawn_by(policy, queries, uniforms, temperature: float):
    params = SamplingParams(temperature=temperature, eos_id=EOS, pad_id=PAD)
    return sample(policy, queries, uniforms=uniforms, params=params)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    queries = torch.randint(1, VOCABULARY, (ROWS, 6))
    queries[0, :4] = PAD
    queries[5, :2] = PAD
    return queries, torch.rand(ROWS, LENGTH, dtype=torch.float64)


@pytest.mark.parametrize("family", CONFIGS)
def test_samples_are_those_of_the_librarys_cache_with_every_row_to_the_end(family, monkeypatch):
    policy, (queries, uniforms) = policy_of(family), prompts()
    responses, logprobs = drawn_by(policy, queries, uniforms, 3.0)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sampler_cache", lambda config, room: DynamicCache(config=config))
        patch.setattr(sampling, "ENDED_SHARE", 2.0)  # nobody leaves
        whole, theirs = drawn_by(policy, queries, uniforms, 3.0)
    assert torch.equal(responses, truncate_after(whole, EOS, PAD))
    close(logprobs, torch.where(responses != PAD, theirs, 0.0), 1e-6)
    ended = (responses == EOS).any(dim=1)
    assert ended.any()  # both kinds were there
    assert not ended.all()


class Recording(TorchDispatchMode):
    """What a CUDA graph does: it keeps operations, and repeats them on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def refuse(graph) -> None:
    raise RuntimeError("no graph here")


def test_memory_that_recording_lacks_is_an_error_so_that_the_batch_is_halved(monkeypatch):
    @contextmanager
    def short(graph):
        yield
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("recording ended")

    policy, (queries, uniforms) = policy_of("llama").float(), prompts()
    monkeypatch.setattr(sampling, "FIXED_SHAPE", ("cpu",))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", short)
    with pytest.raises(torch.OutOfMemoryError):
        drawn_by(policy, queries, uniforms, 3.0)
    assert Decoding.records


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2"])
@pytest.mark.parametrize("recording", ["steps", "nothing", "refused"])
def test_steps_of_one_shape_which_a_graph_repeats_draw_the_same(
    family, recording, monkeypatch, capsys
):
    policy, (queries, uniforms) = policy_of(family).float(), prompts()
    usual, usual_logprobs = drawn_by(policy, queries, uniforms, 3.0)
    monkeypatch.setattr(sampling, "FIXED_SHAPE", ("cpu",))
    monkeypatch.setattr(sampling, "COUNTED_EVERY", {"cpu": 4})
    monkeypatch.setattr(Decoding, "records", recording != "nothing")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    graph = refuse if recording == "refused" else lambda graph: graph
    monkeypatch.setattr(torch.cuda, "graph", graph)
    passes: list[int] = []
    policy.model.register_forward_pre_hook(lambda _, args: passes.append(1))
    responses, logprobs = drawn_by(policy, queries, uniforms, 3.0)
    assert torch.equal(responses, usual)
    close(logprobs, usual_logprobs, 1e-5)
    assert (len(passes) < LENGTH) == (recording == "steps")
    assert ("without CUDA graphs: no graph here" in capsys.readouterr().err) == (
        recording == "refused"
    )


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2"])
def test_no_token_copies_the_cache_in_bf16_and_nothing_changes(family, monkeypatch):
    policy, (queries, uniforms) = policy_of(family).float(), prompts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "sampler_cache", lambda config, _: DynamicCache(config=config))
            usual = drawn_by(policy, queries, uniforms, 3.0)
        with Recording() as recorded:
            responses = drawn_by(policy, queries, uniforms, 3.0)
    assert all(map(torch.equal, responses, usual))
    longer = queries.shape[1] + 1
    copied = [x.shape for function, _, _, x in recorded.calls if "copy" in function.name()]
    assert not [shape for shape in copied if len(shape) == 4 and shape[2] >= longer]


def test_the_samplers_log_probabilities_are_those_of_a_whole_pass(monkeypatch):
    policy, (queries, uniforms) = policy_of("llama"), prompts()
    responses, logprobs = drawn_by(policy, queries, uniforms, 0.7)
    batch = ResponseBatch(queries=queries, responses=responses, pad_id=PAD)
    with torch.no_grad():
        again, _ = response_logprobs(policy, batch, temperature=0.7)
    close(logprobs, torch.where(responses != PAD, again, 0.0), 1e-5)


def test_every_token_is_drawn_as_often_as_its_probability_says():
    logits, count = 2 * torch.randn(200, generator=torch.Generator().manual_seed(1)), 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sampling.draw(logits.expand(count, -1), uniforms, 0.7)
    expected = count * (logits.double() / 0.7).softmax(dim=0)
    assert (torch.bincount(drawn, minlength=200) - expected).abs().max() < 1


def test_rows_that_have_ended_are_computed_no_more():
    policy, (queries, uniforms) = policy_of("gpt_neox"), prompts()
    seen: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(len(inputs["input_ids"])), with_kwargs=True
    )
    responses, _ = drawn_by(policy, queries, uniforms, 1.0)
    going = (responses != PAD).sum(dim=0).tolist()  # at each step, rows that had not ended before
    for computed, needed in zip(seen, going, strict=False):
        assert needed <= computed < needed / (1 - ENDED_SHARE) + 1
    assert seen[-1] < ROWS


def test_a_reserved_layer_is_written_in_place_and_knows_its_room():
    config = CONFIGS["llama"]
    cache = sampler_cache(config, room=2)
    layer = cache.layers[0]
    assert isinstance(layer, ReservedLayer)
    first, second = (torch.randn(3, 2, tokens, 8) for tokens in (4, 1))
    layer.update(first, -first)
    place = layer.keys.data_ptr()
    keys, values = layer.update(second, -second)
    assert keys.data_ptr() == place
    assert torch.equal(keys, torch.cat([first, second], dim=2))
    assert torch.equal(values, -keys)
    layer.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(layer.keys, keys[[2, 0]])
    assert layer.get_seq_length() == 5
    layer.update(second[:2], second[:2])
    with pytest.raises(IndexError, match="room for 2 tokens"):
        layer.update(second[:2], second[:2])
