"""Summaries of posts of the built-in world that tell what a test asks for, and nothing else."""

from stages.data.builtin import CLAUSES, WANTED, facts_of

# The facts of a post that are worth telling, besides its event.
NTH = ("first", "second", "third")


def told(post: str, *clauses: str, **wrong: str) -> str:
    """The clauses of a post in this order, each named by its fact, `event`, or one of `NTH`.

    `wrong` are facts that are told with another word: `who="uncle"`.
    """
    facts = facts_of(post)
    nth = dict(zip(NTH, WANTED[facts.subreddit], strict=True))
    texts = [CLAUSES[nth.get(name, name)] for name in clauses]
    return ", ".join(texts).format(**{**facts.words, **wrong})
