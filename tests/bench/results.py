"""What was measured, and the ratios that the table shows."""

from dataclasses import dataclass, field

from tests.bench.case import Case
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
    """All runs of one case. There are none of TRL if it could not be measured."""

    case: Case
    ours: list[OurUpdate]
    trl: list[Update]

    @property
    def speed_over_trl(self) -> float | None:
        """How many times as fast as TRL's our update is."""
        return fastest(self.trl) / fastest(self.ours) if self.trl else None

    @property
    def memory_over_trl(self) -> float | None:
        """Our peak memory over TRL's."""
        return peak(self.ours) / peak(self.trl) if self.trl else None


def fastest(updates: list[OurUpdate] | list[Update]) -> float:
    """Return the seconds of the fastest run."""
    return min(update.seconds for update in updates)


def spread(updates: list[OurUpdate] | list[Update]) -> float:
    """Return the seconds of the slowest run over those of the fastest, minus 1."""
    return max(update.seconds for update in updates) / fastest(updates) - 1


def peak(updates: list[OurUpdate] | list[Update]) -> int:
    """Return the highest peak of all runs, bytes."""
    return max(update.peak for update in updates)


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
        return max(update.matrix_rate for each in self.comparisons for update in each.ours)

    def lower_bound(self, comparison: Comparison) -> float:
        """Return the seconds of the matrix products that an update needs."""
        return comparison.ours[0].operations / self.matrix_rate
