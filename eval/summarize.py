"""What the policies of a finished run write about one post: `make summarize POST="..."`.

    python -m eval.summarize --name tiny --post "My boss sold my bike. Should I quit?"
    python -m eval.summarize --name tiny --id toy0-validation-3
    python -m eval.summarize --name tiny --interactive < posts.txt

A post is a filled prompt, text with `r/tifu`, `TITLE:` and `POST:` where they are known, or plain
text. It is cut as in training; all policies read the same tokens. The run's reward model scores
each summary. A held-out post of the run gets the summaries of its evaluation.
"""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.summaries import longest
from stages.finished import check_run, check_stage, read_manifest, stage_folder
from stages.functional import truncate_after
from stages.learning.loop import make_accelerator
from stages.learning.models import load_policy, load_reward_model, load_tokenizer, require_room
from stages.learning.passes import summary_scores
from stages.learning.sampling import sample, sampling_noise
from stages.posts.ragged import TokenizedSplit, load_split
from stages.posts.tokens import fit_query, plain_encoder
from stages.posts.toy import OPTIONAL, WORDS, facts_of, read_summary, score_summary
from stages.running.progress import folded
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line, is_above_0, say_error, show
from stages.settings.command_line import recorded_config
from stages.settings.config import TOY, Config, UserError
from stages.settings.outputs import Released
from stages.settings.prompt import format_post, parse_post
from stages.settings.stages import POLICY_STAGES

