"""The page of an ablation study claims what its runs show, and no more; the runs are fabricated."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from eval.stats.hypothesis_tests import fisher_exact
from reports import ablation_runs, ablations, about_runs
from reports.ablation_runs import read_study
from reports.results import find_runs
from reports.verdicts import Word
from stages.config import paths
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.presets import ABLATIONS, GROUPS, ablations_named
from stages.runs.files import read_lines
from stages.runs.manifest import partial_of, stage_folder
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import OFFLINE, fabricate, write_rows

SEEDS = (1, 2, 3)
SIX_SEEDS = (1, 2, 3, 4, 5, 6)
T2 = 4.302653  # Student's t at 97.5% with 2 degrees of freedom, from a table
POSTS = 20
OWN_TEXTS = [f"summary {index}" for index in range(9)]


@pytest.fixture(autouse=True)
def folder(runs, no_drawing):
    """A runs folder of the test's own, and pages with empty plots."""
    return runs


def wins(count):
    """Scores of posts of which this number is won and all others are lost."""
    return [1.0] * count + [0.0] * (POSTS - count)


def config_of(name, seed, *overrides, upstream="tiny"):
    """The config of an ablation in `make ablations`."""
    return make_config(
        "tiny",
        seed=seed,
        name=f"tiny-{name}",
        upstream=upstream,
        overrides=(*ABLATIONS[name].settings, *overrides),
    )


def make_default(seeds=SEEDS, won=0, **changes):
    for seed in seeds:
        fabricate(make_config("tiny", seed=seed), scores=wins(won), **changes)


def make_ablation(name, won, overrides=(), texts=OWN_TEXTS, **changes):
    """An ablation that wins this number of the 20 posts, seed by seed."""
    for seed, count in zip(SEEDS, won, strict=False):
        config = config_of(name, seed, *overrides)
        fabricate(config, scores=wins(count), texts=texts, **changes)


def break_ppo(config):
    """A run whose PPO ended in an error."""
    partial = partial_of(stage_folder(config, "ppo"))
    partial.mkdir(parents=True)
    (partial / "failed.json").write_text(json.dumps({"error": "the loss is not finite"}))


def study_of(*names):
    return ablations.study_of("tiny", "", read_study("tiny", names))


def page_of(*names):
    """The Markdown of the page."""
    ablations.write_page("tiny", names)
    (path,) = about_runs.folder().glob("*.md")
    return path.read_text()


def title_of(page):
    return page.splitlines()[0].removeprefix("# tiny: ")


def first_screen(page):
    return page.partition("\n## Limitations")[0]


def section(page, title):
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def row_of(table, *first_cells):
    """The other cells of the first row that begins with these cells."""
    start = "".join(f"| {cell} " for cell in first_cells)
    row, *_ = [line for line in table.splitlines() if line.startswith(start)]
    others = row.removeprefix(start).removesuffix("|").removeprefix("|")
    return [cell.strip() for cell in others.split("|")]


def t_interval(values):
    """The mean of three values with its 95% t interval."""
    mean = sum(values) / 3
    half = T2 * statistics.stdev(values) / math.sqrt(3)
    return mean, mean - half, mean + half


# -- numbers ---------------------------------------------------------------------------------------


def test_the_difference_from_the_default_is_that_computed_by_hand():
    make_default()
    make_ablation("dropout", (10, 11, 9))  # +50, +55 and +45 points

    page = page_of("dropout")

    verdict, difference, _, _, seeds = row_of(first_screen(page), "dropout")
    assert verdict == "better"
    assert seeds == "3"
    # Nine posts are won in all seeds, one in two and one in one. With one more post of 1 and one of
    # -1 (Bonett and Price 2012) the mean is 10 / 22 and the error 0.1232, which is wider than the
    # interval over seeds, [37.6, 62.4].
    assert difference == "+50.0 [+21.3, +69.6]"
    assert "The 95% intervals are over posts" in first_screen(page)
    over_seeds, over_posts, *_ = row_of(section(page, "How the verdicts are reached"), "dropout")
    mean, low, high = (100 * value for value in t_interval((0.5, 0.55, 0.45)))
    assert over_seeds == f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
    assert over_posts == difference


