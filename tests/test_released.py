"""Released checkpoints: judged without training, and reward models of the paper's layout."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
)

from eval.judge import judge_summaries
from stages import normalize, ppo, rm
from stages.driving.start import run_module
from stages.driving.wanted import wanted_stages
from stages.finished import stage_folder
from stages.models.foreign import load_released_reward_model
from stages.models.forward import score_responses
from stages.models.loading import load_reward_model
from stages.running.files import read_lines
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from stages.training.checkpoints import read_weights
from tests.lib.asserts import refusal_of
from tests.lib.families import GROUPED, WIDTH
from tests.lib.resuming import ARGUMENTS, SETTINGS

ROOT = Path(__file__).parents[1]
MEAN = 1.75
WORLD = [one for one in SETTINGS if one.startswith(("world.", "memory."))]


def paper_layout(ours: Path, folder: Path, kind: str = "safetensors") -> Path:
    """A reward model of ours as the paper's code saves it: a backbone, a scalar head, and the mean
    in the configuration. Every score stays what it is."""
    model = AutoModelForTokenClassification.from_pretrained(ours, dtype=torch.float32)
    weights = {f"lm_backbone.{k}": v.clone() for k, v in model.gpt_neox.state_dict().items()}
    weights["scalar_head.weight"] = model.classifier.weight.detach().clone()
    weights["scalar_head.bias"] = model.classifier.bias.detach().clone() + MEAN
    folder.mkdir()
    if kind == "safetensors":
        save_file(weights, folder / "model.safetensors")
    else:  # as older versions of transformers saved it
        weights["lm_backbone.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
        weights["lm_backbone.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        weights["lm_backbone.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(4)
        torch.save(weights, folder / "pytorch_model.bin")
    base = json.loads((ours / "config.json").read_text()) | {
        "architectures": ["GPTNeoXForCausalLM"]
    }
    saved = {"architectures": ["ScalarModel"], "base_config": base, "base_model": "models/sft"}
    saved |= {"bias": MEAN, "hidden_size": base["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


class PaperModel(nn.Module):
    """The paper's forward pass, written from its description: details 11, 12 and 15."""

    def __init__(self, folder: Path, backbone_config: Any) -> None:
        super().__init__()
        weights, _ = read_weights(folder)
        self.lm_backbone = GPTNeoXModel(backbone_config).eval()
        self.scalar_head = nn.Linear(backbone_config.hidden_size, 1)
        assert not self.load_state_dict(weights, strict=False).missing_keys
        self.bias = json.loads((folder / "config.json").read_text())["bias"]

    @torch.no_grad()
    def score(self, tokens: list[int]) -> float:
        output = self.lm_backbone(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        return (self.scalar_head(output.hidden_states[-1]) - self.bias)[0, -1, 0].item()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_converted_reward_model_scores_as_the_papers_forward_pass(whole, tmp_path, kind):
    ours = whole / "normalize/model"
    folder = paper_layout(ours, tmp_path / "paper", kind)
    converted, mean = load_released_reward_model(folder)
    assert mean == MEAN
    theirs = PaperModel(folder, AutoModelForTokenClassification.from_pretrained(ours).config)
    queries, response = [[5, 6, 7, 8], [9, 5, 3, 2]], [11, 12, 0]
    found = score_responses(
        converted, torch.tensor(queries), torch.tensor([response, response]), -1
    )
    expected = [theirs.score([*query, *response]) for query in queries]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert expected[0] != expected[1]
    converted.save_pretrained(tmp_path / "saved")
    again = load_reward_model(tmp_path / "saved").eval()
    same = score_responses(again, torch.tensor(queries), torch.tensor([response, response]), -1)
    weights = zip(again.parameters(), converted.parameters(), strict=True)
    assert all(torch.equal(saved, ours) for saved, ours in weights)
    assert torch.allclose(same, found, atol=1e-6)  # where memory lies changes rounding


FAMILIES = {
    "llama": LlamaConfig(**GROUPED, vocab_size=40),
    "qwen2": Qwen2Config(**GROUPED, vocab_size=40),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40),
    "gpt_neox": GPTNeoXConfig(**WIDTH, intermediate_size=64, vocab_size=40),
    "gemma3": Gemma3TextConfig(**GROUPED, vocab_size=40, sliding_window=4),
    "olmo2": Olmo2Config(**GROUPED, vocab_size=40, pad_token_id=39),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_classifier_gives_its_own_scores_at_the_last_token(family, tmp_path):
    config = copy.deepcopy(FAMILIES[family])
    config.num_labels, config.pad_token_id = 1, 39
    torch.manual_seed(3)
    theirs = AutoModelForSequenceClassification.from_config(config).eval()
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32
    ).eval()
    model, mean = load_released_reward_model(tmp_path / "theirs")
    assert mean == 0.0
    queries, responses = (
        torch.tensor([[39, 6, 7, 8], [9, 5, 3, 2]]),
        torch.tensor([[11, 12, 0]] * 2),
    )
    own = score_responses(model, queries, responses, 39)
    for row, query in enumerate(([6, 7, 8], [9, 5, 3, 2])):
        expected = theirs(torch.tensor([[*query, 11, 12, 0]])).logits[0, 0]
        assert own[row].item() == pytest.approx(expected.item(), abs=1e-5)
    model.save_pretrained(tmp_path / "ours")
    again, mean = load_released_reward_model(tmp_path / "ours")
    assert mean is None
    assert torch.allclose(score_responses(again, queries, responses, 39), own, atol=1e-6)


