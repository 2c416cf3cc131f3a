"""The switches of `make ablations`: each of its runs turns one. Standard library only."""

from dataclasses import dataclass

from stages.settings.checks import unknown


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


def settings_of_ablation(name: str) -> tuple[str, ...]:
    """The overrides of one ablation. Raises UserError, with the nearest name, if it is unknown."""
    if name not in ABLATIONS:
        raise unknown("ablation", name, ABLATIONS)
    return tuple(ABLATIONS[name].settings.split())
