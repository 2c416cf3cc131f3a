"""Model cards have true metadata and code that runs, and no stage reads them."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from eval.summarize import FinishedRun, finished_policies
from stages.__main__ import write_cards
from stages.config import paths
from stages.config.command_line import make_config
from stages.config.recorded import recorded_config
from stages.config.sections import format_post
from stages.config.stages import CARD, STAGES, TRAINING_STAGES
from stages.pipeline import model_cards
from stages.pipeline.model_cards import card
from stages.pipeline.start import call_stage
from stages.runs.manifest import read_manifest
from stages.runs.run import open_stage
from stages.runs.staleness import changed_output, find_problem

TINY = make_config("tiny")
PYTHIA = make_config("pythia-1b")
MANIFEST = {"results": {"loss/validation": 1.25, "rougeL": 0.4321, "other": 7}, "inputs": {}}


def finish(stage, results=MANIFEST["results"], config=TINY):
    """Finish a stage that saves its models, with their cards, as the pipeline does."""

    def work(config):
        with open_stage(config, stage) as run:
            for name in STAGES[stage].models:
                (run.partial / name).mkdir()
                (run.partial / name / "model.safetensors").write_text("weights")
            run.finish(results)
        return run.folder

    folder = call_stage(stage, work, config, "the same command")
    write_cards(config, stage)
    return folder


def metadata(config, stage="ppo"):
    """The metadata of a card, as the hub's client reads them."""
    return ModelCard(card(config, stage, "model", MANIFEST)).data.to_dict()


# -- which models have one -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", TRAINING_STAGES)
def test_every_model_that_a_stage_saves_has_a_card(runs, stage):
    folder = finish(stage)
    assert STAGES[stage].models
    for name in STAGES[stage].models:
        text = (folder / name / CARD).read_text()
        assert ModelCard(text).data.to_dict()["library_name"] == "transformers"
        assert "# tiny, seed 44413: " in text


def test_a_critic_is_loaded_as_a_scorer(runs):
    text = (finish("ppo") / "critic" / CARD).read_text()
    assert "seed 44413: critic of ppo" in text
    assert "AutoModelForTokenClassification" in text


def test_a_base_model_has_no_card(runs):
    assert list(finish("base").rglob(CARD)) == []


def test_a_card_that_cannot_be_written_leaves_the_stage_finished(runs, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_cards, "write_text", fail)
    folder = finish("sft")
    assert read_manifest(folder) is not None
    assert not (folder / "model" / CARD).exists()
    assert "no model card of stage sft: [Errno 28] No space left" in capsys.readouterr().err


# -- what it says ----------------------------------------------------------------------------------


def test_the_metadata_of_a_paper_run():
    data = metadata(PYTHIA)
    assert data["base_model"] == "EleutherAI/pythia-1b-deduped"
    assert data["datasets"] == [
        "vwxyzjn/summarize_from_feedback_tldr_3_filtered",
        "openai/summarize_from_feedback",
    ]
    assert data["pipeline_tag"] == "text-generation"
    assert {"rlhf", "tldr", "ppo"} <= set(data["tags"])


def test_the_metadata_of_a_reward_model_of_built_in_posts():
    data = metadata(TINY, "normalize")
    assert "reward-model" in data["tags"]
    assert not {"base_model", "datasets", "pipeline_tag"} & data.keys()


def test_the_base_model_is_named_without_its_revision():
    base = PYTHIA.base.changed(checkpoint="someone/else@abc")
    assert metadata(PYTHIA.changed(base=base))["base_model"] == "someone/else"


@pytest.mark.parametrize(
    "text",
    [
        "| sft.learning_rate | `3e-06` |",
        "| seed | `44413` |",
        "base `abcdef012345`",
        "| rougeL | 0.4321 |",
    ],
    ids=["setting", "seed", "input", "result"],
)
def test_a_card_has_settings_inputs_and_results(text):
    manifest = MANIFEST | {"inputs": {"base": "abcdef0123456789"}}
    assert text in card(PYTHIA, "sft", "model", manifest)


