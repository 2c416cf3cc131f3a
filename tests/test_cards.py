"""Cards of saved models: true, and nobody's input."""

import errno
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from eval.summarize import Finished, finished_policies
from reports.sharing import cards
from reports.sharing.cards import card
from stages.__main__ import write_cards
from stages.config import config as settings
from stages.config.command_line import make_config, recorded_config
from stages.config.sections import format_post
from stages.config.stages import CARD, STAGES, TRAINING_STAGES
from stages.pipeline.start import call_stage
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.run import open_stage
from stages.runs.staleness import changed_output, find_problem

TINY = make_config("tiny")
MADE = {"results": {"loss/validation": 1.25, "rougeL": 0.4321, "other": 7}, "inputs": {}}


def finish(stage, results=MADE["results"], config=TINY):
    """A finished stage that saved its models, as the door leaves it."""

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


def head_of(config, stage="ppo"):
    """The head of a card, as the hub's own client reads it."""
    return ModelCard(card(config, stage, "model", MADE)).data.to_dict()


def test_every_model_that_a_stage_saves_has_a_card(runs):
    for stage in TRAINING_STAGES:
        folder = finish(stage)
        assert STAGES[stage].models
        for name in STAGES[stage].models:
            text = (folder / name / CARD).read_text()
            assert ModelCard(text).data.to_dict()["library_name"] == "transformers"
            assert "# tiny, seed 44413: " in text
    critic = (stage_folder(TINY, "ppo") / "critic" / CARD).read_text()
    assert "seed 44413: critic of ppo" in critic
    assert "AutoModelForTokenClassification" in critic
    assert list(finish("base").rglob(CARD)) == []  # it is somebody else's model, or none yet


def test_the_card_of_a_reward_model_reads_it_where_it_was_trained():
    always = TINY.changed(base=TINY.base.changed(bos="always"))
    said = "tokenizer(tokenizer.bos_token + text, add_special_tokens=False,"
    assert said in card(always, "rm", "model", MADE)
    before = card(TINY.changed(rm=TINY.rm.changed(read_at="before_eos")), "rm", "model", MADE)
    assert 'on monday."\n' in before
    assert "  # read at the last token before EOS\n" in before


RUN_ALL = """
import sys
for code in sys.argv[1:]:
    exec(compile(code, "card", "exec"), {"__name__": "__main__"})
"""


def printed_by_cards(folder: Path, cards: Sequence[str]) -> list[str]:
    """What the code of some cards prints in a folder, without this project and without network."""
    code = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    codes = [block for text in cards for block in code.findall(text)]
    ended = subprocess.run(  # the folder is shared by tests: nothing is written there
        [sys.executable, "-I", "-c", RUN_ALL, *codes],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_the_code_of_a_card_prints_what_our_own_code_writes(whole, monkeypatch):
    monkeypatch.setattr(settings, "RUNS", whole.parents[1])
    run = Finished(finished_policies("tiny", "resumed", 44413))
    post = run.post_of_text(format_post(cards.POST, run.config.data.prompt))
    for stage in ("sft", "ppo", "dpo"):
        (printed,) = printed_by_cards(whole / stage / "model", [card_of(whole, stage)])
        assert printed == run.text(run.summary(stage, post, temperature=1e-6)) != ""
    tokens = [*run.encode([cards.SUMMARY])[0], run.tokenizer.eos_token_id]
    (score,) = run.scores(post, [tokens])
    lines = printed_by_cards(whole / "normalize/model", [card_of(whole, "normalize")])
    # As it is saved, and as a sequence classifier.
    assert [float(line) for line in lines] == pytest.approx([score, score], abs=1e-5)


def card_of(run_folder, stage):
    config = recorded_config(run_folder / stage)
    assert config is not None
    return card(config, stage, "model", read_manifest(run_folder / stage) or {})


def test_a_card_that_cannot_be_written_leaves_the_stage_finished(runs, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cards, "write_text", full)
    folder = finish("sft")
    assert read_manifest(folder) is not None
    assert not (folder / "model" / CARD).exists()
    assert "no model card of stage sft: [Errno 28] No space left" in capsys.readouterr().err


def test_a_card_makes_nothing_stale(runs):
    folder = finish("sft")
    manifest = read_manifest(folder) or {}
    assert set(manifest["outputs"]) == {"config.json", "model/model.safetensors"}
    (folder / "model" / CARD).write_text("written by hand")
    assert find_problem(TINY, "sft") is None
    assert changed_output(TINY, "sft") is None
    (folder / "model" / CARD).unlink()
    assert changed_output(TINY, "sft") is None
    # Other results are another card and, as they come from equal weights, the same content.
    again = read_manifest(finish("sft", {"rougeL": 0.1})) or {}
    assert again["content"] == manifest["content"]
    assert "0.1" in (folder / "model" / CARD).read_text()


def test_the_head_names_base_and_data_as_far_as_they_are_known():
    paper = head_of(make_config("pythia-1b"))
    assert paper["base_model"] == "EleutherAI/pythia-1b-deduped"
    assert paper["datasets"] == [
        "vwxyzjn/summarize_from_feedback_tldr_3_filtered",
        "openai/summarize_from_feedback",
    ]
    assert paper["pipeline_tag"] == "text-generation"
    assert {"rlhf", "tldr", "ppo"} <= set(paper["tags"])
    own = head_of(TINY, "normalize")
    assert "reward-model" in own["tags"]
    assert not {"base_model", "datasets", "pipeline_tag"} & own.keys()
    config = make_config("pythia-1b")
    other = config.changed(base=config.base.changed(checkpoint="someone/else@abc"))
    assert head_of(other)["base_model"] == "someone/else"


def test_a_card_holds_settings_data_and_results_and_no_folder(runs):
    config = make_config("pythia-1b")
    data = config.data.changed(source="/home/anna/posts")
    config = config.changed(data=data, base=config.base.changed(checkpoint="/home/anna/base"))
    text = card(config, "sft", "model", MADE | {"inputs": {"base": "abcdef0123456789"}})
    assert "datasets" not in ModelCard(text).data.to_dict()
    for said in (
        "| sft.learning_rate | `3e-06` |",
        "| seed | `44413` |",
        "base `abcdef012345`",
        "| rougeL | 0.4321 |",
        "The run began with folder base.",
        "Data: folder posts.",
    ):
        assert said in text, said
    assert "anna" not in text
