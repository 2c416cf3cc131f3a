"""The presets: each says only how it differs from the paper's settings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from stages.config.checks import unknown
from stages.config.config import Config, changes_of, with_changes
from stages.config.stages import LORA_STAGES, POLICY_GRADIENT_STAGES

PYTHIA = "14m 70m 160m 410m 1b 1.4b 2.8b 6.9b"
# What `make smollm` writes.
SMOLLM2 = "runs/models/smollm2-135m-instruct"
AUTO = "memory.microbatch_size=auto memory.forward_batch_size=auto"


def preset(name: str, *changes: str) -> Config:
    """The paper's settings but for some changes, each as on a command line."""
    texts = (text for line in changes for text in line.split())
    return with_changes(Config(preset=name, name=name), changes_of(texts))


def each(stages: Sequence[str], settings: str) -> str:
    """The same settings for several stages."""
    return " ".join(f"{stage}.{text}" for stage in stages for text in settings.split())


# The same settings for every policy-gradient algorithm.
for_algorithms = partial(each, POLICY_GRADIENT_STAGES)


def paper(name: str, *more: str) -> Config:
    """The paper's run at one size: only the checkpoint and memory knobs differ between sizes."""
    size = name.split("-")[1]
    return preset(
        name,
        f"base.checkpoint=EleutherAI/pythia-{size}-deduped",
        AUTO,
        f"memory.gradient_checkpointing={size == '6.9b'}",
        *more,
    )


def with_lora(*stages: str) -> tuple[str, str]:
    """Some stages learn adapters, on less memory, at a higher rate.

    differs: Huang et al. 2024 learns all weights in every stage. The rate is a rule of thumb,
    untested by us: ten times that of all weights.
    """
    adapters = f"lora.rank=16 lora.stages={','.join(stages)} memory.frozen_dtype=bf16"
    return adapters, each(stages, "learning_rate=3e-5")


def tiny(name: str, hidden_size: int, num_layers: int) -> Config:
    """The built-in world at one size of the base model; nothing else differs between sizes."""
    return preset(
        name,
        f"base.tokenizer=train base.hidden_size={hidden_size} base.num_layers={num_layers}",
        "data.source=toy data.max_query_tokens=80 data.max_summary_tokens=20",
        "data.max_query_summary_tokens=100",
        "data.max_comparison_tokens=32 data.max_query_comparison_tokens=112",
        # The weights are new, not pretrained: they need larger steps, and more of them. The posts
        # are mostly noise, so only the summary is learned.
        "optimizer.warmup_fraction=0.05",
        "sft.learning_rate=3e-3 sft.batch_size=16 sft.epochs=2 sft.loss_on_query=false",
        # Without centering, all scores of some posts lie below -1, where not to end is best. After
        # one pass, or at three times the rate, the model is indifferent to some facts.
        "rm.learning_rate=5e-4 rm.batch_size=8 rm.epochs=2 rm.center=0.001",
        "normalize.posts=2000",  # the mean is known to 0.02 of the scores' deviation
        for_algorithms("total_episodes=3584 batch_size=64 samples_every=5 learning_rate=8e-4"),
        # The critic learns alone, and faster, until it explains what it can of the returns.
        "ppo.learning_rate=2e-4 ppo.critic_learning_rate=1e-3 ppo.critic_updates=16",
        "dpo.learning_rate=2e-4 dpo.batch_size=16",
        "eval.dpo_summary_tokens=20 judge.kind=facts",
        "memory.microbatch_size=64 memory.forward_batch_size=128",
        "memory.mixed_precision=no memory.cpu_threads=2",
    )


def posts() -> Config:
    """Real posts and the real tokenizer on a small model that was never pretrained."""
    return preset(
        "posts",
        "data.source=",
        # Rare words have small gradients: 1e-8 lets them through.
        "optimizer.adam_eps=1e-8 optimizer.warmup_fraction=0.05",
        "sft.learning_rate=1e-3 sft.batch_size=16 sft.epochs=3 sft.loss_on_query=false",
        "rm.learning_rate=3e-4 rm.batch_size=32",
        for_algorithms("learning_rate=1e-4 total_episodes=256 batch_size=32 samples_every=4"),
        "dpo.learning_rate=1e-4 dpo.batch_size=32",
        "judge.kind=reward_model memory.mixed_precision=no",
    )


