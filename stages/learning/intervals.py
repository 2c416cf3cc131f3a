"""The interval of a proportion, for accuracies and win rates alike."""

from math import sqrt
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)  # 95%, two-sided


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval for a proportion, in [0, 1].

    `(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)` with p = successes / n; n may be an
    effective number of observations.
    Source: Wilson 1927, equation for the score interval.
    """
    p = successes / n
    center = p + Z**2 / (2 * n)
    half = Z * sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    low, high = (center - half) / (1 + Z**2 / n), (center + half) / (1 + Z**2 / n)
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # rounding at 0 and n
