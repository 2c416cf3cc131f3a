"""Stage 3: the score of a human summary becomes 0 on average (Huang et al. 2024, detail 15).

The mean score of the reference summaries over the SFT train split, or over `normalize.posts` of
them, is subtracted from the head's bias; the scale stays as it is. The saved model is checked on
some of them. PPO loads it twice: as the reward model, and as the critic's start (detail 22).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages.data.ragged import TokenizedSplit, load_split, pad_left, pad_right, rows_of
from stages.models.forward import ResponseBatch, score_responses
from stages.models.heads import shift_scores
from stages.models.loading import load_reward_model, save_model
from stages.models.reward_function import TextReward
from stages.models.tokenizers import load_tokenizer
from stages.rl.start_checks import KNOWN, KNOWN_ANSWERS, save_known_answers, score_in_passes
from stages.runs import Run, open_stage
from stages.settings.checks import UserError
from stages.settings.config import Config
from stages.settings.sections import CHECKED_ROWS
from stages.training.learner import Size, fitting
from stages.training.loop import make_accelerator, over_rows

# How far the mean may be from 0, reward units. In bf16 a score moves with the side of its padding:
# by 0.014 (its deviation, SmolLM2-135M, where scores deviate by 0.43), and by more where scores are
# larger. Huang et al. 2024 report -0.0005 on average at 6.9B (detail 14).
TOLERANCES = {"no": 1e-3, "bf16": 0.05}


def normalize(config: Config) -> None:
    """Run the stage. Raises UserError if the saved model's mean is not 0."""
    accelerator = make_accelerator(config)
    with open_stage(config, "normalize", accelerator.is_main_process) as run:
        train = load_split(run.require("base") / "data", "sft_train")
        if config.normalize.posts:
            train = rows_of(train, evenly(len(train), config.normalize.posts))
        before = shift(accelerator, run, train)
        size, keep = config.memory.forward_batch_size, run.resume
        saved = load_reward_model(run.partial / "model").to(accelerator.device).eval()
        some = evenly(len(train), CHECKED_ROWS)
        checked, expected = rows_of(train, some), (before - before.mean())[some]
        # Padded on the other side, so that one pass checks the saved model and the padding.
        score = partial(score_rows, accelerator, saved, checked, right_padded=True)
        after = reference_scores(accelerator, score, checked, size, "check the saved model", keep)
        # All of `before - before.mean()` averages 0; what the saved model adds is the rest. It is
        # also what the side of the padding changes (detail 14).
        side = after - expected
        mean_after = side.mean().item()
        check_mean(mean_after, TOLERANCES[config.memory.mixed_precision])
        if accelerator.is_main_process:
            keep_known_answers(accelerator, run.partial, saved, train)
        results = {
            "mean_before": before.mean().item(),
            "std": before.std().item(),
            "standard_error": before.std().item() / len(before) ** 0.5,
            "minimum": before.min().item(),
            "maximum": before.max().item(),
            "references": len(before),
            "mean_after": mean_after,
            "padding_difference_over_0.01": (side.abs() > 1e-2).double().mean().item(),
        }
        run.finish(results)


def shift(accelerator: Accelerator, run: Run, train: TokenizedSplit) -> Tensor:
    """Save the reward model with the mean score of the references as its 0; their scores before.

    The network ends here, so that the saved one does not stand beside it on the device.
    """
    rm, size = run.require("rm"), run.config.memory.forward_batch_size
    reward_model = load_reward_model(rm / "model").to(accelerator.device).eval()
    score = partial(score_rows, accelerator, reward_model, train)
    before = reference_scores(accelerator, score, train, size, "reference scores", run.resume)
    shift_scores(reward_model, -before.mean().item())
    if accelerator.is_main_process:
        save_model(reward_model, load_tokenizer(rm / "model"), run.partial / "model")
    accelerator.wait_for_everyone()
    return before


def evenly(rows: int, count: int) -> list[int]:
    """`count` of so many rows, or all if there are fewer: the first, and others evenly spaced."""
    count = min(rows, count)
    return [place * rows // count for place in range(count)]


def check_mean(mean: float, tolerance: float) -> None:
    """Raise UserError unless the saved model scores references 0 on average, reward units."""
    if not abs(mean) <= tolerance:  # a NaN is not small either
        raise UserError(
            f"the normalised reward model scores references {mean:.4f} on average, "
            f"not 0 within {tolerance}: the reward model is unstable, look at the rm stage"
        )


@torch.no_grad()
def keep_known_answers(
    accelerator: Accelerator, folder: Path, reward_model: nn.Module, train: TokenizedSplit
) -> None:
    """Write some references with their scores, in float32, for PPO to replay."""
    rows = range(min(KNOWN, len(train)))
    queries = [train.columns["queries"][row] for row in rows]
    summaries = [train.columns["summaries"][row] for row in rows]
    device = accelerator.device
    texts = ResponseBatch(
        queries=pad_left(queries, -1).to(device),
        responses=pad_right(summaries, -1).to(device),
        pad_id=-1,
    )
    score = partial(score_in_passes, reward_model, texts)
    scores = fitting(accelerator, Size(rows=KNOWN), score)
    save_known_answers(folder / KNOWN_ANSWERS, queries, summaries, scores)


def reference_scores(
    accelerator: Accelerator,
    score: Callable[[list[int]], Tensor],
    train: TokenizedSplit,
    size: int,
    label: str,
    keep: Path,
) -> Tensor:
    """The score of every reference summary of a split, [rows] float64.

    `score` gives those of some rows, as `score_rows` does; `size` rows per forward pass; `keep` as
    in `over_share`.
    """
    lengths = train.columns["queries"].lengths() + train.columns["summaries"].lengths()

    def scores_of(rows: list[int]) -> list[float]:
        return score(rows).tolist()

    scores = over_rows(accelerator, lengths.tolist(), size, label, scores_of, keep)
    return torch.tensor(scores, dtype=torch.float64)


@torch.no_grad()
def score_rows(
    accelerator: Accelerator,
    reward_model: nn.Module,
    split: TokenizedSplit,
    rows: Sequence[int],
    right_padded: bool = False,
) -> Tensor:
    """Scores of the references of some rows, [rows]; padded as in PPO, or on the right only."""
    queries = [split.columns["queries"][row] for row in rows]
    summaries = [split.columns["summaries"][row] for row in rows]
    pad = -1
    if right_padded and not isinstance(reward_model, TextReward):
        # The whole text as the response of an empty query: padding stands on the right only.
        left = torch.empty(len(rows), 0, dtype=torch.long)
        pairs = zip(queries, summaries, strict=True)
        right = pad_right([torch.cat(pair) for pair in pairs], pad)
    else:
        left, right = pad_left(queries, pad), pad_right(summaries, pad)
    texts = ResponseBatch(
        queries=left.to(accelerator.device), responses=right.to(accelerator.device), pad_id=pad
    )
    with accelerator.autocast():
        return score_responses(reward_model, texts)
