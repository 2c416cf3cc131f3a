"""A gold reward model as judge: another run's reward model, which no policy here was trained on.

It reads the texts themselves, with its own tokenizer, so the two runs may differ in everything. A
post is cut as in its training, a summary gets one leading space and its EOS, also where it was cut
at the limit. Scores are computed in float32. Not an LLM.
Source: Gao et al. 2022 (2210.10760), where a gold reward model stands in for people.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from math import isnan, nan
from pathlib import Path

import torch

from eval.judges.offline import higher
from eval.judges.protocol import TOO_LONG, About, Comparison, Judge, Reply, Row, scored_rows
from eval.stats.reward_pairs import pair_accuracy
from stages.config.command_line import recorded_config
from stages.config.config import Config, hash_of
from stages.config.presets import SMOLLM2
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

Text = tuple[str, str]  # a query and a summary of it


def weights_note(checkpoint: str) -> str:
    """Return that a checkpoint began as a 4-bit copy, if it is one of the offline models."""
    path = Path(checkpoint)
    is_offline = path.parent == Path(SMOLLM2).parent
    return f"; its weights began as a 4-bit copy of {path.name}'s" if is_offline else ""


def find_gold(config: Config) -> tuple[Path, Config | None]:
    """The checked folder of the model that `judge.model` names, and the config of its run.

    The config is None for a folder that no run made. Raises UserError where there is no model,
    where a file of it has changed, and where it is the run's own.
    """
    folder = gold_folder(config)
    check_gold(config)
    maker = recorded_config(folder) if read_manifest(folder) is not None else None
    if maker is not None:
        check_stage(maker, "normalize")
        return folder / "model", maker
    return folder, None


def training_of(config: Config, maker: Config | None) -> str:
    """Whether the gold model learned other comparisons than a run's own; no maker: not known."""
    if config.kind != TRAINED:
        return "another reward model; whether a policy was optimised against it is NOT KNOWN"
    own = trained_posts(config)
    gold = trained_posts(maker) if maker else None
    data = "trained on other comparisons than the run's own, with no post in common"
    if own is None or gold is None:
        data = "whether it was trained on other comparisons than the run's own is NOT KNOWN"
    elif shared := len(own & gold):
        data = (
            "trained in part on THE SAME comparisons as the run's own"
            f" ({shared:,} of {len(own):,} posts) and may share its mistakes"
        )
    start = "another reward model than the run's own, not an LLM"
    return f"{start}: {data}; no policy was optimised against it"


def accuracy_of(maker: Config | None) -> str:
    """The gold model's accuracy on held-out comparisons, as its own run measured it."""
    pairs = stage_folder(maker, "rm") / HELD_OUT_PAIRS if maker else None
    if pairs is None or not pairs.exists():
        return "its accuracy is not known"
    measured = pair_accuracy(read_lines(pairs))
    share, low, high = (100 * measured[f"accuracy{end}"] for end in ("", "_low", "_high"))
    ranked = f"it ranks {share:.1f}% [{low:.1f}, {high:.1f}]"
    return f"{ranked} of {measured['pairs']:,} held-out pairs right"


def trained_posts(config: Config) -> set[str] | None:
    """The posts whose comparisons a run's reward model learned; None if there is no record."""
    recorded = recorded_config(stage_folder(config, "rm"))
    path = stage_folder(config, "base") / "data" / "comparisons_train.jsonl"
    if recorded is None or not path.exists():
        return None
    return {row["id"] for row in read_lines(path) if in_half(row["id"], recorded.rm.pairs)}


