"""A gold reward model as judge: another run's reward model, which no policy here was trained on.

It reads the texts with its own tokenizer, so the two runs may differ in every respect. A post is
cut as in the gold model's training. A summary gets one leading space and an EOS, even if it was cut
at the limit. Scores are computed in float32. Not an LLM.
Source: Gao et al. 2022, arXiv 2210.10760, where a gold reward model stands in for people.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

import torch

from eval.judges.offline import higher
from eval.judges.protocol import TOO_LONG, About, Comparison, Judge, Reply, Row, scored_rows
from eval.stats.reward_pairs import pair_accuracy
from stages.config.config import Config
from stages.config.identity import hash_of
from stages.config.presets import SMOLLM2
from stages.config.recorded import recorded_config
from stages.config.sections import format_post, parse_post
from stages.config.stages import TRAINED
from stages.data.chat import ChatFormat
from stages.data.halves import in_half
from stages.data.prompt import Prompt, first_tokens, fit_query, plain_encoder
from stages.models.foreign import load_released_reward_model
from stages.models.forward import summary_scores
from stages.models.tokenizers import load_tokenizer
from stages.runs.files import read_lines
from stages.runs.gold import check_gold, gold_folder
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.run import HELD_OUT_PAIRS
from stages.runs.staleness import check_stage
from stages.training.accelerator import make_accelerator
from stages.training.memory import MemoryBudget, PassSize
from stages.training.row_by_row import measure_rows


class Text(NamedTuple):
    """A summary, and the query it belongs to."""

    query: str
    summary: str


class TokenizedText(NamedTuple):
    """The tokens of a query and of its summary with EOS."""

    query: list[int]
    summary: list[int]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.query) + len(self.summary)


# -- facts about the model -------------------------------------------------------------------------


def find_gold(config: Config) -> tuple[Path, Config | None]:
    """The checked folder of the model that `judge.model` names, and the config of its run.

    The config is None for a folder that no run wrote. Raises UserError if there is no model, if one
    of its files has changed, or if it is the run's own model.
    """
    folder = gold_folder(config)
    check_gold(config)
    gold_config = None
    if read_manifest(folder) is not None:
        gold_config = recorded_config(folder)
    if gold_config is None:
        return folder, None
    check_stage(gold_config, "normalize")
    return folder / "model", gold_config


def training_note(config: Config, gold_config: Config | None) -> str:
    """A note on whether the gold model and the run's own reward model share training comparisons.

    `gold_config` is the config of the gold model's run, None if it is unknown.
    """
    if config.kind != TRAINED:
        return "another reward model; whether a policy was optimized against it is NOT KNOWN"
    own_posts = trained_posts(config)
    gold_posts = trained_posts(gold_config) if gold_config else None
    if own_posts is None or gold_posts is None:
        data = "whether it was trained on other comparisons than the run's own is NOT KNOWN"
    elif own_posts.isdisjoint(gold_posts):
        data = "trained on other comparisons than the run's own, with no post in common"
    else:
        shared = len(own_posts & gold_posts)
        data = (
            "trained in part on THE SAME comparisons as the run's own"
            f" ({shared:,} of {len(own_posts):,} posts) and may share its mistakes"
        )
    return (
        f"another reward model than the run's own, not an LLM: {data};"
        " no policy was optimized against it"
    )


def trained_posts(config: Config) -> set[str] | None:
    """The posts whose comparisons a run's reward model was trained on; None without a record."""
    recorded = recorded_config(stage_folder(config, "rm"))
    path = stage_folder(config, "base") / "data" / "comparisons_train.jsonl"
    if recorded is None or not path.exists():
        return None
    return {row["id"] for row in read_lines(path) if in_half(row["id"], recorded.rm.pairs)}


