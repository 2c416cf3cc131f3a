"""Stage `summaries` (`make eval`): each policy's summaries of held-out posts, one row per post.

The policies are SFT, PPO, other trained algorithms, and best-of-n of SFT's samples; or a single
released policy. A summary is sampled at eval.temperature and cut after EOS. The run's own reward
model scores it and the reference. A judge sees only what is written here.
Source: the evaluation of Huang et al. 2024.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.identity import settings_hash
from stages.config.judge import BEST_OF
from stages.config.stages import POLICY_STAGES, is_part, stage_row
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

REFERENCE = "reference"
Responses = list[list[int]]
"""The tokens of one response to each post, cut after EOS."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The run, its models and its posts, as the stage uses them."""

    run: Run
    accelerator: Accelerator
    budget: MemoryBudget
    posts: TokenizedSplit
    tokenizer: PreTrainedTokenizerBase
    reward_model: nn.Module | None
    """The run's own; None for a released policy that comes without one."""


def write_summaries(config: Config) -> None:
    """Run the stage."""
    accelerator = make_accelerator(config)
    budget = MemoryBudget.from_settings(config.memory)
    with open_stage(config, "summaries", is_main=accelerator.is_main_process) as run:
        posts = held_out(run, config.eval.posts)
        tokenizer, reward_model = load_scorer(run, accelerator)
        evaluation = Evaluation(
            run=run,
            accelerator=accelerator,
            budget=budget,
            posts=posts,
            tokenizer=tokenizer,
            reward_model=reward_model,
        )
        references = [posts.columns["summaries"][row].tolist() for row in range(len(posts))]
        policies = policies_of(config)

        # Sample the summaries that cannot be taken from a finished stage.
        rows_by_policy = kept_rows(run)
        texts = {REFERENCE: references}
        for policy in policies:
            if policy in rows_by_policy:
                model_of(run, policy)  # records the model as an input of the stage
            else:
                texts[policy] = sample_summaries(evaluation, policy)
        if not any(policy.startswith(BEST_OF) for policy in rows_by_policy):
            texts |= sample_best(evaluation)

        # Scores are kept under their label. A killed attempt may have scored other texts, so the
        # label names them.
        scores = score_all(evaluation, texts, label=f"score {', '.join(texts)}")
        for policy, responses in texts.items():
            if policy != REFERENCE:
                rows = make_rows(
                    posts, texts=texts, scores=scores, policy=policy, tokenizer=tokenizer
                )
                distances = kl_from_sft(evaluation, policy, responses)
                rows_by_policy[policy] = [
                    row | {"kl": kl} for row, kl in zip(rows, distances, strict=True)
                ]

        descriptions = {}
        for policy in [*policies, *(f"{BEST_OF}{n}" for n in config.eval.numbers)]:
            write_rows(run, f"{policy}.jsonl", rows_by_policy[policy])
            descriptions[policy] = describe(rows_by_policy[policy])
        reference_lengths = [len(reference) for reference in references]
        results = {
            "posts": len(posts),
            "policies": descriptions,
            "reference_tokens": sum(reference_lengths) / len(reference_lengths),
        }
        run.finish(results, budget.halvings)


# -- summaries that need no sampling ---------------------------------------------------------------


def kept_rows(run: Run) -> dict[str, Rows]:
    """The rows of policies whose summaries would be sampled exactly as in a finished stage.

    They come from this stage, if it has finished before. Otherwise those of SFT and best-of-n come
    from the upstream run, if it samples at the same temperature.
    """
    config = run.config
    rows = rows_still_right(config, made_by=config, needed=stage_row(run.stage, config.kind).inputs)
    if rows:
        # The time that they took counts toward this stage.
        manifest = read_manifest(run.folder) or {}
        run.started -= manifest["seconds"]
        return rows
    if not config.upstream:
        return {}

    upstream = config.changed(name=config.upstream, upstream="", own_from="")
    recorded = read_record(stage_folder(upstream, run.stage) / "config.json")
    if recorded is None or recorded["ppo"]["temperature"] != config.ppo.temperature:
        return {}
    rows = rows_still_right(config, made_by=upstream, needed=("base", "sft", "normalize"))
    return {
        policy: rows[policy] for policy in rows if policy == "sft" or policy.startswith(BEST_OF)
    }


