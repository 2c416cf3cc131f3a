"""Sampling, scoring, loading: what padding, batching and saving must not change."""

import json
import math
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from stages.functional import truncate_after
from stages.models.forward import (
    head_scalars,
    model_inputs,
    response_logprobs,
    response_values,
    score_responses,
)
from stages.models.loading import (
    load_policy,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    save_model,
)
from stages.models.sampling import draw, sample
from stages.settings.config import UserError
from tests.lib import paper_numbers as paper
from tests.lib.asserts import close
from tests.lib.places import SHARED


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 250, (rows, length), generator=generator)


@pytest.fixture
def writer():
    """A policy over 7 tokens (0 is EOS, [PAD] would be 7), so that EOS comes by itself."""
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    return GPTNeoXForCausalLM(config).eval()


def write(writer: torch.nn.Module, queries: Tensor, uniforms: Tensor, eos_id: int = 0) -> Tensor:
    responses, _ = sample(writer, queries, uniforms, temperature=0.9, eos_id=eos_id, pad_id=7)
    return responses


def queries_and_noise(rows: int = 6, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randint(1, 7, (rows, 7), generator=generator)
    for row in range(rows):
        queries[row, : row % 4] = 7  # left padding
    return queries, torch.rand(rows, length, generator=generator, dtype=torch.float64)


def test_sampling_stops_early_with_the_same_tokens_up_to_eos(writer):
    queries, uniforms = queries_and_noise()
    stopped = write(writer, queries, uniforms)
    endless = write(writer, queries, uniforms, eos_id=-1)
    assert ((endless >= 0) & (endless < 7)).all()
    assert torch.equal(truncate_after(stopped, 0, 7), truncate_after(endless, 0, 7))
    ends = [row.index(0) for row in endless.tolist()]
    assert max(ends) < 39, "this seed has to show an early stop"
    for row, end in zip(stopped, ends, strict=True):
        assert (row[end + 1 :] == 7).all()
        assert (row[: end + 1] != 7).all()


def test_cached_sampling_draws_what_whole_forward_passes_predict(writer):
    queries, uniforms = queries_and_noise(rows=3, length=8)
    responses = write(writer, queries, uniforms, eos_id=-1)
    for row, query in enumerate(queries):
        tokens = query[query != 7].tolist()
        for step in range(8):
            logits = writer(torch.tensor([tokens])).logits[0, -1, :7].double()
            cumulative = (logits / 0.9).softmax(0).cumsum(0)
            expected = sum(cumulative.lt(uniforms[row, step]).tolist())
            assert responses[row, step] == expected
            tokens.append(expected)


def test_random_uniforms_pass_a_chi_square_test():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    count = 20_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(5))
    found = draw(logits.expand(count, -1), uniforms, 1.0).bincount(minlength=4)
    weights = [math.exp(logit) for logit in logits.tolist()]
    expected = torch.tensor([count * weight / sum(weights) for weight in weights])
    statistic = ((found - expected) ** 2 / expected).sum().item()
    assert statistic < 16.27  # 99.9 % of chi-square with 3 degrees of freedom


