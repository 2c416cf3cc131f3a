"""Stage 3: shift the reward so that human summaries score 0 on average.

The mean score of the reference summaries over the SFT train split, or over `normalize.posts` of
them, is subtracted from the bias of the reward model's head; the scale does not change. Then the
saved model is checked on some of them. PPO loads it twice: as the reward model, and as the critic
(detail 22).
Source: Huang et al. 2024, detail 15.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.sections import CHECKED_ROWS
from stages.data.ragged import TokenizedSplit, load_split, pad_left, pad_right, rows_of
from stages.models.forward import ResponseBatch, score_responses
from stages.models.heads import shift_scores
from stages.models.loading import load_reward_model, save_model
from stages.models.reward_function import TextReward
from stages.models.tokenizers import load_tokenizer
from stages.rl.start_checks import KNOWN, KNOWN_ANSWERS, save_known_answers, score_in_passes
from stages.runs.run import Run, open_stage
from stages.training.accelerator import make_accelerator
from stages.training.memory import MemoryBudget, PassSize
from stages.training.row_by_row import measure_rows

# How far the mean may be from 0, reward units. In bf16 a score depends on the side of its padding:
# by 0.014 (standard deviation, SmolLM2-135M, where scores deviate by 0.43), and by more if scores
# are larger. Huang et al. 2024 report -0.0005 on average at 6.9B (detail 14).
TOLERANCES = {"no": 1e-3, "bf16": 0.05}
NO_TOKEN = -1
"""Pads queries and summaries here; no token has this id."""


def normalize(config: Config) -> None:
    """Run the stage. Raises UserError if the saved model's mean score is not 0."""
    accelerator = make_accelerator(config)
    budget = MemoryBudget.from_settings(config.memory)
    with open_stage(config, "normalize", accelerator.is_main_process) as run:
        references = load_split(run.require("base") / "data", "sft_train")
        if config.normalize.posts:
            references = rows_of(references, evenly(len(references), config.normalize.posts))

        # Score all references, and save the model with their mean subtracted.
        scores = subtract_mean_score(run, accelerator, budget, references)

        # Check the saved model on some references. They are padded on the other side, so that one
        # pass checks the saved model and the padding.
        saved_model = load_reward_model(run.partial / "model").to(accelerator.device).eval()
        checked_rows = evenly(len(references), CHECKED_ROWS)
        checked = rows_of(references, checked_rows)
        scores_after = reference_scores(
            accelerator,
            budget,
            partial(score_rows, accelerator, saved_model, checked, right_padded=True),
            checked,
            label="check the saved model",
            keep=run.resume,
        )
        # The expected scores of all references average 0; those of the checked ones need not. So
        # look at the differences: what the saved model adds, and what the padding's side changes
        # (detail 14).
        expected_scores = (scores - scores.mean())[checked_rows]
        differences = scores_after - expected_scores
        mean_after = differences.mean().item()
        check_mean(mean_after, TOLERANCES[config.memory.mixed_precision])

        if accelerator.is_main_process:
            keep_known_answers(accelerator, budget, run.partial, saved_model, references)
        results = {
            "mean_before": scores.mean().item(),
            "std": scores.std().item(),
            "standard_error": scores.std().item() / len(scores) ** 0.5,
            "minimum": scores.min().item(),
            "maximum": scores.max().item(),
            "references": len(scores),
            "mean_after": mean_after,
            "padding_difference_over_0.01": (differences.abs() > 0.01).double().mean().item(),
        }
        run.finish(results, budget.halvings)


def subtract_mean_score(
    run: Run, accelerator: Accelerator, budget: MemoryBudget, references: TokenizedSplit
) -> Tensor:
    """Save the reward model with the references' mean score shifted to 0; return their old scores.

    When this function returns, the network is freed: it and the saved one are never on the device
    together.
    """
    rm = run.require("rm")
    reward_model = load_reward_model(rm / "model").to(accelerator.device).eval()
    scores = reference_scores(
        accelerator,
        budget,
        partial(score_rows, accelerator, reward_model, references),
        references,
        label="reference scores",
        keep=run.resume,
    )
    shift_scores(reward_model, -scores.mean().item())
    if accelerator.is_main_process:
        save_model(reward_model, load_tokenizer(rm / "model"), run.partial / "model")
    accelerator.wait_for_everyone()
    return scores


