"""What the reward model and SFT learn, compared with forward passes written out here.

Training and evaluation share `score_pairs` and `summed_loss`, so no accuracy and no loss shows a
mistake in them. Here each row goes through the plain model on its own, without padding, masks or
position ids.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stages.config.command_line import make_config
from stages.data.lengths import Limits
from stages.data.ragged import TokenizedSplit
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from stages.models.policy import PolicyModel
from stages.rm import score_pairs, take_step
from stages.sft import count_tokens, summed_loss
from tests.lib.asserts import close
from tests.lib.learners import state_of

CPU = torch.device("cpu")
POST = {"subreddit": "tifu", "title": "my bike", "post": "My boss sold my bike."}
LIMITS = Limits(query=300, response=100, query_response=400)


def comparison(first: str, second: str, choice: int, post: str = POST["post"]) -> dict[str, Any]:
    """A row as OpenAI published them."""
    return {
        "info": {**POST, "id": "t3_1", "post": post},
        "summaries": [{"text": text, "policy": "p", "note": None} for text in (first, second)],
        "choice": choice,
        "worker": "w",
        "batch": "b",
        "split": "s",
        "extra": {"confidence": None},
    }


PAIRS = [
    comparison(" My boss sold my bike.", " bike", 0),
    comparison(" no", " My boss sold it, and I walk.", 1, post="I walk. " * 5),
    comparison(" A bike and a boss.", " A boss", 1),
]


@pytest.fixture
def pairs(tokenizer) -> TokenizedSplit:
    located = [(f"f:{number}", row) for number, row in enumerate(PAIRS)]
    return tokenize_comparisons(located, tokenizer, LIMITS, "comparisons_train")


def score_by_hand(reward_model, tokenizer, row: dict[str, Any], text: str) -> torch.Tensor:
    """The scalar at the token EOS of one prompt and summary."""
    info = row["info"]
    prompt = f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}\n\nPOST: {info['post']}"
    ids = [*tokenizer(f"{prompt}\n\nTL;DR:{text}").input_ids, tokenizer.eos_token_id]
    scalars = reward_model(torch.tensor([ids])).logits[0, :, 0]
    assert len(scalars) == len(ids)
    return scalars[len(ids) - 1]


def scores_by_hand(reward_model, tokenizer, row: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The scores of the chosen and of the rejected summary."""
    texts = [summary["text"] for summary in row["summaries"]]
    order = (row["choice"], 1 - row["choice"])
    return tuple(score_by_hand(reward_model, tokenizer, row, texts[index]) for index in order)


def test_the_chosen_and_the_rejected_summary_are_scored_at_their_eos(
    reward_model, tokenizer, pairs
):
    chosen, rejected = score_pairs(reward_model, pairs, range(len(PAIRS)), CPU)
    for number, row in enumerate(PAIRS):
        expected_chosen, expected_rejected = scores_by_hand(reward_model, tokenizer, row)
        close(chosen[number], expected_chosen, 1e-5)
        close(rejected[number], expected_rejected, 1e-5)


def test_a_step_of_the_reward_model_raises_what_people_chose_above_what_they_did_not(
    reward_model, tokenizer, pairs
):
    """The gradient is that of -log sigmoid(chosen - rejected), and of 0.001 times the square of
    their sum, which centers the scores of `tiny`, computed for each text by hand.
    """
    by_hand = copy.deepcopy(reward_model)
    losses = []
    for row in PAIRS:
        chosen, rejected = scores_by_hand(by_hand, tokenizer, row)
        losses.append(-F.logsigmoid(chosen - rejected) + 0.001 * (chosen + rejected) ** 2)
    torch.stack(losses).mean().backward()
    with torch.no_grad():
        for weight in by_hand.parameters():
            weight -= 0.1 * weight.grad

    ours = copy.deepcopy(reward_model)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    state = state_of(make_config("tiny"), ours, optimizer)
    statistics = take_step(state, pairs, list(range(len(PAIRS))))

    mean_loss = sum(loss.item() for loss in losses) / len(losses)
    assert statistics["loss/train"] == pytest.approx(mean_loss)
    for found, expected in zip(ours.parameters(), by_hand.parameters(), strict=True):
        close(found.detach(), expected.detach(), 1e-5)


@pytest.mark.parametrize("loss_on_query", [True, False])
def test_the_sft_loss_counts_the_tokens_that_the_setting_names(policy, tokenizer, loss_on_query):
    rows = [
        {**POST, "id": "1", "summary": "My boss sold my bike."},
        {**POST, "id": "2", "summary": "bike", "post": "I walk. " * 6},
    ]
    located = [(f"f:{number}", row) for number, row in enumerate(rows)]
    split = tokenize_posts(located, tokenizer, LIMITS, "sft_train")

    expected = torch.tensor(0.0)
    tokens = 0
    for row in rows:
        prompt = f"SUBREDDIT: r/tifu\n\nTITLE: my bike\n\nPOST: {row['post']}\n\nTL;DR:"
        query = tokenizer(prompt).input_ids
        ids = query + tokenizer(f" {row['summary']}").input_ids + [tokenizer.eos_token_id]
        logprobs = policy(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        start = 1 if loss_on_query else len(query)
        for place in range(start, len(ids)):
            expected = expected - logprobs[place - 1, ids[place]]
            tokens += 1

    found = summed_loss(PolicyModel(policy), split, [0, 1], loss_on_query, CPU)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert count_tokens(split, [0, 1], loss_on_query) == tokens
