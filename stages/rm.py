"""Stage 2 (`make rm`): the reward model from pairwise comparisons.

The backbone is the SFT model of the same seed, the scalar head is new. One update: chosen and
rejected summaries of a global batch of pairs in one forward pass, scores read at their EOS only
(`rm.read_at`), loss -log sigmoid(chosen - rejected), one AdamW step, cosine schedule.
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

from stages.data.ragged import TokenizedSplit, load_split
from stages.functional import preference_loss
from stages.models.foreign import fetch_reward_model
from stages.models.forward import summary_scores
from stages.models.loading import new_reward_model, require_room, save_model
from stages.models.lora import keep_model
from stages.models.reward_function import TextReward
from stages.models.tokenizers import load_tokenizer
from stages.runs import HELD_OUT_CNNDM, HELD_OUT_PAIRS, Run, open_stage, write_rows
from stages.settings.config import Config
from stages.settings.sections import BEFORE_EOS, CNNDM, COMPARISONS, POSTS, PPO_TRAIN
from stages.training.learner import stream
from stages.training.loop import make_accelerator
from stages.training.preferences import (
    gap_rows,
    of_pairs,
    over_pairs,
    pair_step,
    posts_of,
    summarize_gaps,
    training_pairs,
)
from stages.training.state import State
from stages.training.supervised import begin_supervised, check_batch, set_rate

INSTEAD = "take it by reward.function, which gets texts"


def train_reward_model(config: Config) -> None:
    """Run the stage. A function, or a reward model of others, is put where ours would be.

    Raises UserError for one that is not there or does not fit.
    """
    accelerator = make_accelerator(config)
    with open_stage(config, "rm", accelerator.is_main_process) as run:
        if config.reward.function or config.released.reward_model:
            take(run, accelerator)
            return
        data, sft = run.require("base") / "data", run.require("sft")
        tokenizer = load_tokenizer(sft / "model")
        train = training_pairs(data, config.rm.pairs)
        check_batch("rm", config.rm.batch_size, len(train), accelerator)
        generator = stream(config.seed, "reward head")
        reward_model = new_reward_model(sft / "model", generator, config.rm.dropout)
        if config.rm.read_at == BEFORE_EOS:
            read_scores_before(reward_model, tokenizer.eos_token_id)
        together = posts_of(train) if config.rm.by_post else ()
        state = begin_supervised(run, accelerator, reward_model, len(train), together)
        for update in state.remaining("rm"):
            rate, rows = set_rate(state, config.rm.learning_rate), state.order.batch(update)
            stats = take_step(state, train, rows)
            stats |= {"lr": rate, "seconds/update": state.seconds}
            run.log(update + 1, **stats)
        trained = keep_model(accelerator, state.learner.trained, tokenizer, run.partial / "model")
        validation = load_split(data, "comparisons_validation")
        about = run, accelerator, trained
        results: dict[str, Any] = dict(evaluate(*about, validation, HELD_OUT_PAIRS))
        results |= {"training_pairs": len(train), "cnndm": None}
        if (data / f"{CNNDM}.jsonl").exists():
            articles = load_split(data, CNNDM)
            results["cnndm"] = evaluate(*about, articles, HELD_OUT_CNNDM)
        run.finish(results)


def read_scores_before(model: PreTrainedModel, token_id: int) -> None:
    """Let a reward model's scores be read before this token, EOS; its config.json will say so."""
    model.config.score_before_token = token_id


def take(run: Run, accelerator: Accelerator) -> None:
    """Save a function of texts, with the rows that it will get, or a reward model of others, as the
    stage's model. Its accuracy on held-out pairs, if there are any, is measured like that of ours.
    """
    config, data, sft = run.config, run.require("base") / "data", run.require("sft") / "model"
    tokenizer = load_tokenizer(sft)
    reward_model: Any
    if function := config.reward.function:
        splits = [split for split in (*POSTS, PPO_TRAIN) if (data / f"{split}.jsonl").exists()]
        rows = [row for split in splits for row in load_split(data, split).rows]
        reward_model = TextReward(function, tokenizer, rows)
    else:
        reward_model, _ = fetch_reward_model(config, sft, INSTEAD)
        lengths = config.data.max_query_tokens, config.data.max_summary_tokens
        require_room(reward_model, *lengths, "data.max_summary_tokens")
        if config.rm.read_at == BEFORE_EOS:
            read_scores_before(reward_model, tokenizer.eos_token_id)
    if run.main:
        save_model(reward_model, tokenizer, run.partial / "model")
    results: dict[str, Any] = {"function": function, "training_pairs": 0, "cnndm": None}
    results["checkpoint"] = config.released.reward_model
    if (data / f"{COMPARISONS[1]}.jsonl").exists():
        pairs, placed = load_split(data, COMPARISONS[1]), reward_model.to(accelerator.device)
        results |= evaluate(run, accelerator, placed, pairs, HELD_OUT_PAIRS)
    run.finish(results)


def take_step(state: State, train: TokenizedSplit, rows: list[int]) -> dict[str, float]:
    """One optimizer step on a global batch of pairs; returns its mean loss and accuracy."""
    learner, accelerator, reward_model = state.learner, state.accelerator, state.learner.trained
    center = state.run.config.rm.center
    reward_model.train()

    def losses(part: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        chosen, rejected = score_pairs(reward_model, train, part, accelerator.device)
        loss = preference_loss(chosen, rejected, center) * len(part)
        yield loss / len(rows), {"loss/train": loss, "accuracy/train": (chosen > rejected).sum()}

    return pair_step(learner, train, rows, losses)


def score_pairs(
    reward_model: nn.Module, split: TokenizedSplit, rows: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and the rejected summaries of some rows, each [rows], in one pass."""
    return of_pairs(split, rows, partial(summary_scores, reward_model, device=device))


@torch.no_grad()
def evaluate(
    run: Run, accelerator: Accelerator, reward_model: nn.Module, split: TokenizedSplit, file: str
) -> dict[str, float]:
    """Loss and accuracy on held-out pairs; `file` gets one row a pair."""
    size = run.config.memory.forward_batch_size
    reward_model.eval()

    def gaps(rows: list[int]) -> list[float]:
        chosen, rejected = score_pairs(reward_model, split, rows, accelerator.device)
        return (chosen - rejected).tolist()

    label = f"rm {Path(file).stem}"
    measured = over_pairs(accelerator, split, size, label, gaps, run.resume)
    write_rows(run, file, gap_rows(measured, split))
    return summarize_gaps(measured)
