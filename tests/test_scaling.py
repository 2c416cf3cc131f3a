"""Sizes and seeds side by side: the means, the spreads, the verdict, and what is left out."""

from dataclasses import replace

import pytest

from reports import scaling_page
from reports.parts import page
from reports.parts.collect import find_all
from reports.parts.run_report import stem_about, where
from reports.scaling import answers, details
from reports.scaling.measures import UNKNOWN, Pooled, frame_of, size_verdicts
from stages.config.command_line import make_config
from stages.runs.manifest import stage_folder
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import fabricate, two_judges


def four_runs(**changes):
    """Two sizes with two seeds each; `changes` go to the larger one's config."""
    for preset, size, rates in (("tiny-s", 10**5, (0.3, 0.4)), ("tiny", 10**6, (0.6, 0.64))):
        for seed, ppo in zip((1, 2), rates, strict=True):
            config = make_config(preset, seed=seed)
            if preset == "tiny":
                config = config.changed(**changes)
            fabricate(config, ppo=ppo, sft=0.25, accuracy=ppo + 0.2, size=size)
    return find_all(["tiny", "tiny-s"])


def test_the_mean_over_seeds_is_the_mean(runs):
    frame = frame_of(four_runs()[0])
    frame.loc[frame["name"].eq("tiny") & frame["seed"].eq(1), "ppo/controlled"] = None
    table = details.measured_table(frame)
    found = {row[0]: row[1:] for row in table.texts}
    assert list(table.header) == ["", "tiny-s, 100K", "tiny, 1M"]
    assert found["PPO: win rate"] == ["35.0% (30.0 to 40.0)", "62.0% (60.0 to 64.0)"]
    assert found["PPO - SFT"][1] == "+37.0 points (+35.0 to +39.0)"
    assert found["PPO: at equal length"][1].endswith(" 1 of 2 seeds")


def test_seeds_and_posts_spread_apart(runs):
    records, _ = four_runs()
    table = details.spreads_table(frame_of(records))
    found = {(row[0], row[1]): row[2:] for row in table.texts}
    # Seeds of 30 and 40%: mean 35, deviation 7.07, t(1) = 12.706: 35 -+ 63.5, within 0 and 1.
    assert found["tiny-s", "PPO"] == ["2", "35.0%", "[0.0, 98.5]", "7.1", "3.0"]
    assert found["tiny", "PPO"][1:3] == ["62.0%", "[36.6, 87.4]"]
    assert found["tiny", "SFT"][1:3] == ["25.0%", "–"]  # both seeds give one number


def test_a_size_with_a_rate_that_may_not_be_given_is_not_compared(runs):
    four_runs()
    fabricate(make_config("tiny", seed=3), unjudged=0.05, size=10**6)
    records, _ = find_all(["tiny", "tiny-s"])
    frame = frame_of(records)
    assert details.growth_table(frame).texts[0][2:5] == ["–", "1 of 1", "–"]
    text = page.to_markdown("x", "x", scaling_page.blocks(records))
    assert "tiny seed 3: PPO: 5.0% of the posts have no verdict" in text
    assert "nan" not in text.lower().replace("nanc", "")
    (size,) = size_verdicts(frame[frame["name"].eq("tiny")])
    assert (size.verdict, size.seeds) == (UNKNOWN, 2)
    assert answers.answers_table([size]).rows[0][-1] == "0 of 2"
    frame["ppo/extrapolated"] = 1.0
    both = size_verdicts(frame)
    assert answers.answer(both).endswith(" (EXTRAPOLATED at tiny-s (100K) and tiny (1M)).")
    assert answers.answer(both[1:]).endswith(" EXTRAPOLATED.")


def test_the_answer_has_the_verdict_of_each_size(runs):
    small, large = size_verdicts(frame_of(four_runs()[0]))
    assert (small.verdict, large.verdict) == (UNKNOWN, UNKNOWN)  # two seeds have a wide interval
    surely = replace(large, win_rate=Pooled(estimate=0.6, low=0.55, high=0.65, seeds=2))
    where = "PPO is inconclusive at tiny-s (100K). At equal length it is inconclusive at"
    assert answers.answer([small, surely]).startswith(where)
    assert answers.answer([small]).startswith("PPO wins 35.0% [")
    assert [answers.title(x) for x in ([small], [small, large], [surely, small])] == [
        "tiny-s: PPO is inconclusive against the references, winning 35.0% of posts, over 2 seeds",
        "PPO is not shown to beat the references at any of 2 sizes",
        "PPO beats the references at 1 of 2 sizes, the smallest 1M",
    ]


def test_a_seed_without_an_optional_stage_is_compared_in_what_both_have(runs):
    records, _ = four_runs()
    first, *others = records
    dpo = {"dpo": {"beta": 0.05}}
    records = [replace(first, settings=first.settings | dpo), *others]
    assert details.alike(records, frame_of(records)) == []
    records[1] = replace(others[0], settings=others[0].settings | {"dpo": {"beta": 0.1}})
    said = "The sizes are NOT alike: dpo.beta differs (0.05 / 0.1)."
    assert details.alike(records, frame_of(records)) == [said]


def test_sizes_that_differ_in_a_setting_are_flagged(runs):
    ppo = make_config("tiny").ppo.changed(kl_coef=0.1)
    memory = make_config("tiny").memory.changed(cpu_threads=1, microbatch_size=3)
    records, _ = four_runs(ppo=ppo, memory=memory)
    notes = details.alike(records, frame_of(records))
    for differs in ("ppo.kl_coef differs (0.05 / 0.1)", "memory.cpu_threads differs (1 / 2)"):
        assert any(differs in note for note in notes)
    assert len(notes) == 2
    assert "memory.cpu_threads: 1 / 2" in where(records)


