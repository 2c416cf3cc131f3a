"""The page of the ablations says what fabricated runs say, and no more than they bear out."""

import math
import statistics

import pytest

from reports import ablations_page
from reports.parts import ablated, page
from reports.parts.blocks import escape
from stages.config import config as settings
from stages.config.command_line import make_config
from stages.config.config import UserError
from stages.config.presets import ABLATIONS, GROUPS, ablations_named
from stages.runs.manifest import stage_folder
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import OFFLINE, fabricate

SEEDS = (1, 2, 3)
T2 = 4.302653  # Student's t at 97.5% with 2 degrees of freedom, from a table
POSTS = 20
FIRST = "the first screen"
OWN_TEXTS = [f"summary {index}" for index in range(9)]


def wins(count):
    """Scores of posts of which so many are won and all others lost."""
    return [1.0] * count + [0.0] * (POSTS - count)


def turned(name, seed, *more, upstream="tiny"):
    """The config that make gives an ablation."""
    asked = (*ABLATIONS[name].settings, *more)
    return make_config("tiny", seed=seed, name=f"tiny-{name}", upstream=upstream, overrides=asked)


def default_runs(seeds=SEEDS, **changes):
    for seed in seeds:
        fabricate(make_config("tiny", seed=seed), scores=wins(0), **changes)


def ablate(name, won, more=(), **changes):
    """An ablation that wins so many of the 20 posts, seed by seed, where the default wins none."""
    for seed, count in zip(SEEDS, won, strict=False):
        fabricate(turned(name, seed, *more), scores=wins(count), **{"texts": OWN_TEXTS, **changes})


def text_of(*names):
    return page.to_markdown("x", "x", ablations_page.blocks(*ablated.collect("tiny", names)))


def cells(text, section, *first):
    """The cells of a row of the table in a section, after those that it begins with."""
    start = "".join(f"| {one} " for one in first)
    table = text if section == FIRST else text.split(f"## {section}")[1]
    line = next(x for x in table.splitlines() if x.startswith(start))
    return [cell.strip() for cell in line.split("|")[1 + len(first) : -1]]


def by_hand(values):
    mean, spread = sum(values) / len(values), statistics.stdev(values)
    return mean, mean - T2 * spread / math.sqrt(3), mean + T2 * spread / math.sqrt(3)


# -- numbers ---------------------------------------------------------------------------------------


def test_means_differences_and_intervals_are_those_computed_by_hand(runs):
    kls, rates = (1.0, 1.2, 1.7), (0.5, 0.55, 0.4)
    default_runs()
    for seed, kl, rate, count in zip(SEEDS, kls, rates, (10, 11, 9), strict=True):
        found = {"objective/kl": kl, "policy/eos_rate": 0.9 + seed / 100}
        config = turned("dropout", seed)
        fabricate(config, ppo=rate, scores=wins(count), texts=OWN_TEXTS, found=found)
    text = text_of("dropout")
    verdict, effect, failed = cells(text, FIRST, "dropout")
    changed, posts, rate, kl, tokens, eos = cells(text, "Each seed", "dropout")
    shown = "{:.1f}% [{:.1f}, {:.1f}]".format
    assert rate == shown(*(100 * x for x in by_hand(rates)))
    assert kl == "{:.2f} [{:.2f}, {:.2f}]".format(*by_hand(kls))
    assert (tokens, changed, verdict) == ("19.8", "100.0%", "matters")
    assert failed == "1 of 3"  # 40% is not above the 41.2% of SFT
    assert eos == shown(*(100 * x for x in by_hand((0.91, 0.92, 0.93))))
    effects = [100 * x for x in by_hand((0.5, 0.55, 0.45))]
    assert effect == "{:+.1f} [{:+.1f}, {:+.1f}]".format(*effects)
    # Nine posts won by all seeds, one by two and one by one, nine by none; and one more at 1 and at
    # -1 (Bonett and Price 2012): mean 10 / 22, squares 9 + 5 / 9 + 2, so an error of 0.1232.
    assert posts == "[+21.3, +69.6]"
    assert cells(text, "Each seed", "dropout", "2")[:2] == ["55.0% [52.0, 58.0]", "1.20"]
    assert cells(text, "Each seed", "default", "3")[:2] == ["63.0% [60.0, 66.0]", "7.31"]


def test_changed_summaries_are_counted_by_their_text(runs):
    default_runs(texts=OWN_TEXTS)
    ablate("dropout", (1, 2, 3), texts=[*OWN_TEXTS[:6], "a", "b", "c"])
    found = ablated.collect("tiny", ["dropout"])[1][0]
    assert found.pair
    assert (found.changed, found.pair.written) == (9, 27)
    assert cells(text_of("dropout"), "Each seed", "dropout")[0] == "33.3%"


def test_the_switches_of_the_critic_have_a_page_of_their_own(runs):
    default_runs()
    for name in GROUPS["critic"]:
        ablate(name, (10, 11, 9))
    said = ablations_page.write_page("tiny", ["critic"])
    assert "ablations-tiny-critic.html" in said
    assert ablations_named(["dropout", "critic", "lambda-1"]) == ["dropout", *GROUPS["critic"]]
    ablate("dropout", (10, 11, 9))
    both = ablations_page.write_page("tiny", ["lambda-1", "dropout"])
    assert both.rstrip().endswith("ablations-tiny.html")


# -- words -----------------------------------------------------------------------------------------


