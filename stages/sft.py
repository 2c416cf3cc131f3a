"""Stage 1: supervised fine-tuning on the reference summaries (P1 detail 9).

One update: a global batch of query + summary, the mean negative log-likelihood of its tokens
(of the summary only where sft.loss_on_query is off), one AdamW step, cosine schedule.
differs: the loss is a mean over the global batch's tokens, not a mean of microbatch means.
"""

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from stages.config import Config, UserError, fail
from stages.data import TokenizedSplit, load_split
from stages.likelihood import counted_tokens, sequence_length, summed_loss
from stages.lora import adapt, merge
from stages.models import load_policy, load_tokenizer, save_model
from stages.presets import config_from_arguments
from stages.progress import progress
from stages.runs import Run, open_stage
from stages.text_metrics import rouge
from stages.training import (
    batch_rows,
    batch_tensors,
    check_batch,
    chunks,
    cosine_rate,
    gather_rows,
    global_sum,
    local_share,
    make_accelerator,
    make_optimizer,
    refuse_non_finite,
    respond,
    saving_a_broken_batch,
    set_learning_rate,
    synchronized_last,
    use_gradient_checkpointing,
)


def train_sft(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    with open_stage(config, "sft", accelerator.is_main_process) as run:
        base = run.require("base")
        tokenizer = load_tokenizer(base / "model")
        train = load_split(base / "data", "sft_train")
        validation = load_split(base / "data", "sft_validation")
        check_batch("sft", config.sft.batch_size, len(train), accelerator)
        policy = load_policy(base / "model", config.sft.dropout)
        adapt(policy, config, "sft")
        use_gradient_checkpointing(policy, config.memory)
        optimizer = make_optimizer(policy.parameters(), config.sft.learning_rate, config.optimizer)
        policy, optimizer = accelerator.prepare(policy, optimizer)
        updates = config.sft.epochs * len(train) // config.sft.batch_size
        evaluation = max(1, updates // config.sft.evaluations)
        run.log(0, **{"loss/validation": validation_loss(accelerator, policy, validation, config)})
        for update in progress(range(updates), "sft", updates):
            rate = config.sft.learning_rate * cosine_rate(
                update, updates, config.optimizer.warmup_fraction
            )
            set_learning_rate(optimizer, rate)
            rows = batch_rows(len(train), config.sft.batch_size, update, config.seed, "sft")
            with saving_a_broken_batch(
                run, accelerator, update, "base", partial(batch_tensors, train, rows)
            ):
                loss = take_step(accelerator, policy, optimizer, train, rows, config)
            metrics = {"loss/train": loss, "lr": rate}
            if (update + 1) % evaluation == 0 or update + 1 == updates:
                policy.eval()
                metrics["loss/validation"] = validation_loss(
                    accelerator, policy, validation, config
                )
            run.log(update + 1, **metrics)
        finish(run, accelerator, accelerator.unwrap_model(policy), tokenizer, validation)


def take_step(
    accelerator: Accelerator,
    policy: nn.Module,
    optimizer: Any,
    train: TokenizedSplit,
    rows: list[int],
    config: Config,
) -> float:
    """One optimizer step on a global batch; returns its mean loss, nats per token."""
    policy.train()
    mine = local_share(rows, accelerator)
    (count,) = global_sum(accelerator, counted_tokens(train, mine, config.sft.loss_on_query))
    mine.sort(key=lambda row: sequence_length(train, row))
    total = 0.0
    parts = chunks(mine, config.memory.microbatch_size)
    for part in synchronized_last(accelerator, policy, parts):
        summed = summed_loss(policy, train, part, config.sft.loss_on_query, accelerator.device)
        total += summed.item()
        # Devices average their gradients; the global mean wants their sum.
        accelerator.backward(summed * accelerator.num_processes / count)
    (total,) = global_sum(accelerator, total)
    refuse_non_finite("sft", {"loss/train": total})
    optimizer.step()
    optimizer.zero_grad()
    return total / count


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator, policy: nn.Module, split: TokenizedSplit, config: Config
) -> float:
    """Mean loss over the validation split, nats per counted token."""
    policy.eval()
    on_query, device = config.sft.loss_on_query, accelerator.device
    mine = sorted(
        local_share(range(len(split)), accelerator), key=lambda row: sequence_length(split, row)
    )
    total = 0.0
    for part in chunks(mine, config.memory.forward_batch_size):
        total += summed_loss(policy, split, part, on_query, device).item()
    total, count = global_sum(accelerator, total, counted_tokens(split, mine, on_query))
    return total / count


def finish(
    run: Run,
    accelerator: Accelerator,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    validation: TokenizedSplit,
) -> None:
    """Save first, then measure ROUGE on the validation split, then close the stage."""
    merge(policy)
    if accelerator.is_main_process:
        save_model(policy, tokenizer, run.partial / "model")
    policy.eval()
    responses = respond(
        accelerator,
        policy,
        validation.columns["queries"],
        tokenizer,
        run.config,
        "sft validation",
        max_tokens=run.config.data.max_summary_tokens,
    )
    texts = [tokenizer.decode(one, skip_special_tokens=True).strip() for one in responses]
    texts = gather_rows(accelerator, texts)
    loss = validation_loss(accelerator, policy, validation, run.config)
    results: dict[str, Any] = {"loss/validation": loss}
    results |= rouge(texts, [row["reference"] for row in validation.rows])
    run.finish(results)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    try:
        train_sft(config_from_arguments(argv, "stage 1: supervised fine-tuning"))
    except UserError as error:
        fail(error)


if __name__ == "__main__":
    main()
