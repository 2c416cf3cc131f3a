"""P-values: paired tests over posts and over seeds, Fisher's exact test, Holm's correction.

Importing scipy.stats or statsmodels takes a second, so the functions import them when they run.
"""

from collections.abc import Sequence

import numpy as np

from eval.stats.intervals import Floats, Z, mean_of_seeds

EQUIVALENCE_LEVEL = 0.05
"""The level of each of the two one-sided tests of equivalence."""
# Scores are means over two orders and up to 100 seeds: differences are multiples of 1 / 400.
FINEST_GRID = 400


def sign_flip_p_value(differences: Floats) -> float:
    """Two-sided p-value of "the mean difference is 0", if each post's sign could be flipped.

    All sign patterns are counted, so the p-value is exact to about 1e-16 and never too coarse for
    a correction for many tests. Posts with differences of the same size have a binomial sum, and
    the distributions of the sizes are convolved. `differences` must be multiples of 1/4 (of 1/12
    for means over three seeds); otherwise a ValueError is raised.
    Source: Fisher's paired randomization test.
    """
    from scipy.signal import fftconvolve
    from scipy.stats import binom

    parts = _grid_of(differences)
    steps = np.rint(parts * np.abs(differences)).astype(int)

    # The probability of each sum of signed steps; neighboring sums are two steps apart.
    probabilities = np.ones(1)
    size_counts = np.unique_counts(steps[steps > 0])
    for size, count in zip(size_counts.values, size_counts.counts, strict=True):
        probabilities_of_size = np.zeros(size * count + 1)
        probabilities_of_size[::size] = binom.pmf(np.arange(count + 1), count, 0.5)
        probabilities = fftconvolve(probabilities, probabilities_of_size)
    sums = 2 * np.arange(len(probabilities)) - steps.sum()

    observed = abs(round(parts * float(differences.sum())))
    p_value = float(probabilities[np.abs(sums) >= observed].sum())
    # Both extremes are possible, so a p-value is never below this; rounding can bring it lower.
    least = 2.0 ** (1 - np.count_nonzero(steps))
    return min(1.0, max(least, p_value))


def _grid_of(differences: Floats) -> int:
    """The smallest multiple of 4, n, for which all differences are multiples of 1 / n."""
    for parts in range(4, FINEST_GRID + 1, 4):
        scaled = parts * np.abs(differences)
        if np.allclose(scaled, np.rint(scaled), rtol=0, atol=1e-6):
            return parts
    raise ValueError("the differences are not multiples of a common fraction")


def p_of_seeds(values: Sequence[float]) -> float:
    """Two-sided p-value of a mean over seeds being 0, by a t test.

    1 if there is no t interval: with one seed, or with equal values.
    """
    from scipy.stats import ttest_1samp

    if mean_of_seeds(values) is None:
        return 1.0
    return float(ttest_1samp(values, 0.0).pvalue)


def within_margin(values: Sequence[float], margin: float) -> bool:
    """Whether the mean over seeds is shown to lie between -margin and +margin.

    Two one-sided t tests at 5% each are equivalent to a 90% t interval inside the margin.
    Source: Schuirmann 1987.
    """
    bounds = mean_of_seeds(values, confidence=1 - 2 * EQUIVALENCE_LEVEL)
    if bounds is None:
        return False
    low, high = bounds
    return -margin < low and high < margin


def p_of_interval(*, estimate: float, low: float, high: float, value: float) -> float:
    """Two-sided p-value of a true `value`, from an estimate and its 95% interval.

    The standard error comes from the bound that is on the value's side of the estimate.
    """
    from scipy.stats import norm

    bound = low if estimate > value else high
    error = abs(bound - estimate) / Z
    if error == 0:
        return 1.0 if estimate == value else 0.0
    return float(2 * norm.sf(abs(estimate - value) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for the number of tests, so that the chance of even one false claim stays
    below the level.

    Source: Holm 1979.
    """
    from statsmodels.stats.multitest import multipletests

    if len(p_values) == 0:
        return []
    _, corrected, _, _ = multipletests(p_values, method="holm")
    return [float(p_value) for p_value in corrected]


def fisher_exact(failed: tuple[int, int], tried: tuple[int, int]) -> float:
    """Two-sided p-value of "two groups have the same failure rate".

    Source: Fisher's exact test (Fisher 1934).
    """
    from scipy.stats import fisher_exact as exact_test

    table = [[bad, count - bad] for bad, count in zip(failed, tried, strict=True)]
    return float(exact_test(table).pvalue)
