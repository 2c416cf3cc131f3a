"""LoRA: nothing changes at the start, the base never does, off is SFT, merged says the same."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from stages import base, dpo, normalize, ppo, rm, sft
from stages.config.command_line import make_config
from stages.config.lora import Lora
from stages.models.forward import head_scalars, model_inputs, response_logprobs
from stages.models.loading import load_policy, load_reward_model, save_model
from stages.models.lora import adapt, adapter_layers, adapter_off, merge
from stages.models.policy import PolicyModel
from stages.rl.networks import save_networks
from stages.runs.files import read_lines
from tests.lib.asserts import refusal_of
from tests.lib.learners import flat, two_updates_of_ppo
from tests.lib.make_stages import run_module

RANK = 3
TOKENS = torch.arange(1, 25).view(2, 12)


def config_with(**lora: Any) -> Any:
    return make_config("tiny").changed(lora=Lora(**{"rank": RANK, "alpha": 6, **lora}))


def stir(model, seed=5):
    """Stands for training: an adapter whose product is not 0, and another head."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn(one.shape, generator=generator), alpha=0.1)


@torch.no_grad()
def outputs(model):
    return model(input_ids=TOKENS).logits


@pytest.fixture(params=["policy", "reward_model"])
def model(request):
    return request.getfixturevalue(request.param)


def stage_of(model):
    return "rm" if hasattr(model, "classifier") else "dpo"


def adapted_names(model):
    """Full names of the layers that have an adapter."""
    return [name for name, _ in adapter_layers(model)]


@pytest.fixture
def adapted(model):
    adapt(model, config_with(), stage_of(model))
    return model


def test_a_fresh_adapter_changes_no_output(model):
    before = outputs(model)
    adapt(model, config_with(), stage_of(model))
    assert len(list(adapter_layers(model))) == 2 * 4  # of both layers, every linear one
    assert torch.equal(outputs(model), before)


def test_only_named_layers_are_adapted(model):
    adapt(model, config_with(target_modules="query_key_value, mlp.dense_h_to_4h"), stage_of(model))
    ends = {name.partition(".layers.")[2] for name in adapted_names(model)}
    assert ends == {
        "0.attention.query_key_value",
        "0.mlp.dense_h_to_4h",
        "1.attention.query_key_value",
        "1.mlp.dense_h_to_4h",
    }


def test_naming_all_layers_gives_the_adapters_of_all_linear(policy_folder):
    by_default = load_policy(policy_folder)
    by_name = load_policy(policy_folder)
    adapt(by_default, config_with(), "sft")
    names = "query_key_value,dense,dense_h_to_4h,dense_4h_to_h"
    adapt(by_name, config_with(target_modules=names), "sft")
    assert adapted_names(by_name) == adapted_names(by_default)
    assert torch.equal(flat(by_name), flat(by_default))


@pytest.mark.parametrize("names", ["q_proj", "query_key_value,q_proj"])
def test_a_target_module_that_does_not_exist_is_refused_with_the_names_that_do(policy, names):
    line = refusal_of(adapt, policy, config_with(target_modules=names), "sft")
    assert line == (
        "lora.target_modules: gpt_neox has no linear layer 'q_proj': choose from dense, "
        "dense_4h_to_h, dense_h_to_4h, query_key_value, or set all-linear"
    )


@pytest.mark.parametrize("name", ["embed_in", "embed_out", "lm_head"])
def test_layers_that_read_or_write_tokens_cannot_be_adapted(policy, name):
    line = refusal_of(adapt, policy, config_with(target_modules=name), "sft")
    assert f"no linear layer '{name}'" in line


def test_the_scalar_head_cannot_be_adapted(reward_model):
    line = refusal_of(adapt, reward_model, config_with(target_modules="classifier"), "rm")
    assert "no linear layer 'classifier'" in line


def test_gpt2_has_layers_of_other_names():
    policy = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=40))
    adapt(policy, config_with(target_modules="c_attn"), "sft")
    assert adapted_names(policy) == ["transformer.h.0.attn.c_attn"]


def test_a_target_module_is_checked_before_any_stage_trains(runs):
    overrides = (
        "world.train_posts=8",
        "world.train_comparisons=8",
        "base.hidden_size=8",
        "lora.rank=2",
        "lora.stages=ppo",
        "lora.target_modules=query",
    )
    config = make_config("tiny-xs", name="misspelt", overrides=overrides)
    assert "no linear layer 'query'" in refusal_of(base.make_base, config)


