"""The page about sizes: its answer, its tables, its limitations and its refusals."""

from dataclasses import replace

import pytest

from reports import about_runs, scaling
from reports.about_runs import stem_about
from reports.pooled_rates import Outcome, Pooled
from reports.results import Interval, find_all
from reports.sizes import SizeResult, runs_by_label
from stages.config.command_line import make_config
from stages.runs.manifest import stage_folder
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import ONLINE, fabricate, pythia_study, two_judges


@pytest.fixture(autouse=True)
def places(runs, no_drawing):
    """A folder for runs, and empty plots."""


def two_sizes():
    """Two sizes with two seeds each: PPO wins 30 and 40%, then 60 and 64%."""
    for seed, ppo in ((1, 0.3), (2, 0.4)):
        fabricate(make_config("tiny-s", seed=seed), ppo=ppo, sft=0.25, size=10**5)
    for seed, ppo in ((1, 0.6), (2, 0.64)):
        fabricate(make_config("tiny", seed=seed), ppo=ppo, sft=0.25, size=10**6)


def sizes_of(*names) -> list[SizeResult]:
    runs, _ = find_all(names)
    return list(scaling.measure(runs_by_label(runs)).sizes)


def page_of(*names, judge="") -> str:
    """The Markdown of the page about some runs, on one line for each paragraph."""
    scaling.write_page(names, judge)
    (path,) = about_runs.folder().glob(f"{stem_about('scaling', names)}.md")
    return path.read_text(encoding="utf-8")


def row_of(page: str, *beginning: str) -> list[str]:
    """The other cells of the first row of a table that begins with some cells."""
    start = f"| {' | '.join(beginning)} | "
    (row, *_) = [line for line in page.splitlines() if line.startswith(start)]
    return row.removeprefix(start).removesuffix(" |").split(" | ")


# -- the answer ------------------------------------------------------------------------------------


def with_rate(size: SizeResult, low: float, high: float) -> SizeResult:
    """A size in which PPO's win rate has this interval."""
    interval = Interval(estimate=(low + high) / 2, low=low, high=high)
    rate = Pooled(interval=interval, seeds=2)
    ppo = replace(size.policies["ppo"], win_rate=rate)
    return replace(size, policies={**size.policies, "ppo": ppo})


@pytest.mark.parametrize(
    ("low_of_small", "low_of_large", "holds_from"),
    [
        (0.45, 0.55, "1M"),
        (0.55, 0.55, "100K"),
        (0.55, 0.45, ""),
        (0.45, 0.45, ""),
    ],
    ids=["the larger one", "both", "the smaller one", "none"],
)
def test_the_answer_says_from_which_size_on_ppo_beats_the_references(
    low_of_small, low_of_large, holds_from
):
    two_sizes()
    small, large = sizes_of("tiny-s", "tiny")
    sizes = [with_rate(small, low_of_small, 0.65), with_rate(large, low_of_large, 0.65)]
    answer = scaling.answer(sizes, trained="ppo")
    assert answer.holds_from == holds_from


def test_the_answer_names_the_other_sizes_by_their_outcome():
    two_sizes()
    small, large = sizes_of("tiny-s", "tiny")
    sizes = [with_rate(small, 0.2, 0.4), with_rate(large, 0.4, 0.6)]
    answer = scaling.answer(sizes, trained="ppo")
    assert answer.others == {Outcome.LOSES: ("100K",), Outcome.INCONCLUSIVE: ("1M",)}
    assert not answer.is_same_at_equal_length


def test_rates_below_50_percent_at_every_size_do_not_reach_the_references():
    two_sizes()
    sizes = [with_rate(size, 0.2, 0.4) for size in sizes_of("tiny-s", "tiny")]
    assert scaling.answer(sizes, trained="ppo").is_below_everywhere


