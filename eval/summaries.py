"""Summaries of held-out posts by SFT, PPO, any rival that was trained, and best-of-n of SFT's
samples; or by a released policy alone: one row a post.

A summary is sampled at eval.temperature and cut after EOS; the run's own reward model scores it and
the reference. A judge sees only what is written here.
Source: the evaluation of Huang et al. 2024.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from stages.config.config import Config, UserError, settings_hash
from stages.config.judge import BEST_OF
from stages.config.stages import POLICY_STAGES, is_part, row_of
from stages.data.ragged import TokenizedSplit, load_split, pad_left, pad_right, rows_of
from stages.data.text_metrics import text_measures, unshown_tokens
from stages.models.forward import EMPTY, ResponseBatch, response_logprobs, summary_scores
from stages.models.loading import load_policy, load_reward_model, require_room
from stages.models.policy import PolicyModel
from stages.models.sampling import Sampling, respond_often
from stages.models.tokenizers import load_tokenizer
from stages.runs.files import read_lines, read_record
from stages.runs.inputs import REWARD_FUNCTION, current_inputs
from stages.runs.machine import device_name, library_versions, processor
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.run import Run, open_stage, write_rows
from stages.runs.staleness import changed_output, has_same_code
from stages.training.accelerator import make_accelerator
from stages.training.memory import MemoryBudget, PassSize
from stages.training.processes import gather_rows
from stages.training.row_by_row import measure_rows


def write_summaries(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    budget = MemoryBudget.from_settings(config.memory)
    with open_stage(config, "summaries", accelerator.is_main_process) as run:
        posts = held_out(run, config.eval.posts)
        tokenizer, reward_model = scorer_of(run, accelerator)
        references = [posts.columns["summaries"][row].tolist() for row in range(len(posts))]
        kept = kept_rows(run)
        texts = {"reference": references}
        for name in policies_of(config):
            if name in kept:
                model_of(run, name)
            else:
                texts[name] = sample_summaries(run, accelerator, budget, name, posts, tokenizer)
        if not any(name.startswith(BEST_OF) for name in kept):
            texts |= sample_best(run, accelerator, budget, reward_model, posts, tokenizer)
        # A killed attempt may have scored other texts: then its scores have another name.
        label = f"score {', '.join(texts)}"
        scores = score_all(run, accelerator, budget, reward_model, posts, texts, label)
        written = dict(kept)
        for name in [name for name in texts if name != "reference"]:
            rows = make_rows(posts, texts, scores, name, tokenizer)
            distances = kl_from_sft(run, accelerator, budget, name, posts, texts[name])
            written[name] = [row | {"kl": kl} for row, kl in zip(rows, distances, strict=True)]
        policies = {}
        for name in (*policies_of(config), *(f"{BEST_OF}{n}" for n in config.eval.numbers)):
            write_rows(run, f"{name}.jsonl", written[name])
            policies[name] = describe(written[name])
        tokens = sum(map(len, references)) / len(references)
        results = {"posts": len(posts), "policies": policies, "reference_tokens": tokens}
        run.finish(results, budget.halvings)


def kept_rows(run: Run) -> dict[str, list[dict[str, Any]]]:
    """The rows that the finished stage has of policies that are still what they were, by name.

    A run whose stage has none takes those of SFT and best-of-n from its upstream, if it samples at
    the same temperature.
    """
    config = run.config
    if rows := rows_still_right(config, config, row_of(run.stage, config.kind).inputs):
        run.started -= (read_manifest(run.folder) or {})["seconds"]  # they count as the stage's
        return rows
    if not config.upstream:
        return {}
    upstream = config.changed(name=config.upstream, upstream="", own_from="")
    recorded = read_record(stage_folder(upstream, run.stage) / "config.json")
    if recorded is None or recorded["ppo"]["temperature"] != config.ppo.temperature:
        return {}
    rows = rows_still_right(config, upstream, ("base", "sft", "normalize"))
    return {name: of for name, of in rows.items() if name == "sft" or name.startswith(BEST_OF)}


def rows_still_right(
    config: Config, maker: Config, needed: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """What `maker` has of summaries that `config` would sample just so; all or none of best-of-n.

    `needed`: the inputs that must be alike. The stage's record says by which code, with which
    libraries and on which machine all its rows were made, so other ones keep none.
    """
    stage, now = "summaries", current_inputs(config, "summaries")
    folder = stage_folder(maker, stage)
    manifest = read_manifest(folder)
    if manifest is None or manifest["settings_hash"] != settings_hash(config, stage):
        return {}
    here = {"device": device_name(), "processor": processor(), "versions": library_versions()}
    if not here.items() <= manifest.items() or not has_same_code(maker, stage):
        return {}
    same = {name for name, content in now.items() if manifest["inputs"].get(name) == content}
    # The reward model of a function has the same content whatever the function says.
    required = {*needed, REWARD_FUNCTION} if REWARD_FUNCTION in now else {*needed}
    if not same.issuperset(required) or changed_output(maker, stage):
        return {}
    policies = manifest["results"]["policies"]
    names = [x for x in policies if x.split("-")[0] in same or x.startswith(BEST_OF)]
    return {name: read_lines(folder / f"{name}.jsonl") for name in names}


def sample_summaries(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    name: str,
    posts: TokenizedSplit,
    tokenizer: PreTrainedTokenizerBase,
) -> list[list[int]]:
    """A policy's response to every post, each cut after its EOS; from all processes."""
    return [response for (response,) in draw(run, accelerator, budget, name, posts, tokenizer)]


