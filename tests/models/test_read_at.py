"""Where a score is read (`rm.read_at`): by hand in both ways of scoring, and in every stage."""

import json

import pytest
import torch
from transformers import AutoModelForTokenClassification, Qwen2Config

from eval import summaries
from stages import base, normalize, ppo, rm, sft
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.data.ragged import load_split, pad_left, pad_right
from stages.models.foreign import load_released_reward_model
from stages.models.forward import (
    ResponseBatch,
    head_scalars,
    score_responses,
    shares_query,
    summary_scores,
    token_read_before,
)
from stages.models.loading import load_reward_model, save_model
from stages.models.tokenizers import load_tokenizer
from stages.rl import start_checks
from stages.rm import read_scores_before
from stages.runs.files import read_json, read_lines
from tests.lib.asserts import close
from tests.lib.families import CONFIGS, GROUPED, random_model
from tests.lib.make_stages import run_module

CPU = torch.device("cpu")
EOS = 0
PAD = -1
QUERIES = [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15]]
# Ended, cut before an EOS, EOS alone; then the other way round, and of other lengths.
SUMMARIES = [[[3, 4, EOS], [2, 3, 4, 5], [EOS]], [[EOS], [3, EOS], [6, 7]]]
WINDOW = {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0}
# Whether a row holds several summaries -> a model for which it does.
SHARES = {True: CONFIGS["llama"], False: Qwen2Config(**GROUPED, **WINDOW)}


def tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