def test_a_size_without_a_rate_at_equal_length_is_not_called_inconclusive_there():
    two_sizes()
    small, large = sizes_of("tiny-s", "tiny")
    ppo = replace(small.policies["ppo"], at_equal_length=None)
    without_length = replace(small, policies={**small.policies, "ppo": ppo})
    answer = scaling.answer([without_length, large], trained="ppo")
    assert answer.at_equal_length == {Outcome.INCONCLUSIVE: ("1M",)}
    assert answer.without_equal_length == ("100K",)


def test_a_rate_at_equal_length_of_only_some_seeds_is_no_answer():
    two_sizes()
    small, large = sizes_of("tiny-s", "tiny")
    rate = small.policies["ppo"].at_equal_length
    assert rate is not None
    ppo = replace(small.policies["ppo"], at_equal_length=replace(rate, seeds=1))
    of_one_seed = replace(small, policies={**small.policies, "ppo": ppo})

    answer = scaling.answer([of_one_seed, large], trained="ppo")

    assert answer.without_equal_length == ("100K",)


def test_two_wide_seeds_show_nothing():
    two_sizes()
    page = page_of("tiny-s", "tiny")
    assert page.startswith("# PPO is not shown to beat the references at any of 2 sizes\n")
    assert "PPO is inconclusive at 100K and 1M parameters." in page
    assert "**higher** for the largest model than for the smallest: 35.0% at 100K, 62.0%" in page
    scope = 'Judged on 600 posts by the offline rule "facts", not an LLM; 2 sizes with 2 seeds'
    assert f"{scope} each; built-in posts; models without pre" in page


def test_the_first_page_of_the_study_says_where_ppo_won_and_which_seeds_collapsed():
    page = page_of(*pythia_study())
    assert page.startswith("# PPO beats the references from 2.78B parameters on, at 2 of 3 sizes")
    collapsed = (
        "- **1.01B, seed 44413 collapsed:** PPO has a win rate of 19.7%, its SFT model 32.9%."
    )
    assert collapsed in page
    assert row_of(page, "1.01B")[1] == "inconclusive"
    assert row_of(page, "1.01B")[-1] == "2 of 4, 2 collapsed"
    assert row_of(page, "2.78B")[1] == "beats the references"
    assert row_of(page, "2.78B")[-1] == "0 of 4"
    # Four seeds of 53.9, 22.2, 19.7 and 61.8%: mean 39.4, s = 21.5, t(3) = 3.18: +- 34.3.
    assert row_of(page, "1.01B")[2] == "39.4% [5.1, 73.7]"


def test_a_page_of_one_run_is_about_its_seeds():
    for seed in (1, 2, 3):
        fabricate(make_config("tiny", seed=seed), ppo=0.9)
    page = page_of("tiny")
    title = "# tiny: PPO beats the references, with a win rate of 90.0% (3 seeds)\n"
    assert page.startswith(title)
    assert row_of(page, "PPO") == ["3", "90.0% [87.0, 93.0]", "86.0% [83.0, 89.0]"]
    assert "Does it grow" not in page


def test_a_page_of_one_run_says_that_it_says_nothing_about_size():
    for seed in (1, 2):
        fabricate(make_config("tiny", seed=seed), size=10**6)
    page = page_of("tiny")
    assert "There is only one size (1M parameters)" in page
    assert "in a t test over 2 seeds, not corrected for other comparisons" in page


def test_one_run_without_a_rate_has_no_conclusion():
    fabricate(make_config("tiny"), unjudged=0.05)
    page = page_of("tiny")
    assert page.startswith("# tiny: too many comparisons had no verdict\n")
    assert "nan" not in page.lower()


# -- tables ----------------------------------------------------------------------------------------


def test_the_mean_over_seeds_is_the_mean():
    two_sizes()
    page = page_of("tiny-s", "tiny")
    assert row_of(page, "1M")[2] == "62.0% [36.6, 87.4]"
    assert row_of(page, "1M", "1")[1] == "60.0% [57.0, 63.0]"
    assert row_of(page, "1M", "PPO")[1] == "62.0% [36.6, 87.4]"