def draw(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    name: str,
    posts: TokenizedSplit,
    tokenizer: PreTrainedTokenizerBase,
    most: int = 0,
) -> list[list[list[int]]]:
    """A policy's responses to every post: one at eval.temperature, or `most` at ppo.temperature."""
    config = run.config
    length, setting = longest(config, name)
    policy = PolicyModel(load_policy(model_of(run, name)).to(accelerator.device).eval())
    queries = posts.columns["queries"]
    require_room(policy, int(queries.lengths().max()), length, setting)
    sampling = Sampling(
        seed=config.seed,
        purpose=f"best of {most}" if most else f"{name} summaries",
        length=length,
        temperature=config.ppo.temperature if most else config.eval.temperature,
        forward_batch_size=config.memory.forward_batch_size,
        samples_per_query=most or 1,
    )
    share = respond_often(accelerator, budget, policy, queries, tokenizer, sampling, run.resume)
    return gather_rows(accelerator, share)


def sample_best(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    reward_model: nn.Module | None,
    posts: TokenizedSplit,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, list[list[int]]]:
    """Best-of-n: of the first n of SFT's samples at ppo.temperature, what the reward model likes
    best, by the policy's name (`best-of-4`). All n share their samples.
    """
    numbers = run.config.eval.numbers
    most = max(numbers, default=0)
    if not most:
        return {}
    samples = draw(run, accelerator, budget, "sft", posts, tokenizer, most)
    columns = {str(place): [of[place] for of in samples] for place in range(most)}
    scored = score_all(
        run, accelerator, budget, reward_model, posts, columns, f"score {most} samples"
    )
    scores = list(zip(*scored.values(), strict=True))
    return {
        f"{BEST_OF}{n}": [of[place] for of, place in zip(samples, best_of(scores, n), strict=True)]
        for n in numbers
    }


def best_of(scores: Sequence[Sequence[float]], n: int) -> list[int]:
    """The place of the highest of each post's first n scores; of equal ones the first."""
    return [max(range(n), key=lambda place: of[place]) for of in scores]


def best_of_bound(n: int) -> float:
    """The most that best-of-n's KL from the policy it samples can be, nats: log n - (n - 1) / n.

    Source: Stiennon et al. 2020, appendix G.3; Beirami et al. 2024, arXiv 2401.01879 (a bound).
    """
    return math.log(n) - (n - 1) / n


def scorer_of(
    run: Run, accelerator: Accelerator
) -> tuple[PreTrainedTokenizerBase, nn.Module | None]:
    """The run's tokenizer and reward model; a released policy may come without the latter."""
    is_released = bool(run.config.released.policy)
    folder = run.require("released" if is_released else "normalize")
    scorer = folder / ("reward_model" if is_released else "model")
    tokenizer = load_tokenizer(folder / "model")
    if not scorer.is_dir():
        return tokenizer, None
    return tokenizer, load_reward_model(scorer).to(accelerator.device).eval()


def policies_of(config: Config) -> list[str]:
    """The stages whose policies are compared, optional ones once made, and those that PPO kept."""
    row = row_of("summaries", config.kind)
    joined = {stage for stage in row.joined_by if is_part(stage, config.kind)}
    ready = {stage for stage in joined if read_manifest(stage_folder(config, stage)) is not None}
    stages = [stage for stage in POLICY_STAGES if stage in {*row.inputs, *ready}]
    return stages + kept_by_ppo(stage_folder(config, "ppo"))


def kept_by_ppo(folder: Path) -> list[str]:
    """The policies that PPO kept on the way, in its folder."""
    return sorted(path.name.replace("model", "ppo") for path in folder.glob("model-*"))


def place_of(policy: str) -> tuple[str, str]:
    """A policy's stage and, in its folder, the model: `ppo-12` is PPO's `model-12`."""
    stage, *update = policy.split("-")
    return stage, "-".join(("model", *update))


def model_of(run: Run, policy: str) -> Path:
    """The folder of a policy's model, after checking its stage."""
    stage, model = place_of(policy)
    return run.require(stage) / model


def longest(config: Config, name: str) -> tuple[int, str]:
    """Most tokens of a policy's summary, and the setting that says so."""
    if name == "dpo":  # Huang et al. 2024 lets its summaries be longer than PPO's
        return config.eval.dpo_summary_tokens, "eval.dpo_summary_tokens"
    return config.data.max_summary_tokens, "data.max_summary_tokens"


def held_out(run: Run, count: int) -> TokenizedSplit:
    """The first `count` posts of the validation split; all of them if count is 0."""
    split = load_split(run.require("base") / "data", "sft_validation")
    if count > len(split):
        raise UserError(f"eval.posts is {count} but the validation split has {len(split)} posts")
    return rows_of(split, range(count or len(split)))


