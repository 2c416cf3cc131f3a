"""What a run was made with: repositories, lengths of its data, settings, time, versions, hashes."""

from collections.abc import Sequence

from eval.judges.openai.budget import cost
from reports.parts.cells import MISSING
from reports.parts.collect import GIVEN, RELEASED, Record
from reports.parts.page import Block, Details, Heading, Table, Text
from reports.parts.run_report import where
from reports.parts.sentences import distrust, lead, too_many_unjudged
from reports.parts.words import Row, rate, shown, whole
from stages.running.machine import changed_files, other_code
from stages.running.progress import duration
from stages.settings.config import POLICY_NUMERICS, TOY, Config
from stages.settings.judge import JudgeSettings
from stages.settings.presets import PRESETS

NUMERIC_SETTINGS = tuple(f"memory.{name}" for name in POLICY_NUMERICS)
OF_TRAINING = (
    " These are the paper's, but for the base model (the paper: pretrained Pythia), the judge (the"
    " paper: gpt-3.5-turbo-0125) and four quirks of its code (`ppo.compat`). Threads and precision"
    " always stand here: they change rounding, and so PPO's numbers. The other memory knobs only"
    " cut batches to fit memory, and stand below."
)
# What has a word of its own on the command line, and names a place rather than a value.
ASKED_APART = ("data.source", "base.tokenizer")
# Measured length -> the setting that bounds it.
POST_LIMITS = {
    "longest_query": "max_query_tokens",
    "longest_summary": "max_summary_tokens",
    "longest_query_summary": "max_query_summary_tokens",
}
COMPARISON_LIMITS = {
    "longest_query": "max_query_tokens",
    "longest_summary": "max_comparison_tokens",
    "longest_query_summary": "max_query_comparison_tokens",
}
SPLIT_LIMITS = {
    "sft_train": POST_LIMITS,
    "sft_validation": POST_LIMITS,
    "comparisons_train": COMPARISON_LIMITS,
    "comparisons_validation": COMPARISON_LIMITS,
    "ppo_train": {"longest_query": "max_query_tokens"},
}


def data(record: Record) -> list[Block]:
    """The section on a run's data: where it came from, how long it is, what is odd about it."""
    base = record.results("base")
    return [Heading("Data"), *from_hub(base), splits(base, record.settings["data"])]


def from_hub(results: Row) -> list[Block]:
    """The repositories of the hub that a run was made from, each at its commit; none for others."""
    rows = [
        [repository["setting"], _named(repository), repository["revision"], repository["commit"]]
        for repository in results.get("hub", [])
    ]
    if not rows:
        return []
    caption = "Every stage, seed and run of this folder uses these commits."
    header = ("setting", "made from", "revision", "at commit")
    return [Table(header, rows, caption, name="from-the-hub")]


def _named(record: dict[str, str]) -> str:
    name, configuration = record["repository"], record["configuration"]
    return f"{name}, configuration {configuration}" if configuration else name


COUNTED = {
    "over a limit": "over_limit",
    "by tokens at most": "most_over",
    "empty summaries": "empty_summaries",
    "two equal ones": "equal_summaries",
    "without confidence": "without_confidence",
    "skipped": "skipped",
}


def splits(results: Row, limits: Row) -> Table:
    """A row a split: its longest row and what was allowed, and its odd rows by kind."""
    rows = []
    for split, measured in results["tokens"].items():
        bounds, odd = SPLIT_LIMITS.get(split, {}), results["rows"].get(split, {})
        cells = [_length(measured, name, limits.get(bounds.get(name, ""))) for name in POST_LIMITS]
        counts = [whole(odd.get(key)) for key in COUNTED.values()]
        rows.append([split.replace("_", " "), whole(measured.get("rows")), *cells, *counts])
    header = ("split", "rows", "query", "summary", "query and summary", *COUNTED)
    caption = (
        "Tokens of the longest row, of those allowed; a policy samples as long as an SFT summary."
        " Odd rows that the published data hold too are kept and learned from, as in the paper."
    )
    for split, counts in results["published"].items():
        same = "as" if counts["rows"] == counts["known"] else "not as"
        caption += f" {split.replace('_', ' ')}: {counts['rows']:,} rows, {same} published"
        caption += f" ({counts['known']:,})."
    if not any(results["rows"].values()):
        kept = len(header) - len(COUNTED)
        header, rows = header[:kept], [row[:kept] for row in rows]
    return Table(header, rows, caption, name="splits")


def _length(measured: dict[str, int], name: str, limit: int | None) -> object:
    both = [
        measured.get(name.replace("summary", kind)) for kind in ("summary", "chosen", "rejected")
    ]
    longest = max((length for length in both if length is not None), default=None)
    return whole(longest) if longest is None or limit is None else f"{longest} of {limit}"


