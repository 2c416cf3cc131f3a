"""The worked changes of `docs/change-it.md` do what it says.

Each test takes the change, the command and the expected output from the document.
"""

import re

import pytest

from eval.judge import judge_summaries
from stages.config.command_line import config_of, make_config
from stages.pipeline.variables import read_command, request_from
from stages.runs.files import read_json, read_lines
from stages.runs.manifest import stage_folder
from tests.lib.chat_server import GOOD, chat, serving
from tests.lib.documents import code_blocks, make_commands, section
from tests.lib.fabricated_runs import fabricate, finish_summaries
from tests.lib.pipeline import typed
from tests.lib.project_copy import ProjectCopy
from tests.lib.resuming import SETTINGS

DOCUMENT = "docs/change-it.md"
FORMULA = section(DOCUMENT, "A formula")
ALGORITHM = section(DOCUMENT, "An algorithm")
PROMPT = section(DOCUMENT, "The judge's prompt")
PRESET = section(DOCUMENT, "A preset")
PLOT = section(DOCUMENT, "A plot or a sentence on a page")
NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")


@pytest.fixture
def project(tmp_path):
    """A copy of the project that a test can change."""
    return ProjectCopy(tmp_path / "project")


def without_numbers(text: str) -> list[str]:
    """The lines of a text, with `#` for each number, because a smaller run prints other numbers."""
    return [NUMBER.sub("#", line) for line in text.splitlines()]


def test_a_changed_formula_changes_the_advantages_and_prints_the_documented_warning(project, whole):
    project.take_run(whole, "base", "sft", "rm", "normalize")
    (diff,) = code_blocks(FORMULA, "diff")
    project.edit(diff)
    documented_command = make_commands(FORMULA)[0]
    assert documented_command.words == ["ppo", "eval", "NAME=my_gae", "UPSTREAM=tiny"]
    settings = [word for word in SETTINGS if word.startswith(("ppo.", "memory."))]
    settings.remove("ppo.total_episodes=96")
    settings.append("ppo.total_episodes=48")

    done = project.make("ppo", "NAME=my_gae", "UPSTREAM=resumed", f"SET={' '.join(settings)}")

    (documented,) = code_blocks(FORMULA, "text")
    assert without_numbers(done.stderr)[:2] == without_numbers(documented)
    assert done.stderr.count("warning") == 1
    changed = read_lines(project.folder / "runs/my_gae/seed44413/ppo/metrics.jsonl")
    assert [row["step"] for row in changed] == [1, 2, 3]
    # In the first update PPO has the same responses, scores and values, but other advantages.
    first = changed[0]
    original_first = read_lines(whole / "ppo/metrics.jsonl")[0]
    assert first["objective/scores"] == pytest.approx(original_first["objective/scores"])
    variance = first["val/advantage_variance_critic"]
    assert variance < 0.9 * original_first["val/advantage_variance_critic"]


def test_an_added_algorithm_is_in_the_help(project):
    for code in code_blocks(ALGORITHM, "python"):
        project.add(code)
    *_, help_command, _ = make_commands(ALGORITHM)

    done = project.make(*help_command.words)

    (documented,) = code_blocks(ALGORITHM, "text")
    assert documented.split() in [line.split() for line in done.stdout.splitlines()]


@pytest.mark.walk
def test_an_added_algorithm_is_trained_judged_and_on_the_page(project, whole):
    project.take_run(whole, "base", "sft", "rm", "normalize", "ppo")
    for code in code_blocks(ALGORITHM, "python"):
        project.add(code)
    *_, train_command = make_commands(ALGORITHM)
    assert train_command.words == ["raft", "eval"]
    settings = [
        *SETTINGS,
        "raft.total_episodes=32",
        "raft.batch_size=16",
        "raft.learning_rate=1e-3",
        "eval.posts=8",
        "checks.control_posts=4",
    ]

    done = project.make("raft", "eval", "NAME=resumed", f"SET={' '.join(settings)}")

    assert "warning" not in done.stderr
    folder = project.folder / "runs/resumed/seed44413"
    metrics = read_lines(folder / "raft/metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert metrics[1]["objective/kl"] != 0
    results = read_json(folder / "win_rate/facts/manifest.json")["results"]
    assert results["policies"]["raft"]["posts"] == 8
    (page,) = (folder / "report/facts").glob("resumed-*.md")
    assert "RAFT" in page.read_text(encoding="utf-8")


def judge_by_command(words, server):
    """Judge the summaries as a `make` command says, by this server; return the config."""
    _, variables = read_command(words)
    variables["SET"] += f" judge.base_url={server.url}"
    config = config_of(request_from(variables))
    judge_summaries(config)
    return config


@pytest.mark.usefixtures("judge_environment")
def test_a_new_prompt_is_asked_and_its_verdicts_are_kept_apart_from_the_old_ones(place):
    summary = {"id": "p0", "query": "the post", "summary": "one", "reference": "two"}
    finish_summaries(make_config("tiny"), ppo=[summary])
    (prompt,) = code_blocks(PROMPT, "markdown")
    (place / "my_prompt.md").write_text(prompt)
    (command,) = make_commands(PROMPT)

    with serving(lambda number, body: chat(GOOD, model="gpt-6-luna")) as server:
        old = judge_by_command(["eval", "SET=judge.kind=openai"], server)
        new = judge_by_command(command.words, server)

    # Each prompt was asked in both orders.
    questions = [request["messages"][0]["content"] for request in server.requests]
    first_line, _, _ = prompt.partition("\n")
    assert [first_line in question for question in questions] == [False, False, True, True]
    for question in questions[2:]:
        for text in ("the post", "one", "two"):
            assert text in question

    assert stage_folder(old, "judge") != stage_folder(new, "judge")
    for config in (old, new):
        assert len(read_lines(stage_folder(config, "judge") / "judgements.jsonl")) == 2
        assert config.name == "tiny"
    assert new.judge.label == "gpt-6-luna, prompt my_prompt"


def test_a_preset_file_gives_the_documented_settings_and_names_the_run(place):
    (text,) = code_blocks(PRESET, "yaml")
    (place / "my_preset.yaml").write_text(text)
    settings_command, train_command = make_commands(PRESET)

    settings = typed(place, *settings_command.words).stdout.splitlines()
    plan = typed(place, *train_command.words, "DRY=1", OPENAI_API_KEY="none").stdout.splitlines()

    (documented,) = code_blocks(PRESET, "text")
    assert set(documented.splitlines()) <= set(settings)
    assert "base.checkpoint=EleutherAI/pythia-1b-deduped" in settings
    assert plan[0] == "my_preset seed 44413: would run base (not run yet)"
    assert plan[-1] == "my_preset seed 44413: would run report (not run yet)"


def test_an_added_plot_is_on_the_page_with_its_caption(project, monkeypatch):
    (code,) = code_blocks(PLOT, "python")
    project.add(code)
    for diff in code_blocks(PLOT, "diff"):
        project.edit(diff)
    monkeypatch.setattr("stages.config.paths.RUNS", project.folder / "runs")
    config = make_config("tiny")
    fabricate(config)
    (command,) = make_commands(PLOT)

    project.make(*command.words)

    folder = project.folder / "runs/tiny/seed44413/report/facts"
    page = (folder / "tiny-seed44413.md").read_text(encoding="utf-8")
    caption = "The score of each PPO update over its KL from SFT."
    assert caption in PLOT
    assert f"*{caption}*" in page
    assert "tiny-seed44413-score-over-kl.svg" in page
    assert "<svg" in (folder / "tiny-seed44413-score-over-kl.svg").read_text(encoding="utf-8")
