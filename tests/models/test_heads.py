"""The scalar head: how it starts, and that it computes in float32."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification, LlamaConfig

from stages.models.heads import (
    Float32Head,
    head_name,
    scalar_head,
    shift_scores,
    use_float32_head,
)
from stages.models.loading import new_reward_model, save_model
from stages.models.tokenizers import load_tokenizer
from stages.rl.networks import freeze
from tests.lib.asserts import close
from tests.lib.families import save_checkpoint

TOKENS = torch.arange(1, 9)[None]


# -- a new head ------------------------------------------------------------------------------------


def test_a_new_head_is_normal_with_the_papers_deviation_and_no_bias(policy_folder):
    heads = []
    for seed in range(12):
        reward_model = new_reward_model(policy_folder, torch.Generator().manual_seed(seed))
        heads.append(reward_model.classifier)
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


def test_a_family_that_may_omit_the_heads_bias_gets_one_for_the_normalization(
    tokenizer_folder, tmp_path
):
    folder = save_checkpoint("llama", tokenizer_folder, tmp_path / "theirs")
    config = LlamaConfig.from_pretrained(folder, token_classification_bias=False)
    config.save_pretrained(folder)
    model = new_reward_model(folder, torch.Generator().manual_seed(1)).eval()
    shift_scores(model, -2.5)
    save_model(model, load_tokenizer(folder), tmp_path / "saved")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    close(plain(TOKENS).logits, model(TOKENS).logits)
    assert plain.score.bias.item() == -2.5


# -- float32 ---------------------------------------------------------------------------------------


def test_loaded_reward_models_have_a_float32_head(reward_model):
    assert isinstance(scalar_head(reward_model), Float32Head)


@torch.no_grad()
def test_a_head_keeps_its_bias_in_float32_under_autocast(reward_model):
    with torch.autocast("cpu", torch.bfloat16):
        before = reward_model(TOKENS).logits
        shift_scores(reward_model, 7.123456)  # bf16 would make 7.125 of it
        after = reward_model(TOKENS).logits
    assert after.dtype == torch.float32
    close(after - before, torch.full_like(before, 7.123456), 1e-5)


def test_a_float32_head_takes_over_the_parameters_of_the_head():
    model = nn.ModuleDict({"score": nn.Linear(4, 1)})
    parameters = dict(model.named_parameters())
    use_float32_head(model)
    assert head_name(model) == "score"
    assert isinstance(scalar_head(model), Float32Head)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert model.state_dict().keys() == {"score.weight", "score.bias"}


def test_a_float32_head_converts_the_parameters_of_a_bf16_model():
    model = nn.ModuleDict({"score": nn.Linear(4, 1)}).to(torch.bfloat16)
    hidden = torch.ones(1, 4, dtype=torch.bfloat16)
    use_float32_head(model)
    assert scalar_head(model).weight.dtype == torch.float32
    assert scalar_head(model)(hidden).dtype == torch.float32


def test_a_head_may_have_no_bias():
    model = nn.ModuleDict({"score": nn.Linear(4, 1, bias=False)})
    use_float32_head(model)
    assert scalar_head(model)(torch.ones(1, 4)) == scalar_head(model).weight.sum()
    assert model.state_dict().keys() == {"score.weight"}


def test_a_float32_head_draws_no_random_number():
    model = nn.ModuleDict({"score": nn.Linear(4, 1)})
    before = torch.get_rng_state()
    use_float32_head(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_with_a_float32_head_can_be_copied(reward_model):
    duplicate = copy.deepcopy(reward_model)
    shift_scores(duplicate, 1.0)
    close(duplicate(TOKENS).logits - reward_model(TOKENS).logits, torch.ones(1, 8, 1))


# -- frozen models in bf16 -------------------------------------------------------------------------


def test_only_the_head_of_a_model_frozen_in_bf16_stays_in_float32(reward_model):
    frozen = freeze(reward_model, "bf16")
    wide = {name for name, x in frozen.named_parameters() if x.dtype != torch.bfloat16}
    assert wide == {"classifier.weight", "classifier.bias"}


def test_frozen_weights_in_bf16_leave_rotary_frequencies_as_they_were(policy_folder):
    plain = new_reward_model(policy_folder, torch.Generator().manual_seed(1))
    frozen = freeze(new_reward_model(policy_folder, torch.Generator().manual_seed(1)), "bf16")
    before, after = dict(plain.named_buffers()), dict(frozen.named_buffers())
    assert "gpt_neox.rotary_emb.inv_freq" in before
    # With frequencies in bf16 a token at place 500 would be turned as one that is up to 1 off.
    for name, buffer in before.items():
        assert after[name].dtype == buffer.dtype, name
        assert torch.equal(after[name], buffer), name
