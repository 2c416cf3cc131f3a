"""Direct preference optimization (`make dpo`): a policy from comparisons alone.

It starts from the SFT model that PPO starts from, and learns the pairs that the reward model
learns. Before the first update, the policy gives the log-probabilities of both summaries of every
pair. They are the reference, so no second model is held. One update: both summaries of a global
batch of pairs in one forward pass, log-probabilities summed over the summary and its EOS, the loss
-log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))), one AdamW step, cosine
schedule.
Source: Rafailov et al. 2023, as Huang et al. 2024 run it.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from stages.data.ragged import TokenizedSplit, load_split
from stages.functional import dpo_loss, implicit_rewards
from stages.models.forward import summary_logprobs
from stages.models.loading import load_policy, require_room
from stages.models.lora import keep_model
from stages.models.policy import PolicyModel
from stages.models.tokenizers import load_tokenizer
from stages.runs import HELD_OUT_CNNDM, HELD_OUT_PAIRS, open_stage, write_rows
from stages.settings.checks import UserError
from stages.settings.config import Config
from stages.settings.sections import CNNDM
from stages.training import preferences
from stages.training.learner import MICROBATCH, Size, in_pieces
from stages.training.loop import make_accelerator
from stages.training.state import State
from stages.training.supervised import begin_supervised, check_batch, set_rate

# How far the first batch's loss may be from ln 2 and its mean rewards from 0. Measured in bfloat16
# on the tiny preset, a summary's log-probability moves by up to 0.06 nats with the batch's shape
# and a mean over 64 pairs by 0.001; beta divides both by 20. If rows are mixed up, the numbers are
# off by tenths.
TOLERANCES = {"no": 1e-3, "bf16": 0.01}
MEASURED_AT = 0.05  # beta


def train_dpo(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    with open_stage(config, "dpo", accelerator.is_main_process) as run:
        data = run.require("base") / "data"
        splits = {
            "train": preferences.training_pairs(data, config.rm.pairs),
            "validation": load_split(data, "comparisons_validation"),
        }
        if (data / f"{CNNDM}.jsonl").exists():
            splits[CNNDM] = load_split(data, CNNDM)
        check_batch("dpo", config.dpo.batch_size, len(splits["train"]), accelerator)
        sft = run.require("sft") / "model"
        tokenizer = load_tokenizer(sft)
        policy = PolicyModel(load_policy(sft).to(accelerator.device))
        held_out = load_split(data, "sft_validation").columns["queries"]
        longest = int(held_out.lengths().max())  # known here, and a night before it is sampled
        require_room(policy, longest, config.eval.dpo_summary_tokens, "eval.dpo_summary_tokens")
        references = {
            name: split_logprobs(
                accelerator, policy, split, config, f"dpo reference, {name}", run.resume
            )
            for name, split in splits.items()
        }
        together = preferences.posts_of(splits["train"]) if config.rm.by_post else ()
        state = begin_supervised(run, accelerator, policy, len(splits["train"]), together)
        learn(state, splits["train"], references["train"])
        trained = PolicyModel(
            keep_model(accelerator, state.learner.trained, tokenizer, run.partial / "model")
        )
        results = {
            name: evaluate(state, trained, splits[name], references[name], file)
            for name, file in (("validation", HELD_OUT_PAIRS), (CNNDM, HELD_OUT_CNNDM))
            if name in splits
        }
        run.finish({**results["validation"], "cnndm": results.get(CNNDM)})


def learn(state: State, train: TokenizedSplit, reference: Tensor) -> None:
    """All updates. Raises UserError if the first batch shows that the reference is wrong."""
    run, config, dpo = state.run, state.run.config, state.run.config.dpo
    for update in state.remaining("dpo"):
        rate, rows = set_rate(state, dpo.learning_rate), state.order.batch(update)
        stats = take_step(state, train, reference, rows)
        if update == 0:
            # Rewards grow with beta, and rounding with them.
            larger = max(1.0, dpo.beta / MEASURED_AT)
            check_start(stats, TOLERANCES[config.memory.mixed_precision] * larger)
        stats |= {"lr": rate, "seconds/update": state.seconds}
        run.log(update + 1, **stats)


def take_step(
    state: State, train: TokenizedSplit, reference: Tensor, rows: list[int]
) -> dict[str, float]:
    """One optimizer step on a global batch of pairs; returns its means before the step, as in TRL.

    Shapes: reference [pairs of the split, 2], as `split_logprobs` returns it.
    """
    learner, config = state.learner, state.run.config
    accelerator, policy = learner.accelerator, learner.trained
    policy.train()

    def losses(part: Sequence[int]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        chosen, rejected = pair_logprobs(policy, train, part, accelerator.device)
        ref_chosen, ref_rejected = reference[list(part)].to(chosen).unbind(1)
        loss, chosen_rewards, rejected_rewards = dpo_loss(
            chosen, rejected, ref_chosen, ref_rejected, config.dpo.beta
        )
        columns = {
            "loss/train": loss.expand(len(part)),
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/accuracies": chosen_rewards > rejected_rewards,
            "rewards/margins": chosen_rewards - rejected_rewards,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        sums = {key: x.detach().double().sum() for key, x in columns.items()}
        yield loss * len(part) / len(rows), sums

    return preferences.pair_step(learner, train, rows, losses)


def check_start(stats: dict[str, float], tolerance: float) -> None:
    """Before the first step the policy is its reference: the loss is ln 2 and every reward 0."""
    distances = {
        "loss/train": abs(stats["loss/train"] - math.log(2)),
        "rewards/chosen": abs(stats["rewards/chosen"]),
        "rewards/rejected": abs(stats["rewards/rejected"]),
    }
    for key, distance in distances.items():
        if not distance <= tolerance:  # a NaN is not small either
            raise UserError(
                f"step 0: {key} is {stats[key]:.4g}, off by {distance:.3g} (at most {tolerance}) "
                "from what a policy equal to its reference gives. Stage at fault: dpo: the "
                "reference belongs to other rows or another model, or dropout was left on"
            )


def pair_logprobs(
    policy: nn.Module, split: TokenizedSplit, rows: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen and the rejected summaries of some rows, each [rows] nats.

    The sum is over the summary's tokens and its EOS; the query does not count.
    """
    return preferences.of_pairs(split, rows, partial(summary_logprobs, policy, device=device))


