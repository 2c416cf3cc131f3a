"""What the summaries of a run are like, without a model: copied, compressed, repeated, asked.

Words are runs of letters and digits, in lower case; the post is its title and its text.
Source: coverage, density and compression are those of Grusky et al. 2018 (Newsroom), novel n-grams
those of See et al. 2017, repeated n-grams those of Welleck et al. 2020 (seq-rep-n).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from reports.parts.blocks import Block, Heading, Table
from reports.parts.collect import Record, policies_of
from reports.parts.words import Row, named, number, percent
from stages.posts.text_metrics import copied_title_words, ngrams, words_of
from stages.settings.prompt import PROMPT, parse_post

Words = Sequence[str]
MEASURES = {
    "words": "words",
    "coverage": "coverage",
    "density": "density",
    "compression": "compression",
    "novel_1": "novel words",
    "novel_2": "novel pairs",
    "repeated_3": "repeated triples",
    "copied_title": "title copied",
    "closing_questions": "ends with a question",
}
SHARES = {name for name in MEASURES if name not in ("words", "density", "compression")}
CAPTION = (
    "Means over the posts. Coverage: words that lie in runs that the post has too; density: the"
    " mean length of the run that a word lies in; compression: words of the post for each of the"
    " summary (Grusky et al. 2018). Novel: words and pairs of words that the post does not have;"
    " repeated: triples of words that the summary had before. ROUGE is against the reference."
)
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def styles(record: Record) -> Row:
    """`<policy>/<measure>` of each policy and of the `reference`, which is a summary too."""
    prompt = (record.settings.get("data") or {}).get("prompt", PROMPT)
    written = {name: record.rows("summaries", f"{name}.jsonl") for name in policies_of(record)}
    references = {
        row["id"]: {"query": row["query"], "summary": row["reference"]}
        for rows in written.values()
        for row in rows
    }
    return {
        f"{name}/{measure}": value
        for name, rows in {"reference": references.values(), **written}.items()
        for measure, value in style_of(rows, prompt).items()
    }


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
    return [Heading("Wording"), Table(header, rows, CAPTION)]


def style_of(rows: Iterable[Mapping[str, Any]], prompt: str = PROMPT) -> dict[str, float | None]:
    """The mean of each of `MEASURES` over rows with `query` and `summary`; None where none has it.

    An empty summary has no compression.
    """
    each = [measures(row["query"], row["summary"], prompt) for row in rows]
    known = {name: [of[name] for of in each if of[name] is not None] for name in MEASURES}
    return {name: sum(values) / len(values) if values else None for name, values in known.items()}


def measures(query: str, summary: str, prompt: str = PROMPT) -> dict[str, Any]:
    """`MEASURES` of one summary; shares lie in [0, 1]."""
    fields = parse_post(query, prompt)
    post = words_of(f"{fields['title']}\n{fields['post']}" if fields else query)
    words = words_of(summary)
    sizes = fragments(post, words)
    return {
        "words": len(summary.split()),
        "coverage": sum(sizes) / len(words) if words else 0.0,
        "density": sum(size**2 for size in sizes) / len(words) if words else 0.0,
        "compression": len(post) / len(words) if words else None,
        "novel_1": novel(post, words, 1),
        "novel_2": novel(post, words, 2),
        "repeated_3": repeated(words, 3),
        "copied_title": copied_title_words(query, summary),
        "closing_questions": float(asks(summary)),
    }


def asks(summary: str) -> bool:
    """Whether a summary ends with a question."""
    return summary.rstrip(" \n\t\"'”’)").endswith("?")


def fragments(post: Words, summary: Words) -> list[int]:
    """Lengths of the extractive fragments: the longest runs of words that the post has too.

    From left to right; a run is not begun again inside another.
    Source: Grusky et al. 2018, algorithm 1.
    """
    places = defaultdict(list)
    for place, word in enumerate(post):
        places[word].append(place)
    sizes, start = [], 0
    while start < len(summary):
        longest = max((_run(post, summary, at, start) for at in places[summary[start]]), default=0)
        sizes += [longest] if longest else []
        start += max(1, longest)
    return sizes


def _run(post: Words, summary: Words, at: int, start: int) -> int:
    """How many words from `post[at]` and `summary[start]` on are alike."""
    pairs = zip(islice(post, at, None), islice(summary, start, None), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def novel(post: Words, summary: Words, n: int) -> float:
    """Share of the summary's n-grams that the post does not have; 0 where there are none."""
    known, grams = set(ngrams(post, n)), ngrams(summary, n)
    return sum(gram not in known for gram in grams) / len(grams) if grams else 0.0


def repeated(words: Words, n: int) -> float:
    """Share of the n-grams that stood in the text before: `1 - distinct / all`."""
    grams = ngrams(words, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