def percent_of(shares):
    """The mean of three shares with its t interval, as the page writes it."""
    mean, low, high = t_interval(shares)
    return f"{100 * mean:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def test_means_over_seeds_have_t_intervals():
    make_default()
    rates = (0.5, 0.55, 0.4)
    kls = (1.0, 1.2, 1.7)
    eos_rates = (0.91, 0.92, 0.93)
    for seed, rate, kl, eos_rate in zip(SEEDS, rates, kls, eos_rates, strict=True):
        found = {"objective/kl": kl, "policy/eos_rate": eos_rate}
        fabricate(config_of("dropout", seed), ppo=rate, scores=wins(1), found=found)

    cells = row_of(section(page_of("dropout"), "Means over seeds"), "dropout")

    _, win_rate, kl, tokens, eos_rate = cells[:5]
    assert win_rate == percent_of(rates)
    assert kl == "{:.2f} [{:.2f}, {:.2f}]".format(*t_interval(kls))
    assert tokens == "19.8"  # the same in all seeds
    assert eos_rate == percent_of(eos_rates)


def test_each_seed_has_a_row_with_its_own_difference():
    make_default()
    make_ablation("dropout", (10, 11, 9), ppo=0.55)

    table = section(page_of("dropout"), "Each seed")

    assert row_of(table, "dropout", "2")[:3] == ["+55.0", "55.0% [52.0, 58.0]", "7.31"]
    assert row_of(table, "default", "3")[:3] == ["–", "63.0% [60.0, 66.0]", "7.31"]


def test_changed_summaries_are_counted_by_their_text():
    make_default(texts=OWN_TEXTS)
    make_ablation("dropout", (1, 2, 3), texts=[*OWN_TEXTS[:6], "a", "b", "c"])
    assert row_of(section(page_of("dropout"), "Means over seeds"), "dropout")[0] == "33.3%"


def test_pace_is_the_update_that_ends_the_rise_of_the_score():
    """With a score of 1 after n updates, the first five of 1 end with update n + 5."""
    make_default(won=0)
    make_ablation("dropout", (1, 1, 1))
    for seed in SEEDS:
        write_scores(make_config("tiny", seed=seed), first_of_one=3)
        write_scores(config_of("dropout", seed), first_of_one=seed)

    cells = row_of(section(page_of("dropout"), "Speed of learning, and the critic"), "dropout")

    assert cells[:2] == ["7.0 [4.5, 9.5]", "-1.0 [-3.5, +1.5]"]


def write_scores(config, first_of_one, explained=()):
    """Twelve updates of PPO whose score becomes 1, and the critic's explained variance."""
    rows = []
    for update in range(12):
        row = {"objective/scores": float(update >= first_of_one), "step": update + 1}
        if update < len(explained):
            row["val/explained_variance"] = explained[update]
            row["val/explained_variance_realized"] = explained[update] - 0.25
            row["policy/eos_rate"] = 1.0
        rows.append(row)
    write_rows(stage_folder(config, "ppo") / "metrics.jsonl", rows)


def test_the_critics_explained_variance_is_a_mean_without_its_warm_up():
    make_default()
    explained = {1: (-9.0, 0.2, -0.1, 0.5), 2: (-9.0, 0.4, 0.1, 0.6), 3: (-9.0, -0.3, 0.1, 0.1)}
    for seed, values in explained.items():
        config = config_of("dropout", seed, "ppo.critic_updates=1")
        fabricate(config, scores=wins(1), texts=OWN_TEXTS)
        write_scores(config, first_of_one=1, explained=values)

    cells = row_of(section(page_of("dropout"), "Speed of learning, and the critic"), "dropout")

    # (0.2 + 0.4 - 0.3) / 3 and (0.5 + 0.6 + 0.1) / 3; two of nine are below 0.
    assert cells[2:5] == ["0.10", "0.40", "2 of 9"]
    # Of realized returns 0.25 less: 1.6 / 9 - 0.25, and 6 of 9 are below 0.
    assert cells[5:7] == ["-0.07", "66.7%"]


# -- what the page says ----------------------------------------------------------------------------


