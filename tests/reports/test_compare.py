"""`make compare`: the page that compares policies of finished runs with the first of them."""

import copy
import json
import re
from pathlib import Path

import pytest

from reports import compare as compare_page
from reports.about_runs import folder
from reports.compare import compared_posts, rate_at_equal_length, title_parts, what_differs
from reports.entries import compare, read_entries
from reports.render import PUBLIC
from reports.results import Interval
from stages.config.command_line import make_config
from stages.runs.manifest import stage_folder
from tests.lib.fabricated_runs import RESULTS, fabricate

# Five of these nine posts are won.
A = (1.0, 1.0, 0.5, 0.0, 0.0, 0.5, 1.0, 0.0, 1.0)
B = (0.0, 1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.5)
LOST = (0.0,) * 9
WON = (1.0,) * 9
TEXTS = [f"My aunt sold lamp {number}." for number in range(9)]

pytestmark = pytest.mark.usefixtures("runs", "no_drawing")


def finish(name, scores, *seeds, preset="tiny", **others):
    """Fabricate a run in these seeds; a run with a name of its own has another penalty."""
    overrides: tuple[str, ...] = ()
    if name != preset:
        overrides = ("ppo.kl_coef=0.1",)
    for seed in seeds:
        config = make_config(preset, name=name, seed=seed, overrides=overrides)
        fabricate(config, scores=scores, **others)


def page_of(*texts):
    """The Markdown of the page about these entries, in lines that are not broken."""
    path = Path(compare_page.write_page(texts).splitlines()[-1])
    return path.with_suffix(".md").read_text()


def opening_of(markdown):
    return " ".join(markdown.split("\n\n")[1].split())


def rows_of(*texts):
    """The rows of the page about these entries."""
    entries, _ = read_entries(texts)
    return compare_page.rows_of(entries, [compare(entry, entries[0]) for entry in entries[1:]])


def change_results(config, change):
    """Change the results of the stage win_rate of a finished run."""
    path = stage_folder(config, "win_rate") / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["results"])
    path.write_text(json.dumps(manifest))


# -- verdicts --------------------------------------------------------------------------------------


def test_a_gain_in_all_seeds_is_better():
    finish("tiny", LOST, 1, 2, 3, texts=TEXTS)
    finish("b", WON, 1, 2)
    finish("b", (*WON[:8], 0.0), 3)
    markdown = page_of("tiny", "b")
    assert markdown.startswith("# PPO (b) is better than PPO (tiny)\n")
    assert "The difference is +96.3 points [" in opening_of(markdown)  # 1, 1 and 8/9 on average
    assert "**better**" in opening_of(markdown)


def test_a_gain_over_posts_but_not_over_seeds_is_inconclusive():
    """Two of three seeds gain 1, the third 0: 66.7 -+ 4.303 * 57.74 / sqrt(3)."""
    finish("tiny", LOST, 1, 2, 3, texts=TEXTS)
    finish("b", WON, 1, 2)
    finish("b", LOST, 3)
    opening = opening_of(page_of("tiny", "b"))
    assert "+66.7 points [-76.8, +210.1] (95% interval over seeds;" in opening
    assert "**inconclusive**" in opening


def test_a_gain_in_every_seed_that_is_inconclusive_is_in_the_title():
    """The seeds gain 1, 1 and 1/9: 70.4 -+ 4.303 * 51.3 / sqrt(3) holds 0."""
    finish("tiny", LOST, 1, 2, 3, texts=TEXTS)
    finish("b", WON, 1, 2)
    finish("b", (*LOST[:8], 1.0), 3)
    markdown = page_of("tiny", "b")
    title = "PPO (b) wins more often than PPO (tiny) in every seed, but the verdict is inconclusive"
    assert markdown.startswith(f"# {title}\n")
    assert "but 3 seeds that differ this much are too few for a verdict" in opening_of(markdown)


