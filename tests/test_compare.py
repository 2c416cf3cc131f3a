"""`make compare`: what differs between policies of finished runs, by how much, on which posts."""

import json
from pathlib import Path

import pytest

from reports import compare_page
from reports.compare_page import changed_posts
from reports.parts import gained
from reports.parts.page import PUBLIC, beside_the_runs
from reports.parts.paired import BETTER, beside, read_entries, settings_apart, verdicts
from reports.parts.words import direction, plain
from stages.config.command_line import make_config
from stages.runs.manifest import stage_folder
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import NASTY, fabricate
from tests.test_verdicts import pair_of

# Of nine posts, against the reference. By hand: post 0 is worse, 2 and 4 are better, 3 and 7 lose
# both times, 1, 5 and 6 are as they were, 8 is worse.
A = (1.0, 1.0, 0.5, 0.0, 0.0, 0.5, 1.0, 0.0, 1.0)
B = (0.0, 1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.5)
TEXTS = [f"My aunt sold lamp {number}." for number in range(9)]


pytestmark = pytest.mark.usefixtures("runs", "no_drawing")


def finish(name, scores, *seeds, preset="tiny", **others):
    overrides = ("ppo.kl_coef=0.1",) if name != preset else ()
    for seed in seeds:
        config = make_config(preset, name=name, seed=seed, overrides=overrides)
        fabricate(config, scores=scores, **others)


def test_changes_differences_and_settings_are_those_counted_by_hand(runs):
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1)
    entries, left_out = read_entries(["tiny/1", "b/seed1:ppo"])
    assert left_out == []
    assert [one.label for one in entries] == ["tiny/1:ppo", "b/1:ppo"]
    found = beside(entries[1], entries[0])
    counts = {"better": 2, "worse": 2, "both lose": 2, "unchanged": 3}
    assert dict(found.changes) == counts
    assert found.together is not None
    # -1, 0, +1/2, 0, +1, 0, 0, 0, -1/2
    assert found.together.estimate == pytest.approx(0.0)
    assert found.together.p_value == 1.0
    assert (found.alike, found.written) == (0, 9)
    rates = [one.rate for one in entries]
    assert [one.estimate for one in rates if one] == pytest.approx([sum(A) / 9, sum(B) / 9])
    apart = settings_apart({one.label: one.runs for one in entries})
    assert apart.T.to_dict("list") == {"ppo.kl_coef": ["0.05", "0.1"]}
    rows = changed_posts(entries)
    expected = ["worse", "unchanged", "better", "both lose", "better", "unchanged"]
    expected += ["unchanged", "both lose", "worse"]
    assert [row[1]["change"] for row in rows] == expected


def test_seeds_are_paired_and_their_spread_decides_what_is_clear(runs):
    for seed in (1, 2, 3):
        finish("tiny", (0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0), seed, texts=TEXTS)
        finish("b", (1.0,) * 9 if seed < 3 else (1.0,) * 8 + (0.0,), seed)
    finish("tiny", (1.0,) * 9, 4)  # a seed that only one of them has
    entries, _ = read_entries(["tiny", "b"])
    found = beside(entries[1], entries[0])
    assert found.each == pytest.approx([8 / 9, 8 / 9, 7 / 9])
    assert found.is_clear
    said = "better on 26, worse on 0 of 27 summaries; by seed +88.9, +88.9, +77.8, over seeds ["
    assert said in compare_page.conclusion(found, *verdicts([found]))
    reverse = beside(entries[0], entries[1])
    assert reverse.each == pytest.approx([-8 / 9, -8 / 9, -7 / 9])
    assert "less often than b:ppo" in compare_page.conclusion(reverse, *verdicts([reverse]))


def test_the_first_paragraph_goes_by_posts_and_seeds_and_names_its_intervals(runs):
    """Two of three seeds gain: by the posts b is above tiny, by the seeds it is not."""
    for seed, high in ((1, 1.0), (2, 1.0), (3, 0.0)):
        finish("tiny", (0.0,) * 9, seed, texts=TEXTS)
        finish("b", (high,) * 9, seed)
        finish("c", (1.0,) * 8 + (1.0 - seed / 4,), seed)
    entries, _ = read_entries(["tiny", "b"])
    pair = beside(entries[1], entries[0])
    assert pair.together is not None
    assert pair.together.low > 0
    assert not pair.stands
    text = compare_page.answer(compare_page.by_rate(entries), [pair])
    assert text.startswith("b:ppo against tiny:ppo is inconclusive: +66.7 points [")
    # Seeds 1, 1 and 0: 66.7 -+ 4.303 * 57.74 / sqrt(3).
    assert "over seeds [-76.8, +210.1]. At equal length: b:ppo " in text
    three, _ = read_entries(["tiny", "b", "c"])
    pairs = [beside(entry, three[0]) for entry in three[1:]]
    text = compare_page.answer(compare_page.by_rate(three), pairs)
    assert text.startswith("Of 3 policies c:ppo wins most often against the references, ")
    assert " 1 of 2 are above tiny:ppo by the posts and, " in text