def rows_still_right(config: Config, made_by: Config, needed: Sequence[str]) -> dict[str, Rows]:
    """The finished rows of `made_by` that `config` would sample in the same way, by policy.

    Either all or none of best-of-n are included. `needed` are the inputs that must be the same. The
    stage records code, libraries and machine for all of its rows, so if these differ, no row is
    kept.
    """
    stage = "summaries"
    folder = stage_folder(made_by, stage)
    manifest = read_manifest(folder)
    if manifest is None or manifest["settings_hash"] != settings_hash(config, stage):
        return {}
    is_same_machine = (
        manifest.get("device") == device_name()
        and manifest.get("processor") == processor()
        and manifest.get("versions") == library_versions()
    )
    if not is_same_machine or not has_same_code(made_by, stage):
        return {}

    inputs = current_inputs(config, stage)
    same_inputs = {
        name for name, content in inputs.items() if manifest["inputs"].get(name) == content
    }
    required = set(needed)
    if REWARD_FUNCTION in inputs:
        # The reward model of a function has the same content, whatever the function does.
        required.add(REWARD_FUNCTION)
    if not same_inputs.issuperset(required) or changed_output(made_by, stage):
        return {}

    rows = {}
    for policy in manifest["results"]["policies"]:
        stage_of_policy, _ = place_of(policy)
        if stage_of_policy in same_inputs or policy.startswith(BEST_OF):
            rows[policy] = read_lines(folder / f"{policy}.jsonl")
    return rows


# -- policies and posts ----------------------------------------------------------------------------


def policies_of(config: Config) -> list[str]:
    """The policies to compare: stages (optional ones if finished), and those that PPO kept."""
    row = stage_row("summaries", config.kind)
    stages = set(row.inputs)
    for stage in row.joined_by:
        has_finished = read_manifest(stage_folder(config, stage)) is not None
        if is_part(stage, config.kind) and has_finished:
            stages.add(stage)
    in_order = [stage for stage in POLICY_STAGES if stage in stages]
    return in_order + kept_by_ppo(stage_folder(config, "ppo"))


def kept_by_ppo(folder: Path) -> list[str]:
    """The policies that PPO kept during training, in its folder."""
    return sorted(path.name.replace("model", "ppo") for path in folder.glob("model-*"))


def place_of(policy: str) -> tuple[str, str]:
    """A policy's stage, and the model in the stage's folder: `ppo-12` is PPO's `model-12`."""
    stage, *update = policy.split("-")
    return stage, "-".join(("model", *update))


def model_of(run: Run, policy: str) -> Path:
    """The folder of a policy's model, after checking its stage."""
    stage, model = place_of(policy)
    return run.require(stage) / model


def longest(config: Config, policy: str) -> tuple[int, str]:
    """The maximum number of tokens of a policy's summary, and the setting for it."""
    if policy == "dpo":  # In Huang et al. 2024, DPO's summaries may be longer than PPO's.
        return config.eval.dpo_summary_tokens, "eval.dpo_summary_tokens"
    return config.data.max_summary_tokens, "data.max_summary_tokens"


def held_out(run: Run, count: int) -> TokenizedSplit:
    """The first `count` posts of the validation split; all of them if count is 0."""
    split = load_split(run.require("base") / "data", "sft_validation")
    if count > len(split):
        raise UserError(f"eval.posts is {count} but the validation split has {len(split)} posts")
    return rows_of(split, range(count or len(split)))


def load_scorer(
    run: Run, accelerator: Accelerator
) -> tuple[PreTrainedTokenizerBase, nn.Module | None]:
    """The run's tokenizer and its reward model, which a released policy may lack."""
    if run.config.released.policy:
        folder = run.require("released")
        reward_model_folder = folder / "reward_model"
    else:
        folder = run.require("normalize")
        reward_model_folder = folder / "model"
    tokenizer = load_tokenizer(folder / "model")
    if not reward_model_folder.is_dir():
        return tokenizer, None
    return tokenizer, load_reward_model(reward_model_folder).to(accelerator.device).eval()


def load_policy_of(evaluation: Evaluation, policy: str) -> PolicyModel:
    """A policy on the evaluation's device."""
    model = load_policy(model_of(evaluation.run, policy))
    return PolicyModel(model.to(evaluation.accelerator.device).eval())


# -- sampling --------------------------------------------------------------------------------------


