"""Disk, and what the judge is asked: calls, tokens, dollars. Standard library only."""

from dataclasses import dataclass

from eval.judges.openai.budget import (
    CHARACTERS_PER_TOKEN,
    TEMPLATE_TOKENS,
    price_of,
    usual_reply,
)
from eval.judges.prompt import LINES, make_question
from eval.judges.protocol import VERDICTS
from reports.needs.lengths import CHARACTERS_PER_TOKEN as CHARACTERS_OF_A_POST
from reports.needs.memory import MOMENTS, Setting
from reports.needs.shapes import FULL, adapter_parameters, policy_parameters, scorer_parameters
from stages.settings.config import HUB, RANDOM

CONTROL_TEXTS = 9  # of eval/controls.py, without the reference itself, which is not asked about
POLICIES = 2  # sft and ppo; dpo's summaries are as many questions more
ASKED_KINDS = ("openai",)
# Two good checkpoints are kept while a third is written.
CHECKPOINTS = 3
HUB_BYTES = 2  # a weight in the hub's files
TOKEN_FILES = 1.5e9
"""Bytes of the hub's posts and comparisons, as downloaded and as tokens. An estimate."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What one seed of a run asks its judge."""

    calls: int
    read: float
    """Tokens of all questions."""
    written: float
    """Tokens of all replies."""
    dollars: float | None
    """USD; None if the price is not known."""


def questions_of(setting: Setting) -> Questions | None:
    """What a judge behind a server is asked for one seed; None if the judge needs no server.

    Every summary is compared with its reference in both orders, and so are the controls. Lengths
    are means of real posts, so the sum is an estimate; the judge itself says it again before it
    asks.
    """
    config, lengths = setting.config, setting.lengths
    if config.judge.kind not in ASKED_KINDS:
        return None
    posts = config.eval.posts or lengths.rows["sft_validation"]
    controls = min(config.checks.control_posts, posts) * CONTROL_TEXTS
    calls = len(VERDICTS) * (POLICIES * posts + controls)
    post, summary = (
        "x" * round(tokens * CHARACTERS_OF_A_POST) for tokens in (lengths.query, lengths.summary)
    )
    asked = make_question(post, summary, summary, LINES).prompt
    read = calls * (len(asked) / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS)
    reasons = config.judge.reasoning_effort not in ("none", "default")
    written = float(calls * usual_reply(config.judge, reasons))
    price = price_of(config.judge)
    dollars = None if price is None else price.of(read, written)
    return Questions(calls=calls, read=read, written=written, dollars=dollars)


def disk_of(setting: Setting) -> dict[str, float]:
    """Bytes on disk of one seed: the models that stay (base, sft, ppo, rm, normalize and critic, in
    float32), the checkpoints of the stage with the largest, and what comes from the hub.
    """
    policy, scorer = policy_parameters(setting.shape), scorer_parameters(setting.shape)
    base, source = setting.config.base.checkpoint, setting.config.data.source
    return {
        "models": float(FULL * 3 * (policy + scorer)),
        "checkpoints": float(
            CHECKPOINTS * max(checkpoint_bytes(setting, one) for one in ("sft", "ppo"))
        ),
        "downloads": HUB_BYTES * policy * (base != RANDOM) + TOKEN_FILES * (source == HUB),
    }


def checkpoint_bytes(setting: Setting, stage: str) -> int:
    """Bytes of one checkpoint: all weights of the networks that learn, and Adam's moments."""
    shape, rank = setting.shape, setting.rank(stage)
    networks = [policy_parameters(shape)]
    networks += [scorer_parameters(shape)] if stage == "ppo" else []
    adapter = adapter_parameters(shape, rank)
    learned = len(networks) * adapter if rank else sum(networks)
    return FULL * (sum(networks) + len(networks) * adapter) + MOMENTS * learned
