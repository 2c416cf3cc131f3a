"""One step of TRL's RLOOTrainer, in float64 and at a rate of 1: what it learned from, and how far.

    runs/peers/trl/bin/python -m tests.trl_gradient task.json folder

The task is that of `make bench`; `folder` gets `seen.json` (prompts, responses and rewards in TRL's
order) and `step.safetensors` (weights before less weights after: the gradient). TRL's interpreter
runs it; none of its code is changed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from reports.speed.peer_trl import ids_of, load_grouped, make_grouped, scorer_of

NOISE = 0.02  # the policy is no longer the reference policy, so the KL is not 0
# A step that is the gradient. The trainer learns each microbatch once.
PLAIN_STEP = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}


def main() -> None:
    """Take the step."""
    task, folder = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    policy, reward_model = load_grouped(task)
    for network in (policy, reward_model):
        network.double()
    torch.manual_seed(1)
    for weight in policy.parameters():
        weight.data += NOISE * torch.randn_like(weight)
    policy.save_pretrained(folder / "policy")
    trainer = make_grouped(task, [policy, reward_model], str(folder / "trl"), **PLAIN_STEP)
    trainer.ref_model.double()
    score = scorer_of(task, reward_model)
    seen: dict[str, Any] = {}

    def noting(prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
        rewards = score(prompts, completion_ids)
        seen.update(prompts=[*map(ids_of, prompts)], responses=completion_ids, rewards=rewards)
        return rewards

    trainer.reward_funcs[0] = noting
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    trainer.train()
    step = {name: before[name] - weight.detach() for name, weight in policy.named_parameters()}
    save_file(step, folder / "step.safetensors")
    (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
