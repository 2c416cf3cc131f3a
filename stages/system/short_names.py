"""Names for a narrow column: cut so that two that differ stay different."""

from collections.abc import Sequence


def shortened(names: Sequence[str], width: int) -> list[str]:
    """The names in at most `width` characters; a cut one has `…` where letters are missing.

    Letters go from the middle, or from where two names are still told apart. Where no one place
    does that, a cut name ends with its number among them.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    middle = width // 2
    for head in sorted(range(1, width - 1), key=lambda place: abs(place - middle)):
        found = [_cut(name, head, width) for name in names]
        if len(set(found)) == len(set(names)):
            return found
    return [
        name if len(name) <= width else _cut(name, middle, width - len(f"#{place}")) + f"#{place}"
        for place, name in enumerate(names, start=1)
    ]


def _cut(name: str, head: int, width: int) -> str:
    """A name without the letters between its first `head` and as many last ones as there fit."""
    tail = width - head - 1
    return name if len(name) <= width else f"{name[:head]}…{name[len(name) - tail :]}"
