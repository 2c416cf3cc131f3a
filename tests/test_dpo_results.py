"""What a finished DPO stage records about held-out pairs."""

from statistics import mean

import pytest

from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from stages.runs.run import HELD_OUT_PAIRS


def test_chosen_less_rejected_reward_is_the_mean_gap_of_the_held_out_pairs(whole):
    results = (read_manifest(whole / "dpo") or {})["results"]
    gaps = [row["gap"] for row in read_lines(whole / "dpo" / HELD_OUT_PAIRS)]

    assert abs(mean(gaps)) > 1e-5  # else swapped sides would pass as well
    difference = results["rewards/chosen"] - results["rewards/rejected"]
    assert difference == pytest.approx(mean(gaps), rel=1e-6)
