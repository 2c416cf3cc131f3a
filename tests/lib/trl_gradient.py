"""One step of TRL's RLOOTrainer, in float64 and at a rate of 1: what it learned from, and how far.

    runs/peers/trl/bin/python -m tests.lib.trl_gradient task.json folder

The task is that of `make bench`; `folder` gets `seen.json` (prompts, responses and rewards in TRL's
order) and `step.safetensors` (weights before less weights after: the gradient). TRL's interpreter
runs it; none of its code is changed. The trainer takes texts, so each token id is a word.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.bench.trl_update import Task

NOISE = 0.02  # the policy is no longer the reference policy, so the KL is not 0
SAMPLES = 4
# A step that is the gradient. The trainer learns each microbatch once.
PLAIN_STEP = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}


def ids_of(words: str) -> list[int]:
    """The token ids of a text of words such as `<17>`."""
    return [int(word[1:-1]) for word in words.split()]


def tokenizer_of(task: Task) -> PreTrainedTokenizerFast:
    """A tokenizer of words that are token ids."""
    words = {f"<{token}>": token for token in range(task.pad_id)}
    eos = f"<{task.eos_id}>"
    plain = Tokenizer(models.WordLevel(words, unk_token=eos))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=eos, pad_token=eos, padding_side="left"
    )


def make_trainer(task: Task, policy: Any, rewards_of: Any, folder: Path) -> Any:
    """TRL's trainer for one step over the task's queries."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    settings = RLOOConfig(
        output_dir=str(folder / "trl"),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=task.seed,
        per_device_train_batch_size=task.microbatch_size,
        gradient_accumulation_steps=len(task.queries) * SAMPLES // task.microbatch_size,
        temperature=task.temperature,
        learning_rate=1.0,
        num_generations=SAMPLES,
        num_iterations=1,
        max_steps=1,
        max_completion_length=task.response_length,
        beta=task.kl_coef,
        shuffle_dataset=False,
        normalize_advantages=False,
        **PLAIN_STEP,
    )
    prompts = [{"prompt": " ".join(f"<{token}>" for token in row)} for row in task.queries]
    return RLOOTrainer(
        model=policy,
        reward_funcs=rewards_of,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer_of(task),
    )


def main() -> None:
    """Take the step."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(sys.argv[2])
    policy = AutoModelForCausalLM.from_pretrained(task.weights, dtype=torch.float64)
    scorer = AutoModelForSequenceClassification.from_pretrained(
        task.weights, dtype=torch.float64, num_labels=1, pad_token_id=task.eos_id
    ).eval()
    torch.manual_seed(1)
    for weight in policy.parameters():
        weight.data += NOISE * torch.randn_like(weight)
    policy.save_pretrained(folder / "policy")
    seen: dict[str, Any] = {}

    @torch.no_grad()
    def rewards_of(prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
        rows = [ids_of(prompt) + ids for prompt, ids in zip(prompts, completion_ids, strict=True)]
        ids = pad_sequence([*map(torch.tensor, rows)], True, task.eos_id)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], True)
        rewards = scorer(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()
        seen.update(prompts=[*map(ids_of, prompts)], responses=completion_ids, rewards=rewards)
        return rewards

    trainer = make_trainer(task, policy, rewards_of, folder)
    trainer.ref_model.double()
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    trainer.train()
    step = {name: before[name] - weight.detach() for name, weight in policy.named_parameters()}
    save_file(step, folder / "step.safetensors")
    (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
