"""Sizes and seeds side by side: the means, the spreads, the verdict, and what is left out."""

import time
from dataclasses import replace

import pytest

from reports import scaling_page
from reports.parts import collect, page
from reports.parts.run_report import stem_about, where
from reports.scaling import answers, details
from reports.scaling.measures import BEATS, DOES_NOT, UNKNOWN, frame_of, size_verdicts
from stages.finished import stage_folder
from stages.settings.command_line import make_config
from tests.fabricated_runs import fabricate, two_judges


def four_runs(**changes):
    """Two sizes with two seeds each; `changes` go to the larger one's config."""
    for preset, size, rates in (("tiny-s", 10**5, (0.3, 0.4)), ("tiny", 10**6, (0.6, 0.64))):
        for seed, ppo in zip((1, 2), rates, strict=True):
            config = replace(
                make_config(preset, seed=seed), **(changes if preset == "tiny" else {})
            )
            fabricate(config, ppo=ppo, sft=0.25, accuracy=ppo + 0.2, size=size)
    return scaling_page.collect(["tiny", "tiny-s"])


def test_the_mean_over_seeds_is_the_mean(runs):
    records, left_out = four_runs()
    table = details.measured_table(frame_of(records))
    found = {row[0]: row[1:] for row in table.texts}
    assert (list(table.header), left_out) == (["", "tiny-s, 100K", "tiny, 1M"], [])
    assert found["PPO: win rate"] == ["35.0% (30.0 to 40.0)", "62.0% (60.0 to 64.0)"]
    assert found["PPO - SFT"][1] == "+37.0 points (+35.0 to +39.0)"
    text = page.to_markdown("x", "x", scaling_page.blocks(records))
    assert "| 35.0% (30.0 to 40.0) |" in text
    assert "64.0% [61.0, 67.0]" in text


def test_a_mean_of_fewer_seeds_than_its_column_says_of_how_many(runs):
    frame = frame_of(four_runs()[0])
    frame.loc[frame["name"].eq("tiny") & frame["seed"].eq(1), "ppo/controlled"] = None
    found = {row[0]: row[1:] for row in details.measured_table(frame).texts}
    assert found["PPO: at equal length"][1].endswith(" 1 of 2 seeds")
    assert "seeds" not in found["PPO: at equal length"][0] + "".join(found["PPO: win rate"])


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
    fabricate(make_config("tiny", seed=3), unjudged=0.05)
    records, _ = scaling_page.collect(["tiny", "tiny-s"])
    frame = frame_of(records)
    said = details.conclusion(frame, "ppo/win_rate")
    assert "is not compared: a seed of tiny has too many posts without a verdict" in said
    text = page.to_markdown("x", "x", scaling_page.blocks(records))
    assert "tiny seed 3: PPO: 5.0% of the posts have no verdict" in text
    assert "nan" not in text.lower().replace("nanc", "")
    (size,) = size_verdicts(frame[frame["name"].eq("tiny")])
    assert answers.answer([size]).startswith("Over 2 seeds of tiny PPO is inconclusive against")
    assert answers.answers_table([size]).rows[0][-1] == "none of 2 fell behind"
    frame["ppo/extrapolated"] = 1.0
    both = size_verdicts(frame)
    assert answers.answer(both).endswith(" (EXTRAPOLATED at tiny-s (100K) and tiny (1M)).")
    assert answers.answer(both[1:]).endswith(" EXTRAPOLATED.")
    (lacking,) = size_verdicts(frame[frame["seed"].eq(3)])
    said = "No seed of tiny has a win rate: too many posts have no verdict."
    assert answers.answer([lacking]) == said


def test_a_verdict_names_the_references_also_where_no_size_beats_them(runs):
    sizes = size_verdicts(frame_of(four_runs()[0]))
    worse = [replace(size, verdict=DOES_NOT) for size in sizes]
    where = "the references at tiny-s (100K) and tiny (1M)."
    assert answers.answer(worse).startswith(f"PPO does NOT beat {where}")
    assert "PPO does not beat the references: " in answers.answer(worse[:1])
    open_ = [replace(size, verdict=UNKNOWN) for size in sizes]
    assert answers.answer(open_).startswith(f"PPO is inconclusive against {where}")
    beaten = [worse[0], replace(sizes[1], verdict=BEATS)]
    assert "at tiny (1M), does NOT beat them at tiny-s (100K)." in answers.answer(beaten)


def test_a_seed_without_an_optional_stage_is_compared_in_what_both_have(runs):
    records, _ = four_runs()
    first, *others = records
    dpo = {"dpo": {"beta": 0.05}}
    records = [replace(first, settings=first.settings | dpo), *others]
    assert collect.differing_settings(records, scaling_page.FREE) == {}
    records[1] = replace(others[0], settings=others[0].settings | {"dpo": {"beta": 0.1}})
    assert collect.differing_settings(records, scaling_page.FREE) == {"dpo.beta": ["0.05", "0.1"]}


def test_a_setting_that_only_a_newer_run_has_is_a_difference_in_either_order(runs):
    older, newer = four_runs()[0][:2]
    newer = replace(newer, settings=older.settings | {"rm": {**older.settings["rm"], "new": 1}})
    for records in ([older, newer], [newer, older]):
        assert list(collect.differing_settings(records, scaling_page.FREE)) == ["rm.new"]


