"""The settings of a run in one frozen tree: `config.ppo.kl_coef`."""

from typing import TYPE_CHECKING

from pydantic import Field, create_model, model_validator
from typing_extensions import Self

from stages.config.judge import Checks, Eval, JudgeSettings, Outputs, Released
from stages.config.lora import Lora
from stages.config.paths import NO_RUN_NAME, is_run_name
from stages.config.ppo import Ppo
from stages.config.section import Section, Settings
from stages.config.sections import (
    COMPARISONS,
    POSTS,
    TOY,
    Base,
    Data,
    Dpo,
    Memory,
    Normalize,
    Optimizer,
    Reward,
    Rm,
    Sft,
    World,
)
from stages.config.stages import OUTPUTS, RELEASED, TRAINED, shared_before
from stages.rl.algorithms import ALGORITHMS


class ConfigBase(Settings):
    """All settings of one run."""

    preset: str
    """The preset that the settings started from: its name or its file."""
    name: str
    """The run's folder below runs/; the preset's name unless something was overridden."""
    seed: int = Field(default=44413, ge=0)
    """Seed of all randomness but the built-in world's."""
    upstream: str = ""
    """Run whose base, sft, rm and normalize stages this one starts from. Empty: its own."""
    own_from: str = ""
    """The first of these stages that an override changes: the run trains this stage and those after
    it itself. Empty: none."""
    overrides: tuple[str, ...] = ()
    """What SET changed, so that a `make` command can repeat it."""

    base: Base = Base()
    """Model and tokenizer to start from."""
    world: World = World()
    """The built-in world."""
    data: Data = Data()
    """Posts, comparisons and their length limits."""
    optimizer: Optimizer = Optimizer()
    """AdamW."""
    sft: Sft = Sft()
    """Supervised fine-tuning."""
    reward: Reward = Reward()
    """A reward function."""
    rm: Rm = Rm()
    """The reward model."""
    normalize: Normalize = Normalize()
    """Reward normalization."""
    ppo: Ppo = Ppo()
    """PPO."""
    dpo: Dpo = Dpo()
    """DPO."""
    lora: Lora = Lora()
    """Adapters."""
    released: Released = Released()
    """Models that others have trained."""
    outputs: Outputs = Outputs()
    """Existing summaries."""
    eval: Eval = Eval()
    """Summaries of held-out posts."""
    judge: JudgeSettings = JudgeSettings()
    """Who compares a summary with the reference."""
    checks: Checks = Checks()
    """Checks of the run and of its judge."""
    memory: Memory = Memory()
    """How the run fits its machine."""

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        if not is_run_name(self.name):
            raise ValueError(f"NAME={self.name} {NO_RUN_NAME}")
        if self.outputs.file and (self.released.policy or self.released.reward_model):
            raise ValueError(
                "outputs.file and released.* cannot be combined: give INPUT, or POLICY and"
                " REWARD_MODEL"
            )

        if self.reward.function and self.released.reward_model:
            raise ValueError(
                "reward.function and released.reward_model (REWARD_MODEL) cannot be combined:"
                " leave out one of them"
            )
        if self.reward.function and self.ppo.critic_init == "reward_model":
            raise ValueError(
                "ppo.critic_init must be sft or zero with reward.function, because a critic cannot"
                " start from a function"
            )

        if self.eval.best_of and self.kind != TRAINED:
            raise ValueError("eval.best_of must be empty in a run that trains no SFT model")
        return self

    @model_validator(mode="after")
    def _check_posts(self) -> Self:
        # Section -> the number of held-out posts that it allows.
        limits = {"data": self.data.validation_posts}
        if self.data.source == TOY:
            limits["world"] = self.world.validation_posts

        for section, posts in limits.items():
            if posts and self.eval.posts > posts and self.kind != OUTPUTS:
                raise ValueError(
                    f"eval.posts must be at most {posts}, the posts of {section}.validation_posts,"
                    f" not {self.eval.posts}"
                )
        return self

    def is_from_upstream(self, stage: str) -> bool:
        """Whether the upstream supplies a stage."""
        return bool(self.upstream) and stage in shared_before(self.own_from)

    @property
    def needed_splits(self) -> tuple[str, ...]:
        """The splits that its data must have: no pairs where no reward model is trained."""
        return POSTS if self.has_external_reward else (*POSTS, *COMPARISONS)

    @property
    def has_external_reward(self) -> bool:
        """Whether a reward function or a released reward model replaces training one."""
        return bool(self.reward.function or self.released.reward_model)

    @property
    def kind(self) -> str:
        """What the run does: it trains, judges a released policy, or judges existing summaries."""
        if self.outputs.file:
            return OUTPUTS
        if self.released.policy:
            return RELEASED
        return TRAINED


# At run time a config also has a section for each of the other algorithms, whose table may grow.
# mypy sees only ConfigBase, so typed code reads those sections by `getattr(config, algorithm)`.
if TYPE_CHECKING:
    Config = ConfigBase
else:
    Config = create_model(
        "Config",
        __base__=ConfigBase,
        __doc__=ConfigBase.__doc__,
        __module__=__name__,
        **{
            name: (algorithm.settings, Field(algorithm.settings(), description=algorithm.summary))
            for name, algorithm in ALGORITHMS.items()
            if name != "ppo"
        },
    )


def _sections() -> dict[str, type[Section]]:
    sections = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            sections[name] = field.annotation
    return sections


SECTIONS = _sections()
"""Name of a section -> its class."""
