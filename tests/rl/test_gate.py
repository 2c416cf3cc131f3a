"""ppo.baseline=gated: the critic is used where it explains more of the returns than a constant."""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from stages.rl.update_checks import UpdateCheckError, check_advantages
from stages.runs.files import read_json
from tests.lib.critic_gate import GATED, open_gate
from tests.lib.episodes import PAD, two_episodes
from tests.lib.learners import rollout_from
from tests.lib.processes import launch

SCRIPT = """
import json
from accelerate import Accelerator
from stages.pipeline.start import end_process
from tests.lib.critic_gate import open_gate
accelerator = Accelerator()
factor = {factors}[accelerator.process_index]
with open(f"{{accelerator.process_index}}.json", "w") as file:
    json.dump(open_gate(accelerator, factor), file)
end_process()
"""


@pytest.mark.parametrize(("factor", "explains"), [(0.5, 0.75), (1.0, 1.0), (-0.5, -1.25)])
def test_the_gate_opens_for_a_critic_that_explains_some_of_the_returns(factor, explains):
    explained, is_open = open_gate(Accelerator(cpu=True), factor)
    assert explained == pytest.approx(explains, abs=1e-5)
    assert is_open == (explains > 0)


@pytest.mark.parametrize(
    ("factor", "chosen", "other"), [(0.5, "critic", "mean"), (-0.5, "mean", "critic")]
)
def test_the_advantages_are_those_of_the_baseline_that_is_used(factor, chosen, other):
    returns = rollout_from(two_episodes(), GATED, PAD).returns
    assert returns is not None
    noise = two_episodes().values
    assert noise is not None
    episodes = two_episodes(values=factor * returns + 0.1 * noise)
    advantages = {}
    for baseline in ("gated", "critic", "mean"):
        rollout = rollout_from(episodes, GATED.changed(baseline=baseline), PAD)
        advantages[baseline] = rollout.advantages
    assert torch.equal(advantages["gated"], advantages[chosen])

    wrong = replace(rollout_from(episodes, GATED, PAD), advantages=advantages[other])
    real = wrong.response_mask
    with pytest.raises(UpdateCheckError, match="advantages are not those"):
        check_advantages("update 1", Accelerator(cpu=True), wrong, real, GATED)


@pytest.mark.walk
@pytest.mark.parametrize(("factors", "opens"), [((1.0, -0.2), True), ((1.0, -1.0), False)])
def test_two_processes_whose_own_episodes_disagree_open_the_gate_alike(tmp_path, factors, opens):
    launched = launch(tmp_path, "ddp", SCRIPT.format(factors=factors))
    assert launched.returncode == 0, launched.stderr[-3000:]
    good, is_open_in_first = read_json(tmp_path / "0.json")
    bad, is_open_in_second = read_json(tmp_path / "1.json")
    assert bad < 0 < good
    assert is_open_in_first is is_open_in_second is opens
