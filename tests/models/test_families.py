"""Any causal family goes through all stages, in float32 and bf16.

Each is a tiny random checkpoint as a hub would hold it: its own tokenizer pads with a real token.
"""

import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
)

from eval import summaries
from stages import base, dpo, normalize, ppo, rm, sft
from stages.data.ragged import load_split, pad_left, pad_right
from stages.driving.start import run_module
from stages.finished import read_manifest
from stages.models.forward import score_responses
from stages.models.loading import (
    Float32Head,
    head_name,
    head_of,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    save_model,
    shift_scores,
)
from stages.models.sampling import sample
from stages.rl.networks import freeze
from stages.running.files import read_lines
from tests.lib.asserts import close
from tests.lib.families import CONFIGS
from tests.models.test_loading import configured

STAGES = (base, sft, rm, normalize, ppo, dpo, summaries)
SPARE = 3  # embeddings from [PAD] up, which are no tokens
HEADS = {"gpt_neox": "classifier", "gpt2": "classifier"}
SETTINGS = """
    world.train_posts=32 world.validation_posts=8
    world.train_comparisons=16 world.validation_comparisons=8
    data.max_query_tokens=140 data.max_summary_tokens=110 data.max_query_summary_tokens=250
    data.max_comparison_tokens=200 data.max_query_comparison_tokens=340
    sft.loss_on_query=true sft.batch_size=8 sft.evaluations=1 rm.batch_size=8 dpo.batch_size=8
    ppo.total_episodes=16 ppo.batch_size=8 ppo.num_ppo_epochs=2 ppo.critic_updates=0
    memory.microbatch_size=8 memory.forward_batch_size=16 memory.cpu_threads=1
""".split()


def checkpoint(family: str, tokenizer_folder: Path, folder: Path) -> Path:
    """A random checkpoint with a tokenizer that pads with a real token, as many are published."""
    theirs = configured(
        tokenizer_folder, folder.with_name(f"{folder.name}-tokenizer"), pad_token="!"
    )
    config = CONFIGS[family]
    config.vocab_size = load_tokenizer(theirs).pad_token_id + SPARE
    config.eos_token_id = config.bos_token_id = 0
    config.initializer_range = 0.1
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in theirs.iterdir():
        shutil.copy(path, folder)
    return folder


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    chosen = ["--preset", "tiny", "--name", name, "--tokenizer", str(folder), "--set"]
    return [*chosen, f"base.checkpoint={folder}", *SETTINGS, *more]


def make_all(folder: Path, name: str, *more: str) -> Path:
    """Every stage in the working folder; returns the run's."""
    for stage in STAGES:
        run_module(stage, arguments(folder, name, *more))
    return Path("runs") / name / "seed44413"


def opened(family: str, folder: Path) -> torch.nn.Module:
    """A reward model as plain transformers opens it."""
    if family == "gemma3_text":
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        model.config.pad_token_id = None  # it reads before pads, and this checkpoint's pad is EOS
        return model
    return AutoModelForTokenClassification.from_pretrained(folder)


FIRST, *OTHERS = CONFIGS
WALKING = [pytest.param(family, marks=pytest.mark.walk) for family in OTHERS]


