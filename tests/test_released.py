"""Released checkpoints: judged without training, and reward models of the paper's layout."""

import copy
import json
import math
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
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.models.foreign import load_released_reward_model
from stages.models.forward import ResponseBatch, score_responses
from stages.models.loading import load_reward_model
from stages.models.weights import read_weights
from stages.pipeline.plan import wanted_stages
from stages.runs.files import read_lines
from stages.runs.manifest import stage_folder
from tests.lib.asserts import refusal_of
from tests.lib.families import GROUPED, WIDTH, edit_json
from tests.lib.make_stages import run_module
from tests.lib.resuming import ARGUMENTS, SETTINGS

ROOT = Path(__file__).parents[1]
MEAN = 1.75
WORLD_SETTINGS = [setting for setting in SETTINGS if setting.startswith(("world.", "memory."))]


def save_in_paper_layout(ours: Path, folder: Path, kind: str = "safetensors") -> Path:
    """Save a reward model of ours as the paper's code does; return the folder.

    There is a backbone, a scalar head, and the mean in the configuration. Scores do not change.
    """
    model = AutoModelForTokenClassification.from_pretrained(ours, dtype=torch.float32)
    weights = {}
    for name, weight in model.gpt_neox.state_dict().items():
        weights[f"lm_backbone.{name}"] = weight.clone()
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
    backbone = json.loads((ours / "config.json").read_text())
    backbone["architectures"] = ["GPTNeoXForCausalLM"]
    edit_json(
        folder / "config.json",
        architectures=["ScalarModel"],
        base_config=backbone,
        base_model="models/sft",
        bias=MEAN,
        hidden_size=backbone["hidden_size"],
    )
    return folder


class PaperModel(nn.Module):
    """The paper's forward pass, written from its description: details 11, 12 and 15."""

    def __init__(self, folder: Path, backbone_config: Any) -> None:
        super().__init__()
        weights = read_weights(folder).tensors
        self.lm_backbone = GPTNeoXModel(backbone_config).eval()
        self.scalar_head = nn.Linear(backbone_config.hidden_size, 1)
        assert not self.load_state_dict(weights, strict=False).missing_keys
        self.bias = json.loads((folder / "config.json").read_text())["bias"]

    @torch.no_grad()
    def score(self, tokens: list[int]) -> float:
        output = self.lm_backbone(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        return (self.scalar_head(output.hidden_states[-1]) - self.bias)[0, -1, 0].item()


QUERIES = torch.tensor([[5, 6, 7, 8], [9, 5, 3, 2]])
RESPONSES = torch.tensor([[11, 12, 0], [11, 12, 0]])


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_converted_reward_model_scores_as_the_papers_forward_pass(whole, tmp_path, kind):
    ours = whole / "normalize/model"
    folder = save_in_paper_layout(ours, tmp_path / "paper", kind)
    batch = ResponseBatch(queries=QUERIES, responses=RESPONSES, pad_id=-1)

    converted, mean = load_released_reward_model(folder)
    scores = score_responses(converted, batch)

    assert mean == MEAN
    theirs = PaperModel(folder, AutoModelForTokenClassification.from_pretrained(ours).config)
    expected = [theirs.score(tokens) for tokens in torch.cat([QUERIES, RESPONSES], dim=1).tolist()]
    assert expected[0] != expected[1]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_converted_reward_model_stays_the_same_when_saved(whole, tmp_path):
    folder = save_in_paper_layout(whole / "normalize/model", tmp_path / "paper")
    converted, _ = load_released_reward_model(folder)

    converted.save_pretrained(tmp_path / "saved")
    reloaded = load_reward_model(tmp_path / "saved").eval()

    for weight, expected in zip(reloaded.parameters(), converted.parameters(), strict=True):
        assert torch.equal(weight, expected)


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
    config.num_labels = 1
    config.pad_token_id = 39
    torch.manual_seed(3)
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    theirs.eval()
    queries = torch.tensor([[39, 6, 7, 8], [9, 5, 3, 2]])  # the first one is padded
    batch = ResponseBatch(queries=queries, responses=RESPONSES, pad_id=39)

    model, mean = load_released_reward_model(tmp_path)
    scores = score_responses(model, batch)

    assert mean == 0.0
    unpadded = ([6, 7, 8, 11, 12, 0], [9, 5, 3, 2, 11, 12, 0])
    for score, tokens in zip(scores, unpadded, strict=True):
        expected = theirs(torch.tensor([tokens])).logits[0, 0]
        assert score.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_sequence_classifier_is_in_our_layout_when_saved(family, tmp_path):
    config = copy.deepcopy(FAMILIES[family])
    config.num_labels = 1
    config.pad_token_id = 39
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "theirs")
    model, _ = load_released_reward_model(tmp_path / "theirs")
    batch = ResponseBatch(queries=QUERIES, responses=RESPONSES, pad_id=39)
    scores = score_responses(model, batch)

    model.save_pretrained(tmp_path / "ours")
    again, mean = load_released_reward_model(tmp_path / "ours")

    assert mean is None
    # Where weights lie in memory changes rounding.
    assert torch.allclose(score_responses(again, batch), scores, atol=1e-6)


