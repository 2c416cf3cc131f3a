"""One post followed through a PPO update, with the numbers of a finished run.

    python -m tests.lib.walkthrough tiny 44413 toy1-validation-1

prints the table of `docs/ppo-walkthrough.md`. The policy and the critic are those at the end of
PPO, so that the KL and the values are not trivial.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from stages.config import paths
from stages.config.recorded import recorded_config
from stages.config.sections import POSTS
from stages.data.ragged import load_split
from stages.models.loading import load_policy, load_reward_model
from stages.models.policy import PolicyModel
from stages.models.sampling import Noise
from stages.models.tokenizers import load_tokenizer
from stages.rl.advantages import assign_rewards, compute_advantages
from stages.rl.algorithms import ALGORITHMS
from stages.rl.episodes import Rollout
from stages.rl.networks import Networks, make_learner
from stages.rl.rollout import measure, sample_responses, score

AFTER = "(after the last token)"


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One token of the response."""

    text: str
    logprob: float
    ref_logprob: float
    reward: float
    value: float
    advantage: float
    """Before whitening."""
    target: float
    """What the critic is trained towards."""


@dataclass(frozen=True, kw_only=True)
class Walkthrough:
    """Everything that the table shows of one episode."""

    kl_coef: float
    score: float
    rows: tuple[TokenRow, ...]

    @property
    def kl(self) -> float:
        """The k1 estimate of the KL from SFT, in nats."""
        return sum(row.logprob - row.ref_logprob for row in self.rows)


def follow(folder: Path, post_id: str) -> Walkthrough:
    """Sample one response to a held-out post of the run in `folder`, and take steps 1 to 5."""
    config = recorded_config(folder / "ppo")
    assert config is not None
    tokenizer = load_tokenizer(folder / "sft/model")
    posts = load_split(folder / "base/data", POSTS[1])
    place = [row["id"] for row in posts.rows].index(post_id)

    def freeze(model):
        return model.eval().requires_grad_(False)

    networks = Networks(
        policy=PolicyModel(load_policy(folder / "ppo/model")),
        critic=load_reward_model(folder / "ppo/critic"),
        ref_policy=PolicyModel(freeze(load_policy(folder / "sft/model"))),
        reward_model=freeze(load_reward_model(folder / "normalize/model")),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
    # Whitening needs a batch; of one episode the plain advantages say more.
    ppo = config.ppo.changed(
        batch_size=1, num_minibatches=1, total_episodes=1, critic_updates=0, whiten_advantages=False
    )
    learner = make_learner(Accelerator(cpu=True), networks, ppo, config.optimizer, config.memory)

    noise = Noise(seed=config.seed, purpose="walkthrough", length=config.data.max_summary_tokens)
    sampled = sample_responses(learner, [posts.columns["queries"][place]], noise, ppo)
    episodes = score(learner, measure(learner, sampled, ppo), ppo)
    shaped = assign_rewards(episodes, ppo, tokenizer.pad_token_id, ppo.kl_coef)
    rollout = compute_advantages(learner.accelerator, shaped, ALGORITHMS["ppo"], ppo)
    return Walkthrough(
        kl_coef=ppo.kl_coef,
        score=float(rollout.scores[0]),
        rows=tuple(token_rows(rollout, tokenizer)),
    )


def token_rows(rollout: Rollout, tokenizer) -> list[TokenRow]:
    """Return a row for each position that counts. The last one has the score."""
    assert rollout.values is not None
    assert rollout.returns is not None
    rows = []
    for place in range(int(rollout.value_mask[0].sum())):
        is_token = bool(rollout.response_mask[0, place])
        token = int(rollout.responses[0, place])
        rows.append(
            TokenRow(
                text=f"`{tokenizer.decode([token]).strip()}`" if is_token else AFTER,
                logprob=float(rollout.logprobs[0, place]) if is_token else 0.0,
                ref_logprob=float(rollout.ref_logprobs[0, place]) if is_token else 0.0,
                reward=float(rollout.rewards[0, place]),
                value=float(rollout.values[0, place]),
                advantage=float(rollout.advantages[0, place]),
                target=float(rollout.returns[0, place]),
            )
        )
    return rows


def table_of(walkthrough: Walkthrough) -> str:
    """Return the table as Markdown."""
    lines = [
        "| token | log π | log π_ref | reward | value | advantage | critic's target |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in walkthrough.rows:
        numbers = (
            row.logprob,
            row.ref_logprob,
            row.reward,
            row.value,
            row.advantage,
            row.target,
        )
        cells = " | ".join(f"{number:.2f}" for number in numbers)
        lines.append(f"| {row.text} | {cells} |")
    lines.append("")
    lines.append(
        f"Score {walkthrough.score:.2f}, KL {walkthrough.kl:.2f} nats,"
        f" `ppo.kl_coef` {walkthrough.kl_coef}."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    name, seed, post = sys.argv[1:]
    print(table_of(follow(paths.RUNS / name / f"seed{seed}", post)))
