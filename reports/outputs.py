"""The page of summaries that existed already: whose are preferred, and whether to trust the judge.

It is the stage `report` of a run that judges given summaries (`make judge INPUT=outputs.jsonl`),
and writes the same files as a run's page. The text of the page is `templates/outputs.md`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.stats.hypothesis_tests import holm
from reports import render
from reports.formats import MISSING, percent, text_table
from reports.judging import calibration_of_run, control_rows, judge_prompt
from reports.provenance import provenance, settings_table
from reports.results import Interval, PolicyResult, RunResult, load_run
from reports.run import win_rates_figure, write_stage
from reports.samples import NUMBER_OF_SAMPLES, samples_of
from reports.verdicts import SIGNIFICANCE
from stages.config.config import Config

EVEN = 0.5
TERMINAL_NAME = 22  # columns of a system's name in the terminal


@dataclass(frozen=True, kw_only=True)
class System:
    """One system whose summaries were judged."""

    policy: PolicyResult
    posts: int
    given_name: str
    """Its name in the file, where that cannot name a file of ours; empty otherwise."""
    corrected_p: float | None
    """Of no difference from the references, corrected for the number of systems."""

    @property
    def is_better(self) -> bool:
        """Whether it reliably beats the references."""
        return self._is_reliable and self._rate.is_above(EVEN)

    @property
    def is_worse(self) -> bool:
        """Whether it reliably loses to the references."""
        return self._is_reliable and self._rate.is_below(EVEN)

    @property
    def _rate(self) -> Interval:
        assert self.policy.win_rate is not None
        return self.policy.win_rate

    @property
    def _is_reliable(self) -> bool:
        # The best of many equal systems lies above 50% by chance, hence the correction.
        return self.corrected_p is not None and self.corrected_p < SIGNIFICANCE


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The systems, best raw win rate first, and which of them the leader is not better than."""

    systems: tuple[System, ...]
    inseparable: tuple[str, ...]
    """The titles of the systems that the first one is not reliably better than."""

    @property
    def leader(self) -> System | None:
        """The system with the best win rate; None if none has a rate."""
        rated = [system for system in self.systems if system.policy.win_rate is not None]
        return rated[0] if rated else None

    @property
    def leaders(self) -> list[str]:
        """The titles of the systems with the best win rate; several if they have the same."""
        if self.leader is None or self.leader.policy.win_rate is None:
            return []
        best = self.leader.policy.win_rate.estimate
        rates = [(system.policy.title, system.policy.win_rate) for system in self.systems]
        return [title for title, rate in rates if rate is not None and rate.estimate == best]


def write_report(config: Config) -> str:
    """Write the page of given summaries, and return the result for the terminal.

    Raises UserError, with the command to run, if a stage is missing or stale.
    """
    run = load_run(config)
    return write_stage(
        config,
        run,
        template="outputs.md",
        values=page_values(run),
        has_public_page=True,  # the posts may be other people's words
        terminal_text=terminal_text,
    )


def page_values(run: RunResult) -> dict[str, Any]:
    """Return everything that the template of the page prints."""
    ranked = ranking(run)
    samples = samples_of(run, list(run.policies))
    controls = run.stages["controls"].results
    prompt = judge_prompt(run.settings["judge"])
    return {
        "run": run,
        "ranking": ranked,
        "policies": [system.policy for system in ranked.systems],
        "win_rates": win_rates_figure(run),
        "samples": samples[:NUMBER_OF_SAMPLES],
        "sample_count": len(samples),
        "controls": control_rows(controls),
        "control_posts": controls["posts"],
        "failed_controls": [controls["controls"][name]["what"] for name in controls["failed"]],
        "undecided_controls": controls.get("undecided", ""),
        "judge_prompts": [prompt] if prompt else [],
        "calibration": calibration_of_run(run),
        "settings": settings_table(run),
        "provenance": provenance([run]),
    }


def ranking(run: RunResult) -> Ranking:
    """Return the systems by their raw win rate, with p-values corrected after Holm."""
    judged = run.stages["win_rate"].results["policies"]
    given_names = run.stages["summaries"].results.get("given_names") or {}
    rated = [name for name, policy in run.policies.items() if policy.win_rate is not None]
    corrected = dict(zip(rated, holm([judged[name]["p_value"] for name in rated]), strict=True))

    systems = []
    for name in sorted(run.policies, key=lambda name: -(judged[name]["win_rate"] or 0.0)):
        system = System(
            policy=run.policies[name],
            posts=judged[name]["posts"],
            given_name=given_names.get(name, ""),
            corrected_p=corrected.get(name),
        )
        systems.append(system)
    leading = next((system.policy.name for system in systems if system.policy.name in rated), "")
    return Ranking(systems=tuple(systems), inseparable=_inseparable(run, leading, rated))


def _inseparable(run: RunResult, leading: str, rated: list[str]) -> tuple[str, ...]:
    """Return the titles of the rated systems that the leading one is not reliably better than."""
    pairs = [pair for pair in run.differences if pair.policy in rated and pair.other in rated]
    known = [pair for pair in pairs if pair.p_value is not None]
    corrected = holm([pair.p_value for pair in known if pair.p_value is not None])
    apart = set()
    for pair, p_value in zip(known, corrected, strict=True):
        if p_value < SIGNIFICANCE and leading in (pair.policy, pair.other):
            apart |= {pair.policy, pair.other}
    return tuple(
        run.policies[name].title for name in rated if name != leading and name not in apart
    )


def terminal_text(run: RunResult, path: Path) -> str:
    """Return the result for a terminal; its last line is the path of the page."""
    ranked = ranking(run)
    names = shortened([system.policy.title for system in ranked.systems], TERMINAL_NAME)
    rows = []
    for name, system in zip(names, ranked.systems, strict=True):
        policy = system.policy
        at_length = policy.at_equal_length
        rate = f"{MISSING} ({percent(policy.unjudged)} unjudged)"
        if policy.win_rate is not None:
            rate = percent(policy.win_rate)
        rows.append((name, rate, percent(at_length.rate if at_length else None)))
    table = text_table(("", "win rate [95%]", "at equal length"), rows)
    return render.fill_text("outputs_terminal.txt", run=run, ranking=ranked, table=table, path=path)


def shortened(names: list[str], width: int) -> list[str]:
    """Return names of at most `width` characters; a cut one ends with its number."""
    result = []
    for number, name in enumerate(names, start=1):
        end = f"…#{number}"
        result.append(name if len(name) <= width else name[: width - len(end)] + end)
    return result
