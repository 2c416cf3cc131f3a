"""Stage 2 (`make rm`): the reward model, from pairwise comparisons.

The backbone is the SFT model of the same seed; the scalar head is new. One update: the chosen and
the rejected summaries of a global batch of pairs in one forward pass, scores read at their EOS
(`rm.read_at`), loss -log sigmoid(chosen - rejected), one AdamW step. The learning rate follows a
cosine to 0.
Source: Huang et al. 2024, details 10 to 18.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.config.config import Config
from stages.config.sections import BEFORE_EOS, CNNDM, COMPARISONS
from stages.data.ragged import TokenizedSplit, load_split
from stages.functional import preference_loss
from stages.models.foreign import fetch_reward_model
from stages.models.forward import summary_scores
from stages.models.loading import new_reward_model, require_room, save_model
from stages.models.lora import keep_model
from stages.models.reward_function import TextReward
from stages.models.tokenizers import load_tokenizer
from stages.runs.run import HELD_OUT_CNNDM, HELD_OUT_PAIRS, Run, open_stage, write_rows
from stages.training.accelerator import make_accelerator
from stages.training.memory import FORWARD, MemoryBudget
from stages.training.preferences import (
    gap_rows,
    measure_all_pairs,
    measure_pairs,
    pair_step,
    rows_by_post,
    summarize_gaps,
    training_pairs,
)
from stages.training.random_streams import stream
from stages.training.state import State
from stages.training.supervised import begin_supervised, check_batch, set_rate

INSTEAD = "wrap it in a reward.function, which receives texts"


def train_reward_model(config: Config) -> None:
    """Run the stage. A reward function or an external reward model replaces training, if given.

    Raises UserError if that is missing or does not fit.
    """
    accelerator = make_accelerator(config)
    budget = MemoryBudget.from_settings(config.memory)
    with open_stage(config, "rm", accelerator.is_main_process) as run:
        if config.has_external_reward:
            run.finish(take_existing(run, accelerator, budget), budget.halvings)
            return

        # Load the pairs and the SFT model, which gets a new scalar head; resume if an earlier
        # attempt was interrupted.
        data = run.require("base") / "data"
        sft = run.require("sft")
        tokenizer = load_tokenizer(sft / "model")
        train = training_pairs(data, config.rm.pairs)
        check_batch("rm", config.rm.batch_size, len(train), accelerator)
        head_generator = stream(config.seed, "reward head")
        reward_model = new_reward_model(sft / "model", head_generator, config.rm.dropout)
        if config.rm.read_at == BEFORE_EOS:
            read_scores_before(reward_model, tokenizer.eos_token_id)
        state = begin_supervised(
            run,
            accelerator,
            budget,
            network=reward_model,
            settings=config.rm,
            rows=len(train),
            groups=rows_by_post(train) if config.rm.by_post else (),
            dropout=config.rm.dropout,
        )

        # Train.
        for update in state.remaining("rm"):
            learning_rate = set_rate(state, config.rm.learning_rate)
            metrics = take_step(state, train, state.order.batch(update))
            metrics["lr"] = learning_rate
            metrics["seconds/update"] = state.seconds
            run.log(update + 1, **metrics)

        # Save, then evaluate.
        trained = keep_model(accelerator, state.learner.trained, tokenizer, run.partial / "model")
        validation = load_split(data, "comparisons_validation")
        results: dict[str, Any] = {
            **evaluate(run, accelerator, budget, trained, validation, HELD_OUT_PAIRS),
            "training_pairs": len(train),
            "cnndm": None,
        }
        if (data / f"{CNNDM}.jsonl").exists():
            articles = load_split(data, CNNDM)
            results["cnndm"] = evaluate(run, accelerator, budget, trained, articles, HELD_OUT_CNNDM)
        run.finish(results, budget.halvings)


def take_step(state: State, train: TokenizedSplit, rows: list[int]) -> dict[str, float]:
    """Take one optimizer step on a global batch of pairs; return its mean loss and accuracy."""
    reward_model = state.learner.trained
    center = state.run.config.rm.center

    def losses(microbatch: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        chosen, rejected = score_pairs(reward_model, train, microbatch, state.accelerator.device)
        summed = preference_loss(chosen, rejected, center) * len(microbatch)
        statistics = {"loss/train": summed, "accuracy/train": (chosen > rejected).sum()}
        yield summed / len(rows), statistics

    reward_model.train()
    return pair_step(state.learner, train, rows, losses)


def score_pairs(
    reward_model: nn.Module, split: TokenizedSplit, rows: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the scores of the chosen and of the rejected summaries of these rows, each [rows]."""
    if isinstance(reward_model, TextReward):
        # Rows with the same prompt may differ in the user's columns, so no texts are shared.
        queries, chosen, rejected = (
            [split.columns[name][row] for row in rows] for name in ("queries", "chosen", "rejected")
        )
        facts = [split.rows[row] for row in rows]
        scores = summary_scores(reward_model, queries, [chosen, rejected], device, facts)
        return scores[0], scores[1]
    return measure_pairs(split, rows, partial(summary_scores, reward_model, device=device))


@torch.no_grad()
def evaluate(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    reward_model: nn.Module,
    split: TokenizedSplit,
    file: str,
) -> dict[str, float]:
    """Return loss and accuracy on held-out pairs; `file` gets one row for each pair."""

    def measure_gaps(rows: list[int]) -> list[float]:
        chosen, rejected = score_pairs(reward_model, split, rows, accelerator.device)
        return (chosen - rejected).tolist()

    reward_model.eval()
    gaps = measure_all_pairs(
        accelerator,
        budget,
        split,
        label=f"rm {Path(file).stem}",
        setting=FORWARD,
        measure=measure_gaps,
        keep=run.resume,
    )
    write_rows(run, file, gap_rows(gaps, split))
    return summarize_gaps(gaps)


def read_scores_before(model: PreTrainedModel, token_id: int) -> None:
    """Let a reward model's scores be read before this token, EOS; its config.json records that."""
    model.config.score_before_token = token_id


def take_existing(run: Run, accelerator: Accelerator, budget: MemoryBudget) -> dict[str, Any]:
    """Save a reward function or an external reward model as the stage's model; return results.

    A function's accuracy on held-out pairs, if there are any, is measured like that of our reward
    model.
    """
    config = run.config
    data = run.require("base") / "data"
    sft_model = run.require("sft") / "model"
    tokenizer = load_tokenizer(sft_model)
    reward_model: Any
    if config.reward.function:
        reward_model = TextReward(config.reward.function, tokenizer)
    else:
        reward_model, _ = fetch_reward_model(config, sft_model, INSTEAD)
        require_room(
            reward_model,
            config.data.max_query_tokens,
            config.data.max_summary_tokens,
            "data.max_summary_tokens",
        )
        if config.rm.read_at == BEFORE_EOS:
            read_scores_before(reward_model, tokenizer.eos_token_id)
    if run.is_main:
        save_model(reward_model, tokenizer, run.partial / "model")

    results: dict[str, Any] = {
        "function": config.reward.function,
        "training_pairs": 0,
        "cnndm": None,
        "checkpoint": config.released.reward_model,
    }
    validation = COMPARISONS[1]
    if (data / f"{validation}.jsonl").exists():
        results |= evaluate(
            run,
            accelerator,
            budget,
            reward_model.to(accelerator.device),
            load_split(data, validation),
            HELD_OUT_PAIRS,
        )
    return results