# Few updates: the paper's eps of 1e-5 would slow the small gradients of adapters. The reward model
# learns one half of the comparisons, post by post; a run on the other half is gold.
OF_SMOLLM2 = (
    f"base.checkpoint={SMOLLM2} data.source= sft.loss_on_query=false",
    "optimizer.adam_eps=1e-8 optimizer.warmup_fraction=0.05",
    "rm.pairs=even rm.by_post=true",
    "eval.dpo_summary_tokens=53 eval.best_of=4 judge.kind=reward_model",
)


def smollm2() -> Config:
    """A pretrained model of 135M parameters on real posts and people's labels, for two cores.

    Fewer and shorter posts than the paper's, and none is cut; a pair's post is cut at as many
    tokens. SFT and the reward model learn all weights: on longer, cut posts adapters came to the
    same loss in SFT (2.86 nats) and to a lower ROUGE-L (0.198 against 0.215). PPO and its rivals
    learn adapters, which spares a second copy of the policy. With a critic that started as the
    reward model an older run lowered its score, so PPO's starts at zero, with lambda 1.
    """
    return preset(
        "smollm2",
        *OF_SMOLLM2,
        "data.max_post_characters=900 data.max_query_tokens=320",
        "data.max_query_summary_tokens=373 data.max_query_comparison_tokens=489",
        "data.train_posts=512 data.validation_posts=128 data.ppo_posts=512",
        "lora.rank=16 lora.stages=ppo,rloo,grpo,dpo",
        "sft.learning_rate=1e-4 sft.batch_size=16 sft.evaluations=2",
        "rm.learning_rate=5e-5 rm.batch_size=16",
        "normalize.posts=256",  # the mean is known to 0.06 of the scores' deviation
        for_algorithms("learning_rate=3e-4 batch_size=32 samples_per_query=4 num_ppo_epochs=2"),
        # With 320 episodes PPO's gain was not sure in one of three seeds. Half of what ends scores
        # below -1, so with `replace` not to end would pay.
        for_algorithms("total_episodes=640 eos_trick=subtract samples_every=2"),
        "ppo.critic_init=zero ppo.lam=1",
        "dpo.learning_rate=2e-4 dpo.batch_size=16 memory.cpu_threads=2",
    )


def smollm2_full() -> Config:
    """The same model on all posts and pairs, with the paper's lengths: for a GPU.

    PPO is the paper's again, critic and EOS trick too: 200 updates may let the critic catch up,
    which has not been run.
    """
    return preset(
        "smollm2-full",
        *OF_SMOLLM2,
        "sft.learning_rate=5e-5 sft.batch_size=64 sft.epochs=2",
        "rm.learning_rate=2e-5 rm.batch_size=64",
        for_algorithms("total_episodes=51200 batch_size=256"),
        "dpo.learning_rate=1e-5",
        AUTO,
    )


def own() -> Config:
    """A model and data of one's own; `reports/needs/own.py` chooses what depends on them.

    The critic starts at zero, which no run showed to be worse; bad rows are left out and listed.
    """
    return preset(
        "own",
        "data.source= data.on_bad_row=skip sft.loss_on_query=false",
        for_algorithms("total_episodes=640 batch_size=32 samples_per_query=4 eos_trick=subtract"),
        "ppo.critic_init=zero ppo.lam=1 judge.kind=reward_model",
        AUTO,
    )


PRESETS: dict[str, Callable[[], Config]] = {
    # Width and layers.
    "tiny-xs": partial(tiny, "tiny-xs", 32, 2),
    "tiny-s": partial(tiny, "tiny-s", 64, 2),
    "tiny": partial(tiny, "tiny", 96, 3),
    "tiny-l": partial(tiny, "tiny-l", 128, 4),
    "tiny-xl": partial(tiny, "tiny-xl", 192, 6),
    "posts": posts,
    "smollm2": smollm2,
    "smollm2-full": smollm2_full,
    # pythia-6.9b fits no card unsharded.
    **{f"pythia-{size}": partial(paper, f"pythia-{size}") for size in PYTHIA.split()},
    "pythia-1b-24gb": partial(paper, "pythia-1b-24gb", *with_lora("ppo")),
    "pythia-2.8b-lora": partial(paper, "pythia-2.8b-lora", *with_lora("ppo")),
    "pythia-6.9b-lora": partial(paper, "pythia-6.9b-lora", *with_lora(*LORA_STAGES)),
    "own": own,
    # Summaries that exist already: nothing is trained, and the default judge is an LLM.
    "outputs": partial(preset, "outputs", "data.source="),
}


