"""Fewer rows of each split, where the settings ask for fewer. Standard library only."""

import random

from stages.posts.readers import Located
from stages.settings.checks import UserError
from stages.settings.sections import Data


def subsample(data: Data, located: dict[str, list[Located]]) -> dict[str, list[Located]]:
    """The rows of each split that the settings use, in their order.

    The draw depends on the split alone, so that seeds and sizes are compared on the same rows.
    Raises UserError if a split has fewer rows than are asked for.
    """
    drawn = dict(located)
    for name, count in data.rows.items():
        there = len(located.get(name, ()))
        if count > there:
            raise UserError(f"data.*: {count} rows of {name} are asked for, there are {there}")
        if count:
            places = sorted(random.Random(name).sample(range(there), count))
            drawn[name] = [located[name][place] for place in places]
    return drawn