@pytest.mark.parametrize("names", ["", "dense,"])
def test_an_empty_target_module_is_refused(names):
    line = refusal_of(Lora, target_modules=names)
    assert line.startswith("lora.target_modules must be all-linear, or names of layers")


def test_only_the_adapter_and_the_head_of_a_reward_model_learn(adapted):
    learned = {name for name, one in adapted.named_parameters() if one.requires_grad}
    heads = {name for name in learned if "lora_" not in name}
    expected = {"classifier.weight", "classifier.bias"} if stage_of(adapted) == "rm" else set()
    assert heads == expected
    # Two matrices a linear layer: [rank, in] and [out, rank].
    sizes = ((32, 96), (32, 32), (32, 64), (64, 32))
    counted = sum(one.numel() for name, one in adapted.named_parameters() if "lora_" in name)
    assert counted == 2 * sum(RANK * (inner + outer) for inner, outer in sizes)


def test_an_adapter_is_a_function_of_seed_stage_and_part(policy_folder):
    def first(seed=1, part="policy", noise=0):
        model = load_policy(policy_folder)
        torch.manual_seed(noise)
        adapt(model, config_with().changed(seed=seed), "ppo", part)
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(noise))
        (_, layer), *_ = adapter_layers(model)
        return layer.lora_A["default"].weight

    assert torch.equal(first(), first(noise=9))
    assert not torch.equal(first(), first(seed=2))
    assert not torch.equal(first(), first(part="critic"))


def test_off_is_the_model_as_it_was_and_on_again_it_learns(policy, policy_folder):
    before = outputs(load_policy(policy_folder).eval())
    adapt(policy, config_with(), "ppo")
    stir(policy)
    with adapter_off(policy):
        assert torch.equal(outputs(policy), before)
    after = outputs(policy)
    assert (after - before).abs().max() > 0.01
    with pytest.raises(KeyError), adapter_off(policy):
        raise KeyError
    assert torch.equal(outputs(policy), after)
    layers = [layer for _, layer in adapter_layers(policy)]
    for one in (matrix for layer in layers for matrix in (layer.lora_A, layer.lora_B)):
        assert one["default"].weight.requires_grad


def test_merged_weights_are_the_base_plus_the_scaled_product(policy, policy_folder):
    plain = load_policy(policy_folder).state_dict()
    adapt(policy, config_with(), "sft")
    stir(policy)
    products = {
        f"{name}.weight": 6 / RANK * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        for name, layer in adapter_layers(policy)
    }
    merge(policy)
    merged = policy.state_dict()
    assert merged.keys() == plain.keys()
    for name, weight in plain.items():
        expected = weight + products.get(name, torch.zeros_like(weight))
        torch.testing.assert_close(merged[name], expected, rtol=0, atol=1e-6)
    assert len(products) == 8


def test_a_saved_model_is_plain_loads_strictly_and_says_the_same(adapted, tokenizer, tmp_path):
    stir(adapted)
    before = outputs(adapted)
    merge(adapted)
    assert not list(adapter_layers(adapted))
    save_model(adapted, tokenizer, tmp_path)
    load = load_reward_model if stage_of(adapted) == "rm" else load_policy
    again = outputs(load(tmp_path).eval())
    assert (again - before).abs().max() < 1e-5 * before.abs().max().clamp(min=1)


MINI = [
    "base.hidden_size=32",
    "base.num_layers=2",
    "memory.cpu_threads=1",
    "world.train_posts=320",
    "world.validation_posts=20",
    "world.train_comparisons=32",
    "world.validation_comparisons=40",
    "ppo.total_episodes=64",
    "ppo.batch_size=32",
    "ppo.learning_rate=0.002",
    "ppo.critic_updates=0",
    "dpo.learning_rate=0.01",
    "dpo.epochs=10",
    "lora.rank=3",
    "lora.alpha=6",
]
ARGUMENTS = ["--preset", "tiny", "--name", "mini", "--set", *MINI]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Every training stage with an adapter, made by the stages' own command lines."""
    root = tmp_path_factory.mktemp("lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for module in (base, sft, rm, normalize, ppo, dpo):
            run_module(module, ARGUMENTS)
        yield root / "runs" / "mini" / "seed44413"


def weights(study, model):
    is_policy = model in ("base/model", "sft/model", "ppo/model", "dpo/model")
    load = load_policy if is_policy else load_reward_model
    return load(study / model).state_dict()


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("base/model", "sft/model"),
        ("sft/model", "rm/model"),
        ("sft/model", "ppo/model"),
        ("normalize/model", "ppo/critic"),
        ("sft/model", "dpo/model"),
    ],
)
def test_a_stage_moves_linear_layers_by_a_matrix_of_the_rank_and_nothing_else(study, start, end):
    before = weights(study, start)
    after = weights(study, end)
    linear = ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h")
    for name in after.keys() & before.keys() - {"classifier.weight", "classifier.bias"}:
        moved = after[name] - before[name]
        if name.endswith("weight") and any(part in name for part in linear):
            values = torch.linalg.svdvals(moved.double())
            assert values[0] > 1e-4
            assert values[RANK] < 1e-3 * values[0]
        else:
            assert not moved.any(), name


