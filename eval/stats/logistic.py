"""Logistic regression of outcomes in [0, 1], with standard errors clustered by post."""

import warnings
from dataclasses import dataclass

import numpy as np

from eval.stats.intervals import Floats, Posts

# A larger coefficient only means that the data are separated.
LARGEST_LOGIT = 15.0


@dataclass(frozen=True, kw_only=True)
class LogisticFit:
    """A fitted logistic regression."""

    coefficients: Floats
    """[K]"""
    covariance: Floats
    """[K, K], clustered by post."""

    def error(self, gradient: Floats) -> float:
        """Standard error of a function of the coefficients, from its gradient (delta method)."""
        return float(np.sqrt(gradient @ self.covariance @ gradient))


def clustered_logit(outcomes: Floats, design: Floats, posts: Posts) -> LogisticFit | None:
    """Fit `logit P(outcome) = design @ coefficients`; None without a unique finite fit.

    `outcomes` [n] lie in [0, 1]: a tie enters as 1/2 (a fractional logit). `design` is [n, K].
    Rows with the same number in `posts` [n] form a cluster.
    Source: Papke and Wooldridge 1996 for the fractional logit.
    """
    # statsmodels takes a second to import.
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_linear_model import GLM
    from statsmodels.tools.sm_exceptions import PerfectSeparationWarning

    is_unique = np.linalg.matrix_rank(design) == design.shape[1]
    has_several_clusters = len(np.unique(posts)) > 1
    if not is_unique or not has_several_clusters:
        return None

    model = GLM(outcomes, design, family=Binomial())
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerfectSeparationWarning)
        # The coefficients of separated data overflow before the fit gives up.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            fit = model.fit(cov_type="cluster", cov_kwds={"groups": posts})
        except (PerfectSeparationWarning, np.linalg.LinAlgError):
            return None

    coefficients = np.asarray(fit.params)
    covariance = np.asarray(fit.cov_params())
    is_finite = np.isfinite(coefficients).all() and np.isfinite(covariance).all()
    if not fit.converged or not is_finite or np.abs(coefficients).max() > LARGEST_LOGIT:
        return None
    return LogisticFit(coefficients=coefficients, covariance=covariance)