def test_what_the_frozen_networks_are_held_in_is_a_difference(runs):
    records, _ = four_runs()
    held = [
        replace(x, settings=x.settings | {"memory": dict(x.settings["memory"])}) for x in records
    ]
    held[0].settings["memory"]["frozen_dtype"] = "bf16"
    assert list(collect.differing_settings(held, scaling_page.FREE)) == ["memory.frozen_dtype"]


def test_sizes_that_differ_in_the_model_only_are_found_alike(runs):
    records, _ = four_runs()
    assert not any("NOT alike" in note for note in scaling_page.alike(records, frame_of(records)))
    assert "nothing but the base model" in page.to_markdown("x", "x", scaling_page.blocks(records))


def test_a_setting_that_differs_between_sizes_is_flagged(runs):
    tiny = make_config("tiny")
    records, _ = four_runs(ppo=replace(tiny.ppo, kl_coef=0.1))
    (note,) = scaling_page.alike(records, frame_of(records))
    assert "ppo.kl_coef differs (0.05 / 0.1)" in note
    assert "nothing but the base model" not in page.to_html("", scaling_page.blocks(records))


def test_the_verdict_rises_where_the_numbers_rise_and_says_where_intervals_overlap(runs):
    frame = frame_of(four_runs()[0])
    rising, flat = (details.conclusion(frame, key) for key in ("ppo/win_rate", "sft/win_rate"))
    assert "rises with every step in size (35.0% to 62.0%)" in rising
    assert "do not overlap" in rising
    assert "does NOT rise" in flat
    frame.loc[frame["name"] == "tiny", "sft/win_rate"] += 0.01
    assert "overlap, which establishes no rise by itself" in details.conclusion(
        frame, "sft/win_rate"
    )


def test_five_sizes_and_three_seeds_take_under_20_seconds_and_have_fits(runs):
    names = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
    for step, name in enumerate(names):
        for seed in (1, 2, 3):
            rates = {"ppo": 0.3 + step / 10, "sft": 0.25, "accuracy": 0.6 + step / 25}
            fabricate(make_config(name, seed=seed), size=10 ** (5 + step), **rates)
    began = time.process_time()
    scaling_page.main(["--names", *names])
    assert time.process_time() - began < 20
    markdown = (page.beside_the_runs() / "scaling-ladder.md").read_text()
    assert "| PPO win rate | +10.0 points [+10.0, +10.0] | 1.00 | 5 |" in markdown
    assert "PPO beats the references at tiny (10M)" not in markdown  # 50 %: inconclusive


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
    many, others = [
        ["first-run", *middle, "last-run"] for middle in ("abcdefghijkl", "bcdefghijklm")
    ]
    stems = [stem_about("scaling", names) for names in (many, others, many[::-1])]
    assert stems[0][:-4] == stems[1][:-4] == "scaling-first-run-to-last-run-"
    assert stems[2][:-4] == "scaling-last-run-to-first-run-"
    assert stems[0] != stems[1]
    assert stems[0] == stem_about("scaling", many)


def test_a_page_about_other_runs_is_not_written_over(runs, capsys):
    fabricate(make_config("tiny", name="tiny-s-tiny"))
    four_runs()
    scaling_page.main(["--names", "tiny-s-tiny"])
    before = (page.beside_the_runs() / "scaling-tiny-s-tiny.md").read_text()
    with pytest.raises(SystemExit):
        scaling_page.main(["--names", "tiny-s", "tiny"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: page scaling-tiny-s-tiny in {page.beside_the_runs()} is about tiny-s-tiny, not"
        " tiny-s, tiny: move it away first"
    )
    assert (page.beside_the_runs() / "scaling-tiny-s-tiny.md").read_text() == before
    scaling_page.main(["--names", "tiny-s-tiny"])


def test_a_run_that_is_not_there_is_refused_in_one_line(runs, capsys):
    with pytest.raises(SystemExit):
        scaling_page.main(["--names", "nobody"])
    assert "no finished run in" in capsys.readouterr().err


def test_where_two_judges_judged_a_run_one_is_to_be_chosen(runs, capsys):
    _, other = two_judges()
    with pytest.raises(SystemExit):
        scaling_page.main(["--names", "tiny"])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"was judged by {other.judge.folder}, facts: choose one with JUDGE=" in line
    for judge, rate in (("facts", "63.0%"), (other.judge.folder, "55.0%")):
        scaling_page.main(["--names", "tiny", "--judge", judge])
        text = (page.beside_the_runs() / "scaling-tiny.md").read_text()
        assert [one for one in ("63.0%", "55.0%") if one in text] == [rate]


def test_unknown_runs_and_judges_are_told_the_nearest(runs, capsys):
    fabricate(make_config("tiny"))
    for arguments, said in (
        (["tiyn"], "unknown run 'tiyn': did you mean tiny?"),
        (["tiny", "--judge", "fact"], "unknown judge 'fact': did you mean facts?"),
    ):
        with pytest.raises(SystemExit):
            scaling_page.main(["--names", *arguments])
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_sizes_with_other_threads_or_precision_are_not_alike(runs):
    memory = replace(make_config("tiny").memory, cpu_threads=1, microbatch_size=3)
    records, _ = four_runs(memory=memory)
    (note,) = scaling_page.alike(records, frame_of(records))
    assert "memory.cpu_threads differs (1 / 2)" in note
    assert "memory.cpu_threads: 1 / 2" in where(records)
    assert where(records).startswith("Computed on: CPU, 2 cores")


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
