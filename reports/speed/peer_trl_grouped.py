"""One update of TRL's RLOOTrainer or GRPOTrainer, as `peer_trl` measures one of its PPOTrainer.

These trainers take texts and read them by a tokenizer. So each token id is written as a word of
its own, and the ids come back as they were. The reward model is called by a function, which is one
of the ways that TRL offers: it gets the ids that were sampled.
GRPO is driven as Dr.GRPO: no deviation, no division by length.
"""

import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from reports.speed.meter import Meter, hold
from reports.speed.peer_trl import Clock, measure_files, warm_task

# Stage -> TRL's module, trainer and settings, and what its settings call what ours means.
TRAINERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "rloo": (
        "trl.trainer.rloo_trainer",
        "RLOOTrainer",
        "RLOOConfig",
        {"normalize_advantages": False},
    ),
    "grpo": (
        "trl.trainer.grpo_trainer",
        "GRPOTrainer",
        "GRPOConfig",
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
}
MEASURE = "_get_per_token_logps_and_entropies"
# Methods of both trainers -> what their time counts as.
STEPS = {"_generate_single_turn": "sample", MEASURE: "measure", "_calculate_rewards": "score"}


def word_of(token: int) -> str:
    """A token id as a word, in brackets: a tokenizer finds special tokens within words too."""
    return f"<{token}>"


def words_of(ids: Sequence[int]) -> str:
    """Token ids as a text that `tokenizer_of` reads back."""
    return " ".join(map(word_of, ids))


def ids_of(words: str) -> list[int]:
    """The token ids of a text of `words_of`."""
    return [int(word[1:-1]) for word in words.split()]


def padding_of(task: dict[str, Any]) -> int:
    """The id that TRL pads with, which must be a row of the embeddings: ours need not be."""
    pad_id, eos_id = int(task["pad_id"]), int(task["eos_id"])
    return pad_id if pad_id < task["vocabulary"] else eos_id


def tokenizer_of(task: dict[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer of words that are token ids."""
    words = {word_of(number): number for number in range(task["vocabulary"])}
    plain = Tokenizer(models.WordLevel(words, unk_token=word_of(task["eos_id"])))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=word_of(task["eos_id"]),
        pad_token=word_of(padding_of(task)),
        padding_side="left",
    )


def scorer_of(task: dict[str, Any], reward_model: nn.Module) -> Callable[..., list[float]]:
    """The reward of each response: the reward model's number at its last token."""
    pad_id, size = padding_of(task), task["forward_batch_size"]

    @torch.no_grad()
    def score(prompts: Sequence[str], completion_ids: Sequence[list[int]], **_: Any) -> list[float]:
        rows = [ids_of(prompt) + ids for prompt, ids in zip(prompts, completion_ids, strict=True)]
        scores: list[float] = []
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            longest = max(map(len, some))
            tokens = torch.tensor([row + [pad_id] * (longest - len(row)) for row in some])
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in some])
            logits = reward_model(input_ids=tokens, attention_mask=mask).logits
            scores += logits[:, 0].tolist()
        return scores

    return score


def make_grouped(
    task: dict[str, Any], networks: Sequence[nn.Module], folder: str, **more: Any
) -> Any:
    """A trainer for one update over the task's queries; `more` are settings of TRL's."""
    name, trainer, config, own = TRAINERS[task["stage"]]
    module, (policy, reward_model) = import_module(name), networks
    size, group = task["microbatch_size"], task["samples_per_query"]
    settings = getattr(import_module("trl"), config)(
        output_dir=folder,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=task["bf16"],
        gradient_checkpointing=False,
        seed=task["seed"],
        per_device_train_batch_size=size,
        gradient_accumulation_steps=len(task["queries"]) * group // size,
        num_generations=group,
        num_iterations=task["num_ppo_epochs"],
        max_steps=task["num_ppo_epochs"],
        max_completion_length=task["response_length"],
        temperature=task["temperature"],
        learning_rate=task["learning_rate"],
        beta=task["kl_coef"],
        shuffle_dataset=False,
        **own | more,
    )
    datasets = import_module("datasets")
    prompts = [{"prompt": words_of(query)} for query in task["queries"]]
    return getattr(module, trainer)(
        model=policy,
        reward_funcs=scorer_of(task, reward_model),
        args=settings,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer_of(task),
    )


def load_grouped(task: dict[str, Any]) -> list[Any]:
    """Policy and reward model from the task's weights; TRL loads the reference policy itself."""
    policy = AutoModelForCausalLM.from_pretrained(task["weights"], dtype=torch.float32)
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        task["weights"], dtype=torch.float32, num_labels=1
    )
    reward_model.config.pad_token_id = padding_of(task)
    for network in (policy, reward_model):
        hold(network)
    return [policy, reward_model.eval()]


def measure_grouped(task: dict[str, Any], clock: Clock, meter: Meter) -> dict[str, Any]:
    """Seconds of an update of RLOO or GRPO and of its steps, and its peak."""
    module, name, *_ = TRAINERS[task["stage"]]
    trainer = getattr(import_module(module), name)
    for method, step in STEPS.items():
        timed = clock.timed(getattr(trainer, method), step, learning=method == MEASURE)
        setattr(trainer, method, timed)
    networks = load_grouped(task)
    few = warm_task(task)
    few |= {"queries": few["queries"][: task["microbatch_size"] // task["samples_per_query"]]}
    with tempfile.TemporaryDirectory() as folder:
        make_grouped(few, networks, folder).train()
        return clock.train(make_grouped(task, networks, folder), meter)


def main(argv: list[str] | None = None) -> None:
    """One update of RLOO or GRPO."""
    measure_files(measure_grouped, argv)


if __name__ == "__main__":
    main()
