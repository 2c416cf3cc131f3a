"""What a run needs, before anything is downloaded: `make plan`. Standard library only.

    python -m reports.needs.plan --preset pythia-6.9b --gpus 8
    python -m reports.needs.plan --presets pythia-1b pythia-2.8b-lora --seeds 1 2 3

Parameters; bytes on each GPU, stage by stage, and which knob would make them fit; updates, tokens
and hours at an assumed share of the GPU's peak; disk; what the judge costs.
"""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reports.needs import gpus, work
from reports.needs.memory import Bytes, Setting, setting_of
from reports.needs.parts import mends, part_bytes, too_large
from reports.needs.shapes import parameters
from stages.running.launch import check_numbers
from stages.settings.checks import Parser, in_one_line, require
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.judge_models import known_model

COLUMNS = ("weights", "gradients", "optimizer", "copies", "activations", "logits", "cache", "other")
HEADS = ("weight", "grad", "optim", "copy", "activ", "logit", "cache", "other", "total")
GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is planned for one run: its setting, its GPUs, and how fast they are assumed to be."""

    setting: Setting
    gpu_name: str
    seeds: Sequence[int]
    rate: work.Rate
    price: float = 0.0
    """USD for an hour of one GPU; 0: not known."""

    @property
    def gpu(self) -> gpus.Gpu:
        """Its GPU."""
        return self.rate.gpu

    @property
    def gpus(self) -> str:
        """How many GPUs of which kind."""
        return f"{self.setting.devices} x {self.gpu_name}"

    @property
    def hours(self) -> float:
        """Hours of one seed without DPO, which is optional."""
        hours = work.hours_by_stage(self.setting, self.rate)
        return sum(spent for stage, spent in hours.items() if stage != work.OPTIONAL)

    @property
    def disk(self) -> float:
        """Bytes on disk of all seeds."""
        disk = gpus.disk_of(self.setting)
        return (disk["models"] + disk["checkpoints"]) * len(self.seeds) + disk["downloads"]


def plan_of(request: Request, args: argparse.Namespace) -> Plan:
    """What is planned for one preset.

    Raises UserError for an unknown preset, setting, GPU or shape.
    """
    name, devices = gpus.gpus_for(request.preset, args.gpu, args.gpus)
    engine = args.engine or ("fsdp2" if request.preset in gpus.SHARDED else "ddp")
    check_numbers(devices, args.nodes, engine)
    sharded = engine == "fsdp2"
    return Plan(
        setting=setting_of(config_of(request), devices=devices * args.nodes, sharded=sharded),
        gpu_name=name,
        seeds=args.seeds,
        rate=work.Rate(gpu=gpus.gpu_of(name), mfu=args.mfu),
        price=args.price_per_hour,
    )


# -- one run ---------------------------------------------------------------------------------------


def gib(count: float) -> str:
    """Bytes as GiB: three digits."""
    value = count / gpus.GIB
    return "-" if not count else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def title_lines(plan: Plan) -> list[str]:
    """Which run, which model, which GPUs."""
    setting, gpu = plan.setting, plan.gpu
    policy, scorer = parameters(setting.shape), parameters(setting.shape, scalar=True)
    named = "seeds " if len(plan.seeds) > 1 else "seed "
    shared = ", ENGINE=fsdp2" if setting.sharded else ""
    precision = "bf16 autocast, float32 weights" if setting.half else "float32"
    return [
        f"{setting.config.name}, {named}{' '.join(map(str, plan.seeds))}"[:80],
        f"  starts from {setting.config.base.checkpoint} ({setting.shape.family})"[:80],
        f"  {policy:,} parameters; reward model and critic {scorer:,}",
        f"  {plan.gpus}{shared}, {precision}",
        f"  of {gpu.memory_gib:.1f} GiB a card {gib(gpu.usable)} are for tensors: "
        f"{gpus.USABLE:.0%} less {gpus.CONTEXT_GIB:g} for CUDA",
    ]


def memory_lines(plan: Plan) -> list[str]:
    """A row for every part of every stage, and what would make it fit."""
    parts = part_bytes(plan.setting)
    large = too_large(parts, plan.gpu)
    lines = ["GiB on one card, at the worst moment of each part", _memory_row("", HEADS, "")]
    for name, held in parts.items():
        cells = [gib(getattr(held, column)) for column in COLUMNS] + [gib(held.total)]
        lines.append(_memory_row(name, cells, "NO" if name in large else "ok"))
    return lines + fit_lines(plan, parts)


def _memory_row(name: str, cells: Sequence[str], end: str) -> str:
    return f"{name:14}" + "".join(f"{cell:>6} " for cell in cells) + end


def fit_lines(plan: Plan, parts: dict[str, Bytes]) -> list[str]:
    """Whether everything fits; if not, the fewest knobs with which it does."""
    setting, large = plan.setting, too_large(parts, plan.gpu)
    if not large:
        worst = max(parts, key=lambda name: parts[name].total)
        return [f"everything fits; the most is {worst}, {gib(parts[worst].total)} GiB"]
    lines = textwrap.wrap(f"does not fit: {', '.join(large)}", 80)
    shared = replace(setting, sharded=True)
    if setting.devices > setting.shards and not too_large(part_bytes(shared), plan.gpu):
        return [*lines, "it would fit with ENGINE=fsdp2: the cards share the weights"]
    knobs = mends(setting, plan.gpu)
    if not knobs:
        return [*lines, "no memory knob makes it fit: take a larger card, or a smaller model"]
    quoted = textwrap.wrap(" ".join(knobs), 70, break_on_hyphens=False)
    lines += ["it would fit with SET='", *(f"  {line}" for line in quoted)]
    lines[-1] += "'"
    if any("lora" in knob for knob in knobs):
        lines.append("  (LoRA learns adapters in place of all weights: not the paper's way)")
    return lines


def work_lines(plan: Plan) -> list[str]:
    """Updates, tokens and hours of every stage, and of the whole run."""
    setting, rate = plan.setting, plan.rate
    updates, hours = work.updates_of(setting), work.hours_by_stage(setting, rate)
    tokens = work.totals((each.stage, each.tokens) for each in work.work_of(setting))
    lines = [f"{'stage':12}{'updates':>10}{'million tokens':>16}{'hours':>10}"]
    for stage, spent in hours.items():
        count = f"{updates[stage]:,}" if stage in updates else "-"
        mark = "  (optional)" if stage == work.OPTIONAL else ""
        lines.append(f"{stage:12}{count:>10}{tokens[stage] / 1e6:>16,.0f}{spent:>10.2f}{mark}")
    seeds = f"  x {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else ""
    parts = work.loop_seconds(setting, rate)
    whole = sum(parts.values())
    shares = ", ".join(f"{name} {spent / whole:.0%}" for name, spent in parts.items())
    return [
        *lines,
        f"{'without dpo':38}{plan.hours:>10.2f}{seeds}",
        f"one update of PPO: {whole:.1f} s ({shares})",
        f"at {rate.mfu:.0%} of {plan.gpu.teraflops:g} Tflop/s: ASSUMED, not measured. "
        "`make rehearse` measures it.",
    ]


def cost_lines(plan: Plan) -> list[str]:
    """Disk, GPUs and judge, for all seeds."""
    setting, seeds = plan.setting, len(plan.seeds)
    sizes = ", ".join(f"{name} {size / GIGA:,.1f}" for name, size in gpus.disk_of(setting).items())
    cards = plan.hours * setting.devices * seeds
    paid = f", ${cards * plan.price:,.0f} at ${plan.price:g} an hour" if plan.price else ""
    lines = [
        f"disk for {seeds} seed{'s' * (seeds > 1)}: {plan.disk / GIGA:,.0f} GB (one: {sizes})",
        f"cards: {cards:,.1f} hours of one card{paid}",
    ]
    return [*lines, *bill_of(setting, seeds)]


def bill_of(setting: Setting, seeds: int) -> list[str]:
    """What the judge is asked for all seeds, and its price, in lines."""
    judge, questions = setting.config.judge, gpus.questions_of(setting)
    if questions is None:
        return [f"judge: {judge.kind}, which asks no server"]
    told = "price not known: set judge.input_price and judge.output_price"
    dollars = None if questions.dollars is None else questions.dollars * seeds
    if dollars is not None:
        line = known_model(judge.model)
        listed = line is not None and judge.input_price < 0 and judge.output_price < 0
        told = f"about ${dollars:,.2f}" + (f", prices of {line.priced}" if line and listed else "")
    read, written = questions.read * seeds / 1e6, questions.written * seeds / 1e6
    return [
        f"judge: {judge.model}, {questions.calls * seeds:,} calls, {read:,.1f} M tokens read,"[:80],
        f"  {written:,.1f} M written, {told}"[:80],
    ]


# -- several runs ----------------------------------------------------------------------------------


def grid_lines(plans: Sequence[Plan]) -> list[str]:
    """One row a preset, and their sum; each for all seeds."""
    head = (
        f"{'preset':18}{'cards':>16}{'most GiB':>10}{'fits':>6}{'hours':>9}{'GB':>8}{'judge $':>9}"
    )
    lines, sums = [head], [0.0, 0.0, 0.0]
    for plan in plans:
        parts, questions = part_bytes(plan.setting), gpus.questions_of(plan.setting)
        dollars = (questions.dollars or 0.0) if questions else 0.0
        row = [plan.hours * len(plan.seeds), plan.disk / GIGA, dollars * len(plan.seeds)]
        sums = [before + more for before, more in zip(sums, row, strict=True)]
        worst = max(held.total for held in parts.values())
        fits = "NO" if too_large(parts, plan.gpu) else "yes"
        name = plan.setting.config.name
        lines.append(f"{name:18}{plan.gpus:>16}{gib(worst):>10}{fits:>6}{_sums(row)}")
    return [*lines, f"{'together':50}{_sums(sums)}"]


def _sums(row: Sequence[float]) -> str:
    hours, disk, dollars = row
    return f"{hours:>9,.1f}{disk:>8,.0f}{dollars:>9,.2f}"


# -- command line ----------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of a plan."""
    parser = Parser(description="what a run needs, before anything is downloaded")
    add_arguments(parser)
    parser.add_argument("--presets", nargs="*", default=[], help="a grid: one row a preset")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="default: the one seed")
    parser.add_argument("--gpu", default="", help="name of the GPU; default: the preset's")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs of a machine")
    parser.add_argument("--nodes", type=int, default=1, help="number of machines")
    parser.add_argument("--engine", default="", help="ddp or fsdp2; default: the preset's")
    parser.add_argument("--mfu", type=float, default=work.MFU, help="share of the peak, assumed")
    parser.add_argument("--price-per-hour", type=float, default=0.0, help="of one GPU, USD")
    args = parser.parse_args(argv)
    args.seeds = args.seeds or [args.seed]
    return args


def lines_of(args: argparse.Namespace) -> list[str]:
    """What is printed. Raises UserError as `plan_of` does, and for numbers out of range."""
    require(0 < args.mfu <= 1, "MFU", f"lie above 0 and not above 1, not {args.mfu:g}")
    require(args.price_per_hour >= 0, "PRICE_PER_HOUR", "be at least 0")
    request = request_of(args)
    if not args.presets:
        plan = plan_of(request, args)
        sections = (title_lines, memory_lines, work_lines, cost_lines)
        lines = [line for section in sections for line in ("", *section(plan))]
        return lines[1:]
    plans = [plan_of(replace(request, preset=preset), args) for preset in args.presets]
    seeds = len(args.seeds)
    head = f"{seeds} seed{'s' * (seeds > 1)} of each preset, without DPO; hours are ASSUMED: "
    return [f"{head}{args.mfu:.0%} of the peak", "", *grid_lines(plans)]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print the plan."""
    args = parse(argv)
    print("\n".join(lines_of(args)))


if __name__ == "__main__":
    main()
