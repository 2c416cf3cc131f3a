"""A released policy (`make eval POLICY=...`): a checkpoint that others trained, judged as it is.

The base stage has loaded it with its own tokenizer and tokenised the posts. This stage puts it
where policies are looked for, and its reward model, if one is given, beside it in our layout.
"""

import shutil
from typing import Any

from stages.models.foreign import fetch_reward_model
from stages.models.loading import save_model
from stages.models.tokenizers import load_tokenizer
from stages.running.files import link_or_copy
from stages.runs import open_stage
from stages.settings.checks import UserError
from stages.settings.config import Config

INSTEAD = "judge with it instead (judge.kind=reward_model judge.model=<its folder>)"


def take_released(config: Config) -> None:
    """Run the stage. Raises UserError for a reward model that does not load or does not fit."""
    with open_stage(config, "released") as run:
        if not config.released.policy:
            raise UserError("stage released needs a released policy: add POLICY=")
        base = run.require("base") / "model"
        shutil.rmtree(run.partial / "model", ignore_errors=True)  # of an interrupted attempt
        (run.partial / "model").mkdir()
        for path in base.iterdir():  # without a second copy where the disk allows it
            link_or_copy(path, run.partial / "model" / path.name)
        results: dict[str, Any] = {"reward_model": None}
        if config.released.reward_model:
            reward_model, mean = fetch_reward_model(config, base, INSTEAD)
            save_model(reward_model, load_tokenizer(base), run.partial / "reward_model")
            results["reward_model"] = {"converted": mean is not None, "mean_in_config": mean}
        run.finish(results)