def test_a_backbone_with_a_value_head_and_a_normalization_gives_its_own_scores(tmp_path):
    """OpenRLHF's layout: a head of any name without a bias; mean and std in the configuration."""
    torch.manual_seed(4)
    theirs = AutoModel.from_config(FAMILIES["llama"]).eval()
    head = torch.randn(1, 32)
    weights = {f"model.{name}": weight.clone() for name, weight in theirs.state_dict().items()}
    weights["value_head.weight"] = head
    save_file(weights, tmp_path / "model.safetensors")
    config = FAMILIES["llama"].to_dict()
    config["architectures"] = ["RewardModel"]
    config["normalize_reward"] = True
    config["mean"] = 0.75
    config["std"] = 2.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    query = [9, 5, 3, 2]
    response = [11, 12, 0]
    batch = ResponseBatch(
        queries=torch.tensor([query]), responses=torch.tensor([response]), pad_id=39
    )

    model, mean = load_released_reward_model(tmp_path)
    score = score_responses(model, batch)

    assert mean == 0.75
    hidden_states = theirs(torch.tensor([query + response])).last_hidden_state
    raw_score = (hidden_states[0, -1] * head).sum()
    assert score.item() == pytest.approx((raw_score.item() - 0.75) / 2.0, abs=1e-5)


def test_a_reward_model_of_ours_loads_unchanged(whole):
    ours, mean = load_released_reward_model(whole / "normalize/model")
    assert mean is None
    assert ours.config.num_labels == 1


# -- what is refused -------------------------------------------------------------------------------

NORM = "lm_backbone.final_layer_norm.weight"
HEAD = "scalar_head.weight"


@pytest.fixture
def paper(whole, tmp_path):
    """A reward model in the paper's layout that a test can change."""
    return save_in_paper_layout(whole / "normalize/model", tmp_path / "paper")


def refusal_of_weights(folder: Path, **changes: torch.Tensor | None) -> str:
    """The error for a folder in which some weights are changed, or left out if they are None."""
    weights = {name: weight.clone() for name, weight in read_weights(folder).tensors.items()}
    for name, weight in changes.items():
        if weight is None:
            del weights[name]
        else:
            weights[name] = weight
    save_file(weights, folder / "model.safetensors")
    return refusal_of(load_released_reward_model, folder)


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert "config.json is missing" in refusal_of(load_released_reward_model, tmp_path)


def test_a_policy_is_no_reward_model(whole):
    line = refusal_of(load_released_reward_model, whole / "sft/model")
    assert "is not a reward model: it has 0 heads" in line


def test_a_folder_without_weights_is_refused(paper):
    (paper / "model.safetensors").unlink()
    assert "has no weights" in refusal_of(load_released_reward_model, paper)


