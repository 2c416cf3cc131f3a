"""What `make ablations` turns, one switch at a time, against the preset's own settings.

    python -m stages.ablations                 the names
    python -m stages.ablations critic-sft      the settings of one, as --set takes them

Standard library only, so that `make` can read the list before anything is installed.
"""

import sys
from dataclasses import dataclass

from stages.config import UserError, fail


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One switch: what it changes, and where the paper speaks of it."""

    settings: str
    what: str


ABLATIONS = {
    "no-eos-trick": Ablation(
        settings="ppo.eos_trick=off", what="a missing EOS costs nothing (detail 23)"
    ),
    "critic-sft": Ablation(
        settings="ppo.critic_init=sft", what="critic from the SFT model, new head (detail 22)"
    ),
    "no-normalization": Ablation(
        settings="ppo.reward_normalization=false", what="rewards keep their mean (detail 15)"
    ),
    "whiten-rewards": Ablation(
        settings="ppo.whiten_rewards=true", what="rewards scaled to unit variance (detail 24)"
    ),
    "dropout": Ablation(
        settings="ppo.dropout=0.1", what="dropout 0.1 in policy and critic (detail 7)"
    ),
    "score-at-eos": Ablation(
        settings="ppo.score_at=eos", what="the score stands at EOS, not after it (masking)"
    ),
    "compat-paper": Ablation(
        settings="ppo.compat=paper", what="whitening, means and logprobs as in the paper's code"
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Print the names, or the settings of the one that is named."""
    names = sys.argv[1:] if argv is None else argv
    try:
        unknown = [name for name in names if name not in ABLATIONS]
        if unknown:
            raise UserError(f"no ablation {unknown[0]!r}: known are {', '.join(ABLATIONS)}")
        print(*[ABLATIONS[name].settings for name in names] or ABLATIONS)
    except UserError as error:
        fail(error)


if __name__ == "__main__":
    main()
