"""Two halves of the comparisons that have no post in common. Standard library only."""

import hashlib

from stages.config.sections import ALL_PAIRS


def in_half(post_id: str, pairs: str) -> bool:
    """Whether the comparisons of a post belong to `pairs`: `all`, or the `even` or `odd` half.

    The last bit of the SHA-256 of the post's id decides, so the halves are the same in every run.
    """
    if pairs == ALL_PAIRS:
        return True
    last_byte = hashlib.sha256(post_id.encode()).digest()[-1]
    is_odd = last_byte % 2 == 1
    return is_odd == (pairs == "odd")