def test_a_number_that_fewer_seeds_have_is_marked():
    two_sizes()
    fabricate(make_config("tiny", seed=3), unjudged=0.05, size=10**6)
    page = page_of("tiny-s", "tiny")
    assert row_of(page, "1M")[2] == "62.0% [36.6, 87.4] (2 of 3 seeds)"
    assert "- 1M, seed 3: 5.0% of PPO's posts have no verdict." in page
    assert "- The sizes were run with different seeds." in page
    assert row_of(page, "PPO win rate")[1] == "–"
    assert "nan" not in page.lower()


def test_a_rate_at_equal_length_that_was_extrapolated_is_marked():
    two_sizes()
    runs, _ = find_all(["tiny-s", "tiny"])
    for run in runs:
        at_length = run.policies["ppo"].at_equal_length
        assert at_length is not None
        object.__setattr__(at_length, "is_extrapolated", True)
    answer = scaling.answer(scaling.measure(runs_by_label(runs)).sizes, trained="ppo")
    assert answer.extrapolated == ("100K", "1M")


def test_five_sizes_have_a_line():
    names = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
    for step, name in enumerate(names):
        for seed in (1, 2, 3):
            config = make_config(name, seed=seed)
            fabricate(config, ppo=0.3 + step / 10, sft=0.25, size=10 ** (5 + step))
    scaling.write_page(names, judge="")
    page = (about_runs.folder() / "scaling-ladder.md").read_text(encoding="utf-8")
    assert "| parameters | seeds | verdict | PPO win rate [95%] |" in page
    row = row_of(page, "PPO win rate")
    assert row[2:4] == ["4 of 4", "apart"]
    assert row[4].startswith("+10.0")
    assert row[5] == "1.00"
    assert page.startswith("# PPO beats the references from 100M parameters on, at 2 of 5 sizes")


def test_over_optimized_seeds_are_named_with_what_fell():
    page = page_of(*pythia_study())
    line = (
        "- **1.01B, seed 44413:** the proxy score rose by 6.30, and the win rate fell, at a KL of"
        " 86.0 nats."
    )
    assert line in page


# -- the paper -------------------------------------------------------------------------------------


def test_the_papers_seeds_are_next_to_ours():
    page = page_of(*pythia_study())
    assert "72.9%, 71.1%, 70.5%, 74.9%" in page
    assert "diamonds are the paper's seeds" in page


def test_with_another_judge_no_rates_of_the_paper_are_drawn():
    page = page_of(*pythia_study(judge=ONLINE))
    assert "diamonds" not in page
    assert "not comparable: judged by gpt-4o-mini" in page


def test_built_in_posts_say_why_the_paper_does_not_compare():
    two_sizes()
    page = page_of("tiny-s", "tiny")
    assert "not comparable with these runs: another model on other data." in page
    assert "Compared with the paper" not in page


# -- limitations -----------------------------------------------------------------------------------


def test_a_setting_that_differs_between_sizes_is_a_limitation():
    fabricate(make_config("tiny-s"), size=10**5)
    ppo = make_config("tiny").ppo.changed(kl_coef=0.1)
    fabricate(make_config("tiny").changed(ppo=ppo), size=10**6)
    page = page_of("tiny-s", "tiny")
    assert "- **The sizes are not alike:** ppo.kl_coef differs (0.05, 0.1)." in page


def test_a_judge_that_failed_a_control_is_named_once():
    for seed in (1, 2):
        fabricate(make_config("tiny", seed=seed), controls_pass=False)
    page = page_of("tiny")
    assert page.count("does not reliably prefer the reference to the post's title") == 1
    assert "**The judge failed its checks.**" in page


def test_a_reward_model_no_better_than_chance_is_named():
    fabricate(make_config("tiny", seed=1), accuracy=0.51)  # 49 to 53%
    fabricate(make_config("tiny", seed=2), accuracy=0.60)
    line = "not significantly better than chance in seed 1 (51.0% [49.0, 53.0]), so PPO may"
    assert line in page_of("tiny")


