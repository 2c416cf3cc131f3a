"""A released policy (`make eval POLICY=...`): a checkpoint that others trained, judged as it is.

The base stage has loaded it with its own tokenizer and tokenized the posts. This stage puts it into
the folder where policies belong, together with its reward model, if one is given, in our layout.
"""

import shutil
from pathlib import Path
from typing import Any

from stages.config.config import Config
from stages.config.errors import UserError
from stages.models.foreign import fetch_reward_model
from stages.models.loading import save_model
from stages.models.tokenizers import load_tokenizer
from stages.runs.files import link_or_copy
from stages.runs.run import Run, open_stage

# For the message: what to do with a reward model that uses a different tokenizer.
INSTEAD = "judge with it instead (judge.kind=reward_model judge.model=<its folder>)"


def take_released(config: Config) -> None:
    """Run the stage. Raises UserError for a reward model that does not load or does not fit."""
    with open_stage(config, "released") as run:
        if not config.released.policy:
            raise UserError("stage released needs a released policy: add POLICY=")
        base_model = run.require("base") / "model"
        _copy_policy(base_model, run.partial / "model")

        results: dict[str, Any] = {"reward_model": None}
        if config.released.reward_model:
            results["reward_model"] = _convert_reward_model(config, run, base_model)
        run.finish(results)


def _copy_policy(source: Path, target: Path) -> None:
    """Copy a model's files, as links where the disk allows them: a policy may be large."""
    shutil.rmtree(target, ignore_errors=True)  # of an interrupted attempt
    target.mkdir()
    for path in source.iterdir():
        link_or_copy(path, target / path.name)


def _convert_reward_model(config: Config, run: Run, base_model: Path) -> dict[str, Any]:
    """Save the released reward model in our layout; return what the manifest records of it."""
    reward_model, mean = fetch_reward_model(config, base_model, INSTEAD)
    save_model(reward_model, load_tokenizer(base_model), run.partial / "reward_model")
    return {"converted": mean is not None, "mean_in_config": mean}
