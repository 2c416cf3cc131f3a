"""Straight lines over the logarithm of parameters, by statsmodels, where points can carry one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SIZES = 4  # three points leave a line one degree of freedom: t is 12.7 there, and 4.3 here


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a number changes with ten times the parameters."""

    per_tenfold: float
    low: float
    high: float
    r_squared: float
    sizes: int
    power: bool
    """Whether it is an exponent: the number is multiplied by 10 to this power."""


def fit(parameters: Sequence[float], means: Sequence[float], power: bool = False) -> Fit | str:
    """`y = a + b log10(parameters)` through the means of the sizes; a sentence if there is no fit.

    b with Student's 95% interval, sizes - 2 degrees of freedom: a size is one point, however many
    seeds it has, because seeds of one size say nothing about the form over sizes. With `power`,
    log10 of y is fitted, so b is the exponent of a power law.
    Source: ordinary least squares by statsmodels; Kaplan et al. 2020 for the power law of a loss.
    """
    import statsmodels.api

    x, y = np.log10(np.array(parameters, dtype=float)), np.array(means, dtype=float)
    if len(set(x)) < LEAST_SIZES:
        points = {1: "one size", 2: "two sizes", 3: "three sizes"}.get(len(set(x)), "no size")
        return f"no fit: {points} cannot carry a line with an interval; it takes {LEAST_SIZES}"
    if not np.isfinite(y).all() or (power and (y <= 0).any()):
        return "no fit: a size has no such number"
    fitted = statsmodels.api.OLS(np.log10(y) if power else y, statsmodels.api.add_constant(x)).fit()
    low, high = fitted.conf_int()[1]
    return Fit(
        per_tenfold=float(fitted.params[1]),
        low=float(low),
        high=float(high),
        r_squared=float(fitted.rsquared),
        sizes=len(x),
        power=power,
    )
