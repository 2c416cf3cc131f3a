"""What a command line may change: a preset with overrides becomes a config.

make ppo PRESET=tiny SEED=44413 SET=ppo.kl_coef=0.1 NAME=tiny-kl0.1
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stages.config import config as settings
from stages.config.checks import RESTORE, require, unknown
from stages.config.config import SECTIONS, Config, UserError, changes_of, with_changes
from stages.config.faults import Parser
from stages.config.judge import at_server
from stages.config.presets import PRESETS
from stages.config.stages import (
    GIVEN_BY,
    OUTPUTS,
    RELEASED,
    SHARED_SECTIONS,
    SHARED_STAGES,
    STAGES,
    TRAINED,
    first_changed,
    row_of,
)

# An override of these needs no name of its own: another judge is another opinion of the same run.
SAME_RUN = ("judge", "checks", "memory")
# What ends a setting's value, which may hold spaces itself, in a word of several.
NEXT = re.compile(r"\s+(?=[A-Za-z_]\w*\.\w+=)")
TRAINING_SECTIONS = {"base", "sft", "rm", "ppo", "dpo", "lora"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for; `config_of` makes a config of it."""

    preset: str = "tiny"
    seed: int = 44413
    name: str = ""
    """The run's folder below runs/; empty: the preset's name."""
    data: str = ""
    tokenizer: str = ""
    upstream: str = ""
    """Run that supplies the stages before PPO whose settings no override changes; empty: none."""
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The same, as words of a stage's command line."""
        options = {name: value for name, value in vars(self).items() if value != ""}
        overrides = options.pop("overrides")
        # Joined, so that a value may begin with a dash.
        words = [f"--{name}={value}" for name, value in options.items()]
        return [*words, "--set", *overrides] if overrides else words


def make_config(preset: str, **changes: Any) -> Config:
    """The preset, changed by the other fields of `Request`."""
    return config_of(Request(preset=preset, **changes))


def config_of(request: Request, upstream: Config | None = None, whole: bool = True) -> Config:
    """The preset with what the command line changes; overrides are like `ppo.kl_coef=0.1`.

    If the run has an upstream, the sections of the shared stages are those of the upstream's record
    on disk, or of `upstream`, the config of an upstream that is not made yet, with the overrides.
    Without `whole` a preset's folder of posts need not be given: enough to show its settings.
    Raises UserError for an unknown preset or key, a bad value, a missing folder, an override
    without a name of its own, and one that has no effect.
    """
    for word in request.arguments:  # surrogates stand for bytes that are no text
        require(word.isprintable(), ascii(word)[:80], "hold no control characters, and be UTF-8")
    if request.preset not in PRESETS:
        raise unknown("preset", request.preset, PRESETS)
    config = PRESETS[request.preset]()
    texts = list(request.overrides)
    for key, value, of_preset in (
        ("data.source", request.data, config.data.source),
        ("base.tokenizer", request.tokenizer, config.base.tokenizer),
    ):
        if value and of_preset:
            texts.append(f"{key}={value}")
        elif value:
            config = with_changes(config, changes_of([f"{key}={value}"]))
    changes = changes_of(texts)
    if changes.get("released", {}).get("policy"):  # a preset's best-of-n is of the SFT it trains
        changes.setdefault("eval", {}).setdefault("best_of", "")
    config = _without_training(with_changes(config, changes), request, changes)
    for field in changes.get("ppo", {}).keys() & config.ppo.quirks:
        raise UserError(f"ppo.{field} has no effect: ppo.compat={config.ppo.compat} sets it")
    config.judge.check_read(changes.get("judge", {}))
    names = {RELEASED: config.released.run_name, OUTPUTS: config.outputs.run_name}
    name = request.name or names.get(config.kind, config.name)
    _check_names(request, name, texts)
    if request.upstream:
        config = _shared(config, request, changes, upstream)
    if whole:
        _check_given(config)
    return config.changed(
        seed=request.seed,
        name=name,
        upstream=request.upstream,
        overrides=request.overrides,
        judge=at_server(config.judge),
    )


