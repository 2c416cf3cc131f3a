"""Over-optimisation: the law of Gao et al. 2022, intervals, the check, the page, its input."""

import json
import re
import subprocess
import sys
from math import e, exp, log
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit, minimize_scalar

from eval.rates.overoptimisation import (
    KlPoint,
    fit_curves,
    fit_law,
    held_out,
    predicted,
    ranked_alike,
)
from reports.overoptimisation_page import answer, blocks, laws, main, turned, write_page
from stages.settings.checks import UserError

ROOT = Path(__file__).parents[1]
KLS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 25.0)


def law(kl, alpha, beta):
    """The law over KL, written from the paper once more."""
    return alpha * kl**0.5 - 0.5 * beta * kl**0.5 * log(kl) if kl else 0.0


def curve(alpha, beta, seed="1", start=0.0, noise=None, **more):
    """Points of one seed; with `start` also at KL 0, with `noise` (a generator) of size 0.1."""
    kls = (0.0, *KLS) if start else KLS
    drawn = noise.normal(0, 0.1, len(kls)) if noise else np.zeros(len(kls))
    return [
        KlPoint(seed=seed, kl=kl, gold=start + law(kl, alpha, beta) + float(error), **more)
        for kl, error in zip(kls, drawn, strict=True)
    ]


# -- the fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2.0, 1.0), (0.8, 0.3), (-0.1, 0.4)])
def test_exact_points_give_alpha_beta_and_the_peak_back(alpha, beta):
    fit = fit_law(curve(alpha, beta, start=3.2))
    assert (fit.alpha, fit.beta, fit.start) == pytest.approx((alpha, beta, 3.2))
    highest = minimize_scalar(
        lambda kl: -law(kl, alpha, beta), bounds=(1e-6, 500), options={"xatol": 1e-9}
    )
    assert fit.peak == pytest.approx(highest.x, rel=1e-4)
    assert fit.top == pytest.approx(-highest.fun)


def test_the_peak_by_hand():
    """d* = exp(alpha / beta - 1): e at alpha 2 and beta 1, where R is e (2 - 1)."""
    fit = fit_law(curve(2.0, 1.0))
    assert (fit.peak, fit.top) == pytest.approx((e**2, e))
    assert fit_law(curve(1.0, -0.1)).peak is None  # it only rises


def test_noisy_points_give_what_another_fitter_gives():
    points = curve(1.5, 0.6, start=2.0, noise=np.random.default_rng(1))
    kls, gold = (np.array([getattr(x, key) for x in points]) for key in ("kl", "gold"))

    def model(kl, alpha, beta, start):
        return start + np.array([law(each, alpha, beta) for each in kl])

    theirs, _ = curve_fit(model, kls, gold, p0=(1, 1, 1))
    fit = fit_law(points)
    assert (fit.alpha, fit.beta, fit.start) == pytest.approx(tuple(theirs), rel=1e-5)


def test_scores_without_a_point_at_kl_0_are_relative_already():
    fit = fit_law(curve(1.5, 0.6))
    assert (fit.alpha, fit.beta, fit.start) == pytest.approx((1.5, 0.6, 0.0))


@pytest.mark.parametrize("start", [0.0, 2.0])
def test_one_point_left_out_has_the_prediction_interval_of_statsmodels(start):
    from statsmodels.regression.linear_model import OLS

    noise, count = np.random.default_rng(2), 5 if start else 4  # of four KLs above 0 the largest
    points = curve(1.5, 0.6, start=start, noise=noise)[:count]
    kept, out = held_out(points)
    assert [point.kl for point in out] == [2.0]
    rows = [[law(x.kl, 1, 0), law(x.kl, 0, 1), *[1] * (start > 0)] for x in points]
    fitted = OLS([x.gold for x in kept], rows[:-1]).fit().get_prediction(rows[-1:])
    (forecast,), p_value = predicted([points])
    low, high = fitted.conf_int(obs=True)[0]
    assert forecast.half == pytest.approx((high - low) / 2)
    assert forecast.error == pytest.approx(out[0].gold - fitted.predicted_mean[0])
    assert forecast.inside == (p_value >= 0.05)  # of one point the two tests are one


def study(rng, seeds=4, start=2.0):
    """Seeds that differ in alpha and beta, with noise; the truth is 1.2 and 0.5."""
    points = []
    for seed in range(seeds):
        alpha, beta = 1.2 + rng.normal(0, 0.05), 0.5 + rng.normal(0, 0.02)
        points += curve(alpha, beta, str(seed), start, rng)
    return fit_curves(points)[0]


