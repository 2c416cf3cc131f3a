"""Whether a switch matters, by numbers computed by hand; seeds that fail; the page's sentence."""

import json
from collections import Counter
from math import sqrt

import pytest
from reports.parts.ablated import AblatedRun, SeedsOfRun
from reports.parts.verdicts import LITTLE, MATTERS, NONE, NOT, UNKNOWN

from eval.stats.formulas import fisher_exact, p_of_seeds, within_margin
from eval.win_rate import PairedInterval
from reports.parts import ablated, verdicts
from reports.parts.paired import Entry, Paired
from stages.config.command_line import make_config
from stages.config.config import UserError
from stages.runs.manifest import partial_of, stage_folder
from tests.lib.fabricated_runs import fabricate, write_rows
from tests.test_ablations import FIRST, OWN_TEXTS, cells, text_of, turned, wins

SIX = (1, 2, 3, 4, 5, 6)
LEARNING = "Pace and critic"


def seeds(lows, ended=()):
    """Seeds whose intervals of PPO less SFT begin at these numbers; None: too many unjudged."""
    made = SeedsOfRun(runs=[], ended=list(ended))
    rows = [{"ppo-sft": {"low": low, "headline": low is not None}} for low in lows]
    made.__dict__["rows"] = [{"differences": row} for row in rows]
    return made


def pair_of(each, posts, p_value=0.5, alike=0):
    """Two policies by their differences, seed by seed, and by the interval over posts."""
    low, high = posts
    entry, mean = Entry(name="dropout", policy="ppo", runs=[]), sum(each) / len(each)
    over_posts = PairedInterval(estimate=mean, low=low, high=high, posts=9, p_value=p_value)
    return Paired(
        entry=entry,
        first=entry,
        runs=[],
        together=over_posts,
        each=list(each),
        changes=Counter(),
        alike=alike,
        written=9,
    )


def ablation(*each, name="dropout", posts=(-1.0, 1.0), alike=0, default=(), turned_seeds=()):
    """A switch with these differences, seed by seed, and these seeds."""
    return AblatedRun(
        name=name,
        pair=pair_of(each, posts, alike=alike) if each else None,
        default=default or seeds([0.1] * len(each)),
        turned=turned_seeds or seeds([0.1] * len(each)),
    )


def test_two_one_sided_tests_are_the_90_percent_interval():
    # t(2) at 95% is 2.919986: 2.919986 * 1 / sqrt(3) = 1.6859 points to either side.
    assert within_margin([0.01, -0.01, 0.0], 0.0169)
    assert not within_margin([0.01, -0.01, 0.0], 0.0168)
    assert not within_margin([0.0232, 0.0032, 0.0132], 0.03)  # the upper end is 3.006
    assert within_margin([0.0231, 0.0031, 0.0131], 0.03)  # 2.996
    assert not within_margin([-0.0232, -0.0032, -0.0132], 0.03)
    assert not within_margin([0.0], 0.03)


@pytest.mark.parametrize(
    ("failed", "tried", "p"),
    [
        ((3, 0), (6, 6), 2 * 20 / 220),  # both tails: C(6,3) of C(12,3)
        ((5, 0), (6, 6), 2 * 6 / 792),
        ((4, 0), (4, 4), 2 / 70),
        ((3, 1), (4, 4), 34 / 70),  # Fisher's tea: 1 + 16 + 16 + 1 of 70 ways
        ((3, 0), (3, 6), 1 / 84),  # sides of other sizes: one tail alone
        ((0, 2), (2, 3), 4 / 10),  # 1, 6 and 3 ways: the middle one is likelier
        ((0, 0), (6, 6), 1.0),
        ((6, 6), (6, 6), 1.0),
    ],
)
def test_fishers_exact_test_counts_tables_by_hand(failed, tried, p):
    assert fisher_exact(failed, tried) == pytest.approx(p, rel=1e-12)
    assert fisher_exact(failed[::-1], tried[::-1]) == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize(
    ("each", "kind", "why"),
    [
        # 12 -+ 4.302653 * 2 / sqrt(3) = 4.968
        ((-0.10, -0.12, -0.14), MATTERS, "-12.0 points of win rate [-17.0, -7.0] over 3 seeds"),
        ((0.10, 0.12, 0.14), MATTERS, "+12.0 points of win rate [+7.0, +17.0] over 3 seeds"),
        ((0.010, 0.012, 0.011), LITTLE, "+1.1 points of win rate [+0.9, +1.3] over 3 seeds"),
        (
            (0.01, -0.01, 0.0),
            NOT,
            "+0.0 points of win rate [-2.5, +2.5] over 3 seeds; the 90% interval [-1.7, +1.7] lies"
            " within +-3 points",
        ),
        (
            (0.05, -0.05, 0.0),
            UNKNOWN,
            "+0.0 points of win rate [-12.4, +12.4] over 3 seeds; 14 seeds would narrow it to +-3"
            " points at this spread",
        ),
        (
            (0.01, 0.02, 0.03),
            UNKNOWN,
            "+2.0 points of win rate [-0.5, +4.5] over 3 seeds; it is no wider than +-3 points, but"
            " holds 0 and reaches beyond",
        ),
    ],
)
def test_each_verdict_by_hand(each, kind, why):
    verdict = verdicts.verdict_of(ablation(*each, posts=(min(each), max(each))))
    assert (verdict.kind, verdict.why) == (kind, why)


