"""What the policies of a finished run write about one post: `make summarize POST="..."`, or ID=.

    python -m eval.summarize --name tiny --post "My boss sold my bike. Should I quit?"
    python -m eval.summarize --name tiny --id toy0-validation-3

A post is a filled prompt or plain text, whose first line is the title where there are several.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.summaries import kept_by_ppo, longest, place_of
from stages.config import config as settings
from stages.config.command_line import recorded_config
from stages.config.config import Config, UserError
from stages.config.faults import Parser, in_one_line, show
from stages.config.presets import run_name
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


class Post(NamedTuple):
    """A post as the policies read it, tokens [Q], and the reference of a held-out one."""

    query: str
    tokens: Tensor
    reference: Tensor | None = None
    facts: Mapping[str, Any] | None = None
    """What the data say of a held-out post, for a reward function."""


def finished_policies(preset: str, name: str, seed: int) -> dict[str, Config]:
    """The finished policies of a run's seed, each with its config; UserError if there is none."""
    folder = settings.RUNS / name / f"seed{seed}"
    stages = ("summaries", *POLICY_STAGES, "normalize", "base")
    read = {stage: recorded_config(folder / stage) for stage in stages}
    last = next((config for config in read.values() if config is not None), None)
    # The last config also tells what an upstream supplies.
    configs = {stage: config for stage in POLICY_STAGES if (config := read[stage] or last)}
    manifests = {stage: read_manifest(stage_folder(configs[stage], stage)) for stage in configs}
    if any(manifests.values()):
        return {stage: config for stage, config in configs.items() if manifests[stage]}
    named = f" NAME={name}" if name != preset else ""
    if named:
        check_run(name)
    command = f"make sft rm ppo PRESET={preset} SEED={seed}{named}"
    raise UserError(f"{folder} holds no finished policy: run `{command}` first")


