"""The transcription in tests/lib/paper_numbers.py gives its committed numbers and the paper's."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from stages.functional import entropy, preference_loss, token_logprobs
from tests.lib import paper_numbers as paper
from tests.lib.asserts import close
from tests.lib.places import ROOT

COMMITTED = json.loads(paper.NUMBERS.read_text(encoding="utf-8"))
# Neither `stages` nor torch can be imported.
RUN_ALONE = """
import runpy, sys
sys.modules["stages"] = None
sys.modules["torch"] = None
runpy.run_module("tests.lib.paper_numbers", run_name="__main__")
"""


def test_the_script_alone_writes_the_committed_numbers(tmp_path):
    path = tmp_path / "numbers.json"

    subprocess.run([sys.executable, "-c", RUN_ALONE, str(path)], cwd=ROOT, check=True)

    cases = json.loads(path.read_text(encoding="utf-8"))
    assert cases.keys() == COMMITTED.keys()
    for name, case in cases.items():
        assert case.keys() == COMMITTED[name].keys()
        for key, value in case.items():
            np.testing.assert_allclose(value, COMMITTED[name][key], rtol=0, atol=1e-7, err_msg=key)


def load_golden(path):
    """The arrays of a golden case, in float64 where they were float32."""
    case = dict(np.load(path))
    for key, array in case.items():
        if array.dtype == np.float32:
            case[key] = array.astype(float)
    return case


@pytest.mark.parametrize("name", paper.CASES)
def test_the_transcription_gives_the_losses_of_the_papers_code(shared, name):
    case = load_golden(shared / "golden" / f"{name}.npz")
    for key, value in paper.ppo_outputs(case).items():
        np.testing.assert_allclose(value * 1.0, case[key], rtol=0, atol=1e-5, err_msg=key)


def test_the_transcription_gives_the_scores_of_the_papers_code(shared):
    case = load_golden(shared / "golden/reward_tiny.npz")
    weights = load_file(shared / "golden/tiny_neox/model.safetensors")

    outputs = paper.reward_outputs(case, weights, heads=4)

    response_mask = case["responses"] != case["pad_token_id"]
    value_mask = np.insert(response_mask[:, :-1], 0, values=True, axis=1)  # one token further
    assert outputs.keys() == {"rewards", "values", "logprobs"}
    assert np.abs(outputs["rewards"] - case["rewards"]).max() < 1e-5
    assert np.abs(outputs["values"] - case["values"])[value_mask].max() < 1e-5
    assert np.abs(outputs["logprobs"] - case["logprobs"])[response_mask].max() < 1e-5


def test_logprobs_entropy_and_the_reward_models_loss_are_those_of_the_transcription():
    case = {key: torch.from_numpy(np.array(value)) for key, value in COMMITTED["small"].items()}
    close(token_logprobs(case["logits"], case["tokens"], 0.7), case["logprobs"], 1e-5)
    close(entropy(case["logits"]), case["entropy"])
    close(preference_loss(case["chosen"], case["rejected"]), case["loss"])