def test_an_unfinished_seed_is_left_out_and_named():
    two_sizes()
    (stage_folder(make_config("tiny", seed=2), "judge") / "manifest.json").unlink()
    page = page_of("tiny-s", "tiny")
    assert "- tiny seed2 is left out: stage judge is missing" in page
    assert "- 1M has only one seed" in page


# -- the command -----------------------------------------------------------------------------------


def test_the_terminal_shows_the_answer_in_80_columns_and_the_path(capsys):
    two_sizes()
    scaling.main(["--names", "tiny-s", "tiny"])
    *lines, path = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert lines[0] == "PPO is not shown to beat the references at any of 2 sizes"
    assert path == str(about_runs.folder() / "scaling-tiny-s-tiny.html")


@pytest.mark.parametrize(
    ("names", "study"),
    [
        (["tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl"], ["ladder"]),
        (["tiny-hot", "tiny-xl-hot", "tiny-s-hot", "tiny-l-hot", "tiny-xs-hot"], ["ladder-hot"]),
        (["tiny-xs", "tiny-s", "tiny", "tiny-l"], []),
        (["tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl-hot"], []),
        (["tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl", "other"], []),
        (["tiny"], []),
    ],
)
def test_the_built_in_ladder_is_known_with_the_name_of_its_study(names, study):
    assert scaling.ladder_name(names) == study


@pytest.mark.parametrize(
    ("kind", "names", "stem"),
    [
        ("scaling", ["tiny"], "scaling-tiny"),
        ("scaling", ["pythia-1b", "pythia-6.9b"], "scaling-pythia-1b-pythia-6.9b"),
        ("compare", ["tiny/1:ppo", "tiny:sft"], "compare-tiny-1-ppo-tiny-sft"),
        (
            "scaling",
            ["a-name-that-is-longer-than-any-list-of-names"],
            "scaling-a-name-that-is-longer-than-any-list-of-names",
        ),
    ],
    ids=["one run", "two runs", "entries", "a long name"],
)
def test_a_page_is_called_after_its_runs(kind, names, stem):
    assert stem_about(kind, names) == stem


def test_a_long_list_of_names_is_cut_and_stays_different():
    first = stem_about("scaling", ["first-run", *"abcdefghijkl", "last-run"])
    second = stem_about("scaling", ["first-run", *"bcdefghijklm", "last-run"])
    assert first[:-4] == second[:-4] == "scaling-first-run-to-last-run-"
    assert first != second


def test_a_page_about_other_runs_is_not_overwritten(capsys):
    fabricate(make_config("tiny", name="tiny-s-tiny"))
    two_sizes()
    before = page_of("tiny-s-tiny")
    assert refused_by(capsys, scaling.main, "--names", "tiny-s", "tiny") == (
        f"error: page scaling-tiny-s-tiny in {about_runs.folder()} is about tiny-s-tiny, not"
        " tiny-s, tiny: move it away first"
    )
    path = about_runs.folder() / "scaling-tiny-s-tiny.md"
    assert path.read_text(encoding="utf-8") == before


def test_if_two_judges_judged_a_run_one_has_to_be_chosen(capsys):
    _, other = two_judges()
    line = refused_by(capsys, scaling.main, "--names", "tiny")
    assert f"was judged by {other.judge.folder}, facts: choose one with JUDGE=" in line


def test_the_page_of_a_chosen_judge_has_its_rates():
    _, other = two_judges()
    assert row_of(page_of("tiny", judge="facts"), "PPO")[0].startswith("63.0%")
    assert row_of(page_of("tiny", judge=other.judge.folder), "PPO")[0].startswith("55.0%")


def test_an_unknown_judge_gets_the_nearest_name(capsys):
    fabricate(make_config("tiny"))
    line = refused_by(capsys, scaling.main, "--names", "tiny", "--judge", "fact")
    assert "unknown judge 'fact': did you mean facts?" in line