def sample_summaries(evaluation: Evaluation, policy: str) -> Responses:
    """A policy's response to every post, sampled at eval.temperature; from all processes."""
    responses = _sample(
        evaluation,
        policy,
        purpose=f"{policy} summaries",
        temperature=evaluation.run.config.eval.temperature,
        samples_per_query=1,
    )
    return [response for [response] in responses]


def sample_best(evaluation: Evaluation) -> dict[str, Responses]:
    """Best-of-n by policy name (`best-of-4`): of n SFT samples, the one with the highest score.

    Samples are drawn at ppo.temperature and shared by all n. Empty if eval.best_of is.
    """
    config = evaluation.run.config
    most = max(config.eval.numbers, default=0)
    if most == 0:
        return {}
    samples = _sample(
        evaluation,
        "sft",
        purpose=f"best of {most}",
        temperature=config.ppo.temperature,
        samples_per_query=most,
    )
    samples_by_place = {
        str(place): [samples_of_post[place] for samples_of_post in samples] for place in range(most)
    }
    scored = score_all(evaluation, samples_by_place, label=f"score {most} samples")
    scores_of_posts = list(zip(*scored.values(), strict=True))

    best = {}
    for n in config.eval.numbers:
        places = best_of(scores_of_posts, n)
        best[f"{BEST_OF}{n}"] = [
            samples_of_post[place] for samples_of_post, place in zip(samples, places, strict=True)
        ]
    return best


def _sample(
    evaluation: Evaluation,
    policy: str,
    *,
    purpose: str,
    temperature: float,
    samples_per_query: int,
) -> list[list[list[int]]]:
    """A policy's responses to every post [posts, samples], each cut after EOS."""
    config = evaluation.run.config
    queries = evaluation.posts.columns["queries"]
    length, setting = longest(config, policy)
    model = load_policy_of(evaluation, policy)
    require_room(model, query=int(queries.lengths().max()), response=length, setting=setting)
    sampling = Sampling(
        seed=config.seed,
        purpose=purpose,
        length=length,
        temperature=temperature,
        forward_batch_size=config.memory.forward_batch_size,
        samples_per_query=samples_per_query,
    )
    share = respond_often(
        evaluation.accelerator,
        evaluation.budget,
        policy=model,
        queries=queries,
        tokenizer=evaluation.tokenizer,
        sampling=sampling,
        keep=evaluation.run.resume,
    )
    return gather_rows(evaluation.accelerator, share)


def best_of(scores: Sequence[Sequence[float]], n: int) -> list[int]:
    """The index of the highest of each post's first n scores; of equal ones the first."""
    return [max(range(n), key=lambda place: scores_of_post[place]) for scores_of_post in scores]


def best_of_bound(n: int) -> float:
    """An upper bound of best-of-n's KL from the policy it samples, in nats: log n - (n - 1) / n.

    Source: Stiennon et al. 2020, appendix G.3; Beirami et al. 2024, arXiv 2401.01879 (a bound).
    """
    return math.log(n) - (n - 1) / n


# -- measuring -------------------------------------------------------------------------------------


