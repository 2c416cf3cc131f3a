"""Stage 1: supervised fine-tuning on the reference summaries (Huang et al. 2024, detail 9).

One update: a global batch of posts with their summaries, the mean negative log-likelihood of all
tokens (of the summary's tokens only if sft.loss_on_query is off), one AdamW step. The learning rate
warms up linearly, if the settings say so, and then follows a cosine to 0.
differs: the loss is a mean over the global batch's tokens, not a mean of microbatch means.
"""

from collections.abc import Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stages.config.config import Config
from stages.data.ragged import TokenizedSplit, load_split
from stages.data.text_metrics import rouge
from stages.functional import sequence_logprobs
from stages.models.forward import EMPTY, shared_rows, target_logprobs
from stages.models.loading import load_policy
from stages.models.lora import keep_model
from stages.models.policy import PolicyModel
from stages.models.sampling import Sampling, respond_often
from stages.models.tokenizers import load_tokenizer
from stages.runs.files import read_lines
from stages.runs.run import Run, open_stage
from stages.training.accelerator import make_accelerator
from stages.training.memory import MICROBATCH, MemoryBudget, PassSize, chunks
from stages.training.processes import gather_rows, global_sum, local_share
from stages.training.row_by_row import parts_by_length
from stages.training.sharding import gathered
from stages.training.state import State
from stages.training.step import optimizer_step
from stages.training.supervised import begin_supervised, check_batch, set_rate


def train_sft(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    budget = MemoryBudget.from_settings(config.memory)
    with open_stage(config, "sft", accelerator.is_main_process) as run:
        # Load the data and the pretrained model; resume if an earlier attempt was interrupted.
        base = run.require("base")
        tokenizer = load_tokenizer(base / "model")
        train = load_split(base / "data", "sft_train")
        validation = load_split(base / "data", "sft_validation")
        check_batch("sft", config.sft.batch_size, len(train), accelerator)
        state = begin_supervised(
            run,
            accelerator,
            budget,
            network=PolicyModel(load_policy(base / "model", config.sft.dropout)),
            settings=config.sft,
            rows=len(train),
            dropout=config.sft.dropout,
        )
        policy = state.learner.trained

        # Train; measure the validation loss before the first update, a few times on the way, and
        # after the last update.
        evaluation_interval = max(1, state.updates // config.sft.evaluations)
        if state.update == 0:
            loss = validation_loss(accelerator, budget, policy, validation, config)
            run.log(0, **{"loss/validation": loss})
        for update in state.remaining("sft"):
            learning_rate = set_rate(state, config.sft.learning_rate)
            batch = state.order.batch(update)
            metrics = {
                "loss/train": take_step(state, train, batch),
                "lr": learning_rate,
                "seconds/update": state.seconds,
            }
            updates_done = update + 1
            if updates_done % evaluation_interval == 0 or updates_done == state.updates:
                metrics["loss/validation"] = validation_loss(
                    accelerator, budget, policy, validation, config
                )
            run.log(updates_done, **metrics)

        # Save before evaluating: an evaluation that fails does not cost the model.
        trained = PolicyModel(keep_model(accelerator, policy, tokenizer, run.partial / "model"))
        results = evaluate(run, accelerator, budget, trained, tokenizer, validation)
        if run.is_main:
            # The last update has already measured the final validation loss.
            last = read_lines(run.partial / "metrics.jsonl")[-1]
            results = {"loss/validation": last["loss/validation"], **results}
            run.finish(results, budget.halvings)


def take_step(state: State, train: TokenizedSplit, rows: list[int]) -> float:
    """Take one optimizer step on a global batch; return its mean loss, nats per token."""
    accelerator = state.accelerator
    policy = state.learner.trained
    loss_on_query = state.run.config.sft.loss_on_query

    share = local_share(rows, accelerator)
    share.sort(key=lambda row: sequence_length(train, row))  # less padding in a microbatch
    (tokens,) = global_sum(accelerator, count_tokens(train, share, loss_on_query))

    def losses(microbatch: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        loss = summed_loss(policy, train, microbatch, loss_on_query, accelerator.device)
        yield loss / tokens, {"loss/train": loss}

    policy.train()
    sums = optimizer_step(state.learner, lambda size: chunks(share, size), losses)
    return sums["loss/train"] / tokens


def summed_loss(
    policy: nn.Module,
    split: TokenizedSplit,
    rows: Sequence[int],
    loss_on_query: bool,
    device: torch.device,
) -> Tensor:
    """Return the negative log-likelihood, summed over the tokens of these rows that count, [] nats.

    Logits are computed only at the positions that predict these tokens.
    """
    prefixes = []
    learned_texts = []
    for row in rows:
        query = split.columns["queries"][row]
        tokens = torch.cat([query, split.columns["summaries"][row]])
        # The first token of all is not predicted.
        start = 1 if loss_on_query else len(query)
        prefixes.append(tokens[:start])
        learned_texts.append(tokens[start:])
    inputs = shared_rows(prefixes, [learned_texts], device)
    logprobs, _ = target_logprobs(policy, inputs)
    return -sequence_logprobs(logprobs, inputs.targets != EMPTY).sum()


def sequence_length(split: TokenizedSplit, row: int) -> int:
    """Return the number of tokens of query and summary together."""
    return len(split.columns["queries"][row]) + len(split.columns["summaries"][row])


def count_tokens(split: TokenizedSplit, rows: list[int], loss_on_query: bool) -> int:
    """Return how many tokens of these rows count in the loss."""
    if loss_on_query:
        return sum(sequence_length(split, row) - 1 for row in rows)
    return sum(len(split.columns["summaries"][row]) for row in rows)


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator,
    budget: MemoryBudget,
    policy: nn.Module,
    split: TokenizedSplit,
    config: Config,
) -> float:
    """Return the mean loss over the validation split, nats per token that counts."""
    policy.eval()
    # Processes may have different numbers of passes, so each runs the network without the others.
    unwrapped = accelerator.unwrap_model(policy)
    loss_on_query = config.sft.loss_on_query

    def measure(rows: list[int]) -> list[float]:
        loss = summed_loss(unwrapped, split, rows, loss_on_query, accelerator.device)
        return [loss.item()]

    # As many rows as in training, because the logits of all positions exist, as in training.
    size = PassSize(rows=budget.microbatch_size, setting=MICROBATCH)
    lengths = [sequence_length(split, row) for row in range(len(split))]
    total = 0.0
    with gathered(unwrapped):
        for part in parts_by_length(accelerator, lengths, size.rows):
            total += sum(budget.measure(part, size, measure))

    share = local_share(range(len(split)), accelerator)
    total, tokens = global_sum(accelerator, total, count_tokens(split, share, loss_on_query))
    return total / tokens


def evaluate(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    validation: TokenizedSplit,
) -> dict[str, float]:
    """Sample a summary of each validation post; return their ROUGE against the references."""
    config = run.config
    policy.eval()
    share = respond_often(
        accelerator,
        budget,
        policy,
        validation.columns["queries"],
        tokenizer,
        Sampling(
            seed=config.seed,
            purpose="sft validation",
            length=config.data.max_summary_tokens,
            temperature=config.eval.temperature,
            forward_batch_size=config.memory.forward_batch_size,
        ),
        run.resume,
    )
    summaries = []
    for (tokens,) in gather_rows(accelerator, share):
        summaries.append(tokenizer.decode(tokens, skip_special_tokens=True).strip())
    return rouge(summaries, [row["reference"] for row in validation.rows])
