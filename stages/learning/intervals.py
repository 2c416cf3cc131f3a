"""The interval of a proportion, for accuracies and win rates alike."""

from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)  # 95%, two-sided


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval for a proportion, in [0, 1], by statsmodels.

    n may be an effective number of observations, so neither need be whole.
    Source: Wilson 1927, equation for the score interval.
    """
    # Imported late: it takes seconds, and modules that only look or plan name this one.
    from statsmodels.stats.proportion import proportion_confint

    p = successes / n
    low, high = proportion_confint(successes, n, method="wilson")
    return max(0.0, min(float(low), p)), min(1.0, max(float(high), p))  # rounding at 0 and n
