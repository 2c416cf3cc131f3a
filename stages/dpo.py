"""Direct preference optimization (`make dpo`): a policy from comparisons, without a reward model.

It starts from the same SFT model as PPO, and learns from the same pairs as the reward model. Before
the first update the policy computes the log-probabilities of both summaries of every pair. They are
the reference, so no second model is needed in memory. One update: both summaries of a
global batch of pairs in one forward pass, log-probabilities summed over the summary and its EOS,
the loss -log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))), one AdamW step.
The learning rate follows a cosine to 0.
Source: Rafailov et al. 2023, as Huang et al. 2024 run it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.sections import CNNDM
from stages.data.ragged import TokenizedSplit, load_split
from stages.functional import dpo_loss, implicit_rewards
from stages.models.forward import summary_logprobs
from stages.models.loading import load_policy, require_room
from stages.models.lora import keep_model
from stages.models.policy import PolicyModel
from stages.models.tokenizers import load_tokenizer
from stages.runs.run import HELD_OUT_CNNDM, HELD_OUT_PAIRS, open_stage, write_rows
from stages.training.accelerator import make_accelerator
from stages.training.memory import MICROBATCH, MemoryBudget
from stages.training.preferences import (
    gap_rows,
    measure_all_pairs,
    measure_pairs,
    pair_step,
    rows_by_post,
    summarize_gaps,
    training_pairs,
)
from stages.training.state import State
from stages.training.supervised import begin_supervised, check_batch, set_rate

# How far the first batch's loss may be from ln 2 and its mean rewards from 0. Measured in bfloat16
# on the tiny preset, a summary's log-probability moves by up to 0.06 nats with the batch's shape,
# and a mean over 64 pairs by 0.001; beta divides both by 20. If rows are mixed up, the numbers are
# off by tenths.
TOLERANCES = {"no": 1e-3, "bf16": 0.01}
MEASURED_AT_BETA = 0.05


def train_dpo(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    budget = MemoryBudget.from_settings(config.memory)
    with open_stage(config, "dpo", accelerator.is_main_process) as run:
        # Load the pairs and the SFT model.
        data = run.require("base") / "data"
        train = training_pairs(data, config.rm.pairs)
        held_out = {"validation": load_split(data, "comparisons_validation")}
        if (data / f"{CNNDM}.jsonl").exists():
            held_out[CNNDM] = load_split(data, CNNDM)
        check_batch("dpo", config.dpo.batch_size, len(train), accelerator)
        sft = run.require("sft") / "model"
        tokenizer = load_tokenizer(sft)
        policy = PolicyModel(load_policy(sft).to(accelerator.device))

        # Summaries are sampled after training. Find out now, not after a night of training,
        # whether the model has enough positions for them.
        queries = load_split(data, "sft_validation").columns["queries"]
        require_room(
            policy,
            int(queries.lengths().max()),
            config.eval.dpo_summary_tokens,
            "eval.dpo_summary_tokens",
        )

        # Compute the reference while the policy is still the SFT model.
        references = {}
        for name, split in {"train": train, **held_out}.items():
            references[name] = split_logprobs(
                accelerator,
                budget,
                policy,
                split,
                label=f"dpo reference, {name}",
                keep=run.resume,
            )

        # Train; resume if an earlier attempt was interrupted.
        state = begin_supervised(
            run,
            accelerator,
            budget,
            network=policy,
            settings=config.dpo,
            rows=len(train),
            groups=rows_by_post(train) if config.rm.by_post else (),
        )
        learn(state, train, references["train"])

        # Save, then evaluate.
        trained = PolicyModel(
            keep_model(accelerator, state.learner.trained, tokenizer, run.partial / "model")
        )
        results: dict[str, Any] = {
            **evaluate(
                state, trained, held_out["validation"], references["validation"], HELD_OUT_PAIRS
            ),
            "cnndm": None,
        }
        if CNNDM in held_out:
            results["cnndm"] = evaluate(
                state, trained, held_out[CNNDM], references[CNNDM], HELD_OUT_CNNDM
            )
        run.finish(results, budget.halvings)


def learn(state: State, train: TokenizedSplit, reference: Tensor) -> None:
    """Take all updates. Raises UserError if the first batch shows that the reference is wrong."""
    config = state.run.config
    for update in state.remaining("dpo"):
        learning_rate = set_rate(state, config.dpo.learning_rate)
        metrics = take_step(state, train, reference, state.order.batch(update))
        if update == 0:
            # Rewards grow with beta, and so does their rounding.
            tolerance = TOLERANCES[config.memory.mixed_precision]
            tolerance *= max(1.0, config.dpo.beta / MEASURED_AT_BETA)
            check_first_batch(metrics, tolerance)
        metrics["lr"] = learning_rate
        metrics["seconds/update"] = state.seconds
        state.run.log(update + 1, **metrics)


def take_step(
    state: State, train: TokenizedSplit, reference: Tensor, rows: list[int]
) -> dict[str, float]:
    """Take one optimizer step on a global batch of pairs; return its means before the step.

    Their names are TRL's. `reference` is what `split_logprobs` returned, [pairs of the split, 2].
    """
    policy = state.learner.trained
    beta = state.run.config.dpo.beta

    def losses(microbatch: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        chosen, rejected = pair_logprobs(policy, train, microbatch, state.accelerator.device)
        ref_chosen, ref_rejected = reference[list(microbatch)].to(chosen).unbind(1)
        loss, chosen_rewards, rejected_rewards = dpo_loss(
            chosen, rejected, ref_chosen, ref_rejected, beta
        )
        pairs = len(microbatch)
        by_pair = {
            "loss/train": loss.expand(pairs),
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/accuracies": chosen_rewards > rejected_rewards,
            "rewards/margins": chosen_rewards - rejected_rewards,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        sums = {key: values.detach().double().sum() for key, values in by_pair.items()}
        yield loss * pairs / len(rows), sums

    policy.train()
    return pair_step(state.learner, train, rows, losses)


def check_first_batch(metrics: dict[str, float], tolerance: float) -> None:
    """Raise UserError if the policy is not its reference: a loss of ln 2 and rewards of 0."""
    expected = {"loss/train": math.log(2), "rewards/chosen": 0.0, "rewards/rejected": 0.0}
    for key, value in expected.items():
        distance = abs(metrics[key] - value)
        if not distance <= tolerance:  # also if the distance is NaN
            raise UserError(
                f"dpo, update 1: {key} is {metrics[key]:.4g}, which differs by {distance:.3g} (at"
                f" most {tolerance}) from that of a policy equal to its reference. Likely causes:"
                " the reference belongs to other rows or another model, or dropout was left on"
            )


def pair_logprobs(
    policy: nn.Module, split: TokenizedSplit, rows: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the chosen and the rejected summaries, each [rows] nats.

    They are summed over the summary's tokens and its EOS; the query does not count.
    """
    return measure_pairs(split, rows, partial(summary_logprobs, policy, device=device))


