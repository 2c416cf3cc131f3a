"""Points of KL and gold score from finished runs, and which runs are refused."""

import pytest

from eval.rates.overoptimisation import fit_law
from reports.overoptimisation_page import write_page
from reports.parts.collect import find_runs
from reports.parts.kl_points import points_of_runs, temperature_notes
from stages.finished import stage_folder
from stages.posts.toy import make_post
from stages.settings.checks import UserError
from stages.settings.command_line import make_config
from stages.settings.prompt import format_post
from stages.settings.sections import EOS_TOKEN
from tests.fabricated_runs import fabricate, write_rows
from tests.test_overoptimisation import law


def run_of(name, seed, pairs, kl=7.3, kl_coef="0.05", **more):
    """A finished run whose policy and SFT have a gold score."""
    overrides = (f"ppo.kl_coef={kl_coef}", "ppo.samples_every=1")
    config = make_config("tiny", name=name, seed=seed, overrides=overrides)
    gold = {"sft": {"estimate": 3.0}, "ppo": {"estimate": 3.0 + law(kl, 1.0, 0.5)}}
    found = {"objective/kl": kl, "rm": {"training_pairs": pairs}}
    fabricate(config, found=found | {"win_rate": {"scores": {"gold": gold}}}, **more)
    return config


def test_runs_with_a_penalty_give_the_policy_at_their_end_and_sft_once(runs, no_drawing):
    for name, kl in (("a", 1.0), ("b", 2.0), ("c", 4.0), ("d", 9.0)):
        for seed in (1, 2):
            run_of(name, seed, 3000, kl)
    points = points_of_runs([record for name in "abcd" for record in find_runs(name)[0]])
    assert sorted(x.kl for x in points if x.seed == "1") == [0.0, 1.0, 2.0, 4.0, 9.0]
    assert {x.strength for x in points} == {"3000 pairs"}
    assert fit_law([x for x in points if x.seed == "2"]).alpha == pytest.approx(1.0)
    assert all(x.proxy is not None for x in points)
    write_page("", ["a", "b", "c", "d"])
    assert "seeds" in (runs / "reports/overoptimisation-a-b-c-d.md").read_text()


def test_a_rival_of_ppo_is_a_point_of_its_own(runs):
    run_of("a", 1, 3000, kl=4.0)
    (record,) = find_runs("a")[0]
    record.folders["rloo"] = record.folders["ppo"]
    record.manifests["rloo"] = record.manifests["ppo"]
    record._results["rloo"] = record.results("ppo") | {"objective/kl": 9.0}
    judged = record.results("win_rate")
    judged["scores"]["gold"]["rloo"] = {"estimate": 2.5}
    for stage in ("win_rate", "summaries"):
        policies = record.results(stage)["policies"]
        policies["rloo"] = policies["ppo"]
    points = points_of_runs([record])
    assert [(x.kl, x.gold) for x in points] == [(0.0, 3.0), (4.0, points[1].gold), (9.0, 2.5)]
    del judged["scores"]["gold"]["rloo"]
    with pytest.raises(UserError, match="a seed 1: rloo has no gold score"):
        points_of_runs([record])


def test_strengths_of_other_sizes_are_named_by_them(runs):
    run_of("a", 1, 3000)
    run_of("b", 1, 3000, size=2_900_000)
    points = points_of_runs([record for name in "ab" for record in find_runs(name)[0]])
    assert {x.strength for x in points} == {"930K, 3000 pairs", "2.9M, 3000 pairs"}


def test_a_run_without_a_gold_score_is_refused(runs):
    fabricate(make_config("tiny"))
    with pytest.raises(UserError, match="tiny seed 44413: sft has no gold score"):
        points_of_runs(find_runs("tiny")[0])


def trained(seed, updates, waiting=2):
    """A run without a penalty: a summary that tells the event of the post scores 3 by the rule."""
    config = run_of("free", seed, 750, kl_coef="0")
    posts = [make_post(f"toy1-train-{number}") for number in range(3)]
    data = stage_folder(config, "base") / "data"
    data.mkdir()
    queries = [{"id": post["id"], "query": format_post(post)} for post in posts]
    write_rows(data / "sft_train.jsonl", queries)
    kls = [0.0] * waiting + [0.5 * step for step in range(1, updates + 1)]
    rows = [{"step": step, "objective/kl": kl} for step, kl in enumerate(kls, start=1)]
    told = [f" {post['summary'].split(',')[0]}{EOS_TOKEN}" for post in posts]
    samples = [
        {"step": row["step"], "query": query["query"], "response": text, "score": 1.0}
        for row in rows
        for query, text in zip(queries, told, strict=True)
    ]
    folder = stage_folder(config, "ppo")
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "samples.jsonl", samples)
    return folder, samples


def test_a_run_without_a_penalty_gives_stretches_of_its_training(runs):
    trained(1, updates=24)
    points = points_of_runs(find_runs("free")[0])
    assert [x.kl for x in points[:3]] == [0.0, 0.75, 1.75]  # two updates each
    assert len(points) == 1 + 12
    assert {x.strength for x in points} == {"750 pairs"}
    assert all(-3 <= x.gold <= 3 and x.proxy == 1.0 for x in points)


def test_no_stretch_of_a_curve_is_a_leftover_of_few_updates(runs):
    """25 updates in 12 stretches, by hand: eleven of two, and the last of three (KL 11.5 to 12.5).

    Chunks of three would have left one update alone, with the largest KL and the most noise.
    """
    trained(1, updates=25)
    points = points_of_runs(find_runs("free")[0])
    assert len(points) == 1 + 12
    assert [x.kl for x in points[1:3]] == [0.75, 1.75]
    assert points[-1].kl == 12.0


def test_two_kinds_of_kl_are_not_one_curve(runs):
    """The KL of a penalty's run is of its last updates; of a curve, of the samples it scores."""
    trained(1, updates=24)
    run_of("bound", 1, 750)
    records = [record for name in ("free", "bound") for record in find_runs(name)[0]]
    with pytest.raises(UserError, match="bound seed 1: of one seed, runs with a KL penalty and"):
        points_of_runs(records)


def test_a_gold_score_at_another_temperature_than_the_kl_is_said(runs):
    run_of("a", 1, 3000)
    (record,) = find_runs("a")[0]
    record.settings["eval"]["temperature"] = record.settings["ppo"]["temperature"] = 0.7
    assert temperature_notes([record]) == []
    record.settings["eval"]["temperature"] = 0.01
    (note,) = temperature_notes([record])
    assert "1 of 1 runs: the KL is of samples at temperature 0.7, the gold score of" in note
    assert "at 0.01." in note


def test_a_curve_with_too_few_samples_or_of_an_unknown_post_is_refused(runs):
    folder, samples = trained(1, updates=3)
    with pytest.raises(UserError, match="samples of 3 updates above KL 0"):
        points_of_runs(find_runs("free")[0])
    folder, samples = trained(2, updates=8)
    samples[0]["query"] = "another post"
    write_rows(folder / "samples.jsonl", samples)
    with pytest.raises(UserError, match="is not in stage base"):
        points_of_runs([x for x in find_runs("free")[0] if x.seed == 2])