class Finished:
    """A finished run: its posts, its tokenizer, its policies and what scores them."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        self.configs = configs
        self.config = list(configs.values())[-1]
        kept = kept_by_ppo(self._folder("ppo")) if "ppo" in configs else []
        self.policies = [*configs, *kept]
        for stage, config in configs.items():
            check_stage(config, stage)
        self.accelerator = make_accelerator(self.config)
        self.tokenizer = load_tokenizer(self._folder(next(iter(configs))) / "model")
        data = self.config.data
        self.first = first_tokens(self.tokenizer, self.config.base.bos, data.chat_template)
        self.encode = plain_encoder(self.tokenizer, self.first)
        self.held_out = load_split(self._folder("base") / "data", "sft_validation")

    def _folder(self, stage: str) -> Path:
        return stage_folder(self.configs.get(stage, self.config), stage)

    def post_of_id(self, post_id: str) -> Post:
        """The held-out post with an id; UserError if there is none."""
        rows, columns = self.held_out.rows, self.held_out.columns
        ids = [row["id"] for row in rows]
        if post_id not in ids:
            whose = f"ID={post_id} is no held-out post of {self.config.name}"
            raise UserError(f"{whose}: ids are such as {ids[0]}")
        at = ids.index(post_id)
        return Post(
            query=rows[at]["query"],
            tokens=columns["queries"][at],
            reference=columns["summaries"][at],
            facts=rows[at],
        )

    def post_of_text(self, text: str) -> Post:
        """A typed post, filled into the run's prompt and cut as in training. Where the run's rows
        hold whole prompts it is one, of which the end is kept.

        Its subreddit is that of the first held-out post. Raises UserError for a title too long.
        """
        data = self.config.data
        prompt = self._prompt_of(text.strip())
        try:
            if data.chat_template:
                chat = ChatFormat(self.tokenizer, self.first)
                query = chat.fit_prompt(prompt, data.max_query_tokens)
                return Post(query=query.text, tokens=torch.tensor(query.tokens))
            if not prompt.shortened_field:
                tokens = self.encode([prompt.text])[0]
                if len(tokens) > data.max_query_tokens:
                    tokens = keep_end(tokens, self.first, data.max_query_tokens)
                return Post(query=prompt.text, tokens=torch.tensor(tokens))
            text, tokens = fit_query(
                lambda filled: self.encode([filled])[0],
                template=prompt.template,
                fields=prompt.fields,
                shortened_field=prompt.shortened_field,
                limit=data.max_query_tokens,
            )
        except ValueError as error:
            raise UserError(f"{error} (data.max_query_tokens): shorten the title") from None
        return Post(query=text, tokens=torch.tensor(tokens))

    def _prompt_of(self, text: str) -> Prompt:
        """A typed post as the run's prompt; a whole prompt if the run's rows hold such."""
        template = self.config.data.prompt
        fields = parse_post(text, template)
        if fields is None:
            usual = parse_post(self.held_out.rows[0]["query"], template)
            if usual is None:
                return Prompt(template="{post}", fields={"post": text})
            first, _, rest = text.partition("\n")
            title, post = (first, rest.strip()) if rest else ("", first)
            fields = {**usual, "title": title, "post": post}
        return Prompt(template=template, fields=fields, shortened_field="post")

    @torch.no_grad()
    def summary(self, name: str, post: Post, temperature: float) -> list[int]:
        """The tokens of a policy's summary, with EOS."""
        stage, model = place_of(name)
        config, device = self.configs[stage], self.accelerator.device
        policy = PolicyModel(load_policy(self._folder(stage) / model).to(device).eval())
        (length, setting), pad_id = longest(config, name), self.tokenizer.pad_token_id
        require_room(policy, len(post.tokens), length, setting)
        noise = sampling_noise(config.seed, f"{name} summaries", 0, 1, length)
        eos_id, query = self.tokenizer.eos_token_id, post.tokens[None].to(device)
        params = SamplingParams(temperature=temperature, eos_id=eos_id, pad_id=pad_id)
        with self.accelerator.autocast():
            drawn, _ = sample(policy, query, uniforms=noise.to(device), params=params)
        row: list[int] = truncate_after(drawn, eos_id, pad_id)[0].tolist()
        return [token for token in row if token != pad_id]

    @torch.no_grad()
    def scores(self, post: Post, summaries: Sequence[Sequence[int]]) -> Sequence[float | None]:
        """The normalised reward of each summary by the run's reward model; None without one."""
        is_released = "released" in self.configs
        stage, name = ("released", "reward_model") if is_released else ("normalize", "model")
        folder, device = self._folder(stage) / name, self.accelerator.device
        if not folder.is_dir():
            return [None] * len(summaries)
        check_stage(self.config, stage)
        reward_model = load_reward_model(folder).to(device).eval()
        each = [[torch.tensor(tokens)] for tokens in summaries]
        facts = [] if post.facts is None else [post.facts]
        with self.accelerator.autocast():
            scores = summary_scores(reward_model, [post.tokens], each, device, facts)
        return scores[:, 0].tolist()

    def text(self, tokens: Sequence[int]) -> str:
        """A summary as text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def lines(self, post: Post) -> list[str]:
        """What is printed of a post, in lines of at most 80 columns."""
        temperature = self.config.eval.temperature
        written = {name: self.summary(name, post, temperature) for name in self.policies}
        if post.reference is not None:
            written = {"reference": post.reference.tolist(), **written}
        lines = [part for line in post.query.split("\n") for part in folded(line, "") or [""]]
        scores = self.scores(post, list(written.values()))
        for (writer, tokens), score in zip(written.items(), scores, strict=True):
            scored = "" if score is None else f", score {score:+.2f}"
            end = "" if self.tokenizer.eos_token_id in tokens else ", does not end"
            lines += ["", *folded(f"{writer}: {len(tokens)} tokens{scored}{end}")]
            lines += folded(f"  {self.text(tokens)}", "  ")
        return lines


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print a post and its summaries; `make` leaves the post in the environment."""
    parser = Parser(description="summaries of one post by a finished run")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--name", default="", help="the run's folder below runs/")
    parser.add_argument("--seed", type=int, default=44413)
    post = os.environ.get("POST", "")
    parser.add_argument("--post", default=post, help="text, or a filled prompt (also as POST)")
    parser.add_argument("--id", default="", help="of a held-out post of the run")
    args = parser.parse_args(argv)
    if bool(args.id) == bool(args.post.strip()):
        raise UserError("give one post: POST='...', or ID= of a held-out post")
    run = Finished(finished_policies(args.preset, args.name or run_name(args.preset), args.seed))
    show(run.lines(run.post_of_id(args.id) if args.id else run.post_of_text(args.post)))


if __name__ == "__main__":
    main()
