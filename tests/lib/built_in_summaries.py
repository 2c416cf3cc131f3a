"""Summaries of posts of the built-in world with the clauses that a test names, and no others."""

from stages.data.builtin import CLAUSES, WANTED, facts_of

# The facts of a post that readers of its subreddit want, besides its event.
WANTED_FACTS = ("first", "second", "third")


def summary_with(post: str, *clauses: str, **wrong_words: str) -> str:
    """The clauses of a post in this order, each named by its fact, `event`, or a wanted fact.

    `wrong_words` replace the right word of a fact: `who="uncle"`.
    """
    facts = facts_of(post)
    wanted = dict(zip(WANTED_FACTS, WANTED[facts.subreddit], strict=True))
    words = {**facts.words, **wrong_words}
    texts = [CLAUSES[wanted.get(clause, clause)].format(**words) for clause in clauses]
    return ", ".join(texts)
