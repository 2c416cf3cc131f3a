"""What the summaries of a run are like, without a model: one table, and its numbers."""

from eval.rates.summary_style import MEASURES, SHARES
from reports.parts.collect import Record
from reports.parts.page import Block, Heading, Table
from reports.parts.run_report import styles
from reports.parts.words import Row, named, number, percent

CAPTION = (
    "Means over the posts. Coverage: words that lie in runs that the post has too; density: the"
    " mean length of the run that a word lies in; compression: words of the post for each of the"
    " summary (Grusky et al. 2018). Novel: words and pairs of words that the post does not have;"
    " repeated: triples of words that the summary had before. ROUGE is against the reference."
)
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def blocks(record: Record, numbers: Row) -> list[Block]:
    """The section: how long, how copied, how repetitive the summaries are, beside ROUGE."""
    found = numbers | styles(record)
    names = ["reference", *numbers["policies"]]
    rows = []
    for name in names:
        cells = [
            (percent if measure in SHARES else number)(found[f"{name}/{measure}"])
            for measure in MEASURES
        ]
        rouge = [number(found.get(f"{name}/{key}"), 3) for key in ROUGE]
        rows.append([named(name, numbers["policies"]), *cells, *rouge])
    header = ("", *MEASURES.values(), *ROUGE.values())
    return [Heading("The summaries themselves"), Table(header, rows, CAPTION)]