def test_the_title_names_the_ablations_that_change_the_win_rate():
    make_default(won=10)
    make_ablation("no-eos-trick", (1, 1, 2))
    make_ablation("dropout", (18, 19, 19))
    make_ablation("entropy", (10, 10, 10), texts=None)

    page = page_of("no-eos-trick", "dropout", "entropy")

    assert title_of(page) == "no EOS trick makes PPO worse; dropout makes PPO better"
    assert "**Better:** dropout (+" in page
    assert "**No difference of 3 points:** entropy bonus." in page
    table = [line for line in first_screen(page).splitlines() if "|" in line]
    _, _, _, *ablation_rows = table  # without the header, its line and the default
    verdicts = [row.split("|")[2].strip() for row in ablation_rows]
    assert verdicts == ["worse", "better", "no difference of 3 points (no summary changed)"]


def test_a_study_without_any_difference_says_so_in_its_title():
    make_default()
    make_ablation("dropout", (0, 0, 0), texts=None)
    make_ablation("entropy", (0, 0, 0), texts=None)
    page = page_of("dropout", "entropy")
    assert title_of(page) == "dropout and entropy bonus change PPO's win rate by less than 3 points"


def test_an_inconclusive_ablation_is_not_said_to_change_anything():
    make_default(won=10)
    make_ablation("dropout", (7, 14, 9))
    make_ablation("entropy", (10, 10, 10), texts=None)
    page = page_of("dropout", "entropy")
    assert title_of(page) == "neither of 2 ablations is shown to change PPO's win rate"
    assert "**Inconclusive:** dropout (+0.0 points [" in page


def test_an_inconclusive_ablation_says_how_many_seeds_would_narrow_it():
    make_default(won=10)
    make_ablation("dropout", (9, 10, 11))  # -5, 0 and +5 points
    # t * 5 / sqrt(n): 3.01 with 13 seeds and t = 2.179, 2.89 with 14 and t = 2.160.
    cells = row_of(section(page_of("dropout"), "How the verdicts are reached"), "dropout")
    assert cells[-1] == "14"


def test_every_ablation_has_its_own_title():
    titles = {ablation.title for ablation in ABLATIONS.values()}
    assert len(titles) == len(ABLATIONS)


def test_every_ablation_is_explained_on_the_page_and_listed_on_the_terminal(capsys):
    make_default()
    for name in ABLATIONS:
        make_ablation(name, (1, 2, 0))

    ablations.main(["--name", "tiny"])

    page = (about_runs.folder() / "ablations-tiny.md").read_text()
    table = section(page, "What each ablation changes")
    printed = capsys.readouterr().out
    for name, ablation in ABLATIONS.items():
        settings_cell, what = row_of(table, f"{ablation.title} (`{name}`)")
        assert settings_cell == " ".join(ablation.settings)
        assert what == ablation.what
        assert f"\n{ablation.title} " in printed
    assert printed.splitlines()[-1] == str(about_runs.folder() / "ablations-tiny.html")


def test_a_group_of_ablations_has_a_page_of_its_own():
    make_default()
    for name in GROUPS["critic-start"].ablations:
        make_ablation(name, (10, 11, 9))
    make_ablation("dropout", (10, 11, 9))

    group_page = ablations.write_page("tiny", ["critic-start"])
    other_page = ablations.write_page("tiny", ["lambda-1", "dropout"])

    assert group_page.rstrip().endswith("ablations-tiny-critic-start.html")
    assert other_page.rstrip().endswith("ablations-tiny.html")
    assert ablations_named(["dropout", "critic-start", "lambda-1"]) == [
        "dropout",
        *GROUPS["critic-start"].ablations,
    ]


@pytest.fixture
def default_with_rloo(monkeypatch):
    """A default run that wins 5 of 20 posts, and whose RLOO loses one, two or three."""
    make_default(won=5)
    for seed in SEEDS:
        config = make_config("tiny", seed=seed)
        summaries = stage_folder(config, "summaries")
        rows = read_lines(summaries / "ppo.jsonl")
        written = [{**row, "summary": f"RLOO's {row['id']}"} for row in rows]
        write_rows(summaries / "rloo.jsonl", written)

        path = stage_folder(config, "win_rate") / "post_scores.jsonl"
        rows = read_lines(path)
        ppo_rows = [row for row in rows if row["policy"] == "ppo"]
        for post, row in enumerate(ppo_rows):
            is_lost = post < seed
            rows.append({**row, "policy": "rloo", "score": 0.0 if is_lost else 1.0})
        write_rows(path, rows)

    def find_runs_with_rloo(name, judge):
        runs, left_out = find_runs(name, judge)
        if name == "tiny":
            runs = [with_rloo(run) for run in runs]
        return runs, left_out

    monkeypatch.setattr(ablation_runs, "find_runs", find_runs_with_rloo)