def test_a_missing_weight_is_refused(paper):
    line = refusal_of_weights(paper, **{NORM: None, "scalar_head.bias": None})
    assert "lacks 1 weights (gpt_neox.final_layer_norm.weight)" in line


def test_an_unexpected_weight_is_refused(paper):
    line = refusal_of_weights(paper, **{"lm_backbone.more": torch.ones(1)})  # of no layer
    assert "has unexpected 1 weights (gpt_neox.more)" in line


def test_a_head_of_another_width_is_refused(paper):
    line = refusal_of_weights(paper, **{HEAD: torch.ones(1, 1)})
    assert "it has 0 heads" in line


def test_a_weight_of_another_shape_is_refused(paper):
    line = refusal_of_weights(paper, **{NORM: torch.ones(3)})
    assert "the shapes of its weights differ from its configuration" in line


def test_a_weight_that_is_not_finite_is_refused(paper):
    norm = read_weights(paper).tensors[NORM]
    assert "not finite" in refusal_of_weights(paper, **{NORM: norm * torch.nan})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"bias": math.nan}, "bias must be a number, not nan"),
        ({"bias": "high"}, "bias must be a number, not 'high'"),
        ({"normalize_reward": True, "mean": True}, "mean must be a number, not True"),
        ({"normalize_reward": True, "std": math.inf}, "std must be a number, not inf"),
    ],
    ids=["bias NaN", "bias text", "mean boolean", "std infinite"],
)
def test_a_normalization_that_is_no_number_is_refused(paper, fields, expected):
    edit_json(paper / "config.json", **fields)
    assert expected in refusal_of(load_released_reward_model, paper)


# -- in a run --------------------------------------------------------------------------------------


def test_a_released_reward_model_takes_the_place_of_training_one(attempt, whole, paper):
    run = attempt("rm").parent

    for stage in (rm, normalize, ppo):
        run_module(stage, [*ARGUMENTS, f"released.reward_model={paper}"])

    used = load_reward_model(run / "rm/model")
    released = load_reward_model(whole / "normalize/model")
    for weight, expected in zip(used.parameters(), released.parameters(), strict=True):
        assert torch.allclose(weight, expected, atol=1e-6)


