"""DPO's part of a run's page: its policy as a reward model, beside the reward model itself."""

from typing import Any

from reports.collect import Record
from reports.page import Block, Heading, Table, Text
from reports.verdict import STRENGTH, counted, interval, number, percent, whole

GROUPS = (("by_split", "split"), ("by_strength", STRENGTH), ("by_batch", "batch"))
RANKED = "pairs ranked as the labellers did [95%]"


def blocks(record: Record) -> list[Block]:
    """The section; none if the run was made without DPO."""
    if "dpo" not in record.manifests:
        return []
    dpo, reward = record.results("dpo"), record.results("rm")
    beta = record.settings["dpo"]["beta"]
    text = (
        f"A policy learned by DPO is a reward model too: beta ({number(beta)}) times how much"
        " likelier it makes a summary than the SFT model does, in nats. On the same"
        f" {whole(dpo['pairs'])} held-out comparisons as the reward model's, after learning from"
        " the same training pairs:"
    )
    rows = [
        ["reward model", _accuracy(reward), number(reward["loss"], 3)],
        ["DPO's implicit reward", _accuracy(dpo), number(dpo["loss"], 3)],
    ]
    tables = [_group_table(reward[key], dpo[key], what) for key, what in GROUPS if dpo.get(key)]
    return [Heading("DPO"), Text(text), Table(("", RANKED, "loss"), rows), *tables]


def _accuracy(found: dict[str, Any]) -> str:
    inside = interval(found["accuracy_low"], found["accuracy_high"])
    return f"{percent(found['accuracy'])} {inside}"


def _group_table(reward: dict[str, Any], dpo: dict[str, Any], what: str) -> Table:
    names = sorted(dpo, key=lambda name: (len(name), name))
    rows = []
    for name in names:
        shares = (counted(one[name]) for one in (reward, dpo))
        rows.append([name, *shares, whole(dpo[name]["pairs"])])
    return Table((what, "reward model [95%]", "DPO [95%]", "pairs"), rows)