def with_rloo(run):
    """A run with the policy RLOO, which is as PPO."""
    rloo = replace(run.policies["ppo"], name="rloo", title="RLOO")
    return replace(
        run,
        policies={**run.policies, "rloo": rloo},
        stages={**run.stages, "rloo": run.stages["ppo"]},
    )


def test_a_groups_algorithm_is_compared_with_ppo_on_its_page(default_with_rloo):
    for name in GROUPS["critics"].ablations:
        make_ablation(name, (5, 6, 4))

    page = Path(ablations.write_page("tiny", ["critics"]).splitlines()[-1]).with_suffix(".md")

    text = page.read_text()
    assert text.startswith("# tiny, critics on preferences: RLOO is better than PPO\n")
    assert "RLOO is another algorithm, trained from the same SFT and reward model." in text
    assert GROUPS["critics"].about.split()[0] in text
    cells = row_of(text.partition("## Limitations")[0], "RLOO")
    assert cells[0] == "better"


def test_a_page_without_a_group_has_no_algorithms(default_with_rloo):
    make_ablation("dropout", (5, 6, 4))
    assert "RLOO" not in page_of("dropout")


def test_no_cell_of_a_table_has_more_than_three_numbers():
    make_default(seeds=SIX_SEEDS)
    for seed in SIX_SEEDS:
        fabricate(config_of("dropout", seed), scores=wins(seed), texts=OWN_TEXTS)
    page, _, _ = page_of("dropout").partition("## Runs, code and versions")
    rows = [line for line in page.splitlines() if line.startswith("| dropout")]
    for row in rows:
        if "ppo." not in row:
            words_by_cell = [len(cell.split()) for cell in row.split("|")]
            assert max(words_by_cell) <= 5, row


# -- failed seeds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failed", "tried", "p"),
    [
        ((3, 0), (6, 6), 2 * 20 / 220),  # both tails: C(6,3) of C(12,3)
        ((5, 0), (6, 6), 2 * 6 / 792),
        ((4, 0), (4, 4), 2 / 70),
        ((3, 1), (4, 4), 34 / 70),  # Fisher's tea: 1 + 16 + 16 + 1 of 70 ways
        ((3, 0), (3, 6), 1 / 84),  # sides of other sizes: only one tail
        ((0, 2), (2, 3), 4 / 10),  # 1, 6 and 3 ways: the middle one is likelier
        ((0, 0), (6, 6), 1.0),
        ((6, 6), (6, 6), 1.0),
    ],
)
def test_fishers_exact_test_counts_tables_by_hand(failed, tried, p):
    assert fisher_exact(failed, tried) == pytest.approx(p, rel=1e-12)
    assert fisher_exact(failed[::-1], tried[::-1]) == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize(("rate", "failed"), [(0.30, 3), (0.451, 3), (0.453, 0), (0.63, 0)])
def test_a_seed_fails_if_ppo_is_not_shown_to_beat_its_sft_model(rate, failed):
    """SFT wins 41.2%, and the interval of the difference is 4 points to either side."""
    make_default()
    make_ablation("dropout", (1, 1, 1), ppo=rate)
    (row,) = study_of("dropout").ablations
    assert row.failures.failed == failed
    assert row.failures.tried == 3


def test_without_a_failed_seed_the_tests_of_failures_are_left_out():
    make_default()
    make_ablation("dropout", (1, 1, 1))
    page = page_of("dropout")
    assert "failed seeds |" not in page
    assert "No seed failed, so there is nothing to test." in page