def test_a_card_names_no_folder_of_this_machine():
    config = PYTHIA.changed(
        data=PYTHIA.data.changed(source="/home/anna/posts"),
        base=PYTHIA.base.changed(checkpoint="/home/anna/base"),
    )
    text = card(config, "sft", "model", MANIFEST)
    assert "The run started from folder base." in text
    assert "Its data: folder posts." in text
    assert "anna" not in text
    assert "datasets" not in ModelCard(text).data.to_dict()


def test_the_accuracy_on_held_out_pairs_is_a_result(runs):
    folder = finish("rm")
    model_cards.write_cards(TINY, "rm", accuracy={"accuracy": 0.625})
    assert "| accuracy | 0.625 |" in (folder / "model" / CARD).read_text()


# -- its code --------------------------------------------------------------------------------------

RUN_ALL = """
import sys
for code in sys.argv[1:]:
    exec(compile(code, "card", "exec"), {"__name__": "__main__"})
"""


def printed_by(text: str, folder: Path) -> list[str]:
    """What the code of a card prints in a folder, without this project and without a network."""
    codes = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    process = subprocess.run(
        [sys.executable, "-I", "-c", RUN_ALL, *codes],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def card_of(stage_folder: Path) -> str:
    """The card of a finished stage's model."""
    config = recorded_config(stage_folder)
    assert config is not None
    return card(config, stage_folder.name, "model", read_manifest(stage_folder) or {})


@pytest.fixture
def run(whole, monkeypatch):
    """The small run, opened as `make summarize` does."""
    monkeypatch.setattr(paths, "RUNS", whole.parents[1])
    return FinishedRun(finished_policies("tiny", "resumed", 44413))


@pytest.mark.parametrize("stage", ["sft", "ppo", "dpo"])
def test_the_code_of_a_policys_card_prints_our_summary(run, whole, stage):
    post = run.post_of_text(format_post(model_cards.POST, run.config.data.prompt))
    summary = run.text(run.summary(stage, post, temperature=1e-6))
    assert summary != ""

    (printed,) = printed_by(card_of(whole / stage), whole / stage / "model")

    assert printed == summary


def test_the_code_of_a_reward_models_card_prints_our_score(run, whole):
    post = run.post_of_text(format_post(model_cards.POST, run.config.data.prompt))
    tokens = [*run.encode([model_cards.SUMMARY])[0], run.tokenizer.eos_token_id]
    (score,) = run.scores(post, [tokens])

    lines = printed_by(card_of(whole / "normalize"), whole / "normalize/model")

    score_as_saved, score_as_sequence_classifier = lines
    assert float(score_as_saved) == pytest.approx(score, abs=1e-5)
    assert float(score_as_sequence_classifier) == pytest.approx(score, abs=1e-5)


def test_the_code_adds_bos_if_the_run_did():
    config = TINY.changed(base=TINY.base.changed(bos="always"))
    code = "tokenizer(tokenizer.bos_token + text, add_special_tokens=False,"
    assert code in card(config, "rm", "model", MANIFEST)


def test_the_code_reads_the_score_where_it_was_trained():
    before_eos = TINY.changed(rm=TINY.rm.changed(read_at="before_eos"))
    text = card(before_eos, "rm", "model", MANIFEST)
    assert 'on monday."\n' in text  # without EOS
    assert "  # read at the last token before EOS\n" in text


# -- no stage reads it -----------------------------------------------------------------------------


def test_a_card_is_no_output_of_its_stage(runs):
    folder = finish("sft")
    manifest = read_manifest(folder) or {}
    assert set(manifest["outputs"]) == {"config.json", "model/model.safetensors"}


def test_a_card_that_was_edited_or_deleted_makes_nothing_stale(runs):
    path = finish("sft") / "model" / CARD
    path.write_text("written by hand")
    assert find_problem(TINY, "sft") is None
    assert changed_output(TINY, "sft") is None
    path.unlink()
    assert changed_output(TINY, "sft") is None


def test_other_results_with_the_same_weights_change_only_the_card(runs):
    before = read_manifest(finish("sft", {"rougeL": 0.4})) or {}
    folder = finish("sft", {"rougeL": 0.1})
    after = read_manifest(folder) or {}
    assert after["content"] == before["content"]
    assert "| rougeL | 0.1 |" in (folder / "model" / CARD).read_text()