def accuracy_note(gold_config: Config | None) -> str:
    """The gold model's accuracy on held-out comparisons, as its own run measured it."""
    pairs = stage_folder(gold_config, "rm") / HELD_OUT_PAIRS if gold_config else None
    if pairs is None or not pairs.exists():
        return "its accuracy is not known"
    measured = pair_accuracy(read_lines(pairs))
    accuracy = 100 * measured["accuracy"]
    low = 100 * measured["accuracy_low"]
    high = 100 * measured["accuracy_high"]
    return (
        f"it ranks {accuracy:.1f}% [{low:.1f}, {high:.1f}]"
        f" of {measured['pairs']:,} held-out pairs right"
    )


def weights_note(checkpoint: str) -> str:
    """A note if the weights began as a 4-bit copy, as the offline models' do; else empty."""
    path = Path(checkpoint)
    if path.parent != Path(SMOLLM2).parent:
        return ""
    return f"; its weights began as a 4-bit copy of {path.name}'s"


# -- the judge -------------------------------------------------------------------------------------


class GoldJudge(Judge):
    """Prefers the text to which the gold reward model gives the higher score."""

    def __init__(self, config: Config) -> None:
        """Load the model. Raises the errors of `find_gold`."""
        folder, gold_config = find_gold(config)
        self.label = (
            f"{gold_config.name} seed {gold_config.seed}"
            if gold_config
            else f"in folder {folder.name}"
        )
        self.name = f"gold reward model {self.label}, not an LLM"
        weights = weights_note(gold_config.base.checkpoint) if gold_config else ""
        self.note = f"{training_note(config, gold_config)}; {accuracy_note(gold_config)}{weights}"

        # A judgement must not depend on the precision of the policy's training.
        memory = config.memory.changed(mixed_precision="no")
        self.accelerator = make_accelerator(config.changed(memory=memory))
        self.budget = MemoryBudget.from_settings(memory)
        model, _ = load_released_reward_model(folder)
        self.model = model.to(self.accelerator.device).eval()
        self.positions = getattr(self.model.config, "max_position_embeddings", None)

        # Texts are formatted as in the gold model's training, as far as it is known.
        self.prompt = config.data.prompt
        self.gold_data = gold_config.data if gold_config else config.data
        uses_chat_template = gold_config is not None and gold_config.data.chat_template
        self.tokenizer = load_tokenizer(folder)
        self.encode = plain_encoder(self.tokenizer)
        bos = gold_config.base.bos if gold_config else "auto"
        first = first_tokens(self.tokenizer, bos, chat_template=uses_chat_template)
        self.encode_query = plain_encoder(self.tokenizer, first)
        self.chat = ChatFormat(self.tokenizer, first) if uses_chat_template else None

        self.scores: dict[Text, float] = {}
        self.too_long: set[Text] = set()
        """Texts with more tokens than the model has positions; their score is NaN."""

    @property
    def about(self) -> About:
        """The judge's name, and notes on how far to trust it."""
        return About(kind="gold_reward_model", name=self.name, is_llm=False, note=self.note)

    def prepare(
        self, comparisons: Sequence[Comparison], earlier: Iterable[Comparison] = ()
    ) -> None:
        """Score every text, in batches of similar length."""
        texts = set()
        for comparison in comparisons:
            texts.add(Text(comparison.query, comparison.first))
            texts.add(Text(comparison.query, comparison.second))
        self.score(texts)

    def reply(self, comparison: Comparison) -> Reply:
        """The higher score wins; equal scores tie. A text that is too long is not judged.

        `prepare` has scored the texts.
        """
        first = Text(comparison.query, comparison.first)
        second = Text(comparison.query, comparison.second)
        first_score = self.scores[first]
        second_score = self.scores[second]
        text = f"[{self.name}] A {first_score:.4f}, B {second_score:.4f}"
        if first in self.too_long or second in self.too_long:
            return Reply(choice=None, text=text, finish_reason=TOO_LONG)
        return Reply(choice=higher(first_score, second_score), text=text)

    def scores_of(self, policies: Mapping[str, Sequence[Row]]) -> list[Row]:
        """Its scores, one row per summary; None for a text that is too long for the model."""
        texts = set()
        for rows in policies.values():
            for row in rows:
                texts.add(Text(row["query"], row["summary"]))
                texts.add(Text(row["query"], row["reference"]))
        self.score(texts)

        def score_of(row: Row, summary: str) -> float | None:
            score = self.scores[Text(row["query"], summary)]
            return None if isnan(score) else score

        return scored_rows(policies, score_of)

    def score(self, texts: set[Text]) -> None:
        """Score the texts that have no score yet. A post is read once for all of its texts."""
        tokens: dict[Text, TokenizedText] = {}
        texts_by_query: dict[str, list[Text]] = {}
        for text in sorted(texts - self.scores.keys()):
            tokenized = self.tokenize(text)
            if self.positions is not None and tokenized.length > self.positions:
                self.scores[text] = nan
                self.too_long.add(text)
            else:
                tokens[text] = tokenized
                texts_by_query.setdefault(text.query, []).append(text)
        posts = list(texts_by_query.values())
        if not posts:
            return

        @torch.no_grad()
        def measure(rows: list[int]) -> list[list[float]]:
            """The scores of the texts of each of these posts."""
            texts_by_post = [posts[row] for row in rows]
            queries = [torch.tensor(tokens[texts[0]].query) for texts in texts_by_post]
            # A post with fewer texts repeats its last one, which costs less than a row per text.
            most_texts = max(len(texts) for texts in texts_by_post)
            summaries = []
            for place in range(most_texts):
                texts_at_place = [texts[min(place, len(texts) - 1)] for texts in texts_by_post]
                summaries.append([torch.tensor(tokens[text].summary) for text in texts_at_place])
            scores = summary_scores(self.model, queries, summaries, self.accelerator.device)
            return [
                scores_of_post[: len(texts)]
                for texts, scores_of_post in zip(texts_by_post, scores.T.tolist(), strict=True)
            ]

        lengths = [
            len(tokens[texts[0]].query) + sum(len(tokens[text].summary) for text in texts)
            for texts in posts
        ]
        most_texts = max(len(texts) for texts in posts)
        # Scores are stored by the number of their post, so other texts need another folder.
        keep = self.keep / f"gold-posts-{hash_of(list(tokens))}" if self.keep else None
        scores_of_posts = measure_rows(
            self.accelerator,
            self.budget,
            label="gold scores",
            sort_keys=lengths,
            size=PassSize(rows=max(1, self.budget.forward_batch_size // most_texts)),
            measure=measure,
            keep=keep,
        )
        for texts_of_post, scores in zip(posts, scores_of_posts, strict=True):
            self.scores.update(zip(texts_of_post, scores, strict=True))

    def tokenize(self, text: Text) -> TokenizedText:
        """A text as the gold model was trained to read it."""
        limit = self.gold_data.max_query_tokens
        if self.chat is not None:
            prompt = Prompt(template="{post}", fields={"post": text.query})
            return TokenizedText(
                query=self.chat.fit_prompt(prompt, limit).tokens,
                summary=self.chat.response(text.summary),
            )

        fields = parse_post(text.query, self.prompt)
        if fields:
            query = self.encode_query([format_post(fields, self.gold_data.prompt)])[0]
            # If the title alone is over the limit, the whole query is read.
            with suppress(ValueError):
                _, query = fit_query(
                    lambda filled: self.encode_query([filled])[0],
                    template=self.gold_data.prompt,
                    fields=fields,
                    shortened_field="post",
                    limit=limit,
                )
        else:
            query = self.encode_query([text.query])[0]

        summary = text.summary.strip()
        words = self.encode([f" {summary}"])[0] if summary else []
        return TokenizedText(query=query, summary=[*words, self.tokenizer.eos_token_id])
