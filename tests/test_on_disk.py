"""What lies on a disk and is not as it should be: tokenizers, weights, caches."""

import math

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from stages import base
from stages.learning.models import load_policy, load_reward_model, load_tokenizer
from stages.posts.bad_rows import BadRows
from stages.posts.ragged import load_split
from stages.posts.tokens import plain_encoder, tokenize_posts
from stages.running.files import read_record
from stages.running.machine import code_of
from stages.settings.config import UserError
from stages.settings.prompt import format_post
from tests.test_posts import LIMITS, POST

SIZES = {"train_posts": 8, "validation_posts": 4, "train_comparisons": 8}
SMALL = [f"world.{name}={size}" for name, size in (SIZES | {"validation_comparisons": 4}).items()]
POSTS = [("f:1", POST), ("f:2", POST | {"post": "I walk. " * 6, "summary": "I walk."})]


def cuts(backend):
    backend.enable_truncation(8)


def pads(backend):
    backend.enable_padding(pad_id=1, pad_token="x")


@pytest.mark.parametrize("kept", [cuts, pads])
def test_a_tokenizer_that_was_saved_cutting_or_padding_does_neither_here(tokenizer, tmp_path, kept):
    expected = tokenize_posts(POSTS, tokenizer, LIMITS, "posts")
    tokenizer.save_pretrained(tmp_path)
    other = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    kept(other.backend_tokenizer)
    other.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    lengths = [len(one.ids) for one in loaded.backend_tokenizer.encode_batch(["a", "a b c " * 9])]
    assert max(lengths) == 8 or lengths[0] == lengths[1]  # what a careless reader would get
    found = tokenize_posts(POSTS, loaded, LIMITS, "posts")
    for name, column in expected.columns.items():
        rows = range(len(POSTS))
        assert [found.columns[name][row].tolist() for row in rows] == [
            column[row].tolist() for row in rows
        ]
    assert found.rows[1]["query"] == format_post(POSTS[1][1])


def test_what_a_tokenizer_did_a_moment_ago_does_not_matter(tokenizer):
    texts = ["I walk.", "I walk. " * 9]
    expected = plain_encoder(tokenizer)(texts)
    tokenizer(texts, padding=True, truncation=True, max_length=4)
    assert plain_encoder(tokenizer)(texts) == expected


def test_a_tokenizer_without_a_fast_form_is_refused_in_one_line(monkeypatch, tmp_path):
    class Slow:
        eos_token_id = 0

    monkeypatch.setattr(
        "stages.learning.models.AutoTokenizer.from_pretrained", lambda source, **_: Slow()
    )
    with pytest.raises(UserError, match=r"is no fast one: save it with a tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_when_loaded(policy, reward_model, tmp_path, value):
    for model, load in ((policy, load_policy), (reward_model, load_reward_model)):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        load(folder)
        weights = load_file(folder / "model.safetensors")
        name = sorted(weights)[-1]
        weights[name].view(-1)[0] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match="has weights that are not finite"):
            load(folder)


def test_a_damaged_cache_is_named_and_made_anew_and_no_run_can_damage_it(runs, capsys):
    arguments = ["--preset", "tiny", "--set", *SMALL]

    def made(name):
        base.main([*arguments, "--name", name])
        files = (runs / name / "seed44413/base/data").iterdir()
        return {path.name: path.read_bytes() for path in files}, capsys.readouterr().err

    whole, said = made("first")
    assert "damaged" not in said
    for path in (runs / "first/seed44413/base/data").iterdir():
        path.write_bytes(b"x" + path.read_bytes()[1:])
    again, said = made("second")
    assert again == whole
    assert "damaged" not in said
    for cache in sorted((runs / "cache").iterdir()):
        path = max(cache.iterdir(), key=lambda path: path.stat().st_size)
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        again, told = made(f"after-{cache.name}")
        assert again == whole
        assert f"{cache} is damaged or of an older version: it is made anew" in told


def test_other_tokenising_code_finds_no_tokens_of_the_old_and_other_code_does(
    runs, tokenizer, tmp_path, monkeypatch
):
    rows = base.SourceRows(located={"sft_train": POSTS}, bad=BadRows("stop"), published={})

    def caches(**edited):
        closure = code_of("stages.posts.tokens") | edited
        monkeypatch.setattr(base, "code_of", lambda module: closure)
        base.copy_tokens(tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "data")
        return len(list((runs / "cache").iterdir()))

    assert caches() == caches() == 1
    assert caches(**{"stages/settings/stages.py": "edited"}) == 1
    assert caches(**{"stages/posts/tokens.py": "edited"}) == 2
    assert caches(**{"stages/settings/prompt.py": "edited"}) == 3


def test_a_tokenizer_with_another_eos_finds_no_tokens_of_the_old(runs, tokenizer, tmp_path):
    rows = base.SourceRows(located={"sft_train": POSTS}, bad=BadRows("stop"), published={})
    tokenizer.save_pretrained(tmp_path)
    other = load_tokenizer(tmp_path)
    other.eos_token = other.convert_ids_to_tokens(1)  # as a chat model beside its base model
    for eos in (tokenizer, other):
        base.copy_tokens(eos, rows, {"sft_train": LIMITS}, tmp_path / "data")
        summary = load_split(tmp_path / "data", "sft_train").columns["summaries"][0]
        assert summary[-1] == eos.eos_token_id
    assert tokenizer.eos_token_id != other.eos_token_id


def test_another_length_of_summaries_is_another_input_though_all_tokens_are_equal(runs):
    contents = set()
    for name, length in (("short", 20), ("long", 30)):
        longest = f"data.max_summary_tokens={length}"
        base.main(["--preset", "tiny", "--name", name, "--set", *SMALL, longest])
        contents.add(read_record(runs / name / "seed44413/base/manifest.json")["content"])
    assert len(contents) == 2
