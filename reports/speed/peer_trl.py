"""One update of TRL's PPOTrainer on the task that ours is measured on; its interpreter runs it.

    runs/peers/trl/bin/python -m reports.speed.peer_trl task.json result.json

TRL is driven by its own settings, and none of its code is changed. Nothing of ours is imported but
the meter.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from reports.speed.meter import Meter, hold

PPO = "trl.experimental.ppo"
LIBRARIES = ("trl", "torch", "transformers", "accelerate")
WARM_TOKENS = 2


def load(task: dict[str, Any]) -> list[Any]:
    """Policy and ref_policy, reward model and critic, all from the task's weights."""
    networks = []
    for labels in ({}, {}, {"num_labels": 1}, {"num_labels": 1}):
        kind: Any = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
        network = kind.from_pretrained(
            task["weights"], dtype=torch.float32, trust_remote_code=False, **labels
        )
        hold(network)
        networks.append(network)
    return networks


def make_trainer(task: dict[str, Any], networks: Sequence[nn.Module], folder: str) -> Any:
    """A PPOTrainer for one update over the task's queries."""
    ppo, pad_id = import_module(PPO), task["pad_id"]
    policy, ref_policy, reward_model, critic = networks
    settings = ppo.PPOConfig(
        output_dir=folder,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=task["bf16"],
        gradient_checkpointing=False,
        seed=task["seed"],
        per_device_train_batch_size=task["microbatch_size"],
        gradient_accumulation_steps=len(task["queries"]) // task["microbatch_size"],
        temperature=task["temperature"],
        learning_rate=task["learning_rate"],
        local_rollout_forward_batch_size=task["forward_batch_size"],
        total_episodes=len(task["queries"]),
        num_ppo_epochs=task["num_ppo_epochs"],
        num_mini_batches=1,
        num_sample_generations=0,
        response_length=task["response_length"],
        kl_coef=task["kl_coef"],
        stop_token="eos",
        missing_eos_penalty=1.0,
    )

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        queries = [torch.tensor(row["input_ids"]) for row in rows]
        return {"input_ids": pad_sequence(queries, True, pad_id, "left")}

    return ppo.PPOTrainer(
        args=settings,
        processing_class=SimpleNamespace(eos_token_id=task["eos_id"], pad_token_id=pad_id),
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=critic,
        train_dataset=[{"input_ids": query} for query in task["queries"]],
        data_collator=collate,
    )


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds, peak memory and tokens of one update, after the smallest one, with which TRL loads
    what it needs.
    """
    if task["cpu_threads"]:
        torch.set_num_threads(task["cpu_threads"])
    transformers_logging.set_verbosity_error()
    queries = task["queries"]
    meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    networks = load(task)
    few = {"queries": queries[: task["microbatch_size"]], "num_ppo_epochs": 1}
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(task | few | {"response_length": WARM_TOKENS}, networks, folder).train()
        _, measured = meter.whole(make_trainer(task, networks, folder).train)
    return {
        **measured,
        "tokens": sum(map(len, queries)) + len(queries) * task["response_length"],
        "threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
    }


def main(argv: list[str] | None = None) -> None:
    """Measure the task of the first file and write the result to the second."""
    task_file, result_file = map(Path, sys.argv[1:] if argv is None else argv)
    task = json.loads(task_file.read_text(encoding="utf-8"))
    if task["bf16"]:  # TRL's trainer makes its accelerator from the environment
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    result_file.write_text(json.dumps(measure(task)), encoding="utf-8")


if __name__ == "__main__":
    main()
