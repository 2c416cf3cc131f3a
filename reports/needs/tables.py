"""What a plan says, in lines of at most 80 columns. Standard library only."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from reports.needs.costs import disk_of, questions_of
from reports.needs.gpus import CONTEXT_GIB, GIB, USABLE, Card, card_of
from reports.needs.memory import Bytes, Setting
from reports.needs.parts import mends, part_bytes, too_large
from reports.needs.shapes import policy_parameters, scorer_parameters
from reports.needs.work import Rate, hours_by_stage, loop_seconds, updates_of, work_of

OPTIONAL = "dpo"
COLUMNS = ("weights", "gradients", "optimizer", "copies", "activations", "logits", "cache", "other")
HEADS = ("weight", "grad", "optim", "copy", "activ", "logit", "cache", "other", "total")
GIGA = 1e9


def gib(count: float) -> str:
    """Bytes as GiB: three digits."""
    value = count / GIB
    return "-" if not count else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def title_lines(setting: Setting, gpu: str, seeds: Sequence[int]) -> list[str]:
    """Which run, which model, which cards."""
    config, card = setting.config, card_of(gpu)
    policy, scorer = policy_parameters(setting.shape), scorer_parameters(setting.shape)
    named = "seeds " if len(seeds) > 1 else "seed "
    shared = ", ENGINE=fsdp2" if setting.sharded else ""
    precision = "bf16 autocast, float32 weights" if setting.half else "float32"
    return [
        f"{config.name}, {named}{' '.join(map(str, seeds))}"[:80],
        f"  starts from {config.base.checkpoint} ({setting.shape.family})"[:80],
        f"  {policy:,} parameters; reward model and critic {scorer:,}",
        f"  {setting.devices} x {gpu}{shared}, {precision}",
        f"  of {card.memory_gib:.1f} GiB a card {gib(card.usable)} are for tensors: {USABLE:.0%} "
        f"less {CONTEXT_GIB:g} for CUDA",
    ]


def memory_lines(setting: Setting, gpu: str) -> list[str]:
    """A row for every part of every stage, and what would make it fit."""
    card, found = card_of(gpu), part_bytes(setting)
    large = too_large(found, card)
    lines = ["GiB on one card, at the worst moment of each part", _memory_row("", HEADS, "")]
    for name, held in found.items():
        cells = [gib(getattr(held, column)) for column in COLUMNS] + [gib(held.total)]
        lines.append(_memory_row(name, cells, "NO" if name in large else "ok"))
    return lines + fit_lines(setting, card, found)


def _memory_row(name: str, cells: Sequence[str], end: str) -> str:
    return f"{name:14}" + "".join(f"{cell:>6} " for cell in cells) + end


def fit_lines(setting: Setting, card: Card, found: dict[str, Bytes]) -> list[str]:
    """Whether everything fits; if not, the fewest knobs with which it does."""
    large = too_large(found, card)
    if not large:
        worst = max(found, key=lambda name: found[name].total)
        return [f"everything fits; the most is {worst}, {gib(found[worst].total)} GiB"]
    lines = textwrap.wrap(f"does not fit: {', '.join(large)}", 80)
    shared = replace(setting, sharded=True)
    if setting.devices > setting.shards and not too_large(part_bytes(shared), card):
        return [*lines, "it would fit with ENGINE=fsdp2: the cards share the weights"]
    knobs = mends(setting, card)
    if not knobs:
        return [*lines, "no memory knob makes it fit: take a larger card, or a smaller model"]
    quoted = textwrap.wrap(" ".join(knobs), 70, break_on_hyphens=False)
    lines += ["it would fit with SET='", *(f"  {one}" for one in quoted)]
    lines[-1] += "'"
    if any("lora" in knob for knob in knobs):
        lines.append("  (LoRA learns adapters in place of all weights: not the paper's way)")
    return lines


def work_lines(setting: Setting, rate: Rate, seeds: int) -> list[str]:
    """Updates, tokens and hours of every stage, and of the whole run."""
    updates, hours = updates_of(setting), hours_by_stage(setting, rate)
    tokens: dict[str, float] = {}
    for work in work_of(setting):
        tokens[work.stage] = tokens.get(work.stage, 0.0) + work.tokens
    lines = [f"{'stage':12}{'updates':>10}{'million tokens':>16}{'hours':>10}"]
    for stage, spent in hours.items():
        count = f"{updates[stage]:,}" if stage in updates else "-"
        mark = "  (optional)" if stage == OPTIONAL else ""
        lines.append(f"{stage:12}{count:>10}{tokens[stage] / 1e6:>16,.0f}{spent:>10.2f}{mark}")
    total = total_hours(setting, rate)
    lines.append(f"{'without dpo':38}{total:>10.2f}" + (f"  x {seeds} seeds" if seeds > 1 else ""))
    parts = loop_seconds(setting, rate)
    whole = sum(parts.values())
    said = ", ".join(f"{name} {spent / whole:.0%}" for name, spent in parts.items())
    return [
        *lines,
        f"one update of PPO: {whole:.1f} s ({said})",
        f"at {rate.mfu:.0%} of {rate.card.teraflops:g} Tflop/s: ASSUMED, not measured. "
        "`make rehearse` measures it.",
    ]


def total_hours(setting: Setting, rate: Rate) -> float:
    """Hours of one seed without DPO, which is optional."""
    hours = hours_by_stage(setting, rate)
    return sum(spent for stage, spent in hours.items() if stage != OPTIONAL)


def cost_lines(setting: Setting, hours: float, price: float, seeds: int) -> list[str]:
    """Disk, cards and judge, for all seeds."""
    disk = disk_of(setting)
    whole = (disk["models"] + disk["checkpoints"]) * seeds + disk["downloads"]
    said = ", ".join(f"{name} {size / GIGA:,.1f}" for name, size in disk.items())
    lines = [f"disk for {seeds} seed{'s' * (seeds > 1)}: {whole / GIGA:,.0f} GB (one: {said})"]
    cards = hours * setting.devices * seeds
    paid = f", ${cards * price:,.0f} at ${price:g} an hour" if price else ""
    lines.append(f"cards: {cards:,.1f} hours of one card{paid}")
    asked = questions_of(setting)
    if asked is None:
        return [*lines, f"judge: {setting.config.judge.kind}, which asks no server"]
    dollars = "price not known: set judge.input_price and judge.output_price"
    if asked.dollars is not None:
        dollars = f"about ${asked.dollars * seeds:,.2f}"
    read, written = asked.read * seeds / 1e6, asked.written * seeds / 1e6
    return [
        *lines,
        f"judge: {setting.config.judge.model}, {asked.calls * seeds:,} calls, {read:,.1f} M tokens "
        f"read,"[:80],
        f"  {written:,.1f} M written, {dollars}"[:80],
    ]


def grid_lines(cells: Sequence[tuple[Setting, str]], rate_of_flops: float, seeds: int) -> list[str]:
    """One row a preset, and their sum; each for all seeds."""
    head = (
        f"{'preset':18}{'cards':>16}{'most GiB':>10}{'fits':>6}{'hours':>9}{'GB':>8}{'judge $':>9}"
    )
    lines, sums = [head], [0.0, 0.0, 0.0]
    for setting, gpu in cells:
        card, found = card_of(gpu), part_bytes(setting)
        rate = Rate(card=card, mfu=rate_of_flops)
        disk, asked = disk_of(setting), questions_of(setting)
        row = [
            total_hours(setting, rate) * seeds,
            ((disk["models"] + disk["checkpoints"]) * seeds + disk["downloads"]) / GIGA,
            (asked.dollars or 0.0) * seeds if asked else 0.0,
        ]
        sums = [one + more for one, more in zip(sums, row, strict=True)]
        worst = max(one.total for one in found.values())
        fits = "NO" if too_large(found, card) else "yes"
        cards = f"{setting.devices} x {gpu}"
        lines.append(f"{setting.config.name:18}{cards:>16}{gib(worst):>10}{fits:>6}{_sums(row)}")
    return [*lines, f"{'together':50}{_sums(sums)}"]


def _sums(row: Sequence[float]) -> str:
    hours, disk, dollars = row
    return f"{hours:>9,.1f}{disk:>8,.0f}{dollars:>9,.2f}"