def test_a_reward_model_with_another_tokenizer_is_refused(attempt, whole, paper, capsys):
    attempt("rm")
    tokenizer = json.loads((whole / "sft/model/tokenizer.json").read_text())
    tokenizer["model"]["merges"].clear()
    (paper / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(whole / "sft/model/tokenizer_config.json", paper)

    with pytest.raises(SystemExit):
        run_module(rm, [*ARGUMENTS, f"released.reward_model={paper}"])

    assert "has a different tokenizer than random" in capsys.readouterr().err


def make_eval(folder: Path) -> str:
    """Judge the released policy of a folder with `make eval`, as people type it; what it prints."""
    settings = [*WORLD_SETTINGS, "eval.posts=6", "checks.control_posts=3"]
    variables = ["POLICY=policy", "REWARD_MODEL=reward", f"SET={' '.join(settings)}"]
    command = ["make", "--no-print-directory", "VENV=", f"PYTHON={sys.executable}", "eval"]
    done = subprocess.run(
        [*command, *variables],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def judged(whole, tmp_path_factory):
    """A folder in which `make eval POLICY=... REWARD_MODEL=...` has judged a released policy."""
    folder = tmp_path_factory.mktemp("released")
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copytree(whole / "sft/model", folder / "policy")
    save_in_paper_layout(whole / "normalize/model", folder / "reward")
    make_eval(folder)
    return folder


@pytest.mark.walk
def test_make_eval_policy_runs_the_stages_from_base_to_report(judged):
    run = judged / "runs/released-policy/seed44413"
    stages = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert stages == {
        "base",
        "released",
        "summaries",
        "judge",
        "controls",
        "win_rate",
        "report",
    }


@pytest.mark.walk
def test_the_summaries_of_a_released_policy_are_scored_by_the_released_reward_model(judged):
    folder = judged / "runs/released-policy/seed44413/summaries"
    assert [path.stem for path in folder.glob("*.jsonl")] == ["released"]
    rows = read_lines(folder / "released.jsonl")
    assert len(rows) == 6

    backbone_config = AutoModelForTokenClassification.from_pretrained(judged / "policy").config
    reward_model = PaperModel(judged / "reward", backbone_config)
    tokenizer = AutoTokenizer.from_pretrained(judged / "policy")
    text = f"{rows[0]['query']} {rows[0]['reference']}"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    expected = reward_model.score([*tokens, tokenizer.eos_token_id])
    assert rows[0]["reference_score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.walk
def test_the_page_names_the_released_policy_in_words(judged):
    (page,) = (judged / "runs/released-policy/seed44413/report").glob("*/*.md")

    assert "| Released policy |" in page.read_text(encoding="utf-8")


@pytest.mark.walk
def test_the_same_make_eval_policy_has_nothing_to_do(judged):
    assert "nothing to do" in make_eval(judged)


def released_policy(*overrides: str, **options: Any) -> Any:
    """The config of a run that judges a released policy."""
    policy = "released.policy=org/policy@v1"
    return make_config("tiny", overrides=(policy, *overrides), **options)


def test_a_released_policy_is_not_trained():
    with pytest.raises(UserError, match="ppo trains, but POLICY= is judged without training"):
        wanted_stages(released_policy(), ["ppo"])


def test_a_released_policy_has_no_upstream():
    with pytest.raises(UserError, match="leave out UPSTREAM="):
        wanted_stages(released_policy(upstream="tiny"), ["eval"])


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("sft.epochs=3", r"sft\.\* has no effect"),
        ("rloo.kl_coef=0.1", r"rloo\.\* has no effect"),
        ("optimizer.adam_beta1=0.8", r"optimizer\.\* has no effect"),
        ("normalize.posts=9", r"normalize\.\* has no effect"),
        ("judge.kind=reward_model", "needs a reward model"),
    ],
)
def test_settings_that_make_no_sense_with_a_released_policy_are_refused(override, error):
    with pytest.raises(UserError, match=error):
        wanted_stages(released_policy(override), ["eval"])


def test_a_released_policy_takes_a_tokenizer_whatever_the_preset():
    config = released_policy("judge.kind=facts", tokenizer="org/tokenizer")
    assert config.base.checkpoint == "org/policy@v1"
    assert config.base.tokenizer == "org/tokenizer"


def test_a_tokenizer_for_existing_summaries_is_refused():
    with pytest.raises(UserError, match=r"base\.\* has no effect: INPUT= is judged without"):
        make_config("tiny", tokenizer="org/tokenizer", overrides=("outputs.file=x",))


def test_a_released_reward_model_can_be_the_gold_judge_of_any_run(whole, place):
    shutil.copytree(whole.parents[1], place / "runs", copy_function=os.link)
    folder = save_in_paper_layout(whole / "normalize/model", place / "paper")
    shutil.copy(whole / "normalize/model/tokenizer.json", folder)
    shutil.copy(whole / "normalize/model/tokenizer_config.json", folder)
    overrides = (*SETTINGS, "judge.kind=reward_model", "judge.model=paper")
    config = make_config("tiny", name="resumed", overrides=overrides)

    results = judge_summaries(config)

    assert results["judge"]["name"] == "gold reward model in folder paper, not an LLM"
    assert "NOT KNOWN" in results["judge"]["note"]
    # The gold model is the run's own reward model, converted, so its scores are those of the run.
    summaries = {row["id"]: row for row in read_lines(whole / "summaries/ppo.jsonl")}
    for row in read_lines(stage_folder(config, "judge") / "gold_scores.jsonl"):
        if row["policy"] == "ppo":
            expected = summaries[row["id"]]["reference_score"]
            assert row["reference_score"] == pytest.approx(expected, abs=1e-4)
