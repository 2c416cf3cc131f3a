"""The walkthrough of one post: its numbers obey the equations that it explains."""

import re

import pytest

from stages import base, normalize, ppo, rm, sft
from tests.lib.make_stages import make_stages
from tests.lib.places import ROOT
from tests.lib.walkthrough import follow, table_of

ARGUMENTS = """
    --preset tiny --name small --set base.hidden_size=32 base.num_layers=1 memory.cpu_threads=1
    world.train_posts=96 world.validation_posts=8 world.train_comparisons=64
    world.validation_comparisons=32 ppo.total_episodes=64 ppo.batch_size=32 ppo.critic_updates=1
""".split()
DOCUMENT = (ROOT / "docs/ppo-walkthrough.md").read_text(encoding="utf-8")
ROUNDED = 0.005  # half a unit of the last digit of the document's numbers


def test_the_numbers_of_a_post_obey_the_equations(tmp_path):
    make_stages(tmp_path, (base, sft, rm, normalize, ppo), ARGUMENTS)

    walkthrough = follow(tmp_path / "runs/small/seed44413", "toy1-validation-1")

    rows = walkthrough.rows
    total = sum(row.reward for row in rows)
    penalty = walkthrough.kl_coef * walkthrough.kl
    assert total == pytest.approx(walkthrough.score - penalty, abs=1e-4)
    for row in rows[:-1]:
        assert row.target == pytest.approx(row.value + row.advantage, abs=1e-5)
    assert "Score" in table_of(walkthrough)


def document_rows():
    """The numbers of the document's table: one list for each token."""
    section = DOCUMENT.split("## One post, followed through")[1].split("\n## ")[0]
    rows = []
    for line in section.splitlines():
        if re.match(r"\| [`(]", line):
            _, *numbers = line.strip("| ").split(" | ")
            rows.append([float(number) for number in numbers])
    return rows


def test_the_documents_table_obeys_the_equations_up_to_rounding():
    rows = document_rows()
    assert len(rows) == 17
    score = 2.98
    kl = sum(logprob - ref_logprob for logprob, ref_logprob, *_ in rows)
    assert kl == pytest.approx(1.83, abs=2 * len(rows) * ROUNDED)
    rewards = sum(row[2] for row in rows)
    assert rewards == pytest.approx(score - 0.05 * kl, abs=len(rows) * ROUNDED)
    for _, _, _, value, advantage, target in rows[:-1]:
        assert target == pytest.approx(value + advantage, abs=3 * ROUNDED + 1e-9)