@torch.no_grad()
def score_all(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    reward_model: nn.Module | None,
    posts: TokenizedSplit,
    texts: Mapping[str, list[list[int]]],
    label: str,
) -> dict[str, list[float | None]]:
    """The normalised reward of each writer's texts, by the writer's name; None without a model."""
    if reward_model is None:
        return {name: [None] * len(posts) for name in texts}

    def score(rows: list[int]) -> list[list[float]]:
        queries = [posts.columns["queries"][row] for row in rows]
        each = [[torch.tensor(written[row]) for row in rows] for written in texts.values()]
        with accelerator.autocast():
            facts = [posts.rows[row] for row in rows]
            scores = summary_scores(reward_model, queries, each, accelerator.device, facts)
        of_posts: list[list[float]] = scores.T.tolist()
        return of_posts

    in_their_order = [0] * len(posts)
    scores = measure_rows(
        accelerator,
        budget,
        label=label,
        sort_keys=in_their_order,
        size=PassSize(rows=max(1, budget.forward_batch_size // len(texts))),
        measure=score,
        keep=run.resume,
    )
    return dict(zip(texts, map(list, zip(*scores, strict=True)), strict=True))


def kl_from_sft(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    name: str,
    posts: TokenizedSplit,
    responses: list[list[int]],
) -> Sequence[float | None]:
    """Log-probability of each response by its policy minus that by SFT, nats, at ppo.temperature.

    Summaries are sampled at eval.temperature: where that is not the temperature of training, the
    mean is no estimate of KL. Of best-of-n the bound of its KL. None in a run without SFT.
    """
    if name == "sft":
        return [0.0] * len(posts)
    if name.startswith(BEST_OF):
        return [best_of_bound(int(name.removeprefix(BEST_OF)))] * len(posts)
    if "sft" not in policies_of(run.config):
        return [None] * len(posts)
    names = ((name, name), (name, "sft"))
    own, sft = (log_likelihoods(run, accelerator, budget, pair, posts, responses) for pair in names)
    return [by_policy - by_sft for by_policy, by_sft in zip(own, sft, strict=True)]


@torch.no_grad()
def log_likelihoods(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    names: tuple[str, str],
    posts: TokenizedSplit,
    responses: list[list[int]],
) -> list[float]:
    """Log-probability of each response of the first policy by the second, nats."""
    writer, reader = names
    policy = PolicyModel(load_policy(model_of(run, reader)).to(accelerator.device).eval())
    queries, temperature = posts.columns["queries"], run.config.ppo.temperature

    def measure(rows: list[int]) -> list[float]:
        texts = [torch.tensor(responses[row], dtype=torch.long) for row in rows]
        batch = ResponseBatch(
            queries=pad_left([queries[row] for row in rows], EMPTY).to(accelerator.device),
            responses=pad_right(texts, EMPTY).to(accelerator.device),
            pad_id=EMPTY,
        )
        with accelerator.autocast():
            logprobs, _ = response_logprobs(policy, batch, temperature=temperature)
        return torch.where(batch.responses != EMPTY, logprobs, 0.0).sum(dim=1).tolist()

    lengths = (queries.lengths() + torch.tensor(list(map(len, responses)))).tolist()
    return measure_rows(
        accelerator,
        budget,
        label=f"{writer} summaries by {reader}",
        sort_keys=lengths,
        size=PassSize(rows=budget.forward_batch_size),
        measure=measure,
        keep=run.resume,
    )


def make_rows(
    posts: TokenizedSplit,
    texts: Mapping[str, list[list[int]]],
    scores: Mapping[str, Sequence[float | None]],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """One row per post for `<name>.jsonl`; texts without special tokens and outer spaces."""
    each = (texts[name], scores[name], texts["reference"], scores["reference"])
    columns = zip(posts.rows, *each, strict=True)
    unshown = set(unshown_tokens(tokenizer))
    return [
        {
            **{key: row[key] for key in ("id", "query", "reference")},
            "summary": tokenizer.decode(response, skip_special_tokens=True).strip(),
            "tokens": len(response),
            "reference_tokens": len(reference),
            "has_eos": tokenizer.eos_token_id in response,
            "special_tokens": sum(token in unshown for token in response),
            "score": score,
            "reference_score": reference_score,
        }
        for row, response, score, reference, reference_score in columns
    ]


def describe(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Means over all posts: tokens with EOS, scores in reward units, `kl` of `kl_from_sft` in nats,
    the share of summaries with special tokens beside the EOS, and the `text_measures` of all.
    """
    # A released policy comes without SFT, and maybe without a reward model.
    keys = ("tokens", "score", "reference_score", "kl")
    known = {key: [row[key] for row in rows if row[key] is not None] for key in keys}
    means = {key: sum(of) / len(of) if of else None for key, of in known.items()}
    means["eos_rate"] = sum(row["has_eos"] for row in rows) / len(rows)
    means["special_tokens"] = sum(row["special_tokens"] > 0 for row in rows) / len(rows)
    return means | text_measures(rows)