def test_many_unclear_policies_are_counted_in_the_title():
    finish("tiny", LOST, 1, texts=TEXTS)
    for name in ("b", "c", "d", "e"):
        finish(name, (*LOST[:8], 1.0), 1)
    finish("f", WON, 1)
    better, unclear = title_parts(rows_of("tiny", "b", "c", "d", "e", "f"))
    assert better.kind == "better"
    assert len(better.labels) == 1
    assert unclear.kind == "many unclear"
    assert len(unclear.labels) == 4


def test_a_row_with_fewer_seeds_is_marked_everywhere():
    finish("tiny", LOST, 1, 2, texts=TEXTS)
    finish("b", WON, 1)
    markdown = page_of("tiny", "b")
    assert markdown.startswith("# PPO (b) (1 of 2 seeds) is better than PPO (tiny)\n")
    assert re.search(r"^\| PPO \(b\) \| better \|.*\| 1 of 2 \|$", markdown, re.MULTILINE)
    assert "PPO (b) has only 1 of 2 seeds" in markdown


def test_one_seed_of_each_is_a_limitation():
    finish("tiny", LOST, 1, texts=TEXTS)
    finish("b", WON, 2)
    markdown = page_of("tiny/1", "b/2")
    assert "- One seed of each says nothing about other seeds." in markdown
    assert "if the 90% interval lies within ±3 points" in markdown


def test_too_many_posts_without_a_verdict_allow_no_comparison():
    finish("tiny", A, 1)
    finish("b", (None, *B[1:]), 1)
    markdown = page_of("tiny/1", "b/1")
    assert markdown.startswith("# PPO (b/1) cannot be compared with PPO (tiny/1)\n")
    assert "11.1% of the posts of PPO (b/1) have no verdict." in markdown


def test_the_terminal_shows_the_verdicts_in_80_columns(capsys):
    finish("tiny", LOST, 1, texts=TEXTS)
    finish("b", WON, 1)
    compare_page.main(["--runs", "tiny/1", "b/1"])
    *lines, path = capsys.readouterr().out.splitlines()
    assert lines[0] == "PPO (b/1) is better than PPO (tiny/1)."
    assert max(map(len, lines)) <= 80
    assert path == str(folder() / "compare-tiny-1-ppo-b-1-ppo.html")


# -- the tables ------------------------------------------------------------------------------------


def test_the_highest_win_rate_is_first():
    finish("tiny", LOST, 1, texts=TEXTS)
    finish("b", A, 1)
    finish("c", WON, 1)
    labels = [row.label for row in compare_page.ranked(rows_of("tiny", "b", "c"))]
    assert labels == ["PPO (c)", "PPO (b)", "PPO (tiny)"]


def extrapolate_ppo(results):
    results["policies"]["ppo"]["statistics"]["length_controlled"]["extrapolated"] = True


def test_the_rate_at_equal_length_is_a_mean_over_seeds_and_marked_if_one_extrapolates():
    finish("tiny", A, 1, 2)
    change_results(make_config("tiny", seed=2), extrapolate_ppo)
    (ppo, sft), _ = read_entries(["tiny:ppo", "tiny:sft"])

    ppo_rate, ppo_is_extrapolated = rate_at_equal_length(ppo)
    sft_rate, sft_is_extrapolated = rate_at_equal_length(sft)

    assert ppo_rate is not None
    assert ppo_rate.estimate == pytest.approx(0.59)  # the fabricated 0.63 - 0.04
    assert ppo_is_extrapolated
    assert sft_rate is not None
    assert sft_rate.estimate == pytest.approx(0.372)
    assert not sft_is_extrapolated


def test_there_is_no_rate_at_equal_length_if_too_many_posts_have_no_verdict():
    finish("tiny", A, 1)
    finish("b", (1.0, None, 0.0), 1)
    (_, entry), _ = read_entries(["tiny", "b"])
    assert rate_at_equal_length(entry) == (None, False)