@pytest.mark.parametrize("family", [FIRST, *WALKING])
def test_a_family_goes_through_all_stages_and_its_models_open_with_plain_transformers(
    family, tokenizer_folder, place
):
    run = make_all(checkpoint(family, tokenizer_folder, place / "theirs"), family)
    tokenizer = load_tokenizer(run / "base/model")
    pad_id = tokenizer.pad_token_id
    assert tokenizer.pad_token == "[PAD]"
    assert pad_id == max(tokenizer.get_vocab().values())

    name = HEADS.get(family, "score")
    ours = load_reward_model(run / "normalize/model")
    assert head_name(ours) == name
    plain, bias = opened(family, run / "normalize/model"), 0.0
    if family == "gemma3_text":  # a class without a bias
        bias = head_of(ours).bias.item()
    assert not any(one.p for one in plain.modules() if isinstance(one, torch.nn.Dropout))
    train = load_split(run / "base/data", "sft_train")
    queries, references = (train.columns[one] for one in ("queries", "summaries"))
    rows = range(len(train))
    scores = score_responses(
        ours,
        pad_left([queries[row] for row in rows], pad_id),
        pad_right([references[row] for row in rows], pad_id),
        pad_id,
    )
    assert abs(scores.mean().item()) < 1e-4
    # By hand: no padding, no masks, no position ids, the scalar at the last token, which is EOS.
    for row in rows[:3]:
        tokens = torch.cat([queries[row], references[row]])
        assert tokens[-1] == tokenizer.eos_token_id
        close(plain(tokens[None]).logits.flatten()[-1] + bias, scores[row], 1e-4)

    policy = AutoModelForCausalLM.from_pretrained(run / "ppo/model")
    assert policy.get_input_embeddings().num_embeddings == pad_id + SPARE  # never resized
    uniforms = torch.rand(4, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = pad_left([queries[row] for row in rows[:4]], pad_id)
    drawn, _ = sample(policy.eval(), batch, uniforms, 5.0, -1, pad_id)
    assert int(drawn.max()) < pad_id
    if not CONFIGS[family].tie_word_embeddings:
        before, after = (embedding(run / stage / "model") for stage in ("base", "ppo"))
        moved = (after - before).abs().amax(dim=1)
        assert moved[:pad_id].max() > 1e-3
        assert moved[pad_id:].max() < 1e-4  # weight decay alone


def embedding(folder: Path) -> torch.Tensor:
    weights: torch.Tensor = (
        AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()
    )
    return weights


def losses(run: Path, stage: str, key: str) -> list[float]:
    return [row[key] for row in read_lines(run / stage / "metrics.jsonl") if key in row]


@pytest.mark.walk
def test_every_stage_learns_in_bf16_as_in_float32(tokenizer_folder, place):
    folder = checkpoint("llama", tokenizer_folder, place / "theirs")
    more = ("world.train_posts=64", "world.train_comparisons=64")
    plain = make_all(folder, "plain", *more)
    AcceleratorState._reset_state(reset_partial_state=True)  # as a process of its own would
    half = make_all(
        folder, "half", *more, "memory.mixed_precision=bf16", "memory.frozen_dtype=bf16"
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    for stage, key, tolerance in (
        ("sft", "loss/train", 0.02),
        ("rm", "loss/train", 0.03),
        ("dpo", "loss/train", 0.02),
        ("ppo", "loss/value_avg", 0.2),
    ):
        expected, found = losses(plain, stage, key), losses(half, stage, key)
        print(stage, key, *(f"{a:.4f}/{b:.4f}" for a, b in zip(expected, found, strict=True)))
        assert found != expected, "bf16 was not used"
        for one, other in zip(expected, found, strict=True):
            assert other == pytest.approx(one, rel=tolerance, abs=tolerance)
    assert losses(half, "sft", "loss/train")[-1] < losses(half, "sft", "loss/train")[0] - 0.5
    results = (read_manifest(half / "normalize") or {})["results"]
    # The check pads on the other side, which moves a score by rounding of the backbone in bf16.
    assert abs(results["mean_after"]) < normalize.TOLERANCES["bf16"]
    assert load_file(half / "ppo/model/model.safetensors").popitem()[1].dtype == torch.float32


def test_a_head_keeps_its_bias_in_float32_under_autocast(policy_folder):
    model = new_reward_model(policy_folder, torch.Generator().manual_seed(1)).eval()
    assert isinstance(head_of(model), Float32Head)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(tokens).logits
        shift_scores(model, 7.123456)  # bf16 would make 7.125 of it
        after = model(tokens).logits
    assert after.dtype == torch.float32
    close(after - before, torch.full_like(before, 7.123456), 1e-5)


def test_frozen_weights_in_bf16_leave_rotary_frequencies_as_they_were(policy_folder):
    plain = new_reward_model(policy_folder, torch.Generator().manual_seed(1))
    frozen = freeze(new_reward_model(policy_folder, torch.Generator().manual_seed(1)), "bf16")
    kinds = {name: weight.dtype for name, weight in frozen.named_parameters()}
    heads = [name for name, kind in kinds.items() if kind != torch.bfloat16]
    assert heads == ["classifier.weight", "classifier.bias"]
    before, after = dict(plain.named_buffers()), dict(frozen.named_buffers())
    assert "gpt_neox.rotary_emb.inv_freq" in before
    # With frequencies in bf16 a token at place 500 would be turned as one that is up to 1 off.
    for name, buffer in before.items():
        assert after[name].dtype == buffer.dtype, name
        assert torch.equal(after[name], buffer), name


def test_a_family_that_may_omit_the_heads_bias_gets_one_for_the_normalization(
    tokenizer_folder, tmp_path
):
    folder = checkpoint("llama", tokenizer_folder, tmp_path / "theirs")
    config = LlamaConfig.from_pretrained(folder, token_classification_bias=False)
    config.save_pretrained(folder)
    model = new_reward_model(folder, torch.Generator().manual_seed(1)).eval()
    shift_scores(model, -2.5)
    save_model(model, load_tokenizer(folder), tmp_path / "saved")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(1, 9)[None]
    close(plain(tokens).logits, model(tokens).logits)
    assert plain.score.bias.item() == -2.5


def test_a_checkpoint_that_ends_texts_with_another_token_is_named(tokenizer_folder):
    """As SmolLM2 from its GGUF with transformers 5.17, whose EOS began a turn."""
    tokenizer = load_tokenizer(tokenizer_folder)
    eos = tokenizer.eos_token_id
    (other,) = tokenizer.convert_ids_to_tokens([eos + 1])

    def remarks(ends: int | list[int] | None) -> list[str]:
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = GPTNeoXConfig(vocab_size=len(tokenizer), eos_token_id=ends, **shape)
        return base.eos_remarks(tokenizer, GPTNeoXForCausalLM(config))

    assert remarks(eos) == remarks([eos + 1, eos]) == remarks(None) == []
    (line,) = remarks(eos + 1)
    assert f"EOS {tokenizer.eos_token}," in line
    assert f"names {other}:" in line