def one_pair(low, p_value, each=(0.05,)):
    return pair_of(each, (low, 0.1), p_value)


def test_of_several_pairs_those_above_are_counted_after_holms_correction():
    """By hand: 0.03 is doubled among two; 0.02 is 0.04. Of seeds the larger p-value counts."""
    assert verdicts([one_pair(0.01, 0.03)]).count(BETTER) == 1
    assert verdicts([one_pair(0.01, 0.03), one_pair(-0.01, 0.3)]).count(BETTER) == 0
    assert verdicts([one_pair(0.01, 0.02), one_pair(-0.01, 0.3)]).count(BETTER) == 1
    seeds = (0.04, 0.05, 0.07)  # t = 0.0533 / (0.0153 / sqrt(3)) = 6.05 with 2 degrees: p = 0.026
    assert one_pair(0.01, 0.001, seeds).p_value == pytest.approx(0.0262, abs=5e-4)
    assert verdicts([one_pair(0.01, 0.001, seeds)]).count(BETTER) == 1
    assert verdicts([one_pair(0.01, 0.001, seeds), one_pair(-0.01, 0.3)]).count(BETTER) == 0


def test_gains_over_sft_are_means_over_seeds_with_the_seeds_that_rose_and_fell(runs):
    spans = {  # by seed: proxy, then gold, each as estimate, low, high over posts
        1: ((0.2, 0.1, 0.3), (0.1, -0.1, 0.3)),
        2: ((0.4, 0.2, 0.6), (-0.3, -0.4, -0.2)),
        3: ((0.3, 0.2, 0.4), (0.2, 0.1, 0.3)),
    }
    for name in ("tiny", "b"):
        finish(name, A, *spans)
    entries, _ = read_entries(["tiny:sft", "tiny:ppo", "b:ppo"])
    for run in entries[1].runs:
        both = zip(("proxy", "gold"), spans[run.seed], strict=True)
        own = {scorer: dict(zip(("estimate", "low", "high"), x, strict=True)) for scorer, x in both}
        run.results("win_rate")["scores"] = {"gains": {"ppo": own}}
    (table,) = gained.table(entries)
    # Three seeds: 0.3 and 0 on average; t(0.975, 2) is 4.303, and the spreads are 0.1 and 0.2646.
    row = ["tiny:ppo", "+0.30 [+0.05, +0.55]", "0.20 (+), 0.40 (+), 0.30 (+)"]
    assert table.texts == [[*row, "+0.00 [-0.66, +0.66]", "0.10, -0.30 (-), 0.20 (+)"]]
    assert gained.table(entries[2:]) == []


def test_a_rate_at_equal_length_is_marked_and_not_given_where_too_much_is_unjudged(runs):
    for seed in (1, 2):
        finish("tiny", A, seed, texts=TEXTS)
        finish("b", (1.0, None, 0.0), seed)
    entries, _ = read_entries(["tiny", "b"])
    assert [str(compare_page.at_length(entry)) for entry in entries] == ["59.0%", "–"]
    policies = entries[0].runs[1].results("win_rate")["policies"]
    policies["ppo"]["statistics"]["length_controlled"]["extrapolated"] = True
    assert str(compare_page.at_length(entries[0])) == "59.0% EXTRAPOLATED"


def test_one_post_says_neither_that_a_score_rose_nor_that_it_fell():
    post = {"estimate": 1.0, "low": 1.0, "high": 1.0, "posts": 1}
    assert direction(post) == "did not reliably move"
    assert str(gained._cells([post])[1]) == "1.00"
    assert str(plain(post)) == "1.00"


def test_more_than_six_seeds_are_counted_and_not_listed():
    each = [{"estimate": at / 10, "low": at / 10 - 0.25, "high": at / 10 + 0.25} for at in range(7)]
    assert str(gained._cells(each)[1]) == "0.00 to 0.60: 4 (+), 0 (-)"  # 0.3 to 0.6 leave out 0
    assert str(gained._cells(each[:6])[1]).count(",") == 5


