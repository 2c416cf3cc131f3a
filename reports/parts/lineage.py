"""What a run was made from, as a picture: its stages, from the base model to the judge's rates."""

import html
from collections.abc import Mapping, Sequence

from reports.parts import plots
from reports.parts.blocks import Figure
from stages.settings.stages import POLICY_STAGES

Inputs = Mapping[str, Sequence[str]]
"""Stage -> the stages that it reads."""
WIDTH, HEIGHT = 132, 40  # of a box, in pixels
ACROSS, DOWN = 20, 22  # between boxes
EDGE = 8  # around the picture
ACCENTS = {
    "rm": plots.RM,
    "normalize": plots.RM,
    **{stage: plots.color_of(stage) for stage in POLICY_STAGES},
}
CAPTION = (
    "What was made from what. Below each stage: the first digits of the hash of its manifest, which"
    " names its settings, its inputs and every file of it. A stage that reads another one's inputs"
    " too has only the line from the later one."
)


def figure(inputs: Inputs, hashes: Mapping[str, str]) -> Figure:
    """The picture of some stages; `hashes` hold the digits that name each."""
    drawn = _boxes(inputs, hashes)
    about = " ".join(
        f"{stage} ({hashes[stage][:8]}) is made from {', '.join(sources) or 'data alone'}."
        for stage, sources in direct(inputs).items()
    )
    width, height = _size(inputs)
    view = f'viewBox="0 0 {width} {height}"'
    named = 'role="img" aria-labelledby="lineage-title lineage-desc"'
    head = (
        f'<title id="lineage-title">Lineage</title><desc id="lineage-desc">{html.escape(about)}'
        "</desc>"
    )
    ground = f'<path d="M0 0H{width}V{height}H0z" style="fill: {plots.GROUND}"/>'
    whole = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {view}'
        f" {named}>{head}{plots.dark_style()}{ground}{drawn}</svg>\n"
    )
    part = f'<svg {named} {view} style="max-width: {width}px">{head}{drawn}</svg>'
    for stand_in, color in plots.PAGE_COLORS.items():
        part = part.replace(stand_in, color)
    return Figure("lineage", CAPTION, whole, [part])


def direct(inputs: Inputs) -> dict[str, list[str]]:
    """Each stage's inputs without those that another of its inputs was made from."""
    nearest = {}
    for stage, sources in inputs.items():
        known = [source for source in sources if source in inputs]
        behind = {far for source in known for far in _ancestors(source, inputs)}
        nearest[stage] = [source for source in known if source not in behind]
    return nearest


def _ancestors(stage: str, inputs: Inputs) -> set[str]:
    sources = [source for source in inputs[stage] if source in inputs]
    return {*sources, *(far for source in sources for far in _ancestors(source, inputs))}


def _depth(stage: str, inputs: Inputs) -> int:
    sources = [source for source in inputs[stage] if source in inputs]
    return 1 + max((_depth(source, inputs) for source in sources), default=-1)


def _rows(inputs: Inputs) -> list[list[str]]:
    """The stages from top to bottom; those of one depth stand side by side."""
    depths = {stage: _depth(stage, inputs) for stage in inputs}
    deepest = max(depths.values(), default=0)
    return [[stage for stage in inputs if depths[stage] == depth] for depth in range(deepest + 1)]


def _size(inputs: Inputs) -> tuple[int, int]:
    rows = _rows(inputs)
    columns = max(map(len, rows))
    width = columns * (WIDTH + ACROSS) - ACROSS + 2 * EDGE
    return width, len(rows) * (HEIGHT + DOWN) - DOWN + 2 * EDGE


def _boxes(inputs: Inputs, hashes: Mapping[str, str]) -> str:
    places = {
        stage: (EDGE + column * (WIDTH + ACROSS), EDGE + row * (HEIGHT + DOWN))
        for row, stages in enumerate(_rows(inputs))
        for column, stage in enumerate(stages)
    }
    lines = [
        _line(places[source], places[stage])
        for stage, sources in direct(inputs).items()
        for source in sources
    ]
    boxes = [_box(stage, hashes[stage][:8], *place) for stage, place in places.items()]
    return "".join([*lines, *boxes])


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    x, y = start[0] + WIDTH // 2, start[1] + HEIGHT
    to_x, to_y = end[0] + WIDTH // 2, end[1]
    bend = to_y - DOWN
    path = f"M{x} {y}V{bend}C{x} {to_y} {to_x} {bend} {to_x} {to_y}"
    return f'<path d="{path}" style="fill: none; stroke: {plots.INK}"/>'


def _box(stage: str, digits: str, x: int, y: int) -> str:
    accent = ACCENTS.get(stage, plots.INK)
    name = html.escape(stage.replace("_", " "))
    font = "system-ui, sans-serif"
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"'
        f' style="fill: {plots.GROUND}; stroke: {plots.GRID}"/>'
        f'<path d="M{x + 6} {y + 8}v{HEIGHT - 16}"'
        f' style="stroke: {accent}; stroke-width: 3; stroke-linecap: round"/>'
        f'<text x="{x + 15}" y="{y + 17}" style="font: 600 13px {font}; fill: {plots.INK}">'
        f'{name}</text><text x="{x + 15}" y="{y + 32}"'
        f' style="font: 11px ui-monospace, monospace; fill: {plots.INK}">{digits}</text>'
    )
