"""One update of TRL's PPOTrainer, on the same queries and weights as ours.

    runs/peers/trl/bin/python -m tests.bench.trl_update task.json result.json

The Python of TRL's environment runs it. TRL is configured through its own settings, and none of its
code is changed. Nothing of this project is imported but the meter.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from tests.bench.meter import Meter, Update, read_weights

WARM_UP_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class Task:
    """One update for TRL. Names are those of our settings."""

    weights: str
    """Folder with the weights that all four networks start from."""
    queries: list[list[int]]
    eos_id: int
    pad_id: int
    response_length: int
    microbatch_size: int
    forward_batch_size: int
    num_ppo_epochs: int
    temperature: float
    learning_rate: float
    kl_coef: float
    seed: int
    is_bf16: bool
    cpu_threads: int
    """0: as many as torch chooses."""


def measure_update(task: Task) -> Update:
    """Measure an update after the smallest one, in which TRL loads what it needs."""
    if task.cpu_threads:
        torch.set_num_threads(task.cpu_threads)
    transformers_logging.set_verbosity_error()
    meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    networks = load_networks(task.weights)
    smallest = replace(
        task,
        queries=task.queries[: task.microbatch_size],
        num_ppo_epochs=1,
        response_length=WARM_UP_TOKENS,
    )

    with tempfile.TemporaryDirectory() as folder:
        make_trainer(smallest, networks, folder).train()
        _, seconds, peak = meter.measure(make_trainer(task, networks, folder).train)
    return Update(
        seconds=seconds,
        peak=peak,
        tokens=sum(len(query) + task.response_length for query in task.queries),
        threads=torch.get_num_threads(),
    )


def load_networks(weights: str) -> list[nn.Module]:
    """Load policy, ref_policy, reward model and critic from the same weights."""
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    policies = [AutoModelForCausalLM.from_pretrained(weights, **options) for _ in range(2)]
    scorers = [
        AutoModelForSequenceClassification.from_pretrained(weights, num_labels=1, **options)
        for _ in range(2)
    ]
    networks = [*policies, *scorers]
    for network in networks:
        read_weights(network)
    return networks


def make_trainer(task: Task, networks: Sequence[nn.Module], folder: str) -> Any:
    """Create a PPOTrainer for one update over the task's queries."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policy, ref_policy, reward_model, critic = networks
    settings = PPOConfig(
        output_dir=folder,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=task.is_bf16,
        gradient_checkpointing=False,
        seed=task.seed,
        per_device_train_batch_size=task.microbatch_size,
        gradient_accumulation_steps=len(task.queries) // task.microbatch_size,
        temperature=task.temperature,
        learning_rate=task.learning_rate,
        local_rollout_forward_batch_size=task.forward_batch_size,
        total_episodes=len(task.queries),
        num_ppo_epochs=task.num_ppo_epochs,
        num_mini_batches=1,
        num_sample_generations=0,
        response_length=task.response_length,
        kl_coef=task.kl_coef,
        stop_token="eos",
        missing_eos_penalty=1.0,
    )

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        queries = [torch.tensor(row["input_ids"]) for row in rows]
        padded = pad_sequence(
            queries,
            batch_first=True,
            padding_value=task.pad_id,
            padding_side="left",
        )
        return {"input_ids": padded}

    return PPOTrainer(
        args=settings,
        processing_class=SimpleNamespace(eos_token_id=task.eos_id, pad_token_id=task.pad_id),
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=critic,
        train_dataset=[{"input_ids": query} for query in task.queries],
        data_collator=collate,
    )


def main() -> None:
    """Measure the task in the first file and write the result to the second."""
    task_file, result_file = map(Path, sys.argv[1:])
    task = Task(**json.loads(task_file.read_text(encoding="utf-8")))
    if task.is_bf16:  # TRL's trainer creates its accelerator from the environment
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    result_file.write_text(json.dumps(asdict(measure_update(task))), encoding="utf-8")


if __name__ == "__main__":
    main()