def test_intervals_hold_the_truth_19_times_in_20_and_the_check_alarms_once_in_20():
    rng = np.random.default_rng(0)
    studies = [study(rng) for _ in range(400)]

    def covered(estimates, truth):
        return np.mean([x.bounds[0] <= truth <= x.bounds[1] for x in estimates])

    truths = {
        "alpha": (1.2, [x.over_seeds(lambda fit: fit.alpha) for x in studies]),
        "beta": (0.5, [x.over_seeds(lambda fit: fit.beta) for x in studies]),
        "peak": (exp(2 * (1.2 / 0.5 - 1)), [x.peak for x in studies]),
        "top": (0.5 * exp(1.2 / 0.5 - 1), [x.top for x in studies]),
    }
    for name, (truth, estimates) in truths.items():
        assert covered(estimates, truth) == pytest.approx(0.95, abs=0.033), name  # 3 errors
    assert covered([x.bias for x in studies], 0.0) == pytest.approx(0.95, abs=0.033)
    forecasts = [forecast for x in studies for forecast in x.forecasts]
    assert np.mean([x.inside for x in forecasts]) == pytest.approx(0.95, abs=0.01)
    assert np.mean([x.p_value < 0.05 for x in studies]) == pytest.approx(0.05, abs=0.033)


@pytest.mark.parametrize(("betas", "without"), [((0.5, -0.1), ["2"]), ((0.5, 0.1), [])])
def test_no_peak_is_shown_where_a_seed_has_none_or_beta_may_be_0(betas, without):
    points = [x for place, beta in enumerate(betas) for x in curve(1.0, beta, str(place + 1))]
    made = fit_curves(points)[0]
    assert made.without_peak == without
    assert (made.peak, made.top) == (None, None)


def test_pairs_of_samples_are_counted_by_hand():
    # Gold 1, 2, 2: two pairs count; the proxy has one right and ties in the other.
    assert ranked_alike([0.0, 1.0, 0.0], [1.0, 2.0, 2.0]) == 0.75
    assert ranked_alike([1.0, 2.0], [3.0, 3.0]) is None


# -- the page --------------------------------------------------------------------------------------


def write_csv(path, points, columns="kl,gold,seed,proxy_strength,proxy,proxy_accuracy"):
    cells = [(x.kl, x.gold, x.seed, x.strength, x.proxy, x.accuracy) for x in points]
    lines = [",".join("" if cell is None else str(cell) for cell in row) for row in cells]
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


def four_strengths(broken=()):
    """Four strengths, three seeds; at the `broken` ones the gold score collapses at large KL."""
    rng, points = np.random.default_rng(5), []
    for place, pairs in enumerate((750, 1500, 3000, 6000)):
        for seed in (1, 2, 3):
            own = curve(0.8 + 0.2 * place, 0.6, str(seed), 3.0, rng, strength=f"{pairs} pairs")
            for x in own:
                fall = 2.0 * (x.kl > 10) * (pairs in broken)
                accuracy = 0.9 - 0.05 * x.root
                made = {"gold": x.gold - fall, "proxy": x.root, "accuracy": accuracy}
                points.append(KlPoint(**{**vars(x), **made}))
    return points


def test_the_page_says_that_the_law_stands_and_where_the_gold_score_peaks(runs, tmp_path, capsys):
    path = write_csv(tmp_path / "points.csv", four_strengths())
    main(["--input", str(path)])
    printed = capsys.readouterr().out
    made = (runs / "reports/overoptimisation-points.md").read_text()
    first = made.split("\n\n")[1]
    assert first.startswith("In ")
    assert " rises. The law R(d) = d (alpha - beta log d) is not refuted here" in first
    assert "(750 pairs) and" in first
    assert len(first.split()) <= 60
    assert " ".join(printed.split()).startswith(first[:200])
    rows = [line for line in made.splitlines() if line.startswith(("| 750", "| 6000"))]
    (alpha,) = re.findall(r"^\| 6000 pairs \| ([\d.]+) \[", rows[1])
    assert float(alpha) == pytest.approx(1.4, abs=0.15)
    assert (
        "Proxy accuracy on the policy's samples"
        in (runs / "reports/overoptimisation-points.html").read_text()
    )
    assert "> **Note.**" not in made


def test_the_table_of_points_makes_the_page_again(runs, tmp_path, no_drawing):
    write_page(str(write_csv(tmp_path / "points.csv", four_strengths())), [])
    page = runs / "reports/overoptimisation-points.md"
    first, listed = page.read_text(), runs / "reports/overoptimisation-points-numbers/points.csv"
    again = tmp_path / "again/points.csv"
    again.parent.mkdir()
    again.write_bytes(listed.read_bytes())
    write_page(str(again), [])
    assert page.read_text() == first


def test_the_first_paragraph_says_that_the_law_does_not_hold(runs, tmp_path, no_drawing):
    path = write_csv(tmp_path / "points.csv", four_strengths(broken=(1500,)))
    write_page(str(path), [])
    made = (runs / "reports/overoptimisation-points.md").read_text()
    first = made.split("\n\n")[1]
    assert "The law R(d) = d (alpha - beta log d) does NOT hold here" in first
    assert "at 1 of 4 strengths" in first
    held = re.findall(r"^\| (\d+) pairs .* (yes|no) \|$", made, re.MULTILINE)
    assert held == [("750", "no"), ("1500", "yes"), ("3000", "no"), ("6000", "no")]
    assert "| refuted? |" in made
    assert "it errs too far at the largest (p &lt; 0.001); the mean error's interval" in first
    assert "leaves out 0 at 1 of 1." in first
    assert len(first.split()) <= 68