def test_an_ablation_that_changes_how_many_seeds_fail_is_said_to_do_so():
    make_default(seeds=SIX_SEEDS, won=12)
    for seed in (1, 2):
        break_ppo(config_of("no-eos-trick", seed))
    for seed in (3, 4, 5):  # not above their SFT model
        config = config_of("no-eos-trick", seed)
        fabricate(config, ppo=0.40, scores=wins(seed), texts=OWN_TEXTS)
    fabricate(config_of("no-eos-trick", 6), ppo=0.63, scores=wins(6), texts=OWN_TEXTS)

    page = page_of("no-eos-trick")

    assert "no EOS trick changes how many seeds fail" in title_of(page)
    assert "**No EOS trick changes how many seeds fail:** 5 of 6, and 0 of 6 by default." in page
    assert row_of(first_screen(page), r"no EOS trick \*")[-1] == "5 of 6 (changed)"
    tests = row_of(section(page, "How the verdicts are reached"), "no EOS trick")
    assert tests[2:6] == ["5 of 6", "0 of 6", "0.015", "0.015"]
    assert "tiny-no-eos-trick seed1 failed: its PPO ended in an error." in page
    assert "seed1 is left out" not in page


def test_failures_are_corrected_for_all_ablations():
    make_default(seeds=SIX_SEEDS, won=12)
    for seed in (1, 2, 3, 4, 5):
        fabricate(config_of("no-eos-trick", seed), ppo=0.40, scores=wins(12), texts=None)
    fabricate(config_of("no-eos-trick", 6), ppo=0.63, scores=wins(12), texts=None)
    for name in ("dropout", "entropy", "lambda-1"):
        for seed in SIX_SEEDS:
            fabricate(config_of(name, seed), scores=wins(12), texts=None)

    study = study_of("no-eos-trick", "dropout", "entropy", "lambda-1")

    (row,) = [row for row in study.ablations if row.name == "no-eos-trick"]
    assert row.failures.p_value == pytest.approx(2 * 6 / 792)
    assert row.failures.corrected_p_value == pytest.approx(4 * 2 * 6 / 792)
    assert study.failing == []
    assert [ablation.name for ablation in study.failing_more] == ["no-eos-trick"]


def test_an_ablation_in_which_every_seed_ended_in_an_error_is_on_the_page():
    make_default(seeds=SIX_SEEDS[:4], won=12)
    for seed in SIX_SEEDS[:4]:
        break_ppo(config_of("dropout", seed))

    page = page_of("dropout")

    assert title_of(page) == "dropout changes how many seeds fail"
    assert row_of(first_screen(page), r"dropout \*") == [
        "–",
        "–",
        "–",
        "–",
        "0",
        "4 of 4 (changed)",
    ]
    assert row_of(section(page, "Speed of learning, and the critic"), "dropout") == ["–"] * 8


def test_seeds_that_ended_in_an_error_forbid_that_an_ablation_makes_no_difference():
    make_default(seeds=SIX_SEEDS[:4])
    make_ablation("dropout", (0, 0, 0), texts=None)
    break_ppo(config_of("dropout", 4))

    study = study_of("dropout")

    assert study.ablations[0].verdict.word is Word.INCONCLUSIVE
    assert "seeds that ended in an error have no win rate" in page_of("dropout")


# -- limitations -----------------------------------------------------------------------------------


def test_only_common_seeds_are_compared_and_a_row_with_fewer_is_marked():
    make_default()
    make_ablation("dropout", (5, 6, 7))
    (stage_folder(config_of("dropout", 2), "judge") / "manifest.json").unlink()

    page = page_of("dropout")

    assert row_of(first_screen(page), r"dropout \*")[4] == "2"
    assert "Fewer seeds than the default" in page
    assert "tiny-dropout seed2 is left out: stage judge is missing." in page


def test_an_ablation_with_too_many_unjudged_posts_is_left_out_and_others_are_compared():
    make_default()
    make_ablation("dropout", (5, 6, 7), unjudged=0.015)
    make_ablation("critic-sft", (5, 6, 7), unjudged=0.05)

    page = page_of("dropout", "critic-sft")

    assert "tiny-critic-sft seed2 is left out: too many of its posts have no verdict." in page
    assert "Dropout, seed 2: 1.5% of PPO's posts have no verdict." in page
    assert "| critic from SFT" not in page
    with pytest.raises(UserError, match="no seed of an ablation has a win rate"):
        read_study("tiny", ["critic-sft"])