def test_posts_whose_verdict_changed_come_first():
    """Of the nine posts 0, 2, 4 and 8 change, and post 0 is the example that opens the page."""
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1)
    entries, _ = read_entries(["tiny", "b"])
    posts = compared_posts(entries)
    assert posts.changed == 4
    assert posts.count == 9
    assert [sample.post_id for sample in posts.samples] == ["toy2", "toy4", "toy8", "toy1", "toy3"]


def test_the_page_shows_one_post_with_the_summary_of_every_policy():
    """The fabricated references state no fact, so that none of them is wrong."""
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1)
    _, _, after_heading = page_of("tiny", "b").partition("## An example: ")
    example, _, _ = after_heading.partition("<details>")
    assert example.startswith("the first held-out post whose reference has no wrong fact\n")
    assert "| PPO (tiny) | My aunt sold lamp 0. |" in example
    assert "| PPO (b) |" in example
    assert "| wanted facts told correctly | 6 of 6 |" in example


def test_policies_that_wrote_the_same_share_a_row():
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1, texts=TEXTS)
    finish("c", B, 1, texts=TEXTS)
    markdown = page_of("tiny", "b", "c")
    assert "| PPO (b) and PPO (c) | My aunt sold lamp 0. |" in markdown


def test_policies_that_wrote_the_same_are_named_on_the_first_screen():
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1, texts=TEXTS)
    finish("c", B, 1)
    opening = opening_of(page_of("tiny", "b", "c"))
    assert "PPO (b) wrote the same summaries as PPO (tiny), word for word." in opening
    assert "PPO (b) +0.0 points, **no difference of 3 points**" in opening


def test_settings_of_evaluation_do_not_differ_between_policies():
    finish("tiny", A, 1, texts=TEXTS)
    config = make_config("tiny", name="b", seed=1, overrides=("ppo.kl_coef=0.1", "eval.posts=40"))
    fabricate(config, scores=B)
    entries, _ = read_entries(["tiny", "b"])
    (difference,) = what_differs(entries)
    assert [setting.name for setting in difference.settings] == ["ppo.kl_coef"]


def test_the_win_rate_of_several_seeds_has_an_interval_over_seeds():
    """All and none of nine posts: 50% on average, and cut off at 0 and 100%."""
    finish("tiny", WON, 1, texts=TEXTS)
    finish("tiny", LOST, 2, texts=TEXTS)
    first, _ = rows_of("tiny:ppo", "tiny:sft")
    assert first.win_rate == Interval(estimate=0.5, low=0.0, high=1.0)


def test_the_opening_has_the_difference_of_each_policy_from_the_first():
    finish("tiny", LOST, 1, texts=TEXTS)
    finish("b", WON, 1)
    finish("c", LOST, 1)
    opening = opening_of(page_of("tiny", "b", "c"))
    assert "Compared with PPO (tiny) on the same posts: PPO (b) +100.0 points" in opening


def test_the_opening_has_every_number_of_posts():
    finish("tiny", LOST, 1, texts=TEXTS)
    finish("b", WON, 1)
    config = make_config("tiny", name="b", seed=1, overrides=("ppo.kl_coef=0.1",))
    change_results(config, lambda results: results.update(posts=40))
    opening = opening_of(page_of("tiny", "b"))
    assert opening.startswith("PPO (b) has a win rate of 100.0%")
    assert "against the references on 40 held-out posts, and PPO (tiny) 0.0%" in opening
    assert "on 600." in opening
    assert "The difference on the posts of both is +100.0 points" in opening


def test_the_settings_that_differ_are_named():
    finish("tiny", A, 1, texts=TEXTS)
    finish("b", B, 1)
    entries, _ = read_entries(["tiny", "b"])
    (difference,) = what_differs(entries)
    assert difference.label == "PPO (b)"
    assert [setting.name for setting in difference.settings] == ["ppo.kl_coef"]
    markdown = page_of("tiny", "b")
    assert "differs from that of PPO (tiny) in `ppo.kl_coef` (0.1 instead of 0.05)." in markdown
    assert "| ppo.kl_coef | 0.05 | 0.1 |" in markdown