def test_runs_whose_gold_score_fell_while_the_proxy_rose_are_counted():
    """By hand: seed 1 goes from 3 and 5 (mean 4) to 1, seed 2 from 4 to 4.5; the proxy rises.

    At the KL before its last seed 1 is still at its start, which counts as not above it.
    """
    first = zip([0, 0, 1, 2, 3, 9], [3, 5, 6, 5, 4, 1], strict=True)
    second = zip([0, 1, 2, 3, 9], [4, 6, 5, 5, 4.5], strict=True)
    points = [
        KlPoint(seed=seed, kl=kl, gold=gold, proxy=kl / 10)
        for seed, own in (("1", first), ("2", second))
        for kl, gold in own
    ]
    curves = fit_curves(points)
    assert curves[0].gained(lambda point: point.gold) == [-3.0, 0.5]
    assert curves[0].over_optimised == {"1": 3}
    fell = "In 1 of 2 seeds the gold score falls below its start, the proxy's rises; from KL 3"
    assert turned(curves) == f"{fell} nats (1) on none is above it. "
    assert laws(curves).rows[0][-1].startswith("-1.25 [")
    # A second policy at the largest KL, above the start: no KL lies beyond it.
    beside = KlPoint(seed="1", kl=9, gold=7, proxy=0.9)
    assert fit_curves([*points, beside])[0].over_optimised == {"1": 9}
    assert turned(fit_curves(curve(2.5, 0.6))) == ""  # no point at KL 0, no proxy


def test_few_strengths_kls_and_seeds_are_said(no_drawing):
    curves = fit_curves(curve(2.5, 0.6)[:5])  # the peak lies at 560 nats
    notes = " ".join(block.text for block in blocks(curves, [], []) if hasattr(block, "text"))
    assert "1 strength of the proxy" in notes
    assert "a seed has fewer than 6 KLs above 0" in notes
    assert "no intervals over seeds" in notes
    assert "1 of 1 seeds have no point at KL 0" in notes
    two = fit_curves([*curve(2.5, 0.6)[:5], *curve(2.5, 0.61, seed="2")[:5]])
    notes = " ".join(block.text for block in blocks(two, [], []) if hasattr(block, "text"))
    assert "no point lies beyond the peak (largest KL 4.0)" in notes
    assert "holds is NOT shown here: no points lie beyond a peak" in answer(
        fit_curves([*curve(1.0, -0.1), *curve(1.0, -0.2, seed="2")])
    )


def test_one_seed_shows_no_peak_because_it_has_no_interval_of_beta():
    """Its points reach beyond the peak of 7.4 nats, and yet another seed may have none."""
    curves = fit_curves(curve(2.0, 1.0))
    assert (curves[0].shows_peak, curves[0].peak, curves[0].top) == (False, None, None)
    assert "holds is NOT shown here: one seed shows no peak of the gold score." in answer(curves)
    assert laws(curves).rows[0][3] == "not shown: one seed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kl,gold\n1,2\n", ["points.csv:2", "no column seed", "there are kl, gold"]),
        ("kl,gold,seed\n1,high,1\n", ["points.csv:2", "gold is 'high'", "correct"]),
        ("kl,gold,seed\n1,2,1\n1,nan,1\n", ["points.csv:3", "gold is 'nan'"]),
        ("kl,gold,seed\n-1,2,1\n", ["points.csv:2", "below 0"]),
        ("kl,gold,seed\n1,2,\n", ["points.csv:2", "seed is empty", "fill it"]),
        ("kl,gold,seed,proxy_accuracy\n1,2,1,72\n", ["points.csv:2", "from 0 to 1"]),
        ("kl,gold,seed\n1,2\n", ["points.csv:2", "cells"]),
        ("kl,gold,seed\n", ["points.csv", "holds no points"]),
        ("kl,gold,seed\n1,1,7\n2,1,7\n3,1,7\n", ["seed 7 has 3 different KLs", "at least 4"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_its_place(runs, tmp_path, capsys, text, expected):
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["--input", str(path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("error: ")
    assert all(part in line for part in expected), line
    assert not (runs / "reports").exists()


def test_a_file_that_is_not_there_and_no_input_are_refused(runs):
    with pytest.raises(UserError, match="no such file"):
        write_page("gone.csv", [])
    with pytest.raises(UserError, match="give INPUT="):
        write_page("", [])


def test_make_takes_a_file_whose_path_has_spaces(tmp_path):
    folder = tmp_path / "my data"
    folder.mkdir()
    write_csv(folder / "my points.csv", four_strengths())
    command = ["make", "-f", str(ROOT / "Makefile"), "overoptimisation", "VENV="]
    command += [f"PYTHON={sys.executable}", "INPUT=my data/my points.csv"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    made = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert "is not refuted here" in made.stdout
    note = json.loads((tmp_path / "runs/reports/overoptimisation-my-points.json").read_text())
    assert note["command"] == 'make overoptimisation INPUT="my data/my points.csv"'
