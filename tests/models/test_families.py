"""Any causal family goes through all stages, in float32 and bf16.

Each is a tiny random checkpoint as a hub would hold it: its own tokenizer pads with a real token.
"""

from dataclasses import dataclass
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
)

from eval import summaries
from stages import base, dpo, normalize, ppo, rm, sft
from stages.data.ragged import load_split, pad_left, pad_right
from stages.models.forward import ResponseBatch, score_responses
from stages.models.heads import head_name, scalar_head
from stages.models.loading import load_reward_model
from stages.models.policy import PolicyModel
from stages.models.sampling import SamplingParams, sample
from stages.models.tokenizers import load_tokenizer
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from tests.lib.asserts import close
from tests.lib.families import CONFIGS, SPARE, save_checkpoint
from tests.lib.make_stages import run_module

STAGES = (base, sft, rm, normalize, ppo, dpo, summaries)
HEADS = {"gpt_neox": "classifier", "gpt2": "classifier"}  # in other families: score
SETTINGS = [
    "world.train_posts=32",
    "world.validation_posts=8",
    "world.train_comparisons=16",
    "world.validation_comparisons=8",
    "data.max_query_tokens=140",
    "data.max_summary_tokens=110",
    "data.max_query_summary_tokens=250",
    "data.max_comparison_tokens=200",
    "data.max_query_comparison_tokens=340",
    "sft.loss_on_query=true",
    "sft.batch_size=8",
    "sft.evaluations=1",
    "rm.batch_size=8",
    "dpo.batch_size=8",
    "ppo.total_episodes=16",
    "ppo.batch_size=8",
    "ppo.num_ppo_epochs=2",
    "ppo.critic_updates=0",
    "memory.microbatch_size=8",
    "memory.forward_batch_size=16",
    "memory.cpu_threads=1",
]


def run_all_stages(checkpoint: Path, name: str, *settings: str) -> Path:
    """Run every stage in the working folder; returns the run's folder."""
    arguments = ["--preset", "tiny", "--name", name, "--tokenizer", str(checkpoint)]
    arguments += ["--set", f"base.checkpoint={checkpoint}", *SETTINGS, *settings]
    for stage in STAGES:
        run_module(stage, arguments)
    return Path("runs") / name / "seed44413"


@dataclass(frozen=True, kw_only=True)
class FamilyRun:
    """A family, and the folder of a finished run that started from it."""

    family: str
    folder: Path


FIRST, *OTHERS = CONFIGS
WALKING = [pytest.param(family, marks=pytest.mark.walk) for family in OTHERS]


@pytest.fixture(scope="module", params=[FIRST, *WALKING])
def run(request, tokenizer_folder, tmp_path_factory):
    """A run through all stages, once for each family."""
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        checkpoint = save_checkpoint(family, tokenizer_folder, root / "theirs")
        folder = run_all_stages(checkpoint, family)
    return FamilyRun(family=family, folder=root / folder)


@pytest.fixture
def references(run):
    """Query and human summary of each post of the SFT train split, as lists of tensors."""
    train = load_split(run.folder / "base/data", "sft_train")
    queries = [train.columns["queries"][row] for row in range(len(train))]
    summaries_ = [train.columns["summaries"][row] for row in range(len(train))]
    return queries, summaries_


def load_plain_reward_model(run: FamilyRun) -> torch.nn.Module:
    """The normalized reward model as plain transformers loads it."""
    folder = run.folder / "normalize/model"
    if run.family == "gemma3_text":
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        model.config.pad_token_id = None  # it reads before pads, and this checkpoint's pad is EOS
        return model
    return AutoModelForTokenClassification.from_pretrained(folder)


def test_a_family_gets_a_pad_token_after_all_others(run):
    tokenizer = load_tokenizer(run.folder / "base/model")
    assert tokenizer.pad_token == "[PAD]"
    assert tokenizer.pad_token_id == max(tokenizer.get_vocab().values())


def test_the_head_of_a_family_has_its_usual_name(run):
    reward_model = load_reward_model(run.folder / "normalize/model")
    assert head_name(reward_model) == HEADS.get(run.family, "score")


def test_a_saved_reward_model_has_no_dropout(run):
    layers = load_plain_reward_model(run).modules()
    assert not any(layer.p for layer in layers if isinstance(layer, torch.nn.Dropout))


