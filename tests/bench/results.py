"""What was measured, and the ratios that the table shows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.case import Case
from tests.bench.environment import TRL
from tests.bench.meter import Update


@dataclass(frozen=True, kw_only=True)
class OurUpdate(Update):
    """One measured update, with what its lower bound follows from."""

    operations: float
    """Operations of the matrix products that the update needs."""
    matrix_rate: float
    """Operations per second of a large matrix product in the same process."""
    device: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All runs of one case. There are none of TRL's if it could not be measured."""

    case: Case
    ours: list[OurUpdate]
    trl: list[Update]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The numbers of one implementation at one case."""

    case: Case
    name: str
    seconds: float
    """Of the fastest run. Tokens per second and the ratios of seconds follow from it."""
    spread: float
    """Seconds of the slowest run over those of the fastest, minus 1."""
    tokens_per_second: float
    gigabytes: float
    """The peak of the run that needed the most memory."""
    speed_over_trl: float | None
    memory_over_trl: float | None
    over_lower_bound: float
    """Seconds over those of the matrix products that the update needs."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that one `make bench` has measured so far."""

    date: str
    code_version: str
    versions: dict[str, str]
    machine: str
    runs: int
    overrides: list[str]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be measured, each with its reason."""

    @property
    def device(self) -> str:
        """The device of our first run."""
        return self.comparisons[0].ours[0].device

    @property
    def matrix_rate(self) -> float:
        """Operations per second of a large matrix product, the best of all our runs."""
        updates = [update for comparison in self.comparisons for update in comparison.ours]
        return max(update.matrix_rate for update in updates)

    @property
    def our_rows(self) -> list[Row]:
        """The numbers of our update at every case."""
        return [
            self.make_row(comparison, "ours", comparison.ours) for comparison in self.comparisons
        ]

    @property
    def rows(self) -> list[Row]:
        """The numbers of our update at every case, each followed by TRL's if there are any."""
        rows = []
        for comparison, our_row in zip(self.comparisons, self.our_rows, strict=True):
            rows.append(our_row)
            if comparison.trl:
                rows.append(self.make_row(comparison, TRL, comparison.trl))
        return rows

    def make_row(self, comparison: Comparison, name: str, updates: Sequence[Update]) -> Row:
        """Return the numbers of the runs of one implementation."""
        fastest = min(updates, key=lambda update: update.seconds)
        slowest = max(updates, key=lambda update: update.seconds)
        peak = max(update.peak for update in updates)
        speed_over_trl = None
        memory_over_trl = None
        if comparison.trl:
            speed_over_trl = min(update.seconds for update in comparison.trl) / fastest.seconds
            memory_over_trl = peak / max(update.peak for update in comparison.trl)
        return Row(
            case=comparison.case,
            name=name,
            seconds=fastest.seconds,
            spread=slowest.seconds / fastest.seconds - 1,
            tokens_per_second=fastest.tokens / fastest.seconds,
            gigabytes=peak / 1e9,
            speed_over_trl=speed_over_trl,
            memory_over_trl=memory_over_trl,
            over_lower_bound=fastest.seconds * self.matrix_rate / comparison.ours[0].operations,
        )