def scored(model, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    batch = ResponseBatch(queries=queries, responses=responses, pad_id=PAD)
    return score_responses(model, batch)


def by_hand(model, before_eos: bool) -> list[list[float]]:
    """Each text alone through the plain model, up to where the score is read, and no further."""
    scores = []
    for each in SUMMARIES:
        texts = [query + summary for query, summary in zip(QUERIES, each, strict=True)]
        read = [text[:-1] if before_eos and text[-1] == EOS else text for text in texts]
        scores.append([model(torch.tensor([text])).logits[0, -1, 0].item() for text in read])
    return scores


@torch.no_grad()
@pytest.mark.parametrize("before_eos", [False, True])
@pytest.mark.parametrize("shares", SHARES)
def test_scores_are_those_of_the_text_up_to_where_they_are_read(shares, before_eos):
    model = random_model(AutoModelForTokenClassification, SHARES[shares])
    assert shares_query(model, 64) == shares
    if before_eos:
        read_scores_before(model, EOS)
    expected = torch.tensor(by_hand(model, before_eos))
    queries = pad_left(tensors(QUERIES), PAD)
    both = summary_scores(model, tensors(QUERIES), [tensors(each) for each in SUMMARIES], CPU)
    close(both.float(), expected, 1e-6)
    for summaries_, scores in zip(SUMMARIES, expected, strict=True):
        alone = summary_scores(model, tensors(QUERIES), [tensors(summaries_)], CPU)[0]
        close(alone.float(), scores, 1e-6)

        padded_left = scored(model, queries, pad_right(tensors(summaries_), PAD))
        close(padded_left.float(), scores, 1e-6)

        # Padding on the right only: the whole text as the response of an empty query.
        texts = [query + summary for query, summary in zip(QUERIES, summaries_, strict=True)]
        no_query = torch.empty(len(texts), 0, dtype=torch.long)
        padded_right = scored(model, no_query, pad_right(tensors(texts), PAD))
        close(padded_right.float(), scores, 1e-6)


@torch.no_grad()
def test_by_default_a_score_is_the_scalar_of_the_last_token_to_the_bit(reward_model):
    assert make_config("tiny").rm.read_at == "eos"
    texts = [query + summary for query, summary in zip(QUERIES, SUMMARIES[0], strict=True)]
    scalars = head_scalars(reward_model, {"input_ids": pad_right(tensors(texts), 0)})
    last_columns = [len(text) - 1 for text in texts]
    queries = pad_left(tensors(QUERIES), PAD)
    responses = pad_right(tensors(SUMMARIES[0]), PAD)
    scores = scored(reward_model, queries, responses)
    assert torch.equal(scores, scalars[torch.arange(3), last_columns])


def load_released(folder):
    model, _ = load_released_reward_model(folder)
    return model


@pytest.mark.parametrize("load", [load_reward_model, load_released])
def test_a_saved_model_says_that_it_is_read_before_eos(reward_model, tokenizer, tmp_path, load):
    read_scores_before(reward_model, EOS)
    save_model(reward_model, tokenizer, tmp_path)
    assert read_json(tmp_path / "config.json")["score_before_token"] == EOS
    loaded = load(tmp_path)
    assert token_read_before(loaded) == EOS
    assert token_read_before(torch.nn.DataParallel(loaded)) == EOS


@pytest.mark.parametrize("load", [load_reward_model, load_released])
def test_a_saved_model_that_says_nothing_is_read_at_eos(reward_model, tokenizer, tmp_path, load):
    save_model(reward_model, tokenizer, tmp_path)
    assert "score_before_token" not in read_json(tmp_path / "config.json")
    loaded = load(tmp_path)
    assert token_read_before(loaded) is None
    assert token_read_before(torch.nn.DataParallel(loaded)) is None


def test_another_place_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^rm.read_at must be 'eos' or 'before_eos', not 'end'$"):
        make_config("tiny", name="mine", overrides=("rm.read_at=end",))


# -- through the stages ----------------------------------------------------------------------------

MEMORY = ["memory.cpu_threads=1", "memory.microbatch_size=6", "memory.forward_batch_size=8"]
UPSTREAM = [
    "base.hidden_size=32",
    "base.num_layers=2",
    "world.train_posts=96",
    "world.validation_posts=10",
    "world.train_comparisons=64",
    "world.validation_comparisons=20",
    *MEMORY,
]
READ_BEFORE_EOS = [
    "rm.read_at=before_eos",
    "ppo.total_episodes=32",
    "ppo.batch_size=16",
    "ppo.samples_every=2",
    "ppo.critic_updates=0",
    "rloo.total_episodes=32",
    "rloo.batch_size=16",
    "rloo.samples_every=2",
    *MEMORY,
]


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    """A run with base and SFT, and one that reads before EOS and makes all that follows."""
    root = tmp_path_factory.mktemp("read")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage in (base, sft):
            run_module(stage, ["--preset", "tiny", "--name", "plain", "--set", *UPSTREAM])
        arguments = ["--preset", "tiny", "--name", "before", "--upstream", "plain", "--set"]
        arguments += READ_BEFORE_EOS
        for stage in (rm, normalize, ppo):
            run_module(stage, arguments)
        run_module(ppo, arguments, "rloo")
        run_module(summaries, arguments)
    return root / "runs"


def test_a_run_shares_what_comes_before_the_reward_model_and_makes_the_rest(runs_folder):
    own = {path.name for path in (runs_folder / "before/seed44413").iterdir() if path.is_dir()}
    assert own == {"rm", "normalize", "ppo", "rloo", "summaries"}
    made_from = (read_json(runs_folder / "before/seed44413/rm/manifest.json") or {})["inputs"]
    sft_made = read_json(runs_folder / "plain/seed44413/sft/manifest.json") or {}
    assert made_from["sft"] == sft_made["content"]


@torch.no_grad()
def test_every_stage_reads_a_model_where_it_was_trained(runs_folder):
    run = runs_folder / "before/seed44413"
    eos_id = load_tokenizer(run / "rm/model").eos_token_id
    for folder in ("rm/model", "normalize/model", "ppo/critic"):
        assert (read_json(run / folder / "config.json") or {})["score_before_token"] == eos_id
    plain = AutoModelForTokenClassification.from_pretrained(run / "normalize/model")

    def before_eos(query: list[int], response: list[int]) -> float:
        text = query + (response[:-1] if response[-1] == eos_id else response)
        return plain(torch.tensor([text])).logits[0, -1, 0].item()

    known = json.loads((run / "normalize" / start_checks.KNOWN_ANSWERS).read_text())
    assert all(answer["response"][-1] == eos_id for answer in known)
    for answer in known[:5]:
        expected = before_eos(answer["query"], answer["response"])
        assert answer["score"] == pytest.approx(expected, abs=1e-5)
    held_out = load_split(runs_folder / "plain/seed44413/base/data", "sft_validation").columns
    for number, row in enumerate(read_lines(run / "summaries/ppo.jsonl")):
        query, reference = (held_out[name][number].tolist() for name in ("queries", "summaries"))
        assert row["reference_score"] == pytest.approx(before_eos(query, reference), abs=1e-4)


def test_held_out_pairs_are_ranked_where_the_model_is_read(runs_folder):
    run = runs_folder / "before/seed44413"
    pairs = load_split(runs_folder / "plain/seed44413/base/data", "comparisons_validation").columns
    plain = AutoModelForTokenClassification.from_pretrained(run / "rm/model")
    for number, row in enumerate(read_lines(run / "rm/held_out_pairs.jsonl")[:5]):
        chosen, rejected = (
            plain(torch.cat([pairs["queries"][number], pairs[name][number][:-1]])[None])
            for name in ("chosen", "rejected")
        )
        gap = (chosen.logits[0, -1, 0] - rejected.logits[0, -1, 0]).item()
        assert row["gap"] == pytest.approx(gap, abs=1e-5)