def settings_tables(settings: dict[str, Row], preset: str) -> list[Block]:
    """First what differs from the preset or from the defaults, then the others."""
    alike, changed, own = [], [], []
    configs = PRESETS[preset](), Config(preset="defaults", name="defaults")
    for section, values in settings.items():
        for key, value in values.items():
            name = f"{section}.{key}"
            usual, default = (getattr(getattr(config, section), key) for config in configs)
            cells = [name, *(shown(name, setting) for setting in (value, usual, default))]
            set_by_hand = value != usual and name not in ASKED_APART
            if set_by_hand:
                own.append(f"{name}={shown(name, value)}")
            matters = section != "world" or settings["data"]["source"] == TOY
            differs = value != default and matters and section != "memory"
            if name in NUMERIC_SETTINGS or set_by_hand or differs:
                changed.append(cells)
            else:
                alike.append(cells[:2])
    caption = "What differs from the preset or from the defaults."
    if GIVEN not in settings:  # of given summaries nothing was trained
        caption += OF_TRAINING
    header = ("setting", "this run", f"preset {preset}", "default")
    return [
        Heading("Settings"),
        Text(
            f"Set beside the preset {preset}: {', '.join(own)}."
            if own
            else f"All settings are those of the preset {preset}."
        ),
        Table(header, changed, caption),
        Details("All other settings", [Table(header[:2], alike, name="all-other-settings")]),
    ]


def provenance(record: Record, hashes: dict[str, str]) -> list[Block]:
    """Time and memory of each stage, and what names the code, libraries and files behind it."""
    manifests = record.manifests
    stages = [
        [
            *(stage, duration(row["seconds"]), f"{row['peak_memory_gib']:.1f}"),
            *(row["code_version"], row["settings_hash"], hashes[stage]),
            *(", ".join(row["inputs"]) or "data alone", row["finished"]),
        ]
        for stage, row in manifests.items()
    ]
    header = "stage|wall time|peak GiB|code|settings|manifest|made from|finished"
    versions = "; ".join(" ".join(line) for line in _versions(list(manifests.values())))
    return [
        Heading("Time, memory and versions"),
        Text(f"{_in_all(manifests)} {judges_price(record)}"),
        *code_note(manifests),
        Text(where([record])),
        Table(header.split("|"), stages, name="stages"),
        Text(f"Libraries: {versions}."),
    ]


def code_note(manifests: dict[str, Row]) -> list[Block]:
    """A sentence on the stages that were made with other code than the page; none without any."""
    changed = {stage: changed_files(manifest["code"]) for stage, manifest in manifests.items()}
    text = other_code(changed)
    return [Text(f"Caveat: {text} than the code that made this page.")] if text else []


def judges_price(record: Record) -> str:
    """A sentence on what the judge's replies cost; those thrown away are not counted."""
    settings = JudgeSettings(**record.settings["judge"])
    if settings.kind != "openai":
        return "The judge ran here and was asked nothing that costs money."
    rows = record.rows("judge", "judgements.jsonl")
    paid = cost(settings, rows)
    price = "at a price that is not known" if paid is None else f"for {paid:,.2f} USD"
    return f"The judge gave {len(rows):,} verdicts {price}, by the price of its tokens now."


def _in_all(manifests: dict[str, Row]) -> str:
    code = sorted({row["code_version"] for row in manifests.values()})
    text = f"{duration(sum(row['seconds'] for row in manifests.values()))} in all. "
    text += f"Code version: {', '.join(code)}."
    if any(version.endswith("-dirty") for version in code):
        text += " It was run with changes that were not committed."
    return text


def _versions(manifests: Sequence[Row]) -> list[list[str]]:
    libraries = [row["versions"] for row in manifests]
    return [
        [name, ", ".join(sorted({versions.get(name, MISSING) for versions in libraries}))]
        for name in sorted({name for versions in libraries for name in versions})
    ]


def summary(record: Record, numbers: Row) -> Text:
    """What was judged, how it ended, and what to distrust."""
    posts = f"{whole(numbers['posts'])} held-out posts"
    ended = f"It is preferred to the reference on {rate(numbers, RELEASED)} of {posts}."
    if too_many_unjudged(numbers):
        ended = f"Of {posts}, too many have no verdict for a conclusion."
    policy = shown("released.policy", record.settings[RELEASED]["policy"])
    return lead(
        f"We judged {policy} as it is: others trained it, and nothing was trained here.",
        ended,
        distrust([numbers]),
    )


def scored_by(record: Record) -> str:
    """Which reward model scored a released policy's summaries."""
    reward_model = record.results(RELEASED)["reward_model"]
    if reward_model is None:
        return "No reward model was given (REWARD_MODEL=), so there are no scores."
    name = shown("released.reward_model", record.settings[RELEASED]["reward_model"])
    if not reward_model["converted"]:
        return f"Its reward model is {name}, as it is: no run here checked where its scores are 0."
    return (
        f"Its reward model is {name}. The mean {reward_model['mean_in_config']:.4f}, which its"
        " configuration holds, is part of the head's bias here, so every score is what it was."
    )
