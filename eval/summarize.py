"""Summarizes one post by the policies of a finished run: `make summarize POST="..."`, or ID=.

    make summarize NAME=tiny POST="My boss sold my bike. Should I quit?"
    make summarize NAME=tiny ID=toy0-validation-3

A post is a filled prompt or plain text. If it has several lines, the first one is the title.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.summaries import kept_by_ppo, longest, place_of
from stages.config import paths
from stages.config.config import Config
from stages.config.error_messages import Parser, in_one_line, show
from stages.config.errors import UserError
from stages.config.presets import run_name
from stages.config.recorded import recorded_config
from stages.config.sections import parse_post
from stages.config.stages import POLICY_STAGES
from stages.data.chat import ChatFormat
from stages.data.prompt import Prompt, first_tokens, fit_query, keep_end, plain_encoder
from stages.data.ragged import load_split
from stages.functional import truncate_after
from stages.models.forward import summary_scores
from stages.models.loading import load_policy, load_reward_model, require_room
from stages.models.policy import PolicyModel
from stages.models.sampling import SamplingParams, sample, sampling_noise
from stages.models.tokenizers import load_tokenizer
from stages.runs.manifest import check_run, read_manifest, stage_folder
from stages.runs.staleness import check_stage
from stages.runs.text import folded
from stages.training.accelerator import make_accelerator


@dataclass(frozen=True, kw_only=True)
class Post:
    """A post as the policies read it."""

    query: str
    tokens: Tensor  # [Q]
    reference: Tensor | None = None  # [T]
    """The human summary of a held-out post."""
    facts: Mapping[str, Any] | None = None
    """The row of a held-out post in the data, for a reward function."""


def finished_policies(preset: str, name: str, seed: int) -> dict[str, Config]:
    """The finished policies of a run's seed, each with its config.

    Raises UserError if there are none.
    """
    folder = paths.RUNS / name / f"seed{seed}"
    recorded = {}
    for stage in ("summaries", *POLICY_STAGES, "normalize", "base"):
        config = recorded_config(folder / stage)
        if config is not None:
            recorded[stage] = config
    if recorded:
        # A policy that this run takes from its upstream is found through a later stage's config.
        last_config = next(iter(recorded.values()))
        finished = {}
        for stage in POLICY_STAGES:
            config = recorded.get(stage, last_config)
            if read_manifest(stage_folder(config, stage)) is not None:
                finished[stage] = config
        if finished:
            return finished

    if name != preset:
        check_run(name)
        raise UserError(f"{folder} has no finished policy: first run the command that trains it")
    command = f"make sft rm ppo PRESET={preset} SEED={seed}"
    raise UserError(f"{folder} has no finished policy: run `{command}` first")


class FinishedRun:
    """A finished run: its posts, its tokenizer, its policies, and the model that scores them."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        """`configs` are those of `finished_policies`."""
        self.configs = configs
        for stage, config in configs.items():
            check_stage(config, stage)
        self.config = list(configs.values())[-1]
        data = self.config.data

        self.policies = list(configs)
        if "ppo" in configs:
            self.policies += kept_by_ppo(self._folder("ppo"))
        self.accelerator = make_accelerator(self.config)
        first_stage = self.policies[0]
        self.tokenizer = load_tokenizer(self._folder(first_stage) / "model")
        self.first = first_tokens(
            self.tokenizer, self.config.base.bos, chat_template=data.chat_template
        )
        self.encode = plain_encoder(self.tokenizer, self.first)
        self.held_out = load_split(self._folder("base") / "data", "sft_validation")

    def _folder(self, stage: str) -> Path:
        return stage_folder(self.configs.get(stage, self.config), stage)

    # -- posts -------------------------------------------------------------------------------------

    def post_of_id(self, post_id: str) -> Post:
        """The held-out post with an id. Raises UserError if there is none."""
        ids = [row["id"] for row in self.held_out.rows]
        if post_id not in ids:
            raise UserError(
                f"ID={post_id} is not a held-out post of {self.config.name}: try ID={ids[0]}"
            )
        number = ids.index(post_id)
        row = self.held_out.rows[number]
        return Post(
            query=row["query"],
            tokens=self.held_out.columns["queries"][number],
            reference=self.held_out.columns["summaries"][number],
            facts=row,
        )

    def post_of_text(self, text: str) -> Post:
        """A typed post, filled into the run's prompt and cut as in training.

        Raises UserError if its title is too long.
        """
        prompt = self._prompt_of(text.strip())
        try:
            query, tokens = self._fit(prompt)
        except ValueError as error:
            raise UserError(f"{error} (data.max_query_tokens): shorten the title") from None
        return Post(query=query, tokens=torch.tensor(tokens))

    def _prompt_of(self, text: str) -> Prompt:
        """A typed post as the run's prompt, with the subreddit of the first held-out post.

        If the run's rows contain whole prompts, the text is taken as a whole prompt.
        """
        template = self.config.data.prompt
        fields = parse_post(text, template)
        if fields is not None:
            return Prompt(template=template, fields=fields, shortened_field="post")

        first_post = parse_post(self.held_out.rows[0]["query"], template)
        if first_post is None:
            return Prompt(template="{post}", fields={"post": text})
        title = ""
        post = text
        if "\n" in text:
            title, post = text.split("\n", maxsplit=1)
        fields = {**first_post, "title": title, "post": post.strip()}
        return Prompt(template=template, fields=fields, shortened_field="post")

    def _fit(self, prompt: Prompt) -> tuple[str, list[int]]:
        """A prompt's text and tokens, cut as in training. Raises ValueError for a long title."""
        limit = self.config.data.max_query_tokens
        if self.config.data.chat_template:
            chat = ChatFormat(self.tokenizer, self.first)
            query = chat.fit_prompt(prompt, limit)
            return query.text, query.tokens
        if prompt.shortened_field:
            return fit_query(
                lambda filled: self.encode([filled])[0],
                template=prompt.template,
                fields=prompt.fields,
                shortened_field=prompt.shortened_field,
                limit=limit,
            )
        # A whole prompt keeps its end.
        tokens = self.encode([prompt.text])[0]
        if len(tokens) > limit:
            tokens = keep_end(tokens, self.first, limit)
        return prompt.text, tokens

    # -- summaries ---------------------------------------------------------------------------------

    @torch.no_grad()
    def summary(self, policy: str, post: Post, temperature: float) -> list[int]:
        """The tokens of a policy's summary, with EOS."""
        stage, model = place_of(policy)
        config = self.configs[stage]
        device = self.accelerator.device
        eos_id = self.tokenizer.eos_token_id
        pad_id = self.tokenizer.pad_token_id
        length, setting = longest(config, policy)
        network = PolicyModel(load_policy(self._folder(stage) / model).to(device).eval())
        require_room(network, query=len(post.tokens), response=length, setting=setting)

        # The same random numbers as for the first post of the evaluation.
        noise = sampling_noise(
            config.seed, purpose=f"{policy} summaries", step=0, rows=1, length=length
        )
        with self.accelerator.autocast():
            sampled, _ = sample(
                network,
                post.tokens[None].to(device),
                uniforms=noise.to(device),
                params=SamplingParams(temperature=temperature, eos_id=eos_id, pad_id=pad_id),
            )
        tokens: list[int] = truncate_after(sampled, eos_id, pad_id)[0].tolist()
        return [token for token in tokens if token != pad_id]

    @torch.no_grad()
    def scores(self, post: Post, summaries: Sequence[Sequence[int]]) -> Sequence[float | None]:
        """The normalized reward of each summary; None in a run without a reward model."""
        if "released" in self.configs:
            stage = "released"
            folder = self._folder(stage) / "reward_model"
        else:
            stage = "normalize"
            folder = self._folder(stage) / "model"
        if not folder.is_dir():
            return [None] * len(summaries)

        check_stage(self.config, stage)
        device = self.accelerator.device
        reward_model = load_reward_model(folder).to(device).eval()
        # Each writer has one text.
        texts = [[torch.tensor(tokens)] for tokens in summaries]
        facts = [post.facts] if post.facts is not None else []
        with self.accelerator.autocast():
            scores = summary_scores(reward_model, [post.tokens], texts, device=device, facts=facts)
        return scores[:, 0].tolist()

    def text(self, tokens: Sequence[int]) -> str:
        """A summary as text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def lines(self, post: Post) -> list[str]:
        """The post and all summaries, in lines of at most 80 columns."""
        temperature = self.config.eval.temperature
        summaries = {}
        if post.reference is not None:
            summaries["reference"] = post.reference.tolist()
        for policy in self.policies:
            summaries[policy] = self.summary(policy, post, temperature)

        lines = []
        for line in post.query.split("\n"):
            lines += folded(line, "") or [""]
        scores = self.scores(post, list(summaries.values()))
        for (writer, tokens), score in zip(summaries.items(), scores, strict=True):
            heading = f"{writer}: {len(tokens)} tokens"
            if score is not None:
                heading += f", score {score:+.2f}"
            if self.tokenizer.eos_token_id not in tokens:
                heading += ", does not end"
            lines += ["", *folded(heading), *folded(f"  {self.text(tokens)}", "  ")]
        return lines


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print a post and its summaries; `make` passes the post in the environment."""
    parser = Parser(description="summarize one post with the policies of a finished run")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--name", default="", help="the run's folder below runs/")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument(
        "--post",
        default=os.environ.get("POST", ""),
        help="text or a filled prompt (also from the variable POST)",
    )
    parser.add_argument("--id", default="", help="id of a held-out post of the run")
    args = parser.parse_args(argv)

    has_post = bool(args.post.strip())
    has_id = bool(args.id)
    if has_post == has_id:
        raise UserError("there is no post to summarize: give POST='...', or ID= of a held-out post")
    name = args.name or run_name(args.preset)
    run = FinishedRun(finished_policies(args.preset, name, args.seed))
    post = run.post_of_id(args.id) if has_id else run.post_of_text(args.post)
    show(run.lines(post))


if __name__ == "__main__":
    main()
