"""What is saved loads again, here and in plain transformers."""

import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from stages.models.loading import load_policy, load_reward_model, save_model
from stages.models.tokenizers import load_tokenizer
from tests.lib.families import edit_json

TOKENS = torch.randint(1, 250, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(policy_folder, tmp_path):
    """A copy of the policy's folder, to be changed."""
    return shutil.copytree(policy_folder, tmp_path / "model")


@torch.no_grad()
def test_a_saved_policy_gives_the_same_logits_in_plain_transformers(policy, tokenizer, tmp_path):
    save_model(policy, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(plain(TOKENS).logits, policy(TOKENS).logits)


@torch.no_grad()
def test_a_saved_reward_model_gives_the_same_scalars_in_plain_transformers(
    reward_model, tokenizer, tmp_path
):
    reward_model.classifier.bias.fill_(-0.75)
    save_model(reward_model, tokenizer, tmp_path)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    scalars = plain(TOKENS).logits
    assert scalars.shape == (2, 8, 1)
    torch.testing.assert_close(scalars, reward_model(TOKENS).logits)


@torch.no_grad()
def test_a_saved_reward_model_loads_again(reward_model, tokenizer, tmp_path):
    reward_model.classifier.bias.fill_(-0.75)
    save_model(reward_model, tokenizer, tmp_path)
    again = load_reward_model(tmp_path).eval()
    assert torch.equal(again(TOKENS).logits, reward_model(TOKENS).logits)


def test_a_saved_model_needs_no_code_of_ours(policy, reward_model, tokenizer, tmp_path):
    save_model(policy, tokenizer, tmp_path / "policy")
    save_model(reward_model, tokenizer, tmp_path / "rm")
    for path in tmp_path.glob("*/config.json"):
        assert "auto_map" not in path.read_text()


def test_the_tokenizer_of_a_saved_model_has_its_pad_token_again(policy, tokenizer, tmp_path):
    assert policy.config.vocab_size == tokenizer.pad_token_id, "no row for [PAD]"
    save_model(policy, tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.pad_token_id == tokenizer.pad_token_id


def test_a_saved_policy_generates_for_two_texts_in_one_batch_as_for_each(
    policy, tokenizer, tmp_path
):
    save_model(policy, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    plain_tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def generate(texts):
        return plain.generate(
            **plain_tokenizer(texts, padding=True, return_tensors="pt"),
            max_new_tokens=5,
            min_new_tokens=5,
            do_sample=False,
            pad_token_id=plain_tokenizer.pad_token_id,
            return_dict_in_generate=False,
        )

    texts = ["My boss sold my bike.", "I"]
    for text, row in zip(texts, generate(texts), strict=True):
        assert row[-5:].tolist() == generate([text])[0, -5:].tolist()


def test_outputs_that_a_config_asks_for_are_left_out_with_a_note(folder, capsys):
    expected = load_policy(folder)(TOKENS).logits
    edit_json(folder / "config.json", output_attentions=True, return_dict=False)
    policy = load_policy(folder)
    assert "output_attentions, return_dict in its config.json is ignored" in capsys.readouterr().err
    assert torch.equal(policy(TOKENS).logits, expected)


def test_outputs_that_a_config_asks_for_are_not_saved_again(folder, tokenizer, tmp_path):
    edit_json(folder / "config.json", output_attentions=True, return_dict=False)
    save_model(load_policy(folder), tokenizer, tmp_path / "saved")
    assert load_policy(tmp_path / "saved")(TOKENS).keys() == {"logits", "past_key_values"}
