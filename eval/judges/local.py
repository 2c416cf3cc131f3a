"""A chat model in this process as judge: its probabilities of "A" and "B", no sampling, no parsing.

It cannot answer "tie": a pair is a tie where its two orders disagree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from eval.judges.offline import higher
from eval.judges.prompt import LETTER, make_question
from eval.judges.protocol import TOO_LONG, About, Choice, Comparison, Judge, Reply, print_too_long
from stages.learning.models import quiet_loading
from stages.learning.passes import model_inputs
from stages.learning.sharding import leave_out_cudnn
from stages.posts.ragged import pad_left
from stages.running.files import KeptRows
from stages.running.progress import progress
from stages.settings.checks import UserError, first_line, is_out_of_memory
from stages.settings.config import hash_of

LETTERS: tuple[Choice, Choice] = ("A", "B")
# Stands in for the question while the chat template is rendered.
PLACE = "QUESTION-5f0c2a9d"


class LocalJudge(Judge):
    """A chat model, from a folder or the hub, on this machine's GPU where it has one."""

    def __init__(self, source: str, batch_size: int, axis: str = "overall") -> None:
        quiet_loading()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            self.model = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto", trust_remote_code=False
            ).eval()
        except Exception as error:  # whatever a library says of a file that the user has given
            if is_out_of_memory(error):
                raise
            raise UserError(f"judge.model={source} does not load: {first_line(error)}") from None
        if self.tokenizer.chat_template is None:
            raise UserError(f"judge.model={source} has no chat template: choose a chat model")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device)
        leave_out_cudnn()
        self.batch_size, self.lock = batch_size, Lock()
        self.letter_ids = [letter_ids(self.tokenizer, letter) for letter in LETTERS]
        self.longest = getattr(self.model.config, "max_position_embeddings", None)
        self.known: dict[Comparison, Reply] = {}
        self.too_long: set[str] = set()
        self.keep: Path | None = None
        self.source, self.axis = source, axis

    @property
    def about(self) -> About:
        """The model, and the axis that it is asked about if it is only one."""
        name = self.source if self.axis == "overall" else f"{self.source}, {self.axis} alone"
        note = "LLM in this process: the more probable of the answers A and B, not sampled"
        return About(kind="local", name=name, is_llm=True, note=note)

    def keep_in(self, folder: Path) -> None:
        """Finished batches outlast the process in this folder."""
        self.keep = folder

    def prepare(self, comparisons: Sequence[Comparison], beside: Iterable[Comparison] = ()) -> None:
        """Judge them all, in batches of texts of similar length, which pad the least.

        It costs nothing, so questions asked `beside` do not matter.
        """
        new = set(comparisons) - self.known.keys()
        kept = KeptRows(self.keep, "local verdicts", 0) if self.keep and new else None
        if kept is not None:
            numbered = ((comparison, number_of(comparison)) for comparison in new)
            self.known |= {
                comparison: Reply(**kept.known[number])
                for comparison, number in numbered
                if number in kept.known
            }
        # Equal lengths in the order of their texts: a set has another order in each process.
        todo = sorted(new - self.known.keys(), key=lambda texts: (sum(map(len, texts[1:4])), texts))
        starts = range(0, len(todo), self.batch_size)
        batches = [todo[start : start + self.batch_size] for start in starts]
        for some in progress(batches, "judge local, batches", len(batches)):
            replies = self._judge(some)
            if kept is not None:
                kept.add([*map(number_of, replies)], [asdict(reply) for reply in replies.values()])
            self.known |= replies

    def reply(self, comparison: Comparison) -> Reply:
        """The more probable letter, with its share of both as confidence.

        A prompt that is longer than the model's context is not judged.
        """
        with self.lock:
            if comparison not in self.known:
                self.known |= self._judge([comparison])
            if self.known[comparison].finish_reason == TOO_LONG:
                self.too_long.add(comparison.post_id)
            return self.known[comparison]

    def finish(self) -> None:
        """Print which posts were not judged."""
        print_too_long("judge local", self.too_long, self.longest)
        self.too_long.clear()

    def _judge(self, comparisons: Iterable[Comparison]) -> dict[Comparison, Reply]:
        replies, fitting = {}, []
        for comparison in comparisons:
            query, first, second = comparison[1:4]
            question = make_question(query, first, second, LETTER, self.axis)
            tokens = encode(self.tokenizer, question.prompt)
            text = f"[not asked: {len(tokens)} tokens, the model takes {self.longest}]"
            reply = Reply(
                choice=None,
                text=text,
                model=self.source,
                requested_model=self.source,
                prompt_hash=question.hash,
            )
            if self.longest is not None and len(tokens) > self.longest:
                replies[comparison] = replace(reply, finish_reason=TOO_LONG)
            else:
                fitting.append((comparison, reply, tokens))
        shares = self._letter_shares([tokens for _, _, tokens in fitting]) if fitting else []
        for (comparison, reply, tokens), (a, b) in zip(fitting, shares, strict=True):
            choice = higher(a, b) if a + b > 0 else None
            replies[comparison] = replace(
                reply,
                choice=choice,
                text=f"[probabilities] A {a:.6f}, B {b:.6f}",
                prompt_tokens=len(tokens),
                confidence=max(a, b) / (a + b) if choice else None,
            )
        return replies

    @torch.no_grad()
    def _letter_shares(self, prompts: Sequence[list[int]]) -> list[tuple[float, float]]:
        """The probabilities of "A" and of "B" as the first token of the answer to each prompt."""
        tokens = pad_left([torch.tensor(prompt) for prompt in prompts], -1).to(self.device)
        inputs = model_inputs(tokens.clamp(min=0), tokens != -1)
        logits: Tensor = self.model(**inputs, logits_to_keep=1, use_cache=False).logits[:, -1]
        shares = logits.float().softmax(dim=-1).cpu()
        a, b = (shares[:, ids].sum(dim=-1).tolist() for ids in self.letter_ids)
        return list(zip(a, b, strict=True))


def number_of(comparison: Comparison) -> int:
    """Names a question among those that are kept, whichever others are asked with it."""
    return int(hash_of(comparison), 16)


def letter_ids(tokenizer: PreTrainedTokenizerBase, letter: str) -> list[int]:
    """The ids that begin an answer with a letter: alone and after a space.

    Raises UserError where the tokenizer has no token for it.
    """
    texts = (letter, f" {letter}")
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids = sorted({tokens[0] for tokens in encoded if len(tokens) == 1})
    if not ids:
        raise UserError(f"judge.model: its tokenizer has no token {letter!r}: choose another model")
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The ids of a prompt in the model's chat template.

    Only the template's own control tokens are control tokens: what looks like one in the prompt
    is spelled out.
    """
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": PLACE}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    before, after = rendered.split(PLACE)
    outer = [tokenizer.encode(text, add_special_tokens=False) for text in (before, after)]
    inner = tokenizer.encode(prompt, add_special_tokens=False, split_special_tokens=True)
    return [*outer[0], *inner, *outer[1]]