def test_a_single_seed_is_said_to_say_little_about_others():
    make_default(seeds=(1,))
    make_ablation("dropout", (5,))
    assert "Dropout has 1 seed. Its verdict is over posts only" in page_of("dropout")


def test_a_run_that_changed_something_else_is_noted_once_for_all_its_seeds():
    make_default()
    make_ablation("dropout", (5, 5), overrides=("ppo.kl_coef=0.1",))
    page = page_of("dropout")
    (line,) = [line for line in page.splitlines() if "ran with other settings than" in line]
    assert line.startswith("- Dropout (seeds 1, 2)")
    assert line.endswith("ppo.kl_coef (0.1).")


def test_the_settings_of_an_ablation_are_those_that_ran():
    make_default()
    make_ablation("dropout", (5, 5), overrides=("ppo.dropout=0.3",))
    (row,) = study_of("dropout").ablations
    assert row.settings == ("ppo.dropout=0.3",)


@pytest.mark.parametrize(("kl", "is_said"), [(3.3, True), (2.2, False)])
def test_an_adaptive_coefficient_that_missed_its_target_is_a_limitation(kl, is_said):
    """The target is 2 nats, and a quarter of it to either side is near."""
    make_default()
    make_ablation("adaptive-kl", (5, 5), found={"objective/kl": kl})
    assert ("not at its target of 2" in page_of("adaptive-kl")) == is_said


def test_a_run_with_another_value_or_another_sft_model_is_noted():
    make_default()
    config = make_config("tiny", seed=2, name="tiny-dropout", overrides=("ppo.dropout=0.3",))
    fabricate(config, accuracy=0.7, scores=wins(5))
    page = page_of("dropout")
    assert "Dropout (seed 2) ran with other settings than" in page
    assert "ppo.dropout (0.3)." in page
    assert "Dropout (seed 2) started from another SFT or reward model than the default." in page


def test_an_ablation_of_the_reward_model_says_that_it_trains_its_own():
    make_default()
    make_ablation("read-before-eos", (5, 6, 7), accuracy=0.7)
    make_ablation("dropout", (5, 6, 7))

    page = page_of("read-before-eos", "dropout")

    stages = {path.name for path in (paths.RUNS / "tiny-read-before-eos/seed1").iterdir()}
    assert {"rm", "normalize", "ppo"} <= stages
    assert not {"base", "sft"} & stages
    assert "Score read before EOS runs the stages rm and normalize again" in page
    assert "Dropout runs the stages" not in page
    assert "ran with other settings than" not in page
    assert "than the default." not in page


def test_an_ablation_that_is_judged_by_its_own_reward_model_is_noted():
    make_default()
    make_ablation("read-before-eos", (5, 6, 7), judge=OFFLINE | {"kind": "reward_model"})
    page = page_of("read-before-eos")
    assert "Score read before EOS (seeds 1, 2, 3) was judged by its own reward model" in page


# -- errors ----------------------------------------------------------------------------------------


def test_a_run_without_any_rate_is_refused():
    make_default(unjudged=0.05)
    with pytest.raises(UserError, match="no seed of tiny has a win rate: tiny seed1 is left out"):
        read_study("tiny", ["dropout"])


def test_an_ablation_without_a_common_seed_is_refused():
    make_default(seeds=(2, 3))
    fabricate(make_config("tiny", seed=1, name="base"))
    fabricate(config_of("dropout", 1, upstream="base"))
    with pytest.raises(UserError, match="dropout has no seed in common with the default run"):
        read_study("tiny", ["dropout"])


def test_an_ablation_that_was_not_run_is_refused():
    make_default()
    with pytest.raises(UserError, match="tiny-critic-sft"):
        read_study("tiny", ["critic-sft"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["dropuot"], "unknown ablation 'dropuot': did you mean dropout?"),
        ([], "no ablation is named: choose from"),
    ],
)
def test_unknown_names_and_none_are_refused_in_one_line(capsys, names, message):
    make_default()
    line = refused_by(capsys, ablations.main, "--name", "tiny", "--ablations", *names)
    assert message in line
    assert not about_runs.folder().exists()
