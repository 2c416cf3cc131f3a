"""What a rehearsal found, beside what the plan says: lines of at most 80 columns."""

import textwrap
from dataclasses import replace
from typing import Any

from reports.needs.gpus import CARDS, Card
from reports.needs.memory import Setting
from reports.needs.parts import part_bytes
from reports.needs.tables import OPTIONAL, gib
from reports.needs.work import Work, work_of
from stages.settings.families import SHARING

Found = dict[str, dict[str, Any]]
# What a part of a run's work takes its measured speed from.
MEASURED_BY = {
    ("sft", "learn"): "sft step",
    ("sft", "validate"): "sft validation",
    ("sft", "sample"): "summaries",
    ("rm", "learn"): "rm step",
    ("rm", "validate"): "rm validation",
    ("rm", "articles"): "rm validation",
    ("normalize", "score"): "references",
    ("ppo", "sample"): "ppo sample",
    ("ppo", "measure"): "ppo measure",
    ("ppo", "score"): "ppo score",
    ("ppo", "learn policy"): "ppo learn",
    ("ppo", "learn critic"): "ppo learn",
    ("dpo", "learn"): "dpo step",
    ("dpo", "reference"): "dpo reference",
    ("summaries", "sample"): "summaries",
    ("summaries", "score"): "references",
    ("summaries", "measure"): "ppo measure",
}
# On a CPU the matrix library keeps packed copies of what it multiplies: 10 to 20 MiB were measured
# at the shapes of Pythia-14m and -70m. Beside a real plan it is nothing, beside a small one it is.
CPU_SCRATCH = 12 * 2**20


def card_of_device(device: str) -> tuple[str, Card] | None:
    """The card of the plan that a device's name means, with its name; None for others."""
    words = device.lower().replace("-", " ").split()
    for name, card in CARDS.items():
        if name.split("-")[0].replace("rtx", "") in words:
            return name, card
    return None


def planned_peaks(setting: Setting, found: Found) -> dict[str, float]:
    """Bytes that the plan gives each part, at the lengths that the rehearsal met."""
    planned = {}
    for part, one in found.items():
        if "longest" not in one or part not in part_bytes(setting):
            continue
        lengths, longest = setting.lengths, one["longest"]
        if part.startswith("sft"):
            lengths = replace(lengths, longest_sft=longest)
        elif part.startswith(("rm", "dpo")):
            if setting.shape.family in SHARING:
                longest -= lengths.longest_compared
            lengths = replace(lengths, longest_pair=longest)
        elif part == "references":
            lengths = replace(lengths, longest_query=longest - lengths.longest_summary)
        else:
            lengths = replace(lengths, longest_query=longest)
        total = part_bytes(replace(setting, lengths=lengths))[part].total
        planned[part] = total + (0 if setting.on_gpu else CPU_SCRATCH)
    return planned


def rates_of(found: Found) -> dict[str, float]:
    """Operations per second that each part reached."""
    return {
        part: one["flops"] / one["seconds"]
        for part, one in found.items()
        if one.get("flops") and one.get("seconds")
    }


def hours_of(setting: Setting, found: Found) -> dict[str, float]:
    """Hours of each stage of the whole run at the measured speeds; stages without one left out."""
    rates, hours = rates_of(found), dict[str, float]()
    lacking = set()
    for work in work_of(setting):
        rate = rates.get(MEASURED_BY[work.stage, work.label])
        if rate is None:
            lacking.add(work.stage)
        else:
            hours[work.stage] = hours.get(work.stage, 0.0) + work.flops / rate / 3600
    return {stage: spent for stage, spent in hours.items() if stage not in lacking}


def update_seconds(setting: Setting, found: Found) -> dict[str, float]:
    """Seconds of sampling, scoring and learning in one update of PPO, at the measured speeds."""
    rates = rates_of(found)
    spent = {"sample": 0.0, "score": 0.0, "learn": 0.0}
    for work in work_of(setting):
        rate = rates.get(MEASURED_BY[work.stage, work.label])
        if work.stage == "ppo" and rate is not None:
            spent[_kind(work)] += work.flops / rate / setting.config.ppo.num_updates
    return spent


def _kind(work: Work) -> str:
    name = work.label.split()[0]
    return "score" if name == "measure" else name


def table_lines(setting: Setting, found: Found, peak_rate: float) -> list[str]:
    """A row for each part: planned and measured peak, seconds, tokens a second, share of peak."""
    planned = planned_peaks(setting, found)
    lines = [
        "GiB, and what the timed step took",
        f"{'part':15}{'plan':>7}{'peak':>7}{'ratio':>7}{'seconds':>9}{'tokens/s':>10}"
        f"{'Gflop/s':>10}{'share':>7}",
    ]
    rates = rates_of(found)
    for part, one in found.items():
        if part in ("start checks", "checkpoint"):
            continue
        if "failed" in one:
            lines.append(f"{part:15}failed: {one['failed']}"[:80])
            continue
        lines.append(_row(part, one, planned.get(part), (rates.get(part), peak_rate)))
    return lines


def _row(
    part: str, one: dict[str, Any], planned: float | None, rates: tuple[float | None, float]
) -> str:
    rate, most = rates
    peak = one.get("peak")
    ratio = f"{planned / peak:.2f}" if planned and peak else "-"
    speed = f"{one['tokens'] / one['seconds']:,.0f}" if one.get("tokens") else "-"
    return (
        f"{part:15}{gib(planned or 0):>7}{gib(peak or 0):>7}{ratio:>7}{one['seconds']:>9.2f}"
        f"{speed:>10}"
        + (f"{rate / 1e9:>10,.0f}{rate / most:>7.0%}" if rate else f"{'-':>10}{'-':>7}")
    )


def whole_lines(setting: Setting, found: Found, price: float) -> list[str]:
    """The whole run at the measured speeds: shares of an update, hours, price, start checks."""
    lines = []
    spent = update_seconds(setting, found)
    whole = sum(spent.values())
    if all(spent.values()):
        said = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in spent.items())
        lines.append(f"one update of PPO: {whole:,.1f} s ({said})")
    hours = hours_of(setting, found)
    lines.append("hours of the whole run at these speeds, by counting")
    lines += [f"  {stage:12}{one:>12,.2f}" for stage, one in hours.items() if stage != OPTIONAL]
    needed = sum(one for stage, one in hours.items() if stage != OPTIONAL)
    paid = f", ${needed * price:,.0f} at ${price:g} an hour" if price else ""
    lines.append(f"  {'together':12}{needed:>12,.2f}{paid}")
    if OPTIONAL in hours:
        lines.append(f"  {'dpo':12}{hours[OPTIONAL]:>12,.2f}  (optional)")
    saved = found.get("checkpoint", {})
    if "bytes" in saved:
        lines.append(
            f"a checkpoint of PPO: {saved['bytes'] / 1e9:.2f} GB, saved in "
            f"{saved['seconds']:.1f} s, checked and loaded in {saved['load_seconds']:.1f} s"
        )
    elif "failed" in saved:
        lines.append(f"a checkpoint of PPO: {saved['failed']}")
    checks = found.get("start checks", {}).get("said", "not reached")
    return [*lines, *textwrap.wrap(f"start checks in this precision: {checks}", 80)]