def test_seeds_that_agree_on_posts_that_do_not_are_told():
    verdict = verdicts.verdict_of(ablation(-0.10, -0.12, -0.14, posts=(-0.25, 0.01)))
    assert verdict.kind == MATTERS
    assert "[-25.0, +1.0], holds 0" in verdict.why


@pytest.mark.parametrize("each", [(), (0.2,), (0.2, 0.21)])
def test_fewer_than_three_seeds_get_no_verdict(each):
    verdict = verdicts.verdict_of(ablation(*each))
    many = f"{len(each)} seed{'' if len(each) == 1 else 's'}"
    assert verdict == (NONE, f"{many} with a win rate")


def test_where_seeds_show_no_spread_posts_stand_in_for_them():
    same = (0.02, 0.02, 0.02)
    found = [
        verdicts.verdict_of(ablation(*same, posts=posts)).kind
        for posts in ((0.01, 0.025), (0.01, 0.04), (-0.01, 0.025), (-0.01, 0.05))
    ]
    assert found == [LITTLE, MATTERS, NOT, UNKNOWN]
    assert verdicts.verdict_of(ablation(0.0, 0.0, 0.0, alike=9)).why == "no summary was changed"


def test_a_seed_fails_where_ppo_is_not_shown_to_be_above_its_sft():
    found = seeds([0.1, 0.0, -0.2, 0.001, None], ended=[7])
    assert (found.failed, found.tried) == (3, 5)  # the one that nobody knows does not count


@pytest.mark.parametrize(
    ("failing", "kind", "p"), [(5, MATTERS, "p = 0.015"), (3, UNKNOWN, "p = 0.182")]
)
def test_failures_alone_can_decide(failing, kind, p):
    bad, good = seeds([-0.1] * failing + [0.1] * (6 - failing)), seeds([0.1] * 6)
    each = (-0.5, 0.1, -0.4, 0.2, -0.3, 0.3)
    found = ablation(*each, name="no-eos-trick", default=good, turned_seeds=bad)
    assert verdicts.verdict_of(found).kind == kind
    said = f"{failing} of 6 seeds failed, 0 of 6 by default (Fisher's exact test, {p})."
    assert verdicts.sentence(found, verdicts.verdict_of(found)).endswith(said)


def test_seeds_without_a_result_forbid_that_a_switch_does_not_matter():
    broken = seeds([0.1] * 3, ended=[4, 5])
    found = verdicts.verdict_of(ablation(0.01, -0.01, 0.0, turned_seeds=broken))
    assert found.kind == UNKNOWN
    assert found.why.endswith("but 2 seeds ended in an error")


def break_ppo(config):
    """A run whose PPO ended in an error."""
    partial = partial_of(stage_folder(config, "ppo"))
    partial.mkdir(parents=True)
    (partial / "failed.json").write_text(json.dumps({"error": "the loss is not finite"}))


def test_the_first_sentences_sort_the_switches():
    both = [
        ablation(-0.120, -0.122, -0.121, name="no-eos-trick"),
        ablation(0.01, -0.01, 0.0, name="dropout"),
        ablation(0.0, 0.0, 0.0, alike=9, name="no-normalization"),
        ablation(0.05, -0.05, 0.0, name="lambda-1"),
        ablation(0.0110, 0.0112, 0.0111, name="critic-zero"),
        ablation(0.2, name="critic-sft"),
    ]
    found = verdicts.verdicts_of(both)
    assert verdicts.summary(found) == (
        "Matters: no-eos-trick; matters little: critic-zero; inconclusive: lambda-1; does not"
        " matter: dropout, no-normalization; no verdict: critic-sft."
    )
    assert "; does not matter: 2 switches; " in verdicts.summary(found, most=1)
    assert verdicts.title(found) == "2 of 6 switches matter: no-eos-trick, critic-zero"
    assert verdicts.title(verdicts.verdicts_of(both[5:])).startswith("too few seeds for a verdict")