class Ablation(NamedTuple):
    """One switch: what it changes, and where the paper speaks of it."""

    settings: str
    what: str


# Switch | settings | what it is, with the paper's detail. The first six are asked about most.
PAPERS_CRITIC = "ppo.critic_init=reward_model ppo.critic_updates=0 ppo.lam=0.95"
SWITCHES = f"""
read-before-eos | rm.read_at=before_eos | scores are read, and learned, before EOS (details 11, 12)
no-eos-trick | ppo.eos_trick=off | a missing EOS costs nothing (detail 23)
no-normalization | ppo.reward_normalization=false | rewards keep their mean (detail 15)
critic-sft | ppo.critic_init=sft | critic from the SFT model, new head (detail 22)
no-advantage-whitening | ppo.whiten_advantages=false | advantages as they are (detail 25)
dropout | ppo.dropout=0.1 | dropout 0.1 in policy and critic (detail 7)
whiten-rewards | ppo.whiten_rewards=true | rewards scaled to unit variance (detail 24)
critic-zero | ppo.critic_init=zero | critic from the reward model, head of zeros (detail 22)
critic-reward-model | ppo.critic_init=reward_model | critic from the reward model (detail 22)
no-critic-updates | ppo.critic_updates=0 | the critic never learns alone (beside detail 22)
critic-paper | {PAPERS_CRITIC} | details 20 and 22
critic-updates | ppo.critic_init=reward_model ppo.critic_updates=16 | first alone (detail 22)
critic-zero-alone | ppo.critic_init=zero ppo.critic_updates=0 | zeros, never alone (detail 22)
critic-sft-alone | ppo.critic_init=sft ppo.critic_updates=0 | SFT's, never alone (detail 22)
gated | {PAPERS_CRITIC} ppo.baseline=gated | critic-paper, but the mean where it explains nothing
mean | {PAPERS_CRITIC} ppo.baseline=mean | critic-paper, but the batch's mean is the baseline
lambda-0.95 | ppo.lam=0.95 | advantages with the paper's lambda (GAE, detail 20)
lambda-1 | ppo.lam=1 | advantages are returns - values (GAE, detail 20)
no-centering | rm.center=0 | each post's scores keep a constant of their own (beside detail 10)
subtract-eos | ppo.eos_trick=subtract | a missing EOS costs 1 of the score, as in TRL (detail 23)
score-at-eos | ppo.score_at=eos | the score stands at EOS, not after it (beside detail 23)
entropy | ppo.entropy_coef=0.01 | an entropy bonus (beyond the paper)
adaptive-kl | ppo.kl_target=2 ppo.kl_horizon=320 | kl_coef steers the KL (beyond the paper)
compat-paper | ppo.compat=paper | whitening, means and logprobs as the paper's code (details 20, 25)
"""
ROWS = [row.split(" | ") for row in SWITCHES.strip().splitlines()]
ABLATIONS = {name: Ablation(settings, what) for name, settings, what in ROWS}
OF_CRITIC = """
    critic-sft critic-zero critic-reward-model no-critic-updates critic-paper critic-sft-alone
    critic-zero-alone critic-updates lambda-0.95 lambda-1
"""
GROUPS = {"critic": tuple(OF_CRITIC.split()), "baseline": ("critic-paper", "gated", "mean")}
"""Ablations that answer one question together, on a page of their own."""


def ablations_named(names: Sequence[str]) -> list[str]:
    """The ablations of these names, of which some may be those of a group."""
    return list(dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,))))


def settings_of_ablation(name: str) -> tuple[str, ...]:
    """The overrides of one ablation. Raises UserError, with the nearest name, if it is unknown."""
    if name not in ABLATIONS:
        raise unknown("ablation", name, [*ABLATIONS, *GROUPS])
    return tuple(ABLATIONS[name].settings.split())