def test_growth_is_a_rise_at_each_step_beyond_the_ranges_of_both_ends(runs):
    frame = frame_of(four_runs()[0])
    ppo, sft, *_ = details.growth_table(frame).texts
    # Seeds of 30 and 40%, 60 and 64%, with 3 points on both sides.
    assert ppo[1:5] == ["35.0% [27.0, 43.0]", "62.0% [57.0, 67.0]", "1 of 1", "apart"]
    assert sft[3:] == ["0 of 1", "overlap", "–", "–"]  # two sizes carry no line


def test_five_sizes_and_three_seeds_have_fits(runs):
    names = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
    for step, name in enumerate(names):
        for seed in (1, 2, 3):
            rates = {"ppo": 0.3 + step / 10, "sft": 0.25, "accuracy": 0.6 + step / 25}
            fabricate(make_config(name, seed=seed), size=10 ** (5 + step), **rates)
    scaling_page.main(["--names", *names])
    markdown = (page.beside_the_runs() / "scaling-ladder.md").read_text()
    assert " | 4 of 4 | apart | +10.0 points [+10.0, +10.0] | 1.00 |" in markdown
    assert markdown.startswith("# PPO beats the references from 100M parameters on, at 2 of 5")


def test_an_unfinished_seed_is_left_out_and_named(runs, capsys):
    four_runs()
    (stage_folder(make_config("tiny", seed=2), "judge") / "manifest.json").unlink()
    scaling_page.main(["--names", "tiny-s", "tiny"])
    html = (page.beside_the_runs() / "scaling-tiny-s-tiny.html").read_text()
    assert "tiny seed2 is left out: stage judge is missing" in html
    assert "One seed only: tiny." in html
    *printed, path = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    assert path == str(page.beside_the_runs() / "scaling-tiny-s-tiny.html")


@pytest.mark.parametrize(
    ("names", "study"),
    [
        ("tiny-xs tiny-s tiny tiny-l tiny-xl", ["ladder"]),
        ("tiny-hot tiny-xl-hot tiny-s-hot tiny-l-hot tiny-xs-hot", ["ladder-hot"]),
        ("tiny-xs tiny-s tiny tiny-l", []),
        ("tiny-xs tiny-s tiny tiny-l tiny-xl-hot", []),
        ("tiny-xs tiny-s tiny tiny-l tiny-xl other", []),
        ("tiny", []),
    ],
)
def test_the_built_in_ladder_is_known_with_the_name_of_its_study(names, study):
    assert scaling_page.ladder_of(names.split()) == study


def test_a_page_is_called_after_its_runs_and_a_long_list_is_cut():
    assert stem_about("scaling", ["tiny"]) == "scaling-tiny"
    assert stem_about("scaling", ["pythia-1b", "pythia-6.9b"]) == "scaling-pythia-1b-pythia-6.9b"
    assert stem_about("compare", ["tiny/1:ppo", "tiny:sft"]) == "compare-tiny-1-ppo-tiny-sft"
    alone = "a-run-with-a-name-that-is-longer-than-any-list"
    assert stem_about("scaling", [alone]) == f"scaling-{alone}"
    lists = (["first-run", *middle, "last-run"] for middle in ("abcdefghijkl", "bcdefghijklm"))
    stems = [stem_about("scaling", names) for names in lists]
    assert stems[0][:-4] == stems[1][:-4] == "scaling-first-run-to-last-run-"
    assert stems[0] != stems[1]


def test_a_page_about_other_runs_is_not_written_over(runs, capsys):
    fabricate(make_config("tiny", name="tiny-s-tiny"))
    four_runs()
    scaling_page.main(["--names", "tiny-s-tiny"])
    before = (page.beside_the_runs() / "scaling-tiny-s-tiny.md").read_text()
    assert refused_by(capsys, scaling_page.main, "--names", "tiny-s", "tiny") == (
        f"error: page scaling-tiny-s-tiny in {page.beside_the_runs()} is about tiny-s-tiny, not"
        " tiny-s, tiny: move it away first"
    )
    assert (page.beside_the_runs() / "scaling-tiny-s-tiny.md").read_text() == before
    scaling_page.main(["--names", "tiny-s-tiny"])


def test_where_two_judges_judged_a_run_one_is_to_be_chosen(runs, capsys):
    _, other = two_judges()
    line = refused_by(capsys, scaling_page.main, "--names", "tiny")
    assert f"was judged by {other.judge.folder}, facts: choose one with JUDGE=" in line
    for judge, rate in (("facts", "63.0%"), (other.judge.folder, "55.0%")):
        scaling_page.main(["--names", "tiny", "--judge", judge])
        text = (page.beside_the_runs() / "scaling-tiny.md").read_text()
        assert [one for one in ("63.0%", "55.0%") if one in text] == [rate]


def test_of_an_unknown_judge_the_nearest_is_named(runs, capsys):
    fabricate(make_config("tiny"))
    line = refused_by(capsys, scaling_page.main, "--names", "tiny", "--judge", "fact")
    assert "unknown judge 'fact': did you mean facts?" in line


def test_every_processor_behind_the_numbers_is_named(runs):
    records, _ = four_runs()
    ppo = records[0].manifests["ppo"]
    newer = ppo | {"processor": {"model": "Xeon", "instructions": "AVX512"}}
    unknown = ppo | {"processor": {}}
    changed = [
        replace(record, manifests=record.manifests | {"ppo": manifest})
        for record, manifest in zip(records, (newer, unknown), strict=False)
    ]
    assert where([*changed, *records[2:]]).startswith(
        "Computed on: CPU, 2 cores / CPU, 2 cores (AMD EPYC, AVX2) / CPU, 2 cores (Xeon, AVX512);"
    )
