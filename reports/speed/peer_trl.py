"""One update of a trainer of TRL's on the task that ours is measured on; its interpreter runs it.

    runs/peers/trl/bin/python -m reports.speed.peer_trl task.json result.json

TRL is driven by its own settings, and none of its code is changed. Only the functions that its
rollout calls are timed. Its PPOTrainer has the policy's log-probabilities from sampling, so what it
measures is the ref_policy. Nothing of ours is imported but the meter.

RLOOTrainer and GRPOTrainer take texts and read them by a tokenizer. So each token id is written as
a word of its own, and the ids come back as they were. Their reward model is called by a function,
which is one of the ways that TRL offers: it gets the ids that were sampled. GRPO is driven as
Dr.GRPO: no deviation, no division by length.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from reports.speed.meter import Meter, hold

PPO = "trl.experimental.ppo"
MEASURE = "_get_per_token_logps_and_entropies"
# Functions of PPO's rollout, methods of the other trainers -> what their time counts as, in the
# words of ours.
PPO_STEPS = {
    "batch_generation": "sample",
    "forward": "measure",
    "selective_log_softmax": "measure",
    "get_reward": "score",  # reward model and critic
}
STEPS = {"_generate_single_turn": "sample", MEASURE: "measure", "_calculate_rewards": "score"}
# Stage -> TRL's trainer and settings, and what its settings call what ours means.
TRAINERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rloo": ("RLOOTrainer", "RLOOConfig", {"normalize_advantages": False}),
    "grpo": ("GRPOTrainer", "GRPOConfig", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
}
LIBRARIES = ("trl", "torch", "transformers", "accelerate")
WARM_TOKENS = 2


def padded(rows: Sequence[list[int]], pad_id: int, side: str = "right") -> torch.Tensor:
    """Rows of token ids as one tensor."""
    return pad_sequence([*map(torch.tensor, rows)], True, pad_id, side)


def settings_of(task: dict[str, Any], folder: str) -> dict[str, Any]:
    """What all of TRL's trainers are told."""
    episodes = len(task["queries"]) * task["samples_per_query"]
    return {
        "output_dir": folder,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": task["bf16"],
        "gradient_checkpointing": False,
        "seed": task["seed"],
        "per_device_train_batch_size": task["microbatch_size"],
        "gradient_accumulation_steps": episodes // task["microbatch_size"],
        "temperature": task["temperature"],
        "learning_rate": task["learning_rate"],
    }


def load(task: dict[str, Any], each: int) -> list[Any]:
    """So many policies and so many scalar networks, all from the task's weights."""
    networks = []
    for labels in ({}, {"num_labels": 1}):
        kind: Any = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
        for _ in range(each):
            network = kind.from_pretrained(
                task["weights"], dtype=torch.float32, trust_remote_code=False, **labels
            )
            hold(network)
            networks.append(network)
    return networks


# -- PPO -------------------------------------------------------------------------------------------


def make_ppo(task: dict[str, Any], networks: Sequence[nn.Module], folder: str) -> Any:
    """A PPOTrainer for one update over the task's queries."""
    ppo, pad_id = import_module(PPO), task["pad_id"]
    policy, ref_policy, reward_model, critic = networks
    settings = ppo.PPOConfig(
        **settings_of(task, folder),
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
        return {"input_ids": padded([row["input_ids"] for row in rows], pad_id, "left")}

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


# -- RLOO and GRPO ---------------------------------------------------------------------------------


def word_of(token: int) -> str:
    """A token id as a word, in brackets: a tokenizer finds special tokens within words too."""
    return f"<{token}>"


def ids_of(words: str) -> list[int]:
    """The token ids of a text of such words."""
    return [int(word[1:-1]) for word in words.split()]


def tokenizer_of(task: dict[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer of words that are token ids."""
    words = {word_of(number): number for number in range(task["vocabulary"])}
    plain = Tokenizer(models.WordLevel(words, unk_token=word_of(task["eos_id"])))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=word_of(task["eos_id"]),
        pad_token=word_of(task["eos_id"]),  # a row of the embeddings, which our [PAD] is not
        padding_side="left",
    )


def scorer_of(task: dict[str, Any], reward_model: nn.Module) -> Callable[..., list[float]]:
    """The reward of each response: the reward model's number at its last token."""
    place = next(reward_model.parameters()).device

    @torch.no_grad()
    def score(prompts: Sequence[str], completion_ids: Sequence[list[int]], **_: Any) -> list[float]:
        rows = [ids_of(prompt) + ids for prompt, ids in zip(prompts, completion_ids, strict=True)]
        mask = padded([[1] * len(row) for row in rows], 0).to(place)
        ids = padded(rows, task["eos_id"]).to(place)
        with torch.autocast(place.type, torch.bfloat16, enabled=task["bf16"]):
            logits = reward_model(input_ids=ids, attention_mask=mask).logits
        return [float(score) for score in logits[:, 0]]

    return score


def load_grouped(task: dict[str, Any]) -> list[Any]:
    """Policy and reward model; TRL loads the reference policy itself."""
    policy, reward_model = load(task, 1)
    reward_model.config.pad_token_id = task["eos_id"]
    place = "cuda" if torch.cuda.is_available() else "cpu"  # TRL moves a model, and no function
    return [policy, reward_model.to(place).eval()]


def make_grouped(
    task: dict[str, Any], networks: Sequence[nn.Module], folder: str, **more: Any
) -> Any:
    """A trainer for one update over the task's queries; `more` are settings of TRL's."""
    trainer, config, own = TRAINERS[task["stage"]]
    trl, (policy, reward_model) = import_module("trl"), networks
    settings = getattr(trl, config)(
        **settings_of(task, folder),
        num_generations=task["samples_per_query"],
        num_iterations=task["num_ppo_epochs"],
        max_steps=task["num_ppo_epochs"],
        max_completion_length=task["response_length"],
        beta=task["kl_coef"],
        shuffle_dataset=False,
        **own | more,
    )
    prompts = [{"prompt": " ".join(map(word_of, query))} for query in task["queries"]]
    return getattr(trl, trainer)(
        model=policy,
        reward_funcs=scorer_of(task, reward_model),
        args=settings,
        train_dataset=import_module("datasets").Dataset.from_list(prompts),
        processing_class=tokenizer_of(task),
    )


# -- measuring -------------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds, peak memory and tokens of one update, after the smallest one, with which TRL loads
    what it needs.
    """
    if task["cpu_threads"]:
        torch.set_num_threads(task["cpu_threads"])
    transformers_logging.set_verbosity_error()
    queries, group = task["queries"], task["samples_per_query"]
    grouped = task["stage"] in TRAINERS
    owner: Any = import_module("trl" if grouped else f"{PPO}.ppo_trainer")
    if grouped:
        owner = getattr(owner, TRAINERS[task["stage"]][0])
    meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    networks = load_grouped(task) if grouped else load(task, 2)
    make = make_grouped if grouped else make_ppo
    steps, learned = (STEPS, [MEASURE]) if grouped else (PPO_STEPS, [*PPO_STEPS])
    few = {"queries": queries[: task["microbatch_size"] // group], "num_ppo_epochs": 1}
    with tempfile.TemporaryDirectory() as folder, meter.watching(owner, steps, learned):
        make(task | few | {"response_length": WARM_TOKENS}, networks, folder).train()
        _, measured = meter.whole(make(task, networks, folder).train)
    return {
        **measured,
        "tokens": group * (sum(map(len, queries)) + len(queries) * task["response_length"]),
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
