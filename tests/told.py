"""Summaries of posts of the built-in world that tell what a test asks for, and nothing else."""

from dataclasses import asdict

from stages.posts.kinds import PLAIN
from stages.posts.toy import facts_of

# The facts of a post that are worth telling, besides its event.
NTH = {"first": "feeling", "second": "ask", "third": "when"}


def told(post: str, *clauses: str, **wrong: str) -> str:
    """The clauses of a post in this order, each named by its fact, `event`, or one of `NTH`.

    `wrong` are facts that are told with another word: `who="uncle"`.
    """
    texts = [PLAIN.clauses[NTH.get(name, name)].strip() for name in clauses]
    return ". ".join(texts).format(**{**asdict(facts_of(post)), **wrong})