@torch.no_grad()
def split_logprobs(
    accelerator: Accelerator,
    policy: nn.Module,
    split: TokenizedSplit,
    config: Config,
    label: str,
    keep: Path | None = None,
) -> Tensor:
    """`pair_logprobs` of every pair of a split, [pairs, 2] float64, from all processes.

    `keep` as in `over_share`.
    """
    policy.eval()

    def read(rows: list[int]) -> list[list[float]]:
        return torch.stack(pair_logprobs(policy, split, rows, accelerator.device), dim=1).tolist()

    sequences = config.memory.microbatch_size  # logits of all response tokens, as in training
    size = Size(rows=max(1, sequences // 2), setting=MICROBATCH)
    measure = partial(in_pieces, accelerator, size, measure=read)
    logprobs = preferences.over_pairs(accelerator, split, sequences, label, measure, keep)
    return torch.tensor(logprobs, dtype=torch.float64)


def evaluate(
    state: State, policy: nn.Module, split: TokenizedSplit, reference: Tensor, file: str
) -> dict[str, float]:
    """Loss, margin and accuracy of the policy as a reward model; `file` gets one row a pair."""
    config, keep = state.run.config, state.run.resume
    label = f"dpo {Path(file).stem}"
    logprobs = split_logprobs(state.accelerator, policy, split, config, label, keep)
    rewards = implicit_rewards(logprobs, reference, config.dpo.beta)
    chosen, rejected = rewards.mean(dim=0).tolist()
    gaps = (rewards[:, 0] - rewards[:, 1]).tolist()
    means = {"rewards/chosen": chosen, "rewards/rejected": rejected}
    write_rows(state.run, file, preferences.gap_rows(gaps, split))
    return means | preferences.summarize_gaps(gaps)
