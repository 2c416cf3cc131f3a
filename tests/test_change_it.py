"""The worked changes of `docs/change-it.md` do what it says.

Each test takes the change, the command and what is printed from the document.
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
    """A copy of the project, to be changed."""
    return ProjectCopy(tmp_path / "project")


def without_numbers(text: str) -> list[str]:
    """The lines of a text, with `#` for each number: a smaller run prints others."""
    return [NUMBER.sub("#", line) for line in text.splitlines()]


def test_a_changed_formula_changes_the_advantages_and_prints_the_documented_warning(project, whole):
    project.take_run(whole, "base", "sft", "rm", "normalize")
    (diff,) = code_blocks(FORMULA, "diff")
    project.edit(diff)

    assert make_commands(FORMULA)[0] == ["make", "ppo", "eval", "NAME=my_gae", "UPSTREAM=tiny"]
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
    original = read_lines(whole / "ppo/metrics.jsonl")
    assert changed[0]["objective/scores"] == pytest.approx(original[0]["objective/scores"])
    variances = [rows[0]["val/advantage_variance_critic"] for rows in (changed, original)]
    assert variances[0] < 0.9 * variances[1]


@pytest.mark.walk
def test_an_added_algorithm_is_listed_trained_judged_and_on_the_page(project, whole):
    project.take_run(whole, "base", "sft", "rm", "normalize", "ppo")
    for code in code_blocks(ALGORITHM, "python"):
        project.add(code)
    *_, show_help, train = make_commands(ALGORITHM)

    lines = [line.split() for line in project.make(*show_help[1:]).stdout.splitlines()]
    (documented,) = code_blocks(ALGORITHM, "text")
    assert documented.split() in lines

    assert train == ["make", "raft", "eval"]
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


@pytest.mark.usefixtures("judge_environment")
def test_a_new_prompt_is_asked_and_its_verdicts_are_kept_apart_from_the_old_ones(place):
    summary = {"id": "p0", "query": "the post", "summary": "one", "reference": "two"}
    finish_summaries(make_config("tiny"), ppo=[summary])
    (prompt,) = code_blocks(PROMPT, "markdown")
    (place / "my_prompt.md").write_text(prompt)
    (command,) = make_commands(PROMPT)

    with serving(lambda number, body: chat(GOOD, model="gpt-6-luna")) as server:
        configs = []
        for words in (["eval", "SET=judge.kind=openai"], command[1:]):
            _, variables = read_command(words)
            variables["SET"] += f" judge.base_url={server.url}"
            config = config_of(request_from(variables))
            judge_summaries(config)
            configs.append(config)

    old, new = configs
    folders = [stage_folder(config, "judge") for config in configs]
    assert len(server.requests) == 4  # both orders, with each of the two prompts
    asked = [request["messages"][0]["content"] for request in server.requests]
    question, _, _ = prompt.partition("\n")
    assert [question in text for text in asked] == [False, False, True, True]
    assert all("the post" in text and "one" in text and "two" in text for text in asked[2:])
    assert folders[0] != folders[1]
    assert all(len(read_lines(folder / "judgements.jsonl")) == 2 for folder in folders)
    assert new.judge.label == "gpt-6-luna, prompt my_prompt"
    assert old.name == new.name == "tiny"


def test_a_preset_file_gives_the_documented_settings_and_names_the_run(place):
    (text,) = code_blocks(PRESET, "yaml")
    (place / "my_preset.yaml").write_text(text)
    settings, train = make_commands(PRESET)

    printed = typed(place, *settings[1:])
    planned = typed(place, *train[1:], "DRY=1", OPENAI_API_KEY="none")  # asks nothing

    (documented,) = code_blocks(PRESET, "text")
    assert set(documented.splitlines()) <= set(printed.stdout.splitlines())
    assert "base.checkpoint=EleutherAI/pythia-1b-deduped" in printed.stdout.splitlines()
    lines = planned.stdout.splitlines()
    assert lines[0] == "my_preset seed 44413: would run base (not run yet)"
    assert lines[-1] == "my_preset seed 44413: would run report (not run yet)"


def test_an_added_plot_is_on_the_page_with_its_caption(project, monkeypatch):
    (code,) = code_blocks(PLOT, "python")
    project.add(code)
    for diff in code_blocks(PLOT, "diff"):
        project.edit(diff)
    monkeypatch.setattr("stages.config.paths.RUNS", project.folder / "runs")
    config = make_config("tiny")
    fabricate(config)
    (command,) = make_commands(PLOT)

    project.make(*command[1:])

    folder = project.folder / "runs/tiny/seed44413/report/facts"
    page = (folder / "tiny-seed44413.md").read_text(encoding="utf-8")
    caption = "The score of each PPO update over its KL from SFT."
    assert caption in PLOT
    assert f"*{caption}*" in page
    assert "tiny-seed44413-score-over-kl.svg" in page
    assert "<svg" in (folder / "tiny-seed44413-score-over-kl.svg").read_text(encoding="utf-8")