def test_an_ablation_that_changed_no_summary_is_said_to_have_changed_none(runs):
    default_runs()
    ablate("no-eos-trick", (0, 0, 0), texts=None)
    ablate("dropout", (1, 0, 2))
    text = text_of("no-eos-trick", "dropout")
    assert "no-eos-trick: does not matter (no summary was changed)." in text
    assert cells(text, FIRST, "no-eos-trick") == ["does not matter", "–", "0 of 3"]
    assert "+0.0, +0.0]" not in text
    assert cells(text, "Each seed", "no-eos-trick")[:4] == ["none", "–", "63.0%", "7.31"]
    assert text.index("| dropout (dropout 0.1") < text.index("| no-eos-trick (a missing EOS costs")


def test_every_switch_is_explained_on_the_page(runs, capsys):
    default_runs()
    for name in ABLATIONS:
        ablate(name, (1, 2, 0))
    ablations_page.main(["--name", "tiny"])
    text = (page.beside_the_runs() / "ablations-tiny.md").read_text()
    for name, one in ABLATIONS.items():
        setting, what = cells(text, "Each switch", name)
        assert setting == " ".join(one.settings)
        assert escape(one.what) == what
    *printed, path = capsys.readouterr().out.splitlines()
    said = " ".join(printed)
    assert all(f" {name}: inconclusive (+5.0 points" in said for name in ABLATIONS)
    assert max(map(len, printed)) <= 80
    assert path == str(page.beside_the_runs() / "ablations-tiny.html")


# -- what to hold against it -----------------------------------------------------------------------


def test_missing_and_unfinished_seeds_are_noted_and_only_common_ones_compared(runs):
    default_runs()
    ablate("dropout", (5, 6, 7))
    (stage_folder(turned("dropout", 2), "judge") / "manifest.json").unlink()
    default, (one,), left_out = ablated.collect("tiny", ["dropout"])
    assert one.pair
    assert ([run.seed for run in one.pair.runs], len(default.runs)) == ([1, 3], 3)
    assert left_out == ["tiny-dropout seed2 is left out: stage judge is missing."]
    assert "Fewer than the default's 3 seeds have: dropout 2. Each is" in text_of("dropout")


def test_an_ablation_without_any_rate_is_left_out_and_the_others_compared(runs):
    default_runs()
    ablate("dropout", (5, 6, 7), unjudged=0.015)
    ablate("critic-sft", (5, 6, 7), unjudged=0.05)
    text = text_of("dropout", "critic-sft")
    assert "tiny-critic-sft seed2 is left out" in text
    assert "tiny-dropout seed 2: PPO: 1.5% of the posts have no verdict" in text
    assert "| critic-sft |" not in text
    with pytest.raises(UserError, match="no seed of an ablation has a win rate"):
        ablated.collect("tiny", ["critic-sft"])


def test_a_preset_without_any_rate_is_refused(runs):
    default_runs(unjudged=0.05)
    with pytest.raises(UserError, match="no seed of tiny has a win rate: tiny seed1 is left out"):
        ablated.collect("tiny", ["dropout"])


def test_an_ablation_without_a_common_seed_is_refused(runs):
    default_runs(seeds=(2, 3))
    fabricate(make_config("tiny", seed=1, name="base"))
    fabricate(turned("dropout", 1, upstream="base"))
    with pytest.raises(UserError, match="dropout has no seed in common with the default run"):
        ablated.collect("tiny", ["dropout"])


@pytest.mark.parametrize(
    ("names", "said"),
    [(["dropuot"], "unknown ablation 'dropuot': did you mean dropout?"), ([], "is named: known")],
)
def test_unknown_names_and_none_are_refused_in_one_line(runs, capsys, names, said):
    default_runs()
    words = ("--name", "tiny", "--ablations", *names)
    assert said in refused_by(capsys, ablations_page.main, *words)
    assert not page.beside_the_runs().exists()


def test_a_run_that_turned_something_else_is_noted(runs):
    default_runs()
    ablate("dropout", (5,), more=("ppo.kl_coef=0.1",))
    own = make_config("tiny", seed=2, name="tiny-dropout", overrides=("ppo.dropout=0.3",))
    fabricate(own, accuracy=0.7, scores=wins(5))
    text = text_of("dropout")
    said = "is not the default with this switch alone:"
    assert f"dropout, seed 1, {said} ppo.kl_coef (0.1)." in text
    assert f"dropout, seed 2, {said} ppo.dropout (0.3)." in text
    assert "dropout, seed 2, has another SFT or reward model than the default." in text


def test_a_switch_of_the_reward_model_shares_base_and_sft_and_the_page_says_so(runs):
    default_runs()
    ablate("read-before-eos", (5, 6, 7), accuracy=0.7)
    ablate("dropout", (5, 6, 7))
    of_switch = {path.name for path in (settings.RUNS / "tiny-read-before-eos/seed1").iterdir()}
    assert {"rm", "normalize", "ppo"} <= of_switch
    assert not {"base", "sft"} & of_switch
    text = text_of("read-before-eos", "dropout")
    assert "read-before-eos makes rm and normalize itself. So, unlike those of other" in text
    assert "is not the default" not in text
    assert "model than the default" not in text
    assert "judged by its own" not in text
    assert "itself. So" not in text_of("dropout")


def test_a_switch_of_the_reward_model_from_another_sft_or_judged_by_itself_is_noted(runs):
    default_runs()
    ablate("read-before-eos", (5, 6, 7), judge=OFFLINE | {"kind": "reward_model"})
    said = "read-before-eos, seed 1, is judged by its own reward model, no one else's."
    assert said in text_of("read-before-eos")
    default_runs(seeds=(4,))
    switch = ("rm.read_at=before_eos",)
    alone = make_config("tiny", seed=4, name="tiny-read-before-eos", overrides=switch)
    fabricate(alone, scores=wins(5), found={"sft": {"loss/validation": 1.0}})
    said = "read-before-eos, seed 4, has another SFT model than the default."
    assert said in text_of("read-before-eos")