def test_a_family_goes_through_all_stages_and_its_models_open_with_plain_transformers(
    run, references
):
    tokenizer = load_tokenizer(run.folder / "base/model")
    pad_id = tokenizer.pad_token_id
    queries, summaries_ = references
    ours = load_reward_model(run.folder / "normalize/model")
    batch = ResponseBatch(
        queries=pad_left(queries, pad_id), responses=pad_right(summaries_, pad_id), pad_id=pad_id
    )
    scores = score_responses(ours, batch)
    assert abs(scores.mean().item()) < 1e-4

    # By hand: no padding, no masks, no position ids, the scalar at the last token, which is EOS.
    plain = load_plain_reward_model(run)
    bias = 0.0
    if run.family == "gemma3_text":  # its plain class has no bias
        bias = scalar_head(ours).bias.item()
    for row in range(3):
        tokens = torch.cat([queries[row], summaries_[row]])
        assert tokens[-1] == tokenizer.eos_token_id
        close(plain(tokens[None]).logits.flatten()[-1] + bias, scores[row], 1e-4)


def test_no_spare_embedding_is_drawn(run, references):
    pad_id = load_tokenizer(run.folder / "base/model").pad_token_id
    queries, _ = references
    policy = AutoModelForCausalLM.from_pretrained(run.folder / "ppo/model").eval()
    assert policy.get_input_embeddings().num_embeddings == pad_id + SPARE  # never resized
    uniforms = torch.rand(4, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn, _ = sample(
        PolicyModel(policy),
        pad_left(queries[:4], pad_id),
        uniforms=uniforms,
        params=SamplingParams(temperature=5.0, eos_id=-1, pad_id=pad_id),
    )
    assert int(drawn.max()) < pad_id


def test_no_spare_embedding_learns(run):
    if CONFIGS[run.family].tie_word_embeddings:
        pytest.skip("tied to the output layer, where every token gets a gradient")
    pad_id = load_tokenizer(run.folder / "base/model").pad_token_id
    before, after = (embedding(run.folder / stage / "model") for stage in ("base", "ppo"))
    moved = (after - before).abs().amax(dim=1)
    assert moved[:pad_id].max() > 1e-3
    assert moved[pad_id:].max() < 1e-4  # only weight decay


def embedding(folder: Path) -> torch.Tensor:
    policy = AutoModelForCausalLM.from_pretrained(folder)
    weight: torch.Tensor = policy.get_input_embeddings().weight.detach()
    return weight


# -- bf16 ------------------------------------------------------------------------------------------


def losses(run: Path, stage: str, key: str) -> list[float]:
    return [row[key] for row in read_lines(run / stage / "metrics.jsonl") if key in row]


@pytest.mark.walk
def test_every_stage_learns_in_bf16_as_in_float32(tokenizer_folder, place):
    checkpoint = save_checkpoint("llama", tokenizer_folder, place / "theirs")
    posts = ("world.train_posts=64", "world.train_comparisons=64")
    plain = run_all_stages(checkpoint, "plain", *posts)
    AcceleratorState._reset_state(reset_partial_state=True)  # as a process of its own would
    bf16 = ("memory.mixed_precision=bf16", "memory.frozen_dtype=bf16")
    half = run_all_stages(checkpoint, "half", *posts, *bf16)
    AcceleratorState._reset_state(reset_partial_state=True)
    for stage, key, tolerance in (
        ("sft", "loss/train", 0.02),
        ("rm", "loss/train", 0.03),
        ("dpo", "loss/train", 0.02),
        ("ppo", "loss/value_avg", 0.2),
    ):
        expected, found = losses(plain, stage, key), losses(half, stage, key)
        assert found != expected, "bf16 was not used"
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), (stage, key)
    sft_losses = losses(half, "sft", "loss/train")
    assert sft_losses[-1] < sft_losses[0] - 0.5
    results = (read_manifest(half / "normalize") or {})["results"]
    # The check pads on the other side, which moves a score by rounding of the backbone in bf16.
    assert abs(results["mean_after"]) < normalize.TOLERANCES["bf16"]
    assert load_file(half / "ppo/model/model.safetensors").popitem()[1].dtype == torch.float32


# -- EOS -------------------------------------------------------------------------------------------


def eos_remarks(tokenizer, ends):
    """What the base stage says of a checkpoint whose config.json has this `eos_token_id`."""
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        eos_token_id=ends,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return base.eos_remarks(tokenizer, GPTNeoXForCausalLM(config))


def test_a_checkpoint_that_ends_texts_with_another_token_is_named(tokenizer):
    """As SmolLM2 from its GGUF with transformers 5.17, whose EOS began a turn."""
    other_id = tokenizer.eos_token_id + 1
    other = tokenizer.convert_ids_to_tokens(other_id)
    (line,) = eos_remarks(tokenizer, other_id)
    assert f"EOS {tokenizer.eos_token}," in line
    assert f"names {other}:" in line


def test_a_checkpoint_that_ends_texts_with_the_tokenizers_eos_gets_no_remark(tokenizer):
    eos_id = tokenizer.eos_token_id
    assert eos_remarks(tokenizer, eos_id) == []
    assert eos_remarks(tokenizer, [eos_id + 1, eos_id]) == []
    assert eos_remarks(tokenizer, None) == []