@torch.no_grad()
def split_logprobs(
    accelerator: Accelerator,
    budget: MemoryBudget,
    policy: nn.Module,
    split: TokenizedSplit,
    *,
    label: str,
    keep: Path | None = None,
) -> Tensor:
    """Return `pair_logprobs` of every pair of a split, [pairs, 2] float64, from all processes.

    `keep` is that of `measure_share`.
    """

    def measure(rows: list[int]) -> list[list[float]]:
        chosen, rejected = pair_logprobs(policy, split, rows, accelerator.device)
        return torch.stack([chosen, rejected], dim=1).tolist()

    policy.eval()
    logprobs = measure_all_pairs(
        accelerator,
        budget,
        split,
        label=label,
        setting=MICROBATCH,  # as in training, logits exist for all tokens of the summaries
        measure=measure,
        keep=keep,
    )
    return torch.tensor(logprobs, dtype=torch.float64)


def evaluate(
    state: State, policy: nn.Module, split: TokenizedSplit, reference: Tensor, file: str
) -> dict[str, float]:
    """Return loss, rewards and accuracy of the policy as a reward model, on held-out pairs.

    `file` gets one row for each pair.
    """
    run = state.run
    logprobs = split_logprobs(
        state.accelerator,
        state.learner.budget,
        policy,
        split,
        label=f"dpo {Path(file).stem}",
        keep=run.resume,
    )
    rewards = implicit_rewards(logprobs, reference, run.config.dpo.beta)  # [pairs, 2]
    chosen, rejected = rewards.unbind(1)
    gaps = (chosen - rejected).tolist()
    write_rows(run, file, gap_rows(gaps, split))
    means = rewards.mean(dim=0)
    return {
        "rewards/chosen": means[0].item(),
        "rewards/rejected": means[1].item(),
        **summarize_gaps(gaps),
    }
