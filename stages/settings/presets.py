"""The presets: each says only how it differs from the paper's settings. Standard library only."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from stages.settings.checks import unknown
from stages.settings.config import (
    TOY,
    TRAIN_TOKENIZER,
    Base,
    Config,
    Data,
    Dpo,
    Eval,
    Grpo,
    JudgeSettings,
    Lora,
    Memory,
    Normalize,
    Optimizer,
    Ppo,
    Rloo,
    Rm,
    Sft,
)
from stages.settings.stages import LORA_STAGES

# What `make smollm` writes.
SMOLLM2 = "runs/models/smollm2-135m-instruct"


def paper(size: str, microbatch_size: int, forward_batch_size: int) -> Config:
    """The paper's run at one size: only the checkpoint and memory knobs differ between sizes."""
    name = f"pythia-{size}"
    memory = Memory(
        microbatch_size=microbatch_size,
        forward_batch_size=forward_batch_size,
        gradient_checkpointing=size == "6.9b",
    )
    base = Base(checkpoint=f"EleutherAI/{name}-deduped")
    return Config(preset=name, name=name, base=base, memory=memory)


def rivals(grouped: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The sections of PPO and of its rivals, alike where they have the same settings.

    PPO keeps its critic's settings, and the number of passes over a batch is each one's own.
    `grouped` are the settings of RLOO and Dr.GRPO that differ from PPO's.
    """
    shared = {field.name for field in fields(Rloo)} - {"num_ppo_epochs"}
    alike = {name: value for name, value in settings.items() if name in shared} | (grouped or {})
    return {"ppo": Ppo(**settings), "rloo": Rloo(**alike), "grpo": Grpo(**alike)}


# A rule of thumb for adapters, untested by us: ten times the rate of all weights.
LORA_RATE = 3e-5


def paper_with_lora(size: str, ending: str, stages: str, *batches: int) -> Config:
    """The paper's run at one size on less memory: some stages learn adapters, at a higher rate.

    differs: Huang et al. 2024 learns all weights in every stage.
    """
    config, name = paper(size, *batches), f"pythia-{size}-{ending}"
    names = stages.split(",")
    rates = {stage: replace(getattr(config, stage), learning_rate=LORA_RATE) for stage in names}
    memory, lora = replace(config.memory, frozen_dtype="bf16"), Lora(rank=16, stages=stages)
    return replace(config, preset=name, name=name, memory=memory, lora=lora, **rates)


def tiny(name: str, hidden_size: int, num_layers: int) -> Config:
    """The built-in world at one size of the base model; nothing else differs between sizes."""
    base = Base(
        tokenizer=TRAIN_TOKENIZER, hidden_size=hidden_size, num_layers=num_layers, num_heads=4
    )
    return Config(
        preset=name,
        name=name,
        base=base,
        data=Data(
            source=TOY,
            max_query_tokens=80,
            max_summary_tokens=20,
            max_query_summary_tokens=100,
            max_comparison_tokens=32,
            max_query_comparison_tokens=112,
        ),
        # The weights are new, not pretrained: they need larger steps, and more of them. The posts
        # are mostly noise, so only the summary is learned.
        optimizer=Optimizer(warmup_fraction=0.05),
        sft=Sft(learning_rate=3e-3, batch_size=16, epochs=2, loss_on_query=False),
        # Without centering, all scores of some posts lie below -1, where not to end is best. After
        # one pass, or at three times the rate, the model is indifferent to some facts.
        rm=Rm(learning_rate=5e-4, batch_size=8, epochs=2, center=0.001),
        normalize=Normalize(posts=2000),  # the mean is known to 0.02 of the scores' deviation
        # The critic learns alone, and faster, until it explains what it can of the returns.
        **rivals(
            learning_rate=2e-4,
            grouped={"learning_rate": 8e-4},  # RLOO makes one pass over a batch
            critic_learning_rate=1e-3,
            critic_updates=16,
            total_episodes=3584,
            batch_size=64,
            samples_every=5,
        ),
        dpo=Dpo(learning_rate=2e-4, batch_size=16),
        eval=Eval(dpo_summary_tokens=20),
        judge=JudgeSettings(kind="facts"),
        memory=Memory(
            microbatch_size=64, forward_batch_size=128, mixed_precision="no", cpu_threads=2
        ),
    )


def posts() -> Config:
    """Real posts and the real tokenizer on a small model that was never pretrained."""
    return Config(
        preset="posts",
        name="posts",
        base=Base(tokenizer="", hidden_size=128, num_layers=4, num_heads=4),
        data=Data(source=""),
        # Rare words have small gradients: 1e-8 lets them through.
        optimizer=Optimizer(adam_eps=1e-8, warmup_fraction=0.05),
        sft=Sft(learning_rate=1e-3, batch_size=16, epochs=3, loss_on_query=False),
        rm=Rm(learning_rate=3e-4, batch_size=32),
        **rivals(learning_rate=1e-4, total_episodes=256, batch_size=32, samples_every=4),
        dpo=Dpo(learning_rate=1e-4, batch_size=32),
        judge=JudgeSettings(kind="reward_model"),
        memory=Memory(microbatch_size=8, forward_batch_size=32, mixed_precision="no"),
    )


def smollm2() -> Config:
    """A pretrained model of 135M parameters on real posts and people's labels, for two cores.

    Fewer and shorter posts than the paper's, and none is cut; a pair's post is cut at as many
    tokens. SFT and the reward model learn all weights: on longer, cut posts adapters came to the
    same loss in SFT (2.86 nats) and to a lower ROUGE-L (0.198 against 0.215). PPO and its rivals
    learn adapters, which spares a second copy of the policy. With a critic that started as the
    reward model an older run lowered its score, so PPO's starts at zero, with lambda 1. The reward
    model learns one half of the comparisons, post by post; a run on the other half is gold.
    """
    return Config(
        preset="smollm2",
        name="smollm2",
        base=Base(checkpoint=SMOLLM2),
        data=Data(
            source="",
            max_post_characters=900,
            train_posts=512,
            validation_posts=128,
            ppo_posts=512,
            max_query_tokens=320,
            max_query_summary_tokens=373,
            max_query_comparison_tokens=489,
        ),
        # Few updates: the paper's eps of 1e-5 would slow the small gradients of adapters.
        optimizer=Optimizer(adam_eps=1e-8, warmup_fraction=0.05),
        lora=Lora(rank=16, stages="ppo,rloo,grpo,dpo"),
        sft=Sft(learning_rate=1e-4, batch_size=16, loss_on_query=False, evaluations=2),
        rm=Rm(learning_rate=5e-5, batch_size=16, pairs="even", by_post=True),
        normalize=Normalize(posts=256),  # the mean is known to 0.06 of the scores' deviation
        **rivals(
            learning_rate=3e-4,
            grouped={"num_ppo_epochs": 2},  # as PPO
            total_episodes=640,  # with 320 PPO's gain was not sure in one of three seeds
            batch_size=32,
            samples_per_query=4,
            num_ppo_epochs=2,
            critic_init="zero",
            lam=1.0,
            eos_trick="subtract",  # half of what ends scores below -1, so not to end would pay
            samples_every=2,
        ),
        dpo=Dpo(learning_rate=2e-4, batch_size=16),
        eval=Eval(dpo_summary_tokens=53, best_of="4"),
        judge=JudgeSettings(kind="reward_model"),
        memory=Memory(microbatch_size=8, forward_batch_size=32, cpu_threads=2),
    )


def smollm2_full() -> Config:
    """The same model on all posts and pairs, with the paper's lengths: for a GPU.

    PPO is the paper's again, critic and EOS trick too: 200 updates may let the critic catch up,
    which has not been run.
    """
    small = smollm2()
    return replace(
        small,
        preset="smollm2-full",
        name="smollm2-full",
        data=Data(source=""),
        lora=Lora(),
        sft=Sft(learning_rate=5e-5, batch_size=64, epochs=2, loss_on_query=False),
        rm=Rm(learning_rate=2e-5, batch_size=64, pairs="even", by_post=True),
        normalize=Normalize(),
        **rivals(learning_rate=3e-6, total_episodes=51_200, batch_size=256, samples_every=20),
        dpo=Dpo(learning_rate=1e-5),
        memory=Memory(microbatch_size=32, forward_batch_size=128),
    )


def own() -> Config:
    """A model and data of one's own; `reports/needs/own.py` chooses what depends on them.

    The critic starts at zero, which no run showed to be worse; rows that cannot be used are left
    out and listed.
    """
    return Config(
        preset="own",
        name="own",
        data=Data(source="", on_bad_row="skip"),
        sft=Sft(loss_on_query=False),
        **rivals(
            total_episodes=640,
            batch_size=32,
            samples_per_query=4,
            critic_init="zero",
            lam=1.0,
            eos_trick="subtract",
        ),
        judge=JudgeSettings(kind="reward_model"),
    )


def outputs() -> Config:
    """Summaries that exist already: nothing is trained, and the default judge is an LLM."""
    return Config(preset="outputs", name="outputs", data=Data(source=""))


TINY = {  # width and layers
    "tiny-xs": (32, 2),
    "tiny-s": (64, 2),
    "tiny": (96, 3),
    "tiny-l": (128, 4),
    "tiny-xl": (192, 6),
}
# Sequences of a pass with gradients and of one without, such that every stage fits the card that
# the preset is made for, as `make plan` counts it; pythia-6.9b fits none without sharding.
PYTHIA = {
    "14m": (32, 128),
    "70m": (32, 128),
    "160m": (32, 128),
    "410m": (16, 128),
    "1b": (8, 64),
    "1.4b": (4, 64),
    "2.8b": (4, 32),
    "6.9b": (2, 16),
}
PRESETS: dict[str, Callable[[], Config]] = {
    **{name: partial(tiny, name, *shape) for name, shape in TINY.items()},
    "posts": posts,
    "smollm2": smollm2,
    "smollm2-full": smollm2_full,
    **{f"pythia-{size}": partial(paper, size, *batches) for size, batches in PYTHIA.items()},
    "pythia-1b-24gb": partial(paper_with_lora, "1b", "24gb", "ppo", 2, 32),
    "pythia-2.8b-lora": partial(paper_with_lora, "2.8b", "lora", "ppo", 4, 32),
    "pythia-6.9b-lora": partial(paper_with_lora, "6.9b", "lora", ",".join(LORA_STAGES), 2, 16),
    "own": own,
    "outputs": outputs,
}


class Ablation(NamedTuple):
    """One switch: what it changes, and where the paper speaks of it."""

    settings: str
    what: str


# Switch | settings | what it is, with the paper's detail. The first six are asked about most.
SWITCHES = """
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
critic-paper | ppo.critic_init=reward_model ppo.critic_updates=0 ppo.lam=0.95 | details 20 and 22
critic-updates | ppo.critic_init=reward_model ppo.critic_updates=16 | first alone (detail 22)
critic-zero-alone | ppo.critic_init=zero ppo.critic_updates=0 | zeros, never alone (detail 22)
critic-sft-alone | ppo.critic_init=sft ppo.critic_updates=0 | SFT's, never alone (detail 22)
lambda-0.95 | ppo.lam=0.95 | advantages with the paper's lambda (GAE, detail 20)
lambda-1 | ppo.lam=1 | advantages are returns - values (GAE, detail 20)
no-centering | rm.center=0 | each post's scores keep a constant of their own (beside detail 10)
subtract-eos | ppo.eos_trick=subtract | a missing EOS costs 1 of the score, as in TRL (detail 23)
score-at-eos | ppo.score_at=eos | the score stands at EOS, not after it (beside detail 23)
compat-paper | ppo.compat=paper | whitening, means and logprobs as the paper's code (details 20, 25)
"""
ROWS = [row.split(" | ") for row in SWITCHES.strip().splitlines()]
ABLATIONS = {name: Ablation(settings, what) for name, settings, what in ROWS}
OF_CRITIC = """
    critic-sft critic-zero critic-reward-model no-critic-updates critic-paper critic-sft-alone
    critic-zero-alone critic-updates lambda-0.95 lambda-1
"""
GROUPS = {"critic": tuple(OF_CRITIC.split())}
"""Ablations that answer one question together, on a page of their own."""


def ablations_named(names: Sequence[str]) -> list[str]:
    """The ablations of these names, of which some may be those of a group."""
    return list(dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,))))


def settings_of_ablation(name: str) -> tuple[str, ...]:
    """The overrides of one ablation. Raises UserError, with the nearest name, if it is unknown."""
    if name not in ABLATIONS:
        raise unknown("ablation", name, [*ABLATIONS, *GROUPS])
    return tuple(ABLATIONS[name].settings.split())