def _without_training(
    config: Config, request: Request, changes: dict[str, dict[str, Any]]
) -> Config:
    """The config with a released policy, if there is one, in the place of the base checkpoint.
    Raises UserError for what makes no sense without training.
    """
    if config.kind == TRAINED:
        return config
    variable = GIVEN_BY[config.kind]
    if request.upstream:
        raise UserError(f"{variable} is judged without training: leave out UPSTREAM=")
    for section in TRAINING_SECTIONS & changes.keys():
        raise UserError(f"{section}.* has no effect: {variable} is judged without training")
    has_model = config.judge.gold or config.released.reward_model
    if config.judge.kind == "reward_model" and not has_model:
        add = "add REWARD_MODEL=" if config.kind == RELEASED else "name it by judge.model"
        other = "or choose another judge, such as SET=judge.kind=openai"
        raise UserError(f"judge.kind=reward_model needs a reward model: {add}, {other}")
    if config.kind == OUTPUTS:
        return config
    base = config.base.changed(checkpoint=config.released.policy, tokenizer=request.tokenizer)
    return config.changed(base=base)


def _check_names(request: Request, name: str, texts: Sequence[str]) -> None:
    named = not request.upstream or settings.is_run_name(request.upstream)
    require(named, "upstream", settings.MUST_BE_A_RUN_NAME)
    own = [text for text in texts if text.split(".")[0] not in SAME_RUN]
    own += [f"upstream {request.upstream}"] if request.upstream else []
    if own and name in PRESETS:
        raise UserError(f"{own[0]} needs a run name of its own: add --name (make: NAME=...)")
    if name in PRESETS and name != request.preset:
        raise UserError(f"--name {name} is the folder of that preset: choose another")


def _shared(
    config: Config, request: Request, changes: dict[str, dict[str, Any]], upstream: Config | None
) -> Config:
    """The config with the shared sections as the upstream has them, and then as overrides say."""
    recorded = {} if upstream else recorded_sections(request)
    preset = upstream or PRESETS[request.preset]()
    sections = {name: recorded.get(name, getattr(preset, name)) for name in SHARED_SECTIONS}
    other = {
        f"{name}.{field}": getattr(section, field)
        for name, section in sections.items()
        for field, value in changes.get(name, {}).items()
        if not settings.is_same(f"{name}.{field}", getattr(section, field), value)
    }
    first = first_changed({key.split(".")[0] for key in other})
    if first == SHARED_STAGES[0]:
        key, value = next(iter(other.items()))
        of_another = f"no stage can be taken from a run with another {first}"
        mend = "leave it out, or UPSTREAM="
        raise UserError(f"{key}: {request.upstream} has {value}, and {of_another}: {mend}")
    own = {name: section.changed(**changes.get(name, {})) for name, section in sections.items()}
    return config.changed(own_from=first, **own)


def recorded_sections(request: Request) -> dict[str, Any]:
    """The shared sections as the stages of `request.upstream` that are made recorded them. Raises
    UserError if there is no such run, or if it has an upstream too.
    """
    folder = settings.RUNS / request.upstream / f"seed{request.seed}"
    if not folder.is_dir():
        raise UserError(
            f"upstream {request.upstream} has no seed {request.seed}: run `make rm "
            f"PRESET={request.preset} SEED={request.seed} NAME={request.upstream}` to make it"
        )
    sections: dict[str, Any] = {}
    for stage in SHARED_STAGES:
        config, path = recorded_config(folder / stage), folder / stage / "config.json"
        if config is None:
            if path.exists():
                raise UserError(f"{path} is no config of ours: {RESTORE}")
            continue
        if PRESETS[preset := config.preset]().base != PRESETS[request.preset]().base:
            of_another = f"upstream {request.upstream} is of preset {preset}, whose base model is"
            raise UserError(f"{of_another} not that of {request.preset}: add PRESET={preset}")
        shared = set(STAGES[stage].sections) & set(SHARED_SECTIONS)
        sections |= {name: getattr(config, name) for name in shared}
    if "base" not in sections:
        configs = map(recorded_config, folder.iterdir())
        for first in (config.upstream for config in configs if config and config.upstream):
            raise UserError(f"{request.upstream} starts from {first}: give UPSTREAM={first}")
    return sections