def test_impossible_tokens_are_never_drawn_even_at_the_ends():
    never = -math.inf
    logits = torch.tensor([[never, 0.0, never, 0.0, never]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniforms, 1.0).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("pads", [0, 1, 7])
def test_padding_on_either_side_changes_no_log_probability_and_no_score(policy, reward_model, pads):
    pad = policy.config.vocab_size
    queries, responses = random_tokens(2, 6, seed=1), random_tokens(2, 5, seed=2)
    left = torch.nn.functional.pad(queries, (pads, 0), value=pad)
    right = torch.nn.functional.pad(responses, (0, pads), value=pad)
    both = torch.cat([queries, responses], dim=1)
    padded = torch.cat([left, right], dim=1)
    with torch.no_grad():
        bare = score_responses(reward_model, queries, responses, pad)
        close(score_responses(reward_model, left, right, pad), bare, 1e-4)
        bare = response_logprobs(policy, both, both != pad, 5, 1.0)
        real = padded != pad
        found = response_logprobs(policy, padded.masked_fill(~real, 0), real, 5 + pads, 1.0)
        close(found[:, :5], bare, 1e-4)
    assert (padded != pad).sum() == both.numel()


def test_pad_ids_reach_no_embedding_and_positions_count_real_tokens():
    tokens = torch.tensor([[9, 9, 4, 5], [6, 7, 9, 9]])
    inputs = model_inputs(tokens, tokens != 9)
    assert inputs["input_ids"].tolist() == [[0, 0, 4, 5], [6, 7, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    positions = inputs["position_ids"]
    assert positions[0, 2:].tolist() == positions[1, :2].tolist() == [0, 1]


@pytest.fixture
def tiny_neox(source, tmp_path):
    """The folder of the model that the golden rewards are of."""
    if source == "shared":
        return SHARED / "golden" / "tiny_neox"
    GPTNeoXConfig(**paper.NEOX).save_pretrained(tmp_path)
    weights = {name: torch.from_numpy(x).float() for name, x in paper.tiny_neox().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_scores_values_and_logprobs_are_those_of_the_papers_code(golden, tiny_neox):
    case, folder = golden("reward_tiny"), tiny_neox
    policy = load_policy(folder).eval()
    reward_model = new_reward_model(folder, torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        reward_model.classifier.weight.copy_(case["head_weight"])
        reward_model.classifier.bias.copy_(case["head_bias"] - case["reward_bias"])
    queries, responses, pad = case["queries"], case["responses"], int(case["pad_token_id"])
    both, length = torch.cat([queries, responses], dim=1), responses.shape[1]
    real = responses != pad
    value_counts = torch.cat([torch.ones(len(real), 1).bool(), real[:, :-1]], dim=1)
    with torch.no_grad():
        scores = score_responses(reward_model, queries, responses, pad)
        values = response_values(reward_model, both, both != pad, length)
        temperature = case["temperature"].item()
        inputs = both.masked_fill(both == pad, 0), both != pad
        logprobs = response_logprobs(policy, *inputs, length, temperature)
    close(scores, case["rewards"], 1e-5)
    close(values[value_counts], case["values"][value_counts], 1e-5)
    close(logprobs[real], case["logprobs"][real], 1e-5)


def test_a_new_head_is_normal_with_the_papers_deviation_and_no_bias(policy_folder):
    heads = [
        new_reward_model(policy_folder, torch.Generator().manual_seed(seed)).classifier
        for seed in range(12)
    ]
    weights = torch.cat([head.weight.flatten() for head in heads])
    assert weights.std().item() == pytest.approx(1 / math.sqrt(33), rel=0.12)
    assert abs(weights.mean().item()) < 0.03
    assert all(torch.equal(head.bias, torch.zeros(1)) for head in heads)
    drawn = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)) / math.sqrt(33)
    torch.testing.assert_close(heads[3].weight.detach(), drawn, rtol=1e-5, atol=0)


def test_a_new_reward_model_keeps_the_policys_backbone(policy, reward_model):
    ours = reward_model.base_model.state_dict()
    theirs = policy.base_model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_saved_models_open_with_plain_transformers(policy, reward_model, tokenizer, tmp_path):
    tokens, mask = random_tokens(2, 8), torch.ones(2, 8).bool()
    with torch.no_grad():
        reward_model.classifier.bias.fill_(-0.75)
    save_model(policy, tokenizer, tmp_path / "policy")
    save_model(reward_model, tokenizer, tmp_path / "rm")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    scorer = AutoModelForTokenClassification.from_pretrained(tmp_path / "rm").eval()
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, policy(tokens).logits)
        scalars = scorer(tokens).logits
        assert scalars.shape == (2, 8, 1)
        inputs = model_inputs(tokens, mask)
        torch.testing.assert_close(scalars[..., 0], head_scalars(reward_model, inputs))
        again = head_scalars(load_reward_model(tmp_path / "rm").eval(), inputs)
        torch.testing.assert_close(scalars[..., 0], again)
    assert load_tokenizer(tmp_path / "policy").get_vocab() == tokenizer.get_vocab()
    assert not any("auto_map" in path.read_text() for path in tmp_path.rglob("config.json"))


def test_missing_and_unexpected_weights_are_refused(policy_folder, tmp_path):
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    folder = shutil.copytree(policy_folder, tmp_path / "policy")
    whole = load_file(folder / "model.safetensors")
    lacking = {key: whole[key] for key in whole if key != name}
    for weights, what in ((lacking, name), (whole | {"extra": torch.ones(2)}, "extra")):
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=what):
            load_policy(folder)
        with pytest.raises(UserError, match=what):
            new_reward_model(folder, torch.Generator())


def configured(tokenizer_folder, folder, **changes):
    """A copy of the tokenizer with other entries in its tokenizer_config.json."""
    shutil.copytree(tokenizer_folder, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])
def test_a_pad_token_of_our_own_is_added_where_the_tokenizer_pads_with_a_real_one(
    tokenizer_folder, tmp_path, pad
):
    """With EOS, as chat models do, and with an id among the others, as GPT-NeoX's own (id 1)."""
    folder = configured(tokenizer_folder, tmp_path / "tokenizer", pad_token=pad)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token == "[PAD]"
    assert tokenizer.pad_token_id == max(tokenizer.get_vocab().values())
    assert tokenizer.pad_token_id == load_tokenizer(tokenizer_folder).pad_token_id
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").get_vocab() == tokenizer.get_vocab()


def test_a_saved_policy_generates_for_two_texts_in_one_batch_as_for_each(
    policy, tokenizer, tmp_path
):
    assert policy.config.vocab_size == tokenizer.pad_token_id  # no row for [PAD]
    save_model(policy, tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    assert load_tokenizer(tmp_path).pad_token_id == tokenizer.pad_token_id
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    reader = AutoTokenizer.from_pretrained(tmp_path)
    settings: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    settings |= {"pad_token_id": reader.pad_token_id, "return_dict_in_generate": False}
    texts = ["My boss sold my bike.", "I"]
    together = plain.generate(**reader(texts, padding=True, return_tensors="pt"), **settings)
    for text, row in zip(texts, together, strict=True):
        alone = plain.generate(**reader(text, return_tensors="pt"), **settings)
        assert row[-5:].tolist() == alone[0, -5:].tolist()


def test_the_pad_token_is_new_and_the_next_free_id(tokenizer, tokenizer_folder):
    entries = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokenizer.eos_token_id == 0
    assert tokenizer.pad_token == "[PAD]"
    assert tokenizer.pad_token_id == len(entries)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
