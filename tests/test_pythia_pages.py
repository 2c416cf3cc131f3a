"""The page about sizes on fabricated Pythia runs: three sizes, four seeds, two of 1B collapsed."""

from dataclasses import replace

import pytest

from reports import scaling_page
from reports.parts import page
from reports.parts.blocks import Caveats, Figure, Heading, Table, Text
from reports.parts.collect import find_all
from reports.parts.run_report import code_line
from reports.scaling import beside_paper
from reports.scaling.answers import answers_table
from reports.scaling.measures import BEATS, UNKNOWN, frame_of, size_verdicts
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import ONLINE, pythia_study


@pytest.fixture
def records(runs):
    found, left_out = find_all(pythia_study())
    assert (len(found), left_out) == (12, [])
    return found


def test_the_first_screen_says_where_ppo_won_and_which_seeds_collapsed(records):
    lead, answers, figure, below, called, *_ = scaling_page.blocks(records)
    assert isinstance(below, Heading)
    assert isinstance(lead, Text)
    assert isinstance(answers, Table)
    assert isinstance(figure, Figure)
    assert lead.text == (
        "PPO is inconclusive at pythia-1b (1.01B). At equal length the same holds. Caveats: judge"
        " gpt-3.5-turbo-0125; 2 of 12 seeds COLLAPSED."
    )
    assert [row[1] for row in answers.texts] == [UNKNOWN, BEATS, BEATS]
    one_b, two_b, _ = answers.texts
    # Four seeds of 53.9, 22.2, 19.7 and 61.8 %: mean 39.4, s = 21.6, t(3) = 3.18: +- 34 and more.
    assert one_b[2].startswith("39.4% [")
    assert (one_b[4], two_b[4]) == ("2 of 4, 2 COLLAPSED", "0 of 4")
    assert isinstance(called, Caveats)
    assert "pythia-1b seed 44413 COLLAPSED (PPO 19.7%, its own SFT 32.9%)" in called.texts[0]
    assert "Huang et al. 2024, rlhf_scale_plot.pdf (vec)" in figure.caption


def test_equal_length_stands_beside_the_win_rate_with_an_interval(records):
    six_b = size_verdicts(frame_of(records))[2]
    assert six_b.win_rate is not None
    assert six_b.controlled is not None
    assert six_b.win_rate.estimate == pytest.approx(0.76925)
    assert six_b.controlled.estimate == pytest.approx(0.76925 - 0.06)
    assert six_b.controlled.low < six_b.controlled.estimate < six_b.controlled.high


def test_a_seed_without_a_rate_at_equal_length_is_said_where_the_others_mean_stands(records):
    frame = frame_of(records)
    row = frame.index[frame["parameters"] == frame["parameters"].max()][0]
    for end in ("", "_low", "_high"):
        frame.loc[row, f"ppo/controlled{end}"] = float("nan")
    cells = [row[3] for row in answers_table(size_verdicts(frame)).texts]
    assert [cell.endswith(" 3 of 4 seeds") for cell in cells] == [False, False, True]


def test_every_number_of_the_paper_has_a_verdict_with_its_seeds(records):
    rows = beside_paper.rows(records, frame_of(records))
    found = {(one.size, one.key): one for one in rows}
    assert len(found) == 3 * 9
    for size in ("2.8b", "6.9b"):
        one = found[size, "ppo_win_rate"]
        assert (one.verdict, one.why) == (beside_paper.REPRODUCED, "")
        assert sorted(one.own_values) == pytest.approx(sorted(one.paper_values))
    unsure = found["1b", "ppo_win_rate"]
    assert (unsure.verdict, unsure.why) == (
        beside_paper.UNKNOWN,
        "the interval of the difference is too wide",
    )
    assert unsure.paper_values == (0.5389, 0.2224, 0.1973, 0.6179)
    text = page.to_markdown("x", "x", scaling_page.blocks(records))
    assert "72.9%, 71.1%, 70.5%, 74.9%" in text


def test_with_another_judge_win_rates_are_not_comparable_and_the_rest_is(runs):
    records, _ = find_all(pythia_study(judge=ONLINE))
    rows = beside_paper.rows(records, frame_of(records))
    found = {(one.size, one.key): one for one in rows}
    one = found["2.8b", "ppo_win_rate"]
    assert one.verdict == beside_paper.NOT_COMPARABLE
    assert one.why == "judged by gpt-4o-mini, the paper's judge was gpt-3.5-turbo-0125"
    assert found["2.8b", "ppo_tokens"].verdict == beside_paper.REPRODUCED
    captions = [one.caption for one in scaling_page.blocks(records) if isinstance(one, Figure)]
    assert not any("rlhf_scale_plot.pdf" in caption for caption in captions)


def test_other_settings_than_the_papers_are_named_and_not_compared(runs):
    ppo = make_config("pythia-1b").ppo.changed(kl_coef=0.2)
    records, _ = find_all(pythia_study(ppo=ppo))
    rows = beside_paper.rows(records, frame_of(records))
    assert {one.verdict for one in rows} == {beside_paper.NOT_COMPARABLE}
    assert rows[0].why == "other settings than the paper's: ppo.kl_coef"


def test_over_optimised_seeds_are_named_and_three_sizes_have_no_fit(records):
    text = page.to_markdown("x", "x", scaling_page.blocks(records))
    assert (
        "OVER-OPTIMISATION: pythia-1b seed 44413: the proxy rose by 6.30 and the win rate fell, at"
        " a KL of 86.0 nats; pythia-1b seed 66613" in text
    )
    assert "| 2 of 2 | apart | – | – |" in text
    assert "PPO - SFT | +6.7 points (-13.1 to +29.5)" in text


def test_code_versions_are_named_in_one_line(records):
    assert code_line(records) == "All stages were made with one version of the code: 508a0d9."
    versions = ("508a0d9", "1234567-dirty")
    mixed = [
        replace(one, manifests={"ppo": {**one.manifests["ppo"], "code_version": versions[n % 2]}})
        for n, one in enumerate(records)
    ]
    assert code_line(mixed) == (
        "Caveat: the code behind this page is not one committed version (1234567-dirty: ppo;"
        " 508a0d9: ppo); 1 held changes that were not committed."
    )