def recorded_config(folder: Path) -> Config | None:
    """The config that a stage's folder recorded; None if it holds none, or none that we wrote.
    Raises UserError, with the file, for a value that no setting has.
    """
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        plain = {key: saved[key] for key in ("preset", "name", "seed", "upstream", "own_from")}
        if plain["preset"] not in PRESETS:
            raise unknown("preset", plain["preset"], PRESETS)
        require(all(type(text) is str for text in saved["overrides"]), "overrides", "be texts")
        # A section that an older run lacks has its defaults.
        sections = {name: section_from(name, saved.get(name, {})) for name in SECTIONS}
        return Config(**plain, overrides=tuple(saved["overrides"]), **sections)
    except UserError as error:
        raise UserError(f"{path}: {error}: {RESTORE}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def section_from(name: str, saved: dict[str, Any]) -> Any:
    """A section as a run recorded it. Raises UserError for a value that it cannot have."""
    return SECTIONS[name](**saved)


def _check_given(config: Config) -> None:
    if config.kind == OUTPUTS:
        return
    if config.preset == "outputs":
        raise UserError("preset outputs needs a file of summaries: add INPUT=outputs.jsonl")
    if not config.data.source:
        raise UserError(f"preset {config.preset} needs a folder of posts: add --data (make: DATA=)")
    if config.base.checkpoint == settings.RANDOM and not config.base.tokenizer:
        add = "add --tokenizer (make: TOKENIZER=)"
        raise UserError(f"preset {config.preset} needs a tokenizer folder: {add}")
    source = config.data.source
    if source not in (settings.TOY, settings.HUB) and not Path(source).exists():
        raise UserError(f"data.source: no file or folder {source}, nor hub id: correct DATA=")
    module = config.reward.module
    if module and not module.exists():  # known here, and hours before it is called
        raise UserError(f"reward.function: no file {module} in this folder: correct the name")


class SplitOverrides(argparse.Action):
    """Takes words that hold several overrides apart."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Called by argparse with the words of one option."""
        texts = [NEXT.split(text.strip()) for text in values]
        for names in ([part.split("=")[0] for part in parts] for parts in texts):
            if len({*names}) < len(names):
                raise UserError(f"{max(names, key=names.count)} is set twice: leave one out")
        setattr(namespace, self.dest, [part for parts in texts for part in parts])


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The option `--set` of a command line, as `overrides`."""
    more: dict[str, Any] = {"nargs": "*", "default": [], "action": SplitOverrides}
    parser.add_argument("--set", metavar="KEY=VALUE", dest="overrides", **more)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every stage takes."""
    parser.add_argument("--preset", default="", help="tiny, or that of the run called --name")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument("--name", default="", help="the run's folder below runs/")
    parser.add_argument("--data", default="", help="folder with posts and comparisons")
    parser.add_argument("--tokenizer", default="", help="tokenizer folder or hub id")
    parser.add_argument("--upstream", default="", help="run to take equal stages from")
    add_overrides(parser)


def request_of(args: argparse.Namespace) -> Request:
    """What parsed options ask for; a run that is named alone is asked for as it was made."""
    known = {option.name: getattr(args, option.name) for option in fields(Request)}
    known |= {"preset": args.preset or Request.preset, "overrides": tuple(args.overrides)}
    request = Request(**known)
    others = [text for text in request.overrides if text.split(".")[0] not in SAME_RUN]
    # `make judge` gives this preset where nobody has chosen one; it needs a file.
    chosen = args.preset not in ("", OUTPUTS)
    alone = not (chosen or others or request.data or request.tokenizer or request.upstream)
    return as_recorded(request) if request.name and alone else request


def as_recorded(request: Request) -> Request:
    """The request with the preset, data and settings of the run that it names, if that is there, or
    of another seed of it. A section that the request sets itself counts as it says.
    """
    root = settings.RUNS / request.name
    configs: dict[str, Config] = {}
    for seed in (root / f"seed{request.seed}", *sorted(root.glob("seed*"))):
        read = {name: recorded_config(seed / name) for name in STAGES if not STAGES[name].per_judge}
        configs = configs or {name: config for name, config in read.items() if config is not None}
    if not configs:
        return request
    *_, last = configs.values()
    own = {text.split(".")[0] for text in request.overrides}
    # The last stage that reads a section knows it; what others record may be older.
    knows = {part: name for name in configs for part in row_of(name, last.kind).sections}
    texts = {
        text.split("=")[0]: text
        for name, config in configs.items()
        for text in config.overrides
        if knows.get(text.split(".")[0], name) == name
    }
    kept = (text for key, text in texts.items() if key.split(".")[0] not in own)
    preset, data, tokenizer = PRESETS[last.preset](), last.data.source, last.base.tokenizer
    return replace(
        request,
        preset=last.preset,
        upstream=last.upstream,
        data="" if data in (*settings.NO_FOLDERS, preset.data.source) else data,
        tokenizer="" if tokenizer in (*settings.NO_FOLDERS, preset.base.tokenizer) else tokenizer,
        overrides=(*kept, *request.overrides),
    )


def config_from_arguments(argv: list[str] | None, description: str) -> Config:
    """The config that a stage's command line asks for. Raises UserError as `config_of` does."""
    parser = Parser(description=description)
    add_arguments(parser)
    return config_of(request_of(parser.parse_args(argv)))
