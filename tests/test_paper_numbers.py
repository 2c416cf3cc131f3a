"""The transcription in tests/lib/paper_numbers.py: its committed numbers, and the paper's own."""

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
ALONE = "import runpy, sys; sys.modules |= dict.fromkeys(('stages', 'torch')); "  # no import works
ALONE += "runpy.run_module('tests.lib.paper_numbers', run_name='__main__')"


def test_the_script_alone_writes_the_committed_numbers(tmp_path):
    again = tmp_path / "again.json"
    subprocess.run([sys.executable, "-c", ALONE, str(again)], cwd=ROOT, check=True)
    written = json.loads(again.read_text(encoding="utf-8"))
    assert written.keys() == COMMITTED.keys()
    for name, case in written.items():
        assert case.keys() == COMMITTED[name].keys()
        for key in case:
            np.testing.assert_allclose(case[key], COMMITTED[name][key], 0, 1e-7, err_msg=key)


@pytest.mark.parametrize("name", [*paper.CASES, "reward_tiny"])
def test_the_transcription_gives_the_numbers_of_the_papers_code(shared, name):
    arrays = dict(np.load(shared / "golden" / f"{name}.npz"))
    case = {key: x.astype(float) if x.dtype == np.float32 else x for key, x in arrays.items()}
    counts = {}  # where a number counts, if not everywhere
    if name == "reward_tiny":
        weights = load_file(shared / "golden/tiny_neox/model.safetensors")
        outputs = paper.reward_outputs(case, weights, heads=4)
        counts["logprobs"] = case["responses"] != case["pad_token_id"]
        counts["values"] = np.insert(counts["logprobs"][:, :-1], 0, values=True, axis=1)
    else:
        outputs = paper.ppo_outputs(case)
    for key, found in outputs.items():
        difference = np.abs(found * 1.0 - case[key])
        assert np.max(difference[counts.get(key, ...)]) < 1e-5, key


def test_logprobs_entropy_and_the_reward_models_loss_are_those_of_the_transcription():
    case = {key: torch.from_numpy(np.array(value)) for key, value in COMMITTED["small"].items()}
    close(token_logprobs(case["logits"], case["tokens"], 0.7), case["logprobs"], 1e-5)
    close(entropy(case["logits"]), case["entropy"])
    close(preference_loss(case["chosen"], case["rejected"]), case["loss"])