def test_the_critics_head_learns_too(study):
    before = weights(study, "normalize/model")["classifier.weight"]
    after = weights(study, "ppo/critic")["classifier.weight"]
    assert (after - before).abs().max() > 1e-4


@pytest.mark.learns
def test_sft_learns(study):
    rows = read_lines(study / "sft/metrics.jsonl")
    losses = [row["loss/validation"] for row in rows if row.get("loss/validation") is not None]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.learns
def test_dpo_starts_at_sft_and_learns(study):
    margins = [row["rewards/margins"] for row in read_lines(study / "dpo/metrics.jsonl")]
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[-1] > 0.05  # of pairs that it has met nine times


@pytest.mark.learns
def test_ppo_starts_at_sft_and_moves(study):
    kl = [row["objective/kl"] for row in read_lines(study / "ppo/metrics.jsonl")]
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert kl[-1] != pytest.approx(0, abs=1e-4)


def mini_config(microbatch_size, forward=32):
    made = make_config("tiny", name="mini", overrides=tuple(MINI))
    memory = made.memory.changed(microbatch_size=microbatch_size, forward_batch_size=forward)
    return made.changed(memory=memory, ppo=made.ppo.changed(batch_size=16, num_ppo_epochs=2))


def test_ppos_reference_is_the_sft_model_while_the_policy_moves(study):
    _, rollout = two_updates_of_ppo(study, mini_config(16))
    sft_model = load_policy(study / "sft" / "model").eval()
    temperature = mini_config(16).ppo.temperature
    with torch.no_grad():
        expected, _ = response_logprobs(PolicyModel(sft_model), rollout, temperature=temperature)
    ref_distance = (rollout.ref_logprobs - expected).abs()[rollout.response_mask]
    policy_distance = (rollout.logprobs - expected).abs()[rollout.response_mask]
    assert ref_distance.max() < 1e-5
    assert policy_distance.max() > 1e-3


def test_ppos_reference_holds_no_second_copy_and_base_weights_stay(study):
    learner, _ = two_updates_of_ppo(study, mini_config(16))
    networks = learner.networks
    shared = {id(parameter) for parameter in networks.policy.parameters()}
    assert {id(parameter) for parameter in networks.ref_policy.parameters()} == shared
    sft_model = load_policy(study / "sft" / "model")
    for name, layer in adapter_layers(networks.policy.model):
        assert torch.equal(layer.get_base_layer().weight, sft_model.get_submodule(name).weight)


def test_the_critic_has_an_adapter_of_its_own(study):
    learner, rollout = two_updates_of_ppo(study, mini_config(16))
    start = load_reward_model(study / "normalize" / "model").eval()
    tokens = torch.cat([rollout.queries, rollout.responses], dim=1)
    real = tokens != learner.networks.pad_id
    inputs = model_inputs(tokens.masked_fill(~real, 0), real)
    with torch.no_grad():
        moved = head_scalars(learner.networks.critic, inputs) - head_scalars(start, inputs)
    assert moved[real].abs().max() > 1e-3


def test_a_kept_policy_is_what_would_be_saved_and_the_learner_stays(study, tokenizer, tmp_path):
    learner, _ = two_updates_of_ppo(study, mini_config(16))
    before = flat(learner.trained).clone()
    ppo.keep_policy(learner, tokenizer, tmp_path / "model-2")
    assert torch.equal(flat(learner.trained), before)
    save_networks(learner, tokenizer, tmp_path)
    kept, saved = (load_file(tmp_path / x / "model.safetensors") for x in ("model-2", "model"))
    assert kept.keys() == saved.keys()
    assert all(torch.equal(kept[name], weight) for name, weight in saved.items())


def test_batch_sizes_in_memory_change_no_adapter_in_ppo(study):
    whole, _ = two_updates_of_ppo(study, mini_config(16))
    for sizes in ((2, 4), (8, 1)):
        parts, _ = two_updates_of_ppo(study, mini_config(*sizes))
        assert (flat(parts.trained) - flat(whole.trained)).abs().max() < 1e-5
