"""What the reward model and SFT learn, against forward passes written out here.

Training and evaluation share `score_pairs` and `summed_loss`; a fault in them shows in no accuracy
and no loss of their own. Here each row goes through the plain model alone, without padding, masks
or position ids.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from eval.rates.reward_pairs import calibration, pair_statistics
from stages.data.lengths import Limits
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from stages.rm import score_pairs, take_step
from stages.settings.command_line import make_config
from stages.sft import counted_tokens, summed_loss
from stages.training.learner import batch_rows
from stages.training.preferences import gap_rows, of_pairs, pair_parts, posts_of, summarize_gaps
from tests.lib.asserts import close
from tests.lib.learners import state_of

CPU = torch.device("cpu")
POST = {"subreddit": "tifu", "title": "my bike", "post": "My boss sold my bike."}
LIMITS = Limits(query=300, response=100, query_response=400)


def comparison(first: str, second: str, choice: int, post: str = POST["post"]) -> dict:
    texts = [{"text": text, "policy": "p", "note": None} for text in (first, second)]
    info = {**POST, "id": "t3_1", "post": post}
    return {
        "info": info,
        "summaries": texts,
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


def score_by_hand(reward_model, tokenizer, row: dict, text: str) -> torch.Tensor:
    """The scalar at the token EOS of one prompt and summary."""
    info = row["info"]
    prompt = f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}\n\nPOST: {info['post']}"
    ids = [*tokenizer(f"{prompt}\n\nTL;DR:{text}").input_ids, tokenizer.eos_token_id]
    scalars = reward_model(torch.tensor([ids])).logits[0, :, 0]
    assert len(scalars) == len(ids)
    return scalars[len(ids) - 1]


def test_the_chosen_and_the_rejected_summary_are_scored_at_their_eos(
    reward_model, tokenizer, pairs
):
    chosen, rejected = score_pairs(reward_model, pairs, range(len(PAIRS)), CPU)
    for number, row in enumerate(PAIRS):
        texts = [summary["text"] for summary in row["summaries"]]
        liked, other = texts[row["choice"]], texts[1 - row["choice"]]
        close(chosen[number], score_by_hand(reward_model, tokenizer, row, liked), 1e-5)
        close(rejected[number], score_by_hand(reward_model, tokenizer, row, other), 1e-5)


def test_a_step_of_the_reward_model_raises_what_people_chose_above_what_they_did_not(
    reward_model, tokenizer, pairs
):
    """The gradient is that of -log sigmoid(chosen - rejected), and of 0.001 times the square of
    their sum, which centres the scores of `tiny`, taken over the texts by hand.
    """
    by_hand = copy.deepcopy(reward_model)
    losses = []
    for row in PAIRS:
        texts = [summary["text"] for summary in row["summaries"]]
        chosen, rejected = (
            score_by_hand(by_hand, tokenizer, row, texts[index])
            for index in (row["choice"], 1 - row["choice"])
        )
        losses.append(-F.logsigmoid(chosen - rejected) + 0.001 * (chosen + rejected) ** 2)
    torch.stack(losses).mean().backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter -= 0.1 * parameter.grad
    ours = copy.deepcopy(reward_model)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    state = state_of(make_config("tiny"), ours, optimizer)
    stats = take_step(state, pairs, list(range(len(PAIRS))))
    assert stats["loss/train"] == pytest.approx(sum(one.item() for one in losses) / len(losses))
    for found, expected in zip(ours.parameters(), by_hand.parameters(), strict=True):
        close(found.detach(), expected.detach(), 1e-5)


def test_a_query_and_each_of_its_summaries_are_measured_once(tokenizer, pairs):
    """The first and the third pair are of one post, and share no text; the second has another.
    A fourth compares two texts of the first post that were compared with others before.
    """
    located = [("f:3", comparison(" A boss", " bike", 0))]
    more = tokenize_comparisons(located, tokenizer, LIMITS, "comparisons_train")
    columns = {
        name: make_ragged([*(row.tolist() for row in tokens_of(pairs, name)), more_tokens.tolist()])
        for name, (more_tokens,) in ((name, tokens_of(more, name)) for name in pairs.columns)
    }
    four = TokenizedSplit(columns=columns, rows=[*pairs.rows, *more.rows])
    seen = []

    def lengths(queries, summaries):
        seen.append((len(queries), [[len(text) > 0 for text in texts] for texts in summaries]))
        return torch.tensor([[len(text) for text in texts] for texts in summaries])

    chosen, rejected = of_pairs(four, [2, 1, 0, 3], lengths)
    assert seen == [(2, [[True, True], [True, True], [True, False], [True, False]])]
    for found, name in ((chosen, "chosen"), (rejected, "rejected")):
        assert found.tolist() == [len(tokens_of(four, name)[row]) for row in (2, 1, 0, 3)]
    # Texts of a part: post A has four, post B two.
    assert pair_parts(four, [0, 1, 2, 3], 8) == [[1, 0, 2, 3]]
    assert pair_parts(four, [0, 1, 2, 3], 4) == [[1], [0, 2, 3]]
    assert pair_parts(four, [0, 1, 2, 3], 2) == [[1], [0], [2], [3]]
    assert posts_of(four) == [[0, 2, 3], [1]]


def test_rows_that_belong_together_stay_neighbours_and_every_one_comes_once():
    together = [[0, 3], [1], [2, 4, 5]]
    epochs = [batch_rows(6, 6, epoch, 1, "rm", together) for epoch in range(8)]
    text = ["".join(map(str, epoch)) for epoch in epochs]
    assert all(sorted(one) == list("012345") and "03" in one and "245" in one for one in text)
    assert len(set(text)) > 1
    halves = [batch_rows(6, 3, update, 1, "rm", together) for update in (2, 3)]
    assert [*halves[0], *halves[1]] == epochs[1]


def tokens_of(split, name):
    return [split.columns[name][row] for row in range(len(split))]


def test_the_share_that_is_right_is_counted_by_the_size_of_the_gap():
    """Bins of half a reward unit, by hand: [0, 0.5), [0.5, 1), and [2, 2.5) after three empty."""
    found = calibration([0.2, -0.1, 0.4, 0.6, 0.9, -0.7, 0.99, 2.3])
    assert found == [[0.25, 2 / 3, 3], [0.75, 3 / 4, 4], [2.25, 1.0, 1]]


def test_a_gap_of_0_is_not_right(reward_model, tokenizer, pairs):
    facts = dict.fromkeys(("id", "split", "batch", "policies"), "x") | {"strength": 2}
    columns = {
        "queries": pairs.columns["queries"],
        "chosen": pairs.columns["chosen"],
        "rejected": pairs.columns["chosen"],
    }
    equal = TokenizedSplit(columns=columns, rows=[facts] * 3)
    gaps = [0.0, 0.5, -0.5]
    assert summarize_gaps(gaps)["accuracy"] == pytest.approx(1 / 3)
    found = pair_statistics(gap_rows(gaps, equal))
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["by_batch"]["x"]["accuracy"] == pytest.approx(1 / 3)
    assert found["calibration"][0][1] == 0
    optimizer = torch.optim.SGD(reward_model.parameters(), lr=0.0)
    state = state_of(make_config("tiny"), reward_model, optimizer)
    assert take_step(state, equal, [0, 1, 2])["accuracy/train"] == 0


@pytest.mark.parametrize("on_query", [True, False])
def test_the_sft_loss_counts_the_tokens_that_the_setting_names(policy, tokenizer, on_query):
    rows = [
        {**POST, "id": "1", "summary": "My boss sold my bike."},
        {**POST, "id": "2", "summary": "bike", "post": "I walk. " * 6},
    ]
    located = [(f"f:{number}", row) for number, row in enumerate(rows)]
    split = tokenize_posts(located, tokenizer, LIMITS, "sft_train")
    expected, count = torch.tensor(0.0), 0
    for row in rows:
        prompt = f"SUBREDDIT: r/tifu\n\nTITLE: my bike\n\nPOST: {row['post']}\n\nTL;DR:"
        query = tokenizer(prompt).input_ids
        ids = query + tokenizer(f" {row['summary']}").input_ids + [tokenizer.eos_token_id]
        logprobs = policy(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        for place in range(1 if on_query else len(query), len(ids)):
            expected = expected - logprobs[place - 1, ids[place]]
            count += 1
    found = summed_loss(policy, split, [0, 1], on_query, CPU)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert counted_tokens(split, [0, 1], on_query) == count