@torch.no_grad()
def score_all(
    evaluation: Evaluation, texts: Mapping[str, Responses], label: str
) -> dict[str, list[Any]]:
    """The normalized reward of each writer's texts, by the writer's name; None without a model."""
    posts = evaluation.posts
    reward_model = evaluation.reward_model
    if reward_model is None:
        return {writer: [None] * len(posts) for writer in texts}
    accelerator = evaluation.accelerator

    def score(rows: list[int]) -> list[list[float]]:
        """[rows, writers]"""
        queries = [posts.columns["queries"][row] for row in rows]
        summaries = [[torch.tensor(responses[row]) for row in rows] for responses in texts.values()]
        facts = [posts.rows[row] for row in rows]
        with accelerator.autocast():
            scores = summary_scores(
                reward_model, queries, summaries, device=accelerator.device, facts=facts
            )
        scores_of_rows: list[list[float]] = scores.T.tolist()
        return scores_of_rows

    scores_of_posts = measure_rows(
        accelerator,
        evaluation.budget,
        label=label,
        sort_keys=[0] * len(posts),  # the posts stay in their order
        size=PassSize(rows=max(1, evaluation.budget.forward_batch_size // len(texts))),
        measure=score,
        keep=evaluation.run.resume,
    )
    return {
        writer: [scores_of_post[place] for scores_of_post in scores_of_posts]
        for place, writer in enumerate(texts)
    }


def kl_from_sft(
    evaluation: Evaluation, policy: str, responses: Responses
) -> Sequence[float | None]:
    """Log-probability of each response by its policy minus that by SFT, in nats.

    Both are computed at ppo.temperature. The mean estimates KL only if summaries are sampled at
    that temperature, too (eval.temperature). For best-of-n it is the bound of its KL. None in a run
    without SFT.
    """
    if policy == "sft":
        return [0.0] * len(responses)
    if policy.startswith(BEST_OF):
        n = int(policy.removeprefix(BEST_OF))
        return [best_of_bound(n)] * len(responses)
    if "sft" not in policies_of(evaluation.run.config):
        return [None] * len(responses)
    by_policy = log_likelihoods(evaluation, responses, writer=policy, reader=policy)
    by_sft = log_likelihoods(evaluation, responses, writer=policy, reader="sft")
    return [own - sft for own, sft in zip(by_policy, by_sft, strict=True)]


@torch.no_grad()
def log_likelihoods(
    evaluation: Evaluation, responses: Responses, *, writer: str, reader: str
) -> list[float]:
    """Log-probability of each of the writer's responses by the reader, in nats."""
    accelerator = evaluation.accelerator
    queries = evaluation.posts.columns["queries"]
    temperature = evaluation.run.config.ppo.temperature
    model = load_policy_of(evaluation, reader)

    def measure(rows: list[int]) -> list[float]:
        texts = [torch.tensor(responses[row], dtype=torch.long) for row in rows]
        batch = ResponseBatch(
            queries=pad_left([queries[row] for row in rows], EMPTY).to(accelerator.device),
            responses=pad_right(texts, EMPTY).to(accelerator.device),
            pad_id=EMPTY,
        )
        with accelerator.autocast():
            logprobs, _ = response_logprobs(model, batch, temperature=temperature)
        sums: list[float] = torch.where(batch.responses != EMPTY, logprobs, 0.0).sum(dim=1).tolist()
        return sums

    response_lengths = torch.tensor([len(response) for response in responses])
    lengths = queries.lengths() + response_lengths
    return measure_rows(
        accelerator,
        evaluation.budget,
        label=f"{writer} summaries by {reader}",
        sort_keys=lengths.tolist(),
        size=PassSize(rows=evaluation.budget.forward_batch_size),
        measure=measure,
        keep=evaluation.run.resume,
    )


# -- rows and results ------------------------------------------------------------------------------


def make_rows(
    posts: TokenizedSplit,
    texts: Mapping[str, Responses],
    scores: Mapping[str, Sequence[float | None]],
    policy: str,
    tokenizer: PreTrainedTokenizerBase,
) -> Rows:
    """One row per post for `<policy>.jsonl`; texts without special tokens and outer spaces."""
    unshown = set(unshown_tokens(tokenizer))
    rows = []
    for number, post in enumerate(posts.rows):
        response = texts[policy][number]
        summary = tokenizer.decode(response, skip_special_tokens=True)
        rows.append(
            {
                "id": post["id"],
                "query": post["query"],
                "reference": post["reference"],
                "summary": str(summary).strip(),
                "tokens": len(response),
                "reference_tokens": len(texts[REFERENCE][number]),
                "has_eos": tokenizer.eos_token_id in response,
                "special_tokens": sum(token in unshown for token in response),
                "score": scores[policy][number],
                "reference_score": scores[REFERENCE][number],
            }
        )
    return rows


def describe(rows: Rows) -> dict[str, float | None]:
    """Means over all posts, for the manifest.

    `tokens` include EOS; `score` and `reference_score` are in reward units; `kl` is that of
    `kl_from_sft`, in nats; `special_tokens` is the share of summaries with special tokens other
    than EOS. The `text_measures` follow. A mean without values is None.
    """
    means: dict[str, float | None] = {}
    for key in ("tokens", "score", "reference_score", "kl"):
        # A released policy comes without SFT, and possibly without a reward model.
        values = [row[key] for row in rows if row[key] is not None]
        means[key] = sum(values) / len(values) if values else None
    means["eos_rate"] = sum(row["has_eos"] for row in rows) / len(rows)
    means["special_tokens"] = sum(row["special_tokens"] > 0 for row in rows) / len(rows)
    return means | text_measures(rows)
