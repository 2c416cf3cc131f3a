"""What the summaries of a run are like, without a model: one table, and its numbers."""

from eval.rates.summary_style import MEASURES, SHARES, styles_of
from reports.parts.blocks import Block, Heading, Table
from reports.parts.collect import Record, policies_of
from reports.parts.words import Row, named, number, percent
from stages.settings.prompt import PROMPT

CAPTION = (
    "Means over the posts. Coverage: words that lie in runs that the post has too; density: the"
    " mean length of the run that a word lies in; compression: words of the post for each of the"
    " summary (Grusky et al. 2018). Novel: words and pairs of words that the post does not have;"
    " repeated: triples of words that the summary had before. ROUGE is against the reference."
)
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def styles(record: Record) -> Row:
    """What the summaries of each policy and the references are like, as numbers.json has it."""
    prompt = (record.settings.get("data") or {}).get("prompt", PROMPT)
    written = {name: record.rows("summaries", f"{name}.jsonl") for name in policies_of(record)}
    return styles_of(written, prompt)


def blocks(record: Record, numbers: Row) -> list[Block]:
    """The section: how long, how copied, how repetitive the summaries are, beside ROUGE."""
    measured = numbers | styles(record)
    names = ["reference", *numbers["policies"]]
    rows = []
    for name in names:
        cells = [
            (percent if measure in SHARES else number)(measured[f"{name}/{measure}"])
            for measure in MEASURES
        ]
        rouge = [number(measured.get(f"{name}/{key}"), 3) for key in ROUGE]
        rows.append([named(name, numbers["policies"]), *cells, *rouge])
    header = ("", *MEASURES.values(), *ROUGE.values())
    return [Heading("The summaries themselves"), Table(header, rows, CAPTION)]