HELD_OUT, TRAINING = "sft_validation", "sft_train"
SPLITS = {HELD_OUT: "a held-out post of this run", TRAINING: "a training post of this run"}
ASK = "post (it ends with TL;DR: or two empty lines; Ctrl-D leaves):"
NO_POST = "no post: add POST='...', FILE=, ID= or INTERACTIVE=1, or write it to standard input"
MOST_WORTH = 6  # of a summary in the built-in world
# A post as people type it; each part but the text may be missing.
TYPED = re.compile(
    r"(?:(?:SUBREDDIT:\s*)?r/(?P<subreddit>\w+)\s+)?(?:TITLE:[ \t]*(?P<title>[^\n]*)\s*)?"
    r"(?P<label>POST:\s*)?(?P<post>.*?)\s*(?:TL;DR:)?",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Post:
    """A post as the policies read it, and what the run knows of it."""

    query: str
    tokens: Tensor
    """[Q]"""
    notes: tuple[str, ...] = ()
    """Where it comes from, what was added, whether it was cut."""
    row: Mapping[str, Any] | None = None
    """As the run's data hold it."""
    reference: Tensor | None = None
    place: int | None = None
    """Among the held-out posts."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One summary: by whom, the text, its tokens with EOS."""

    writer: str
    text: str
    tokens: Sequence[int]
    has_eos: bool


# -- the run ---------------------------------------------------------------------------------------


def finished_policies(preset: str, name: str, seed: int) -> dict[str, Config]:
    """The finished policies of a run's seed, each with the config that it recorded.

    Raises UserError, with the command that makes some, if there is none.
    """
    folder = settings.RUNS / name / f"seed{seed}"
    recorded = {
        stage: recorded_config(folder / stage)
        for stage in ("summaries", *POLICY_STAGES, "normalize", "base")
        if read_manifest(folder / stage) is not None
    }
    known = {stage: config for stage, config in recorded.items() if config is not None}
    last = next(iter(known.values()), None)  # which also tells what an upstream supplies
    every = {stage: known.get(stage, last) for stage in POLICY_STAGES}
    there = {
        stage: config
        for stage, config in every.items()
        if config is not None and read_manifest(stage_folder(config, stage)) is not None
    }
    if there:
        return there
    if name != preset:
        check_run(name)
    named = f" NAME={name}" if name != preset else ""
    command = f"make sft rm ppo PRESET={preset} SEED={seed}{named}"
    raise UserError(f"{folder} holds no finished policy: run `{command}` first")


class Finished:
    """A finished run: its posts, its tokenizer, its policies and what scores them."""

    def __init__(self, configs: Mapping[str, Config], keep_models: bool = False) -> None:
        """`keep_models`: all stay in memory, for the next post."""
        self.configs = configs
        self.config = list(configs.values())[-1]
        for stage, config in configs.items():
            check_stage(config, stage)
        self.accelerator = make_accelerator(self.config)
        self.tokenizer = load_tokenizer(self._folder(next(iter(configs))) / "model")
        self.encode = plain_encoder(self.tokenizer)
        self.policy = cache(self._policy) if keep_models else self._policy
        self.split = cache(self._split)

    def _folder(self, stage: str) -> Path:
        return stage_folder(self.configs.get(stage, self.config), stage)

    def _policy(self, stage: str) -> PreTrainedModel:
        model = load_policy(self._folder(stage) / "model")
        return model.to(self.accelerator.device).eval()

    @cached_property
    def reward_model(self) -> PreTrainedModel | None:
        """The one that the policies were trained on, or that came with a released policy."""
        released = "released" in self.configs
        stage, name = ("released", "reward_model") if released else ("normalize", "model")
        if not (self._folder(stage) / name).is_dir():
            return None
        check_stage(self.config, stage)
        return load_reward_model(self._folder(stage) / name).to(self.accelerator.device).eval()

    def _split(self, name: str) -> TokenizedSplit | None:
        """Posts of the run's data; None where the run has no such split."""
        folder = self._folder("base") / "data"
        return load_split(folder, name) if (folder / f"{name}.safetensors").exists() else None

    @cached_property
    def usual_subreddit(self) -> str:
        """The most frequent one of the held-out posts."""
        split = self.split(HELD_OUT)
        queries = [row["query"] for row in split.rows] if split else []
        posts = [parse_post(query, self.config.data.prompt) for query in queries]
        counts = Counter(post["subreddit"] for post in posts if post)
        return max(counts, key=counts.__getitem__, default="tifu")

    # -- a post --------------------------------------------------------------------------------

    def known_post(self, key: str, value: str) -> Post | None:
        """The post of the run's data whose `id` or `query` this is."""
        for name, note in SPLITS.items():
            split = self.split(name)
            rows = enumerate(split.rows if split else ())
            for at, row in rows:
                if split is not None and row[key] == value:
                    return Post(
                        query=row["query"],
                        tokens=split.columns["queries"][at],
                        notes=(f"{row['id']}: {note}",),
                        row=row,
                        reference=split.columns["summaries"][at],
                        place=at if name == HELD_OUT else None,
                    )
        return None

    def post_of_id(self, post_id: str) -> Post:
        """The post with an id. Raises UserError if the run's data hold none."""
        post = self.known_post("id", post_id)
        split = self.split(HELD_OUT)
        if post is None:
            such = f": ids are such as {split.rows[0]['id']}" if split else ""
            raise UserError(f"ID={post_id} is no post of run {self.config.name}{such}")
        return post

    def post_of_text(self, text: str) -> Post:
        """A typed post, filled into the run's prompt and cut as in training.

        Raises UserError for an empty one, and where title and subreddit alone are too long.
        """
        data, notes = self.config.data, []
        fields = parse_post(text.strip(), data.prompt) or typed_fields(text)
        if not "".join(fields.values()).strip():
            raise UserError(NO_POST)
        if not fields["subreddit"]:
            fields["subreddit"] = self.usual_subreddit
            notes.append(f"no subreddit given: r/{self.usual_subreddit}, the most frequent here")
        try:
            query, tokens = fit_query(
                lambda filled: self.encode([filled])[0],
                data.prompt,
                fields,
                "post",
                data.max_query_tokens,
            )
        except ValueError as error:
            raise UserError(f"{error} (data.max_query_tokens): shorten the title") from None
        if query != format_post(fields, data.prompt):
            notes.append(f"cut to {data.max_query_tokens} tokens, as in training")
        post = Post(query=query, tokens=torch.tensor(tokens), notes=tuple(notes))
        return self.known_post("query", query) or post

    # -- summaries ---------------------------------------------------------------------------------

    @torch.no_grad()
    def summary(self, stage: str, post: Post, temperature: float) -> Answer:
        """A policy's summary, drawn with the random numbers that the evaluation gives its place."""
        config, policy = self.configs[stage], self.policy(stage)
        (length, setting), pad_id = longest(config, stage), self.tokenizer.pad_token_id
        require_room(policy, len(post.tokens), length, setting)
        split = self.split(HELD_OUT)
        rows = config.eval.posts or (len(split) if split else 1)
        at = post.place if post.place is not None and post.place < rows else 0
        noise = sampling_noise(config.seed, f"{stage} summaries", 0, rows, length)[at : at + 1]
        device, eos_id = self.accelerator.device, self.tokenizer.eos_token_id
        with self.accelerator.autocast():
            query = post.tokens[None].to(device)
            drawn, _ = sample(policy, query, noise.to(device), temperature, eos_id, pad_id)
        row = truncate_after(drawn, eos_id, pad_id)[0].tolist()
        return self._written(stage, [token for token in row if token != pad_id])

    def _written(self, writer: str, tokens: Sequence[int]) -> Answer:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        ended = self.tokenizer.eos_token_id in tokens
        return Answer(writer=writer, text=text, tokens=tokens, has_eos=ended)

    @torch.no_grad()
    def scores(self, post: Post, texts: Sequence[Answer]) -> Sequence[float | None]:
        """The normalised reward of each text; None without a reward model."""
        if self.reward_model is None:
            return [None] * len(texts)
        each = [[torch.tensor(written.tokens)] for written in texts]
        with self.accelerator.autocast():
            scored = summary_scores(self.reward_model, [post.tokens], each, self.accelerator.device)
        return scored[:, 0].tolist()

    def lines(self, post: Post, temperature: float) -> list[str]:
        """What is printed of a post, in lines of at most 80 columns."""
        written = [self.summary(stage, post, temperature) for stage in self.configs]
        if post.reference is not None:
            written = [self._written("reference", post.reference.tolist()), *written]
        lines = [part for line in post.query.split("\n") for part in folded(line, "") or [""]]
        lines += [part for note in post.notes for part in folded(f"({note})")]
        no_score = "" if self.reward_model else "; no reward model, so no scores"
        lines += ["", *folded(f"temperature {temperature:g}{no_score}")]
        for text, score in zip(written, self.scores(post, written), strict=True):
            lines += ["", *folded(heading(text, score)), *folded(f"  {text.text}", "  ")]
            if post.row is not None and self.config.data.source == TOY:
                lines += facts_lines(post.row["id"], text.text)
        return lines


# -- what is printed -------------------------------------------------------------------------------


def heading(written: Answer, score: float | None) -> str:
    """Who wrote, the score, the length."""
    parts = [] if score is None else [f"score {score:+.2f}"]
    parts += [f"{len(written.tokens)} tokens", *([] if written.has_eos else ["does not end"])]
    name = written.writer
    return f"{name.upper() if name in POLICY_STAGES else name}: {', '.join(parts)}"


def facts_lines(post_id: str, summary: str) -> list[str]:
    """What a summary of a built-in post tells, by the rule that stands in for readers."""
    facts = facts_of(post_id)
    right, wrong = read_summary(summary, facts)
    unwanted = [slot for slot in OPTIONAL if slot in right - facts.wanted]
    told = [slot for slot in WORDS if slot in right and slot not in unwanted]
    lacking = [slot for slot in WORDS if slot in facts.wanted - right]
    words = {
        "right": [f"{slot} {facts.told[slot]}" for slot in told],
        "right but not wanted": [f"{slot} {facts.told[slot]}" for slot in unwanted],
        "wrong": [f"{slot} {word}, not {facts.told[slot]}" for slot, word in sorted(wrong)],
        "wanted and left out": [f"{slot} {facts.told[slot]}" for slot in lacking],
    }
    worth = f"{score_summary(summary, facts):g} of {MOST_WORTH} by the rule"
    listed = [f"{name}: {', '.join(parts)}" for name, parts in words.items() if parts]
    return folded(f"    {'; '.join([worth, *listed])}", "    ")


def answer_all(run: Finished, temperature: float) -> None:
    """Ask for one post after another; a post that cannot be read is one line."""
    ask = f"\n{ASK}" if sys.stdin.isatty() else ""
    print(ask, end="\n" * bool(ask), flush=True)
    for text in typed_posts(sys.stdin):
        try:
            print("\n".join(run.lines(run.post_of_text(text), temperature)))
        except UserError as error:
            say_error(f"error: {error}")
        print(ask, flush=True)


# -- command line ----------------------------------------------------------------------------------


def typed_fields(text: str) -> dict[str, str]:
    """Subreddit, title and post of a text, empty where missing.

    Without labels the first of several lines is the title; a single line is the post.
    """
    match = TYPED.fullmatch(text.strip())
    parts = {key: value or "" for key, value in match.groupdict().items()} if match else {}
    label, title, post = (parts.get(key, "").strip() for key in ("label", "title", "post"))
    if not label and not title and "\n" in post:
        title, _, post = (part.strip() for part in post.partition("\n"))
    return {"subreddit": parts.get("subreddit", ""), "title": title, "post": post}


def typed_posts(lines: Iterable[str]) -> Iterator[str]:
    """The posts of many lines: one ends with TL;DR:, two empty lines, or the last line."""
    kept: list[str] = []
    for line in lines:
        kept.append(line.rstrip())
        if kept[-1].endswith("TL;DR:") or kept[-2:] == ["", ""]:
            text, kept = "\n".join(kept).strip(), []
            if text:
                yield text
    if "".join(kept):
        yield "\n".join(kept).strip()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; `make` leaves a post in the environment: it may hold line breaks."""
    parser = Parser(description="summaries of one post by a finished run")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--name", default="", help="the run's folder below runs/")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument("--policy", default="", help="the released policy that the run judged")
    post = os.environ.get("POST", "")
    parser.add_argument("--post", default=post, help="text, or a filled prompt (also as POST)")
    parser.add_argument("--file", default="", help="a file with the post")
    parser.add_argument("--id", default="", help="of a post of the run's data")
    parser.add_argument("--temperature", default="", help="above 0; else that of the evaluation")
    parser.add_argument("--interactive", action="store_true", help="one post after another")
    args = parser.parse_args(argv)
    ways = ("POST", "FILE", "ID", "INTERACTIVE")
    given = [name for name in ways if getattr(args, name.lower())]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are given together: give one of them")
    return args


def text_of(args: argparse.Namespace) -> str:
    """The post that is given as text, in a file or on standard input. Raises UserError if none."""
    if args.post:
        return str(args.post)
    if args.file:
        try:
            return Path(args.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UserError(f"FILE={args.file}: {reason}") from None
    if sys.stdin.isatty():
        raise UserError(NO_POST)
    return sys.stdin.read()


def run_of(args: argparse.Namespace) -> str:
    """The folder below runs/ that the command line names."""
    return args.name or (Released(policy=args.policy).run_name if args.policy else args.preset)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print a post and its summaries."""
    args = parse(argv)
    if args.temperature and not is_above_0(args.temperature):
        raise UserError(f"TEMPERATURE={args.temperature}: give a number above 0, such as 0.01")
    configs = finished_policies(args.preset, run_of(args), args.seed)
    text = "" if args.id or args.interactive else text_of(args)
    run = Finished(configs, keep_models=args.interactive)
    temperature = float(args.temperature or run.config.eval.temperature)
    if args.interactive:
        answer_all(run, temperature)
    else:
        post = run.post_of_id(args.id) if args.id else run.post_of_text(text)
        show(run.lines(post, temperature))


if __name__ == "__main__":
    main()
