"""One update of TRL's trainer on the task that ours is measured on; TRL's interpreter runs it.

    runs/peers/trl/bin/python -m reports.speed.peer_trl task.json result.json

TRL is driven by its own settings, and none of its code is changed. Only the functions that its
rollout calls are timed. Its PPOTrainer has the policy's log-probabilities from sampling, so what it
measures is the ref_policy. Nothing of ours is imported but the meter.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from reports.speed.meter import Meter, hold

TRAINER = "trl.experimental.ppo.ppo_trainer"
# Functions of TRL's rollout -> what their time counts as, in the words of ours.
STEPS = {
    "batch_generation": "sample",
    "forward": "measure",
    "selective_log_softmax": "measure",
    "get_reward": "score",  # reward model and critic
}
LIBRARIES = ("trl", "torch", "transformers", "accelerate")
WARM_TOKENS = 2


class Clock:
    """Seconds of each step of a rollout, and when the last of them ended."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(STEPS.values(), 0.0)
        self.ended = 0.0

    def timed(
        self, function: Callable[..., Any], step: str, learning: bool = True
    ) -> Callable[..., Any]:
        """The function with its time noted; where `learning` calls it too, while no gradient is
        wanted.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            if learning and torch.is_grad_enabled():
                return function(*args, **kwargs)
            wait()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            wait()
            self.ended = time.perf_counter()
            self.spent[step] += self.ended - started
            return result

        return call

    def train(self, trainer: Any, meter: Meter) -> dict[str, Any]:
        """Seconds of a trainer's one update, of each of its steps, and its peak memory."""
        self.spent = dict.fromkeys(self.spent, 0.0)
        started = time.perf_counter()
        _, seconds, peak = meter.whole(trainer.train)
        learning = started + seconds - self.ended
        return {"seconds": seconds, "peak": peak, **self.spent, "learn": learning}


def wait() -> None:
    """Until the GPU, if there is one, has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load(task: dict[str, Any]) -> list[torch.nn.Module]:
    """Policy, ref_policy, reward model and critic, all from the task's weights."""
    kinds = [AutoModelForCausalLM] * 2 + [AutoModelForSequenceClassification] * 2
    networks = []
    for kind in kinds:
        labels = {} if kind is AutoModelForCausalLM else {"num_labels": 1}
        network = kind.from_pretrained(task["weights"], dtype=torch.float32, **labels)
        hold(network)
        networks.append(network)
    return networks


def make_trainer(task: dict[str, Any], networks: list[torch.nn.Module], folder: str) -> Any:
    """A PPOTrainer for one update over the task's queries."""
    ppo = import_module("trl.experimental.ppo")
    policy, ref_policy, reward_model, critic = networks
    queries, size = task["queries"], task["microbatch_size"]
    settings = ppo.PPOConfig(
        output_dir=folder,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=task["bf16"],
        gradient_checkpointing=False,
        seed=task["seed"],
        per_device_train_batch_size=size,
        gradient_accumulation_steps=len(queries) // size,
        local_rollout_forward_batch_size=task["forward_batch_size"],
        total_episodes=len(queries),
        num_ppo_epochs=task["num_ppo_epochs"],
        num_mini_batches=1,
        num_sample_generations=0,
        response_length=task["response_length"],
        temperature=task["temperature"],
        learning_rate=task["learning_rate"],
        kl_coef=task["kl_coef"],
        stop_token="eos",
        missing_eos_penalty=1.0,
    )
    pad_id = task["pad_id"]

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        padded = [[pad_id] * (longest - len(row["input_ids"])) + row["input_ids"] for row in rows]
        return {"input_ids": torch.tensor(padded)}

    return ppo.PPOTrainer(
        args=settings,
        processing_class=SimpleNamespace(eos_token_id=task["eos_id"], pad_token_id=pad_id),
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=critic,
        train_dataset=[{"input_ids": query} for query in queries],
        data_collator=collate,
    )


def warm_task(task: dict[str, Any]) -> dict[str, Any]:
    """The smallest update, with which TRL loads what it needs."""
    few = task["queries"][: task["microbatch_size"]]
    return task | {"queries": few, "num_ppo_epochs": 1, "response_length": WARM_TOKENS}


Measured = Callable[[dict[str, Any], Clock, Meter], dict[str, Any]]


def measure(task: dict[str, Any], measured: Measured) -> dict[str, Any]:
    """Seconds, peak memory and tokens of one update after a small one."""
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    transformers_logging.set_verbosity_error()
    clock = Clock()
    meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sampled = len(task["queries"]) * task["samples_per_query"] * task["response_length"]
    return {
        **measured(task, clock, meter),
        "tokens": task["samples_per_query"] * sum(map(len, task["queries"])) + sampled,
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
    }


def measure_ppo(task: dict[str, Any], clock: Clock, meter: Meter) -> dict[str, Any]:
    """Seconds of an update of PPO and of its steps, and its peak."""
    trainer_module = import_module(TRAINER)
    for name, step in STEPS.items():
        setattr(trainer_module, name, clock.timed(getattr(trainer_module, name), step))
    networks = load(task)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(warm_task(task), networks, folder).train()
        return clock.train(make_trainer(task, networks, folder), meter)


def measure_files(measured: Measured, argv: list[str] | None) -> None:
    """Measure the task of the first file and write the result to the second."""
    parser = argparse.ArgumentParser(description="one update of a trainer of TRL's, measured")
    parser.add_argument("task", type=Path)
    parser.add_argument("result", type=Path)
    args = parser.parse_args(argv)
    task = json.loads(args.task.read_text(encoding="utf-8"))
    if task["bf16"]:  # TRL's trainer makes its accelerator from the environment
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    args.result.write_text(json.dumps(measure(task, measured)), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """One update of PPO."""
    measure_files(measure_ppo, argv)


if __name__ == "__main__":
    main()
