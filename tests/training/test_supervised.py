"""What SFT, reward model and DPO refuse before they start."""

import pytest

from stages.config.errors import UserError
from stages.training.supervised import check_batch
from tests.lib.processes import Process


def test_a_batch_that_cannot_be_filled_or_divided_is_refused():
    check_batch("sft", 8, 8, Process(count=4))
    with pytest.raises(
        UserError, match=r"sft\.batch_size is 9 but there are only 8 rows: lower it"
    ):
        check_batch("sft", 9, 8, Process())
    with pytest.raises(UserError, match=r"rm\.batch_size is 8: it must be divisible by 3"):
        check_batch("rm", 8, 100, Process(count=3))