class GoldJudge(Judge):
    """It prefers what the gold reward model gives the higher score."""

    def __init__(self, config: Config) -> None:
        folder, maker = find_gold(config)
        self.label = f"{maker.name} seed {maker.seed}" if maker else f"in folder {folder.name}"
        self.who = f"gold reward model {self.label}, not an LLM"
        weights = weights_note(maker.base.checkpoint) if maker else ""
        self.note = f"{training_of(config, maker)}; {accuracy_of(maker)}{weights}"
        self.prompt = config.data.prompt
        self.learned = (maker or config).data
        # A judgement must not depend on the precision in which a policy was trained.
        memory = config.memory.changed(mixed_precision="no")
        self.accelerator = make_accelerator(config.changed(memory=memory))
        self.budget = MemoryBudget.from_settings(memory)
        model, _ = load_released_reward_model(folder)
        self.model = model.to(self.accelerator.device).eval()
        self.tokenizer = load_tokenizer(folder)
        self.encode = plain_encoder(self.tokenizer)
        first = first_tokens(
            self.tokenizer,
            maker.base.bos if maker else "auto",
            chat_template=maker is not None and maker.data.chat_template,
        )
        self.encode_query = plain_encoder(self.tokenizer, first)
        self.chat = None
        if maker is not None and maker.data.chat_template:
            self.chat = ChatFormat(self.tokenizer, first)
        self.longest = getattr(self.model.config, "max_position_embeddings", None)
        self.scores: dict[Text, float] = {}
        self.too_long: set[Text] = set()

    @property
    def about(self) -> About:
        """Who judges, and how far it can be believed."""
        return About(kind="gold_reward_model", name=self.who, is_llm=False, note=self.note)

    def prepare(
        self, comparisons: Sequence[Comparison], same_cap: Iterable[Comparison] = ()
    ) -> None:
        """Score every text, in batches of similar length."""
        self.score({(x.query, text) for x in comparisons for text in (x.first, x.second)})

    def score(self, texts: set[Text]) -> None:
        """Score the texts that have no score yet; one that is too long for the model gets nan.

        A post is read once for all of its texts.
        """
        todo = sorted(texts - self.scores.keys())
        tokens = {text: self._tokens(text) for text in todo}
        if self.longest is not None:
            too_long = {text for text in todo if sum(map(len, tokens[text])) > self.longest}
            self.too_long |= too_long
            self.scores |= dict.fromkeys(too_long, nan)
            todo = [text for text in todo if text not in too_long]
        if not todo:
            return
        posts = [list(texts) for _, texts in groupby(todo, key=lambda text: text[0])]

        @torch.no_grad()
        def measure(rows: list[int]) -> list[list[float]]:
            few = [posts[row] for row in rows]
            queries = [torch.tensor(tokens[texts[0]][0]) for texts in few]
            # A post with fewer texts repeats its last one, which costs less than a row for each.
            most = max(map(len, few))
            columns = zip(*(texts + texts[-1:] * (most - len(texts)) for texts in few), strict=True)
            each = [[torch.tensor(tokens[text][1]) for text in column] for column in columns]
            measured = summary_scores(self.model, queries, each, self.accelerator.device)
            by_post = zip(few, measured.T.tolist(), strict=True)
            return [scores[: len(texts)] for texts, scores in by_post]

        # Rows are kept by their number among these posts, so other texts have another folder.
        keep = self.keep and self.keep / f"gold-posts-{hash_of(todo)}"
        read = [
            [tokens[of_post[0]][0], *(tokens[text][1] for text in of_post)] for of_post in posts
        ]
        lengths = [sum(map(len, parts)) for parts in read]
        texts_of_longest_post = max(map(len, posts))
        rows = max(1, self.budget.forward_batch_size // texts_of_longest_post)
        scores = measure_rows(
            self.accelerator,
            self.budget,
            label="gold scores",
            sort_keys=lengths,
            size=PassSize(rows=rows),
            measure=measure,
            keep=keep,
        )
        self.scores |= dict(zip(todo, chain.from_iterable(scores), strict=True))

    def _tokens(self, text: Text) -> tuple[list[int], list[int]]:
        query, summary = text
        if self.chat is not None:
            prompt = Prompt(template="{post}", fields={"post": query})
            tokens = self.chat.fit_prompt(prompt, self.learned.max_query_tokens).tokens
            return tokens, self.chat.response(summary)
        fields = parse_post(query, self.prompt)
        data = self.learned
        tokens = self.encode_query([format_post(fields, data.prompt) if fields else query])[0]
        if fields:
            with suppress(ValueError):  # a title over the limit: the whole query is read
                _, tokens = fit_query(
                    lambda filled: self.encode_query([filled])[0],
                    template=data.prompt,
                    fields=fields,
                    shortened_field="post",
                    limit=data.max_query_tokens,
                )
        words = self.encode([f" {summary.strip()}"])[0] if summary.strip() else []
        return tokens, [*words, self.tokenizer.eos_token_id]

    def reply(self, comparison: Comparison) -> Reply:
        """The higher score wins, equal scores tie; a text that is too long is not judged.

        The texts were scored by `prepare`.
        """
        texts = (comparison.first, comparison.second)
        a, b = (self.scores[comparison.query, text] for text in texts)
        text = f"[{self.who}] A {a:.4f}, B {b:.4f}"
        if self.too_long.isdisjoint((comparison.query, text) for text in texts):
            return Reply(choice=higher(a, b), text=text)
        return Reply(choice=None, text=text, finish_reason=TOO_LONG)

    def scores_of(self, policies: Mapping[str, Sequence[Row]]) -> list[Row]:
        """Its scores, one row a summary; None for a text that is too long for the model."""
        rows = [row for of_policy in policies.values() for row in of_policy]
        self.score({(row["query"], row[key]) for row in rows for key in ("summary", "reference")})

        def known(row: Row, text: str) -> float | None:
            score = self.scores[row["query"], text]
            return None if isnan(score) else score

        return scored_rows(policies, known)
