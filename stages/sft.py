"""Stage 1: supervised fine-tuning on the reference summaries (Huang et al. 2024, detail 9).

One update: a global batch of query + summary, the mean negative log-likelihood of its tokens
(of the summary only if sft.loss_on_query is off), one AdamW step, cosine schedule.
differs: the loss is a mean over the global batch's tokens, not a mean of microbatch means.
"""

from collections.abc import Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stages.data.ragged import TokenizedSplit, load_split
from stages.data.text_metrics import rouge
from stages.functional import sequence_logprobs
from stages.models.forward import EMPTY, shared_rows, target_logprobs
from stages.models.loading import load_policy
from stages.models.lora import keep_model
from stages.models.policy import PolicyModel
from stages.models.sampling import Sampling, respond_often
from stages.models.tokenizers import load_tokenizer
from stages.running.files import read_lines
from stages.runs import open_stage
from stages.settings.config import Config
from stages.training.learner import (
    MICROBATCH,
    Size,
    chunks,
    global_sum,
    in_pieces,
    local_share,
    optimizer_step,
)
from stages.training.loop import gather_rows, make_accelerator, parts_by_length
from stages.training.sharding import gathered
from stages.training.state import State
from stages.training.supervised import begin_supervised, check_batch, set_rate


def train_sft(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    with open_stage(config, "sft", accelerator.is_main_process) as run:
        base = run.require("base")
        tokenizer = load_tokenizer(base / "model")
        train = load_split(base / "data", "sft_train")
        validation = load_split(base / "data", "sft_validation")
        check_batch("sft", config.sft.batch_size, len(train), accelerator)
        policy = PolicyModel(load_policy(base / "model", config.sft.dropout))
        state = begin_supervised(run, accelerator, policy, len(train))
        policy = state.learner.trained
        evaluation = max(1, state.updates // config.sft.evaluations)
        if state.update == 0:
            loss = validation_loss(accelerator, policy, validation, config)
            run.log(0, **{"loss/validation": loss})
        for update in state.remaining("sft"):
            rate, rows = set_rate(state, config.sft.learning_rate), state.order.batch(update)
            loss = take_step(state, train, rows)
            metrics = {"loss/train": loss, "lr": rate, "seconds/update": state.seconds}
            if (update + 1) % evaluation == 0 or update + 1 == state.updates:
                policy.eval()
                metrics["loss/validation"] = validation_loss(
                    accelerator, policy, validation, config
                )
            run.log(update + 1, **metrics)
        finish(state, tokenizer, validation)


def sequence_length(split: TokenizedSplit, row: int) -> int:
    """Tokens of query and summary together."""
    return len(split.columns["queries"][row]) + len(split.columns["summaries"][row])


def counted_tokens(split: TokenizedSplit, rows: list[int], loss_on_query: bool) -> int:
    """How many tokens of these rows the loss counts; the very first one is not predicted."""
    if loss_on_query:
        return sum(sequence_length(split, row) - 1 for row in rows)
    return sum(len(split.columns["summaries"][row]) for row in rows)


def summed_loss(
    policy: nn.Module,
    split: TokenizedSplit,
    rows: Sequence[int],
    loss_on_query: bool,
    device: torch.device,
) -> Tensor:
    """Negative log-likelihood summed over the counted tokens of some rows, [] nats.

    Logits exist at the positions that predict these tokens, and at no others.
    """
    prefixes, learned = [], []
    for row in rows:
        tokens = torch.cat([split.columns["queries"][row], split.columns["summaries"][row]])
        start = 1 if loss_on_query else len(split.columns["queries"][row])
        prefixes.append(tokens[:start])
        learned.append(tokens[start:])
    laid_out = shared_rows(prefixes, [learned], device)
    logprobs, _ = target_logprobs(policy, laid_out)
    return -sequence_logprobs(logprobs, laid_out.targets != EMPTY).sum()


def take_step(state: State, train: TokenizedSplit, rows: list[int]) -> float:
    """One optimizer step on a global batch; returns its mean loss, nats per token."""
    learner, config = state.learner, state.run.config
    accelerator, policy = learner.accelerator, learner.trained
    policy.train()
    share = local_share(rows, accelerator)
    (count,) = global_sum(accelerator, counted_tokens(train, share, config.sft.loss_on_query))
    share.sort(key=lambda row: sequence_length(train, row))

    def losses(part: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        summed = summed_loss(policy, train, part, config.sft.loss_on_query, accelerator.device)
        yield summed / count, {"loss/train": summed}

    stats = optimizer_step(learner, lambda size: chunks(share, size), losses)
    return stats["loss/train"] / count


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator, policy: nn.Module, split: TokenizedSplit, config: Config
) -> float:
    """Mean loss over the validation split, nats per counted token."""
    policy.eval()
    alone = accelerator.unwrap_model(policy)  # processes may have different numbers of parts
    on_query, device = config.sft.loss_on_query, accelerator.device
    lengths = [sequence_length(split, row) for row in range(len(split))]
    share = local_share(range(len(split)), accelerator)
    # A microbatch, because logits of all positions exist here as they do in training.
    size = Size(rows=config.memory.microbatch_size, setting=MICROBATCH)

    def measure(rows: list[int]) -> list[float]:
        return [summed_loss(alone, split, rows, on_query, device).item()]

    total = 0.0
    with gathered(alone):
        for part in parts_by_length(accelerator, lengths, size.rows):
            total += sum(in_pieces(accelerator, size, part, measure))
    total, count = global_sum(accelerator, total, counted_tokens(split, share, on_query))
    return total / count


def finish(state: State, tokenizer: PreTrainedTokenizerBase, validation: TokenizedSplit) -> None:
    """Save first, then measure ROUGE on the validation split, then close the stage.

    The loss of the last update is recorded already.
    """
    run, accelerator, config = state.run, state.accelerator, state.run.config
    trained = keep_model(accelerator, state.learner.trained, tokenizer, run.partial / "model")
    policy = PolicyModel(trained.eval())
    sampling = Sampling(
        seed=config.seed,
        purpose="sft validation",
        length=config.data.max_summary_tokens,
        temperature=config.eval.temperature,
        forward_batch_size=config.memory.forward_batch_size,
    )
    queries = validation.columns["queries"]
    share = respond_often(accelerator, policy, queries, tokenizer, sampling, run.resume)
    responses = gather_rows(accelerator, share)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for (tokens,) in responses]
    results = rouge(texts, [row["reference"] for row in validation.rows])
    if run.main:
        last = read_lines(run.partial / "metrics.jsonl")[-1]
        run.finish({"loss/validation": last["loss/validation"], **results})