def reference_scores(
    accelerator: Accelerator,
    budget: MemoryBudget,
    score: Callable[[list[int]], Tensor],
    references: TokenizedSplit,
    *,
    label: str,
    keep: Path | None,
) -> Tensor:
    """Return the score of every reference of a split, [rows] float64.

    `score` returns those of the given rows, as `score_rows` does; `keep` is as in `measure_share`.
    """
    queries = references.columns["queries"]
    summaries = references.columns["summaries"]
    scores = measure_rows(
        accelerator,
        budget,
        label=label,
        sort_keys=(queries.lengths() + summaries.lengths()).tolist(),
        size=PassSize(rows=budget.forward_batch_size),
        measure=lambda rows: score(rows).tolist(),
        keep=keep,
    )
    return torch.tensor(scores, dtype=torch.float64)


@torch.no_grad()
def score_rows(
    accelerator: Accelerator,
    reward_model: nn.Module,
    split: TokenizedSplit,
    rows: Sequence[int],
    right_padded: bool = False,
) -> Tensor:
    """Return the scores of the references of the given rows, [rows].

    They are padded as in PPO: queries on the left, summaries on the right; or, if `right_padded`,
    only on the right.
    """
    queries = [split.columns["queries"][row] for row in rows]
    summaries = [split.columns["summaries"][row] for row in rows]
    facts = [split.rows[row] for row in rows]
    if right_padded and not isinstance(reward_model, TextReward):
        # The whole text as the response to an empty query.
        whole_texts = [
            torch.cat([query, summary]) for query, summary in zip(queries, summaries, strict=True)
        ]
        queries = [query[:0] for query in queries]
        summaries = whole_texts
    texts = ResponseBatch(
        queries=pad_left(queries, NO_TOKEN).to(accelerator.device),
        responses=pad_right(summaries, NO_TOKEN).to(accelerator.device),
        pad_id=NO_TOKEN,
        facts=facts,
    )
    with accelerator.autocast():
        return score_responses(reward_model, texts)


def evenly(rows: int, count: int) -> list[int]:
    """Return `count` row indices: the first, and others evenly spaced. All if there are fewer."""
    count = min(rows, count)
    return [place * rows // count for place in range(count)]


def check_mean(mean: float, tolerance: float) -> None:
    """Raise UserError unless the saved model scores references 0 on average, reward units."""
    if not abs(mean) <= tolerance:  # also if the mean is NaN
        raise UserError(
            f"the normalized reward model scores references {mean:.4f} on average, which is not 0"
            f" within {tolerance}: the reward model is unstable; check the metrics of the rm stage"
        )


@torch.no_grad()
def keep_known_answers(
    accelerator: Accelerator,
    budget: MemoryBudget,
    folder: Path,
    reward_model: nn.Module,
    references: TokenizedSplit,
) -> None:
    """Write some references with their scores, in float32, for PPO to check its scores against."""
    rows = range(min(KNOWN, len(references)))
    queries = [references.columns["queries"][row] for row in rows]
    summaries = [references.columns["summaries"][row] for row in rows]
    texts = ResponseBatch(
        queries=pad_left(queries, NO_TOKEN).to(accelerator.device),
        responses=pad_right(summaries, NO_TOKEN).to(accelerator.device),
        pad_id=NO_TOKEN,
        facts=[references.rows[row] for row in rows],
    )
    score = partial(score_in_passes, reward_model, texts)
    scores = budget.fit(PassSize(rows=KNOWN), score)
    save_known_answers(folder / KNOWN_ANSWERS, queries, summaries, scores)