def test_a_backbone_with_a_value_head_and_a_normalization_gives_its_own_scores(tmp_path):
    """OpenRLHF's layout: a head of any name without a bias; mean and std in the configuration."""
    torch.manual_seed(4)
    theirs = AutoModel.from_config(FAMILIES["llama"]).eval()
    head = torch.randn(1, 32)
    weights = {f"model.{name}": x.clone() for name, x in theirs.state_dict().items()}
    save_file(weights | {"value_head.weight": head}, tmp_path / "model.safetensors")
    config = FAMILIES["llama"].to_dict() | {"architectures": ["RewardModel"]}
    config |= {"normalize_reward": True, "mean": 0.75, "std": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, mean = load_released_reward_model(tmp_path)
    assert mean == 0.75
    tokens = [9, 5, 3, 2, 11, 12, 0]
    raw = (theirs(torch.tensor([tokens])).last_hidden_state[0, -1] * head).sum()
    own = score_responses(model, torch.tensor([tokens[:4]]), torch.tensor([tokens[4:]]), 39)
    assert own.item() == pytest.approx((raw.item() - 0.75) / 2.0, abs=1e-5)


def test_what_is_no_reward_model_is_one_line(whole, tmp_path):
    ours, mean = load_released_reward_model(whole / "normalize/model")
    assert mean is None  # ours already
    assert ours.config.num_labels == 1
    with pytest.raises(UserError, match=r"config\.json is missing"):
        load_released_reward_model(tmp_path)
    with pytest.raises(UserError, match="holds no reward model: 0 of"):
        load_released_reward_model(whole / "sft/model")
    folder = paper_layout(whole / "normalize/model", tmp_path / "paper")
    weights, _ = read_weights(folder)

    def error(changed: dict[str, Any]) -> str:
        save_file(changed, folder / "model.safetensors")
        return refusal_of(load_released_reward_model, folder)

    norm, head = "lm_backbone.final_layer_norm.weight", "scalar_head.weight"
    without = {k: v for k, v in weights.items() if k not in (norm, "scalar_head.bias")}
    assert "lacks 1 weights (gpt_neox.final_layer_norm.weight)" in error(without)
    assert "has unexpected 1 weights (gpt_neox.more)" in error(
        weights | {"lm_backbone.more": torch.ones(1)}
    )
    assert "0 of its weights are a head" in error(weights | {head: torch.ones(1, 1)})
    assert "not finite" in error(weights | {norm: weights[norm] * torch.nan})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bias": torch.nan}))
    assert "bias must be a number, not nan" in error(weights)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        load_released_reward_model(folder)


def test_a_reward_model_of_others_takes_the_place_of_training_one(attempt, whole, tmp_path, capsys):
    folder, run = paper_layout(whole / "normalize/model", tmp_path / "paper"), attempt("rm").parent
    words = [*ARGUMENTS, f"released.reward_model={folder}"]
    for module in (rm, normalize, ppo):
        run_module(module, words)
    pairs = zip(
        load_reward_model(run / "rm/model").parameters(),
        load_reward_model(whole / "normalize/model").parameters(),
        strict=True,
    )
    assert all(torch.allclose(taken, published, atol=1e-6) for taken, published in pairs)
    other = json.loads((whole / "sft/model/tokenizer.json").read_text())
    other["model"]["merges"].clear()
    shutil.rmtree(run / "rm")
    shutil.copy(whole / "sft/model/tokenizer_config.json", folder)
    (folder / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit):
        run_module(rm, words)
    assert "has another tokenizer than random" in capsys.readouterr().err


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make` in a folder of its own, as people type it."""
    shutil.copy(ROOT / "Makefile", folder)
    typed = ["make", "--no-print-directory", "VENV=", f"PYTHON={sys.executable}", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        typed, capture_output=True, text=True, cwd=folder, env=environment, check=False
    )


@pytest.fixture(scope="module")
def judged(whole, tmp_path_factory):
    """A folder in which `make eval POLICY=... REWARD_MODEL=...` has judged a released policy."""
    folder = tmp_path_factory.mktemp("released")
    shutil.copytree(whole / "sft/model", folder / "policy")
    paper_layout(whole / "normalize/model", folder / "reward")
    words = [f"SET={' '.join(WORLD)} eval.posts=6 checks.control_posts=3", "REWARD_MODEL=reward"]
    made = make(folder, "eval", "POLICY=policy", *words)
    assert made.returncode == 0, made.stderr
    return folder, words


@pytest.mark.walk
def test_make_eval_policy_judges_a_released_checkpoint_to_its_page(judged):
    folder, words = judged
    run = folder / "runs/released-policy/seed44413"
    assert {one.name for one in run.iterdir() if not one.name.startswith(".")} == {
        *("base", "released", "summaries", "judge", "controls", "win_rate", "report")
    }
    assert [path.stem for path in (run / "summaries").glob("*.jsonl")] == ["released"]
    rows = read_lines(run / "summaries/released.jsonl")
    assert len(rows) == 6
    model = PaperModel(
        folder / "reward", AutoModelForTokenClassification.from_pretrained(folder / "policy").config
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    row = rows[0]
    text = f"{row['query']} {row['reference']}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert row["reference_score"] == pytest.approx(
        model.score([*ids, tokenizer.eos_token_id]), abs=1e-4
    )
    again = make(folder, "eval", "POLICY=policy", *words)
    assert "nothing to do" in again.stdout, again.stderr


@pytest.mark.parametrize(
    ("changes", "goal", "said"),
    [
        ({}, "ppo", "ppo trains, and POLICY= is judged without training"),
        ({"upstream": "tiny"}, "eval", "leave out UPSTREAM="),
        ({"overrides": ("sft.epochs=3",)}, "eval", r"sft\.\* has no effect"),
        ({"overrides": ("judge.kind=reward_model",)}, "eval", "needs a reward model"),
    ],
)
def test_what_makes_no_sense_with_a_released_policy_is_one_line(changes, goal, said):
    overrides = ("released.policy=org/policy@v1", *changes.get("overrides", ()))
    with pytest.raises(UserError, match=said):
        wanted_stages(make_config("tiny", **{**changes, "overrides": overrides}), [goal])


def test_a_released_reward_model_can_be_the_gold_judge_of_any_run(whole, place):
    shutil.copytree(whole.parents[1], place / "runs", copy_function=os.link)
    folder = paper_layout(whole / "normalize/model", place / "paper")
    shutil.copy(whole / "normalize/model/tokenizer.json", folder)
    shutil.copy(whole / "normalize/model/tokenizer_config.json", folder)
    overrides = (*SETTINGS, "judge.kind=reward_model", "judge.model=paper")
    config = make_config("tiny", name="resumed", overrides=overrides)
    results = judge_summaries(config)
    assert results["judge"]["name"] == "gold reward model in folder paper, not an LLM"
    assert "NOT KNOWN" in results["judge"]["note"]
    written = {row["id"]: row for row in read_lines(whole / "summaries/ppo.jsonl")}
    rows = read_lines(stage_folder(config, "judge") / "gold_scores.jsonl")
    for row in (one for one in rows if one["policy"] == "ppo"):  # it is the run's own, converted
        expected = written[row["id"]]["reference_score"]
        assert row["reference_score"] == pytest.approx(expected, abs=1e-4)
