"""A logistic model with clustered errors, for what is left at equal length. No torch."""

import warnings

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Log ratios at which the two terms of length bend: ratios of about 2.2 and 1.2.
SCALES = (0.8, 0.2)
MOST_LOGITS = 15.0  # beyond it a coefficient only says that the data are separated


def clustered_logit(
    outcomes: Floats, design: Floats, groups: NDArray[np.int64]
) -> tuple[Floats, Floats] | None:
    """Coefficients [K] and their clustered covariance [K, K]; None without one finite fit.

    `logit P(outcome) = design @ coefficients`. Shapes: outcomes [n] in [0, 1] (fractional: a tie
    enters as 1/2), design [n, K], groups [n] (rows of one group are one cluster).
    Source: Papke and Wooldridge 1996.
    """
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_linear_model import GLM
    from statsmodels.tools.sm_exceptions import PerfectSeparationWarning

    if np.linalg.matrix_rank(design) < design.shape[1]:  # any of many fits would do as well
        return None
    if len(np.unique(groups)) < 2:  # one cluster shows no spread
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerfectSeparationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow on the way to no fit
        try:
            fit = GLM(outcomes, design, family=Binomial()).fit(
                cov_type="cluster", cov_kwds={"groups": groups}
            )
        except (PerfectSeparationWarning, np.linalg.LinAlgError):
            return None
    coefficients, covariance = np.asarray(fit.params), np.asarray(fit.cov_params())
    finite = np.isfinite(coefficients).all() and np.isfinite(covariance).all()
    if not (fit.converged and finite) or np.abs(coefficients).max() > MOST_LOGITS:
        return None
    return coefficients, covariance


def length_terms(log_ratios: Floats) -> tuple[Floats, Floats]:
    """The bounded terms of length, `wide` and `narrow`: 0 at equal length, at most 1 in size.

    With both, length may count at once or slowly, and has its end.
    """
    wide, narrow = (np.tanh(log_ratios / scale) for scale in SCALES)
    return wide, narrow


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return float(1 / (1 + np.exp(-x)))
