"""Two halves of the training comparisons that share no post. Standard library only."""

import hashlib

from stages.settings.config import ALL_PAIRS


def in_half(post_id: str, pairs: str) -> bool:
    """Whether the comparisons of a post belong to `pairs`: `all`, `even` or `odd`.

    Even and odd are the last bit of the SHA-256 of the id, so the halves are the same in every run.
    """
    parity = hashlib.sha256(post_id.encode()).digest()[-1] % 2
    return pairs == ALL_PAIRS or parity == (pairs == "odd")