def test_what_matters_by_itself_is_judged_again_among_all_switches():
    """By hand: -5, -10, -15 have t = -10 / (5 / sqrt(3)) = -3.464, and with two degrees of freedom
    p = 1 - 3.464 / sqrt(14) = 0.074. Of -9, -10, -11 t = -17.32 and p = 0.0033, 0.0066 as the
    smaller of two; twice that is 0.013, and eight times is 0.053.
    """
    assert p_of_seeds([-0.05, -0.10, -0.15]) == pytest.approx(1 - sqrt(12 / 14))
    assert p_of_seeds([-0.1, -0.1, -0.1]) == p_of_seeds([-0.1]) == 1.0
    strong = ablation(-0.09, -0.10, -0.11, name="no-eos-trick")
    small = ablation(0.009, 0.010, 0.011, name="no-eos-trick")
    assert verdicts.p_of(strong) == pytest.approx(2 * (1 - sqrt(300 / 302)))
    others = [ablation(0.05, -0.05, 0.0, name=f"other-{at}") for at in range(7)]
    assert verdicts.verdicts_of([strong, *others[:6]])["no-eos-trick"].kind == MATTERS
    for switch, kind in ((strong, UNKNOWN), (small, NOT)):
        found = verdicts.verdicts_of([switch, *others])
        assert found["no-eos-trick"].kind == kind
        said = "; p = 0.007 by itself, p = 0.053 after Holm's correction for 8 switches"
        assert found["no-eos-trick"].why.endswith(said)
    assert verdicts.title(found) == "none of 8 switches is shown to matter"


def test_a_page_counts_failed_seeds_and_begins_with_the_verdicts(runs):
    for seed in SIX:
        fabricate(make_config("tiny", seed=seed), scores=wins(12))
        config = turned("no-eos-trick", seed)
        if seed < 3:
            break_ppo(config)
        else:  # three of the other four are not above their SFT
            rate = 0.40 if seed < 6 else 0.63
            fabricate(config, ppo=rate, scores=wins(seed), texts=OWN_TEXTS)
    text = text_of("no-eos-trick")
    first = text.split("\n\n")[1]
    assert first.startswith(
        "Matters: no-eos-trick. no-eos-trick: 5 of 6 seeds failed, 0 of 6 by default."
    )
    assert "5 of 6 seeds failed, 0 of 6 by default (Fisher's exact test, p = 0.015)." in text
    assert cells(text, FIRST, "no-eos-trick")[2] == "5 of 6"
    assert "interval over posts; by default 0 of 6." in text
    assert "tiny-no-eos-trick seed1 failed: its PPO ended in an error." in text
    assert "seed1 is left out" not in text


def test_a_switch_with_which_no_seed_ended_is_on_the_page(runs):
    for seed in SIX[:4]:
        fabricate(make_config("tiny", seed=seed), scores=wins(12))
        break_ppo(turned("dropout", seed))
    text = text_of("dropout")
    assert "dropout: matters (it changes how many seeds fail). 4 of 4 seeds failed" in text
    assert cells(text, FIRST, "dropout") == ["matters", "–", "4 of 4"]
    assert cells(text, LEARNING, "dropout") == ["–"] * 5
    assert "| critic-sft" not in text
    with pytest.raises(UserError, match="tiny-critic-sft"):
        ablated.collect("tiny", ["critic-sft"])


def test_pace_and_the_critics_explained_variance_are_means_over_seeds(runs):
    """By hand: with a score of 1 after n updates, the first five of 1 end with update n + 5."""
    explained = {1: (-9.0, 0.2, -0.1, 0.5), 2: (-9.0, 0.4, 0.1, 0.6), 3: (-9.0, -0.3, 0.1, 0.1)}
    for seed, values in explained.items():
        default = make_config("tiny", seed=seed)
        fabricate(default, scores=wins(0))
        config = turned("dropout", seed, "ppo.critic_updates=1")
        fabricate(config, scores=wins(1), texts=OWN_TEXTS)
        for run, updates in ((default, 3), (config, seed)):
            rows = [{"objective/scores": float(n >= updates), "step": n + 1} for n in range(12)]
            for row, value in zip(rows, values, strict=False):
                row |= {"val/explained_variance": value, "policy/eos_rate": 1.0}
            write_rows(stage_folder(run, "ppo") / "metrics.jsonl", rows)
    pace = ["7.0 [4.5, 9.5]", "-1.0 [-3.5, +1.5]"]
    # Of the first update the critic learned alone: (0.2 + 0.4 - 0.3) / 3, (0.5 + 0.6 + 0.1) / 3.
    assert cells(text_of("dropout"), LEARNING, "dropout") == [*pace, "0.10", "0.40", "2 of 9"]