def test_a_policy_whose_summaries_are_often_cut_off_is_a_limitation():
    """Of the summaries in the two seeds, 99.1% and 40.9% emit EOS."""
    results = fabricate(make_config("tiny", seed=1), scores=A)
    summaries = copy.deepcopy(results["summaries"])
    summaries["policies"]["ppo"]["eos_rate"] = 0.409
    fabricate(make_config("tiny", seed=2), scores=A, found={"summaries": summaries})
    assert "Only 70.0% of the summaries by PPO emit EOS" in page_of("tiny:sft", "tiny:ppo")


def test_a_policy_that_never_emits_eos_is_a_limitation():
    summaries = copy.deepcopy(RESULTS["summaries"])
    summaries["policies"]["ppo"]["eos_rate"] = 0.0
    fabricate(make_config("tiny", seed=1), scores=A, found={"summaries": summaries})

    page = page_of("tiny:sft", "tiny:ppo")

    assert "None of the summaries by PPO emits EOS: all are cut off at the length limit." in page


ROSE = {"estimate": 0.4, "low": 0.2, "high": 0.6, "posts": 9}
FELL = {"estimate": -0.3, "low": -0.4, "high": -0.2, "posts": 9}


def over_optimize(results):
    results["scores"] = {"gains": {"ppo": {"proxy": ROSE, "gold": FELL}}}


def improve(results):
    results["scores"] = {"gains": {"ppo": {"proxy": ROSE, "gold": ROSE}}}


def test_over_optimization_is_a_limitation():
    finish("tiny", A, 1, 2)
    change_results(make_config("tiny", seed=1), over_optimize)
    change_results(make_config("tiny", seed=2), improve)
    assert "- **PPO over-optimized its reward** in 1 of 2 seeds" in page_of("tiny:sft", "tiny:ppo")


# -- files -----------------------------------------------------------------------------------------


def test_the_page_of_one_run_is_called_after_its_policies():
    finish("tiny", A, 1, texts=TEXTS)
    page_of("tiny/1:ppo", "tiny/1:sft")
    assert (folder() / "compare-tiny-1-ppo-sft.json").exists()
    assert not (folder() / PUBLIC).exists()


def test_the_json_has_the_numbers_of_each_entry():
    finish("tiny", LOST, 1, texts=TEXTS)
    finish("b", WON, 1)
    page_of("tiny/1", "b/1")
    record = json.loads((folder() / "compare-tiny-1-ppo-b-1-ppo.json").read_text())
    first, second = record["numbers"]
    assert first["label"] == "PPO (b/1)"
    assert first["verdict"]["word"] == "better"
    assert second["label"] == "PPO (tiny/1)"
    assert second["verdict"] is None


def test_the_public_page_of_real_data_has_no_texts_of_others():
    finish("pythia-1b", A, 1, preset="pythia-1b", texts=TEXTS)
    page_of("pythia-1b/1:ppo", "pythia-1b/1:sft")
    private = (folder() / "compare-pythia-1b-1-ppo-sft.html").read_text()
    public = (folder() / PUBLIC / "compare-pythia-1b-1-ppo-sft.html").read_text()
    for text in ("SUBREDDIT: r/", "the aunt | lamp"):
        assert text in private
        assert text not in public
    assert TEXTS[3] in public


def test_scripts_in_summaries_stay_text():
    finish("tiny", A, 1, texts=["<script>alert(1)</script>"] * 9)
    finish("b", B, 1)
    page_of("tiny/1", "b/1")
    assert "<script>alert" not in (folder() / "compare-tiny-1-ppo-b-1-ppo.html").read_text()
