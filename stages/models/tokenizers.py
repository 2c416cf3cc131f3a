"""Tokenizers: load one with a [PAD] token that no text contains, and compare two."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stages.config.errors import UserError, first_line

PAD_TOKEN = "[PAD]"
# If two tokenizers give these texts equal ids, and those ids equal texts, they split texts alike.
SAMPLE_TEXTS = (
    "TL;DR: In 2023 I'm 21 (F), they'RE 1,000.50 km away!!! I’ve  said   so\n\n\n\tTwice.  ",
    " a_b camelCase HTML5 http://a.b/c?d=1%20&e=[2] <|endoftext|></s> don't\r\n",
    "café cafe\u0301 \uff21\uff22 ½ x² 你好 рус ١٢ \U0001f600\u200d",
)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer, with a new [PAD] as its last id, whatever its own pad token is.

    If the pad were EOS, as in many chat models, masking pads would hide every EOS from the loss,
    and the model would never learn to stop. If it were another real token, sampling would leave out
    all ids above it. Raises UserError if the tokenizer does not load, has no EOS or no other token.
    Source: Huang et al. 2024, detail 3.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        tokenizer = _prefer_file(tokenizer, Path(source) / "tokenizer.json")
    except Exception as error:  # a library may raise anything for a file that the user supplied
        raise UserError(f"tokenizer {source} does not load: {first_line(error)}") from None

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"tokenizer {source} is not a fast tokenizer: save it with a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {source} has no EOS token: set eos_token in its config")
    _turn_off_dropout(tokenizer.backend_tokenizer)
    _check_has_tokens(tokenizer, source)
    _add_pad_token(tokenizer, source)
    return tokenizer


def _prefer_file(tokenizer: Any, file: Path) -> Any:
    """The tokenizer, or what its file says if the two split texts differently.

    Some tokenizer classes of transformers use only the vocabulary of the file.
    """
    if type(tokenizer) is PreTrainedTokenizerFast or not file.exists():
        return tokenizer
    in_file = Tokenizer.from_file(str(file))
    if _sample(tokenizer.backend_tokenizer) == _sample(in_file):
        return tokenizer

    class_name = type(tokenizer).__name__
    print(
        f"note: transformers' {class_name} does not split texts as {file} says: the file is used",
        file=sys.stderr,
    )
    return PreTrainedTokenizerFast.from_pretrained(
        str(file.parent), eos_token=tokenizer.eos_token, trust_remote_code=False
    )


def _check_has_tokens(tokenizer: PreTrainedTokenizerFast, source: str | Path) -> None:
    # Words, not a whole text: some vocabularies without any word have tokens for white space.
    words = SAMPLE_TEXTS[0].split()
    encodings = tokenizer.backend_tokenizer.encode_batch(words, add_special_tokens=False)
    if not any(encoding.ids for encoding in encodings):
        raise UserError(f"tokenizer {source} cannot encode text: its vocabulary is empty")


def _add_pad_token(tokenizer: PreTrainedTokenizerFast, source: str | Path) -> None:
    """Let the tokenizer pad with a new last id, or with the one that an earlier stage has added."""
    vocabulary = tokenizer.get_vocab()
    last_id = max(vocabulary.values())
    last_token = tokenizer.convert_ids_to_tokens(last_id)

    # Saved by an earlier stage, which may have set the pad to EOS for plain transformers
    # (`save_model`).
    is_our_pad = last_token.startswith(PAD_TOKEN)
    if is_our_pad and tokenizer.pad_token in (last_token, tokenizer.eos_token):
        tokenizer.pad_token = last_token
        return

    pad_token = PAD_TOKEN
    while pad_token in vocabulary:  # an encoder's [PAD] is an ordinary token here
        pad_token += PAD_TOKEN
    tokenizer.add_special_tokens({"pad_token": pad_token})
    if tokenizer.pad_token_id <= last_id:
        raise UserError(f"tokenizer {source} has gaps in its ids: no id is free for {PAD_TOKEN}")


def same_tokens(left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have equal vocabularies, and give sample texts equal ids."""
    if left.get_vocab() != right.get_vocab():
        return False
    return _sample(left.backend_tokenizer) == _sample(right.backend_tokenizer)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """How a tokenizer reads `SAMPLE_TEXTS`."""

    ids: list[list[int]]
    decoded: list[str]


def _sample(backend: Tokenizer) -> _Sample:
    """Encode and decode the sample texts. Turns off dropout, truncation and padding."""
    _turn_off_dropout(backend)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    encodings = backend.encode_batch(SAMPLE_TEXTS, add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    return _Sample(ids=ids, decoded=backend.decode_batch(ids, skip_special_tokens=False))


def _turn_off_dropout(backend: Tokenizer) -> None:
    """Give a text the same tokens each time. A tokenizer's file may ask for BPE dropout."""
    if getattr(backend.model, "dropout", None):  # only BPE models have it
        backend.model.dropout = None