def test_a_policy_whose_summaries_are_often_cut_off_is_named_among_the_caveats(runs):
    made = fabricate(make_config("tiny", seed=1), scores=A)["summaries"]
    cut = {"ppo": made["policies"]["ppo"] | {"eos_rate": 0.409}}  # 0.991 in the other seed
    found = {"summaries": made | {"policies": made["policies"] | cut}}
    fabricate(make_config("tiny", seed=2), scores=A, found=found)
    path = Path(compare_page.write_page(["tiny:sft", "tiny:ppo"]).splitlines()[-1])
    said = "Only 70.0% of PPO's summaries end by themselves; the others are cut off."
    assert said in path.with_suffix(".md").read_text()


def test_one_pair_of_policies_says_nothing_about_seeds(runs):
    finish("tiny", (0.0,) * 9, 1, texts=TEXTS)
    finish("b", (1.0,) * 9, 2)
    entries, _ = read_entries(["tiny/1", "b/2"])
    found = beside(entries[1], entries[0])
    assert not found.is_clear
    text = compare_page.conclusion(found, *verdicts([found]))
    assert "says nothing about other seeds" in text
    assert "often than tiny/1:ppo: +100.0 points" in text


def test_too_many_unjudged_posts_give_no_difference(runs):
    finish("tiny", A, 1)
    finish("b", (None, *B[1:]), 1)
    entries, _ = read_entries(["tiny/1", "b/1"])
    found = beside(entries[1], entries[0])
    assert found.together is None
    assert "too many posts have no verdict" in compare_page.conclusion(found, *verdicts([found]))
    assert found.changes["unjudged"] == 1


def test_the_page_says_the_verdict_first(runs, capsys):
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1)
    compare_page.main(["--runs", "tiny/1", "b/1"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    text = (beside_the_runs() / "compare-tiny-1-ppo-b-1-ppo.md").read_text()
    lead = text.split("\n\n")[1]
    assert lead.startswith("b/1:ppo against tiny/1:ppo is inconclusive: +0.0 points [")
    assert " | 2 | 2 | 2 | 3 | 0 |" in text
    assert "| ppo.kl_coef | 0.05 | 0.1 |" in text
    assert "better or worse than that of tiny/1:ppo on 4 of 9 posts" in text
    page = (beside_the_runs() / "compare-tiny-1-ppo-b-1-ppo.html").read_text()
    assert "<script>alert" not in page
    assert not (beside_the_runs() / PUBLIC).exists()


def test_texts_of_real_data_are_not_in_the_page_that_may_be_published(runs):
    finish("pythia-1b", A, 1, preset="pythia-1b", texts=TEXTS)
    path = Path(compare_page.write_page(["pythia-1b/1:ppo", "pythia-1b/1:sft"]).splitlines()[-1])
    assert path.name == "compare-pythia-1b-1-ppo-sft.html"
    markdown = path.with_suffix(".md").read_text()
    wins = "PPO 55.6%, SFT 55.6% against the references; SFT inconclusive"
    assert markdown.startswith(f"# pythia-1b/1: {wins}\n")
    public = path.parent / PUBLIC / path.name
    for theirs in ("SUBREDDIT: r/", "the aunt | lamp"):
        assert theirs in path.read_text()
        assert theirs not in public.read_text()
    assert TEXTS[3] in public.read_text()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "name two or more"),
        (["tiny:ppo"], "name two or more"),
        (["tiny/1", "tiny/1:ppo"], "are all tiny/1:ppo"),
        (["tiny/1", "tiny/9"], "seed 9 of tiny has not finished"),
        (["tiny/1", "tiny/1:dpo"], "has no policy dpo: it has sft, ppo"),
        (["tiyn", "tiny"], "did you mean tiny?"),
        (["tiny/one", "tiny"], "names no side"),
        (["tiny/seed:ppo", "tiny"], "names no side"),
        (["tiny", "b"], "have no seed in common"),
        (["tiny/1", "b/2"], "toy3 has another text in b/2:ppo"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(runs, capsys, asked, said):
    finish("tiny", A, 1, 3)
    finish("b", B, 2)
    config = make_config("tiny", name="b", seed=2, overrides=("ppo.kl_coef=0.1",))
    path = stage_folder(config, "summaries") / "ppo.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["query"] = NASTY + " More."
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert said in refused_by(capsys, compare_page.main, *(["--runs", *asked] if asked else []))
