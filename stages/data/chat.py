"""Formats conversations by the tokenizer's own chat template (`data.chat_template`).

A query is what the template writes before an answer, `add_generation_prompt=True`. A response is
the answer and what the template writes after it, up to and including the token that ends the turn.
That token becomes the tokenizer's EOS, so that sampling stops there and rewards are read there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from stages.config.errors import UserError, first_line
from stages.data.conversations import ASSISTANT, USER, Message, plain_prompt
from stages.data.prompt import Prompt, fit_query, longest_fitting

# Takes the place of an answer while the template is read. No text has this private character.
MARK = "\ue000"
# Some templates write today's date into the prompt, so that tokens would change from day to day.
TEMPLATE_DATE = "26 Jul 2024"


def user_turn(text: str) -> Message:
    """A text as a message of the user."""
    return {"role": USER, "content": text.strip()}


@dataclass(frozen=True, kw_only=True)
class Query:
    """A prompt as a policy reads it."""

    text: str
    """The conversation as plain text, without the template: what a judge reads."""
    tokens: list[int]


class ChatFormat:
    """How a tokenizer's chat template writes prompts and answers.

    Raises UserError for a tokenizer without a template, or with one that cannot be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, first: Sequence[int] = ()) -> None:
        """`first` are the tokens that begin each query: BOS or nothing (`first_tokens`)."""
        if not tokenizer.chat_template:
            raise UserError(
                f"data.chat_template: tokenizer {tokenizer.name_or_path!r} has no chat template: "
                "start from an instruct model, put a chat_template.jinja next to its "
                "tokenizer.json, or leave the setting out"
            )
        self.tokenizer = tokenizer
        self.first = list(first)
        self.control_tokens = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ]

        # Compare a question with and without an answer.
        question = [user_turn("Why?")]
        answered = [*question, {"role": ASSISTANT, "content": MARK}]
        try:
            prompt = self._render(question, add_generation_prompt=True)
            whole = self._render(answered, add_generation_prompt=False)
        except ValueError as error:
            raise UserError(f"data.chat_template: {error}: correct the template") from None
        before, mark, after = whole.partition(MARK)
        if not mark or not before.startswith(prompt):
            raise UserError(
                "data.chat_template: the tokenizer's chat template does not write an answer after "
                "its own generation prompt: correct the template or leave the setting out"
            )
        # Some templates write an empty chain of thought before an answer. It belongs to the query,
        # so that a response is nothing but the answer. A space becomes a part of the first word's
        # token, so it belongs to the response.
        lead = before.removeprefix(prompt)
        self.end_of_query = lead if lead.strip() else ""
        self.before_answer = "" if lead.strip() else lead
        self.after_answer = self._up_to_end_of_turn(after)

    def _up_to_end_of_turn(self, text: str) -> str:
        """What follows an answer, up to the first control token; EOS if there is none."""
        ends = [text.index(token) + len(token) for token in self.control_tokens if token in text]
        if not ends:
            return str(self.tokenizer.eos_token)
        return text[: min(ends)]

    @property
    def end_of_turn(self) -> str:
        """The token that ends an answer."""
        last_id = self._encode(self.after_answer)[-1]
        return str(self.tokenizer.convert_ids_to_tokens(last_id))

    def query(self, messages: Sequence[Message]) -> list[int]:
        """The tokens before an answer, with BOS at most once.

        Raises ValueError if a message contains a control token or the template raises an error.
        """
        for message in messages:
            self._check_content(message["content"])
        text = self._render(messages, add_generation_prompt=True) + self.end_of_query
        tokens = self._encode(text)
        if tokens[:1] == [self.tokenizer.bos_token_id]:
            tokens = tokens[1:]
        return [*self.first, *tokens]

    def response(self, text: str) -> list[int]:
        """The tokens of an answer, with the token that ends the turn.

        Raises ValueError if the text contains a control token.
        """
        self._check_content(text)
        return self._encode(self.before_answer + text.strip() + self.after_answer)

    def fit_prompt(self, prompt: Prompt, limit: int) -> Query:
        """A prompt of at most `limit` tokens. The user's text is cut, never the template.

        Raises ValueError if that is not possible, and as `query` does.
        """
        if prompt.shortened_field:
            text, tokens = fit_query(
                lambda filled: self.query([user_turn(filled)]),
                template=prompt.template,
                fields=prompt.fields,
                shortened_field=prompt.shortened_field,
                limit=limit,
            )
            return Query(text=text.strip(), tokens=tokens)

        if prompt.messages:
            messages = self._fit_messages(prompt.messages, limit)
            text = plain_prompt(messages)
        else:
            messages = self._fit_messages([user_turn(prompt.text)], limit)
            text = messages[0]["content"]
        return Query(text=text, tokens=self.query(messages))

    def _fit_messages(self, messages: Sequence[Message], limit: int) -> list[Message]:
        """The messages without their beginning, in at most `limit` tokens.

        The request is at the end of a prompt. So the oldest turn loses its beginning, or is dropped
        together with its answer if no part of it fits. A system message is kept.
        """
        kept = list(messages)
        while len(self.query(kept)) > limit:
            user_places = [place for place, turn in enumerate(kept) if turn["role"] == USER]
            if not user_places:
                raise ValueError(f"its system and assistant turns exceed {limit} tokens")
            first_user = user_places[0]
            shortened = self._shorten_turn(kept, first_user, limit)
            if shortened is not None:
                return shortened
            if len(user_places) == 1:
                raise ValueError(f"the chat template alone has more than {limit} tokens")
            kept = kept[:first_user] + kept[user_places[1] :]
        return kept

    def _shorten_turn(
        self, messages: Sequence[Message], place: int, limit: int
    ) -> list[Message] | None:
        """The messages with as much of the end of one turn as fits; None if no part of it fits."""
        content = messages[place]["content"]

        def with_end(length: int) -> list[Message]:
            turn = user_turn(content[len(content) - length :])
            return [*messages[:place], turn, *messages[place + 1 :]]

        def fits(length: int) -> bool:
            return len(self.query(with_end(length))) <= limit

        length = longest_fitting(range(1, len(content)), fits)
        if length is None:
            return None
        return with_end(length)

    def _check_content(self, text: str) -> None:
        """Raise ValueError for a text in which the template's control tokens occur."""
        for token in self.control_tokens:
            if token in text:
                raise ValueError(f"the text contains the control token {token}")

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                date_string=TEMPLATE_DATE,
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template says: {first_line(error)}") from None
        return str(rendered)

    def _encode(self, text: str) -> list[int]:
        """The tokens of a text in which control tokens count as control tokens."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        # `plain_encoder` encodes control tokens as plain text, with the same backend.
        encodes_letters = backend.encode_special_tokens
        backend.encode_special_tokens = False
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        finally:
            backend.encode_special_tokens = encodes_letters
        return ids


def end_answers_as_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that ends an answer the tokenizer's EOS. Raises UserError as `ChatFormat`."""
    end_of_turn = ChatFormat(tokenizer).end_of_turn
    if tokenizer.eos_token != end_of_turn:
        tokenizer.eos_token = end_of_turn
