"""A released policy (`make eval POLICY=...`): a checkpoint that others trained, judged as it is.

The base stage has loaded it with its own tokenizer and tokenised the posts. This stage puts it
where policies are looked for, and its reward model, if one is given, beside it in our layout:
released ones hold the mean of the references in their configuration (Huang et al. 2024, detail 15).
"""

import shutil
from typing import Any

from stages.driving.start import run_stage
from stages.learning.models import (
    load_released_reward_model,
    load_tokenizer,
    same_tokens,
    save_model,
)
from stages.running.files import link_or_copy
from stages.running.hub import fetch_model, model_source
from stages.runs import open_stage
from stages.settings.checks import UserError
from stages.settings.config import Config


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
            source = model_source("released.reward_model", config.released.reward_model)
            folder, tokenizer = fetch_model(source).folder, load_tokenizer(base)
            own = (folder / "tokenizer.json").exists()
            if own and not same_tokens(load_tokenizer(folder), tokenizer):
                raise UserError(
                    "REWARD_MODEL has another tokenizer than POLICY, whose tokens it would read: "
                    "judge with it instead (judge.kind=reward_model judge.model=<its folder>)"
                )
            reward_model, mean = load_released_reward_model(folder)
            save_model(reward_model, tokenizer, run.partial / "reward_model")
            results["reward_model"] = {"converted": mean is not None, "mean_in_config": mean}
        run.finish(results)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("released", take_released, argv, "a released policy, judged without training")


if __name__ == "__main__":
    main()
