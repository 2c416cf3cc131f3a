"""What a run was made with: repositories, lengths of its data, settings, time, versions, hashes."""

from reports.parts.blocks import Block, Details, Heading, Table, Text
from reports.parts.collect import GIVEN, RELEASED, Record
from reports.parts.run_report import code_line, made_from, where
from reports.parts.sentences import distrust, lead
from reports.parts.words import Row, rate, shown, whole
from stages.config.config import DEFAULTS, POLICY_NUMERICS, TOY
from stages.config.presets import PRESETS
from stages.runs.code import changed_files, other_code
from stages.runs.files import file_hash

NUMERIC_SETTINGS = tuple(f"memory.{name}" for name in POLICY_NUMERICS)
OF_TRAINING = (
    " These are the paper's, but for the base model (the paper: pretrained Pythia), the judge (the"
    " paper: gpt-3.5-turbo-0125) and four quirks of its code (`ppo.compat`). Threads and precision"
    " always stand here: they change rounding, and so PPO's numbers. The other memory knobs only"
    " cut batches to fit memory, and stand below."
)
# What has a word of its own on the command line, and names a place rather than a value.
ASKED_APART = ("data.source", "base.tokenizer")


def data(record: Record) -> list[Block]:
    """The section on a run's data: where it came from, how long it is, what is odd about it."""
    base = record.results("base")
    return [Heading("Data"), *from_hub(base), splits(base)]


def from_hub(results: Row) -> list[Block]:
    """The repositories of the hub that a run was made from, each at its commit; none for others."""
    header = ("setting", "repository", "configuration", "revision", "commit")
    rows = [[repository[column] for column in header] for repository in results.get("hub", [])]
    caption = "Every stage, seed and run of this folder uses these commits."
    return [Table(header, rows, caption, name="from-the-hub")] if rows else []


LONGEST = {
    "query": "query",
    "summary": "summary chosen rejected",
    "query and summary": "query_summary query_chosen query_rejected",
}
ODD = {
    "over a limit": "over_limit",
    "by tokens at most": "most_over",
    "empty summaries": "empty_summaries",
    "two equal ones": "equal_summaries",
    "without confidence": "without_confidence",
    "skipped": "skipped",
}


def splits(results: Row) -> Table:
    """A row a split: its rows, the longest lengths in tokens, and its odd rows by kind."""
    rows = []
    for split, measured in results["tokens"].items():
        odd = results["rows"].get(split, {})
        lengths = (
            [measured.get(f"longest_{key}") for key in keys.split()] for keys in LONGEST.values()
        )
        longest = [max((x for x in each if x is not None), default=None) for each in lengths]
        counts = [measured.get("rows"), *longest, *(odd.get(key) for key in ODD.values())]
        rows.append([split.replace("_", " "), *map(whole, counts)])
    caption = (
        "Tokens of the longest row; the settings `data.max_*` bound them, and a policy samples as"
        " long as an SFT summary. Odd rows that the published data hold too are kept and learned"
        " from, as in the paper."
    )
    for split, counts in results["published"].items():
        same = "as" if counts["rows"] == counts["known"] else "not as"
        caption += f" {split.replace('_', ' ')}: {counts['rows']:,} rows, {same} published"
        caption += f" ({counts['known']:,})."
    return Table(("split", "rows", *LONGEST, *ODD), rows, caption, name="splits")


def settings_tables(settings: dict[str, Row], preset: str) -> list[Block]:
    """First what differs from the preset or from the defaults, then the others.

    A preset that is a file is not compared: the file may have changed, or be gone.
    """
    alike, changed, own = [], [], []
    built_in = PRESETS[preset]() if preset in PRESETS else None
    for section, values in settings.items():
        for key, value in values.items():
            name = f"{section}.{key}"
            if name not in DEFAULTS:  # of another version, or of another branch
                continue
            default = DEFAULTS[name]
            usual = value if built_in is None else getattr(getattr(built_in, section), key)
            set_by_hand = value != usual and name not in ASKED_APART
            own += [f"{name}={shown(name, value)}"] if set_by_hand else []
            matters = section != "world" or settings["data"]["source"] == TOY
            differs = value != default and matters and section != "memory"
            if name in NUMERIC_SETTINGS or set_by_hand or differs:
                changed.append([name, *(shown(name, x) for x in (value, usual, default))])
            else:
                alike.append([name, shown(name, value)])
    header = ("setting", "this run", f"preset {preset}", "default")
    caption = "What differs from the preset or from the defaults."
    if GIVEN not in settings:  # of given summaries nothing was trained
        caption += OF_TRAINING
    if built_in is None:
        said = f"The run started from the preset {preset}, which is a file of the user or is gone."
    elif own:
        said = f"Set in addition to the preset {preset}: {', '.join(own)}."
    else:
        said = f"All settings are those of the preset {preset}."
    return [
        Heading("Settings"),
        Text(said),
        Table(header, changed, caption),
        Details("All other settings", [Table(header[:2], alike, name="all-other-settings")]),
    ]


def provenance(record: Record) -> list[Block]:
    """Time and memory of each stage, and what names the code, libraries and files behind it."""
    manifests = record.manifests
    stages = [
        [
            *(stage, duration(row["seconds"]), f"{row['peak_memory_gib']:.1f}"),
            *(row["code_version"], row["settings_hash"]),
            file_hash(record.folders[stage] / "manifest.json")[:12],
            *(", ".join(row["inputs"]) or "data alone", row["finished"]),
        ]
        for stage, row in manifests.items()
    ]
    header = "stage|wall time|peak GiB|code|settings|manifest|made from|finished"
    changed = other_code({stage: changed_files(row["code"]) for stage, row in manifests.items()})
    warning = [Text(f"Caveat: {changed} than the code that made this page.")] if changed else []
    versions = made_from("run", [], record.folders.values())["versions"]
    return [
        Heading("Time, memory and versions"),
        Text(f"{duration(sum(row['seconds'] for row in manifests.values()))} in all."),
        Text(code_line([record])),
        *warning,
        Text(where([record])),
        Table(header.split("|"), stages, name="stages"),
        Text(f"Libraries: {'; '.join(' '.join(names) for names in versions.items())}."),
    ]


def summary(record: Record, numbers: Row) -> Text:
    """What was judged, how it ended, and what to distrust."""
    policy = shown("released.policy", record.settings[RELEASED]["policy"])
    return lead(
        f"We judged {policy} as it is: others trained it, and nothing was trained here.",
        f"It is preferred to the reference on {rate(numbers, RELEASED)} of"
        f" {whole(numbers['posts'])} held-out posts.",
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


def duration(seconds: float) -> str:
    """Seconds for people: `40 s`, `25 min`, `1 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
