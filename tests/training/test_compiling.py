"""Layers that torch compiles: on the CPU here, as if it had triton."""

from typing import Any

import pytest
import torch

from stages.models.loading import load_policy
from stages.rl.metrics import compilations
from stages.training import compiling
from tests.lib.asserts import close

CPU = torch.device("cpu")


def no_compiler(*args: Any) -> None:
    raise RuntimeError("no compiler here")


@pytest.fixture
def compile_with(monkeypatch):
    """Has layers compiled on the CPU by a backend."""

    def prepare(backend: Any) -> None:
        monkeypatch.setattr(compiling, "is_triton_available", lambda: True)
        monkeypatch.setattr(compiling.COMPILER, "devices", ("cpu",))
        monkeypatch.setattr(compiling.COMPILER, "backend", backend)
        monkeypatch.setattr(compiling.COMPILER, "is_on", False)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    return prepare


def compare_with_uncompiled(policy: Any, uncompiled: Any) -> None:
    """Logits and gradients are equal for rows of several lengths."""
    for length in (5, 9, 12):
        tokens = torch.arange(3 * length).view(3, length)
        logits = policy(input_ids=tokens, use_cache=False).logits
        expected = uncompiled(input_ids=tokens, use_cache=False).logits
        logits.square().mean().backward()
        expected.square().mean().backward()
        close(logits, expected, 1e-10)
    for weight, other in zip(policy.parameters(), uncompiled.parameters(), strict=True):
        close(weight.grad, other.grad, 1e-10)


def test_compiled_layers_give_the_same_numbers_with_one_graph(policy_folder, compile_with):
    uncompiled = load_policy(policy_folder).double()
    policy = load_policy(policy_folder).double()
    compile_with("aot_eager")
    compiling.compile_layers(policy, CPU)

    compare_with_uncompiled(policy, uncompiled)
    assert policy.state_dict().keys() == uncompiled.state_dict().keys()
    policy(input_ids=torch.arange(12).view(2, 6), use_cache=True)  # not compiled
    assert compilations() == {"compilations": 1}


def test_layers_run_uncompiled_after_a_failure_which_is_reported_once(
    policy_folder, compile_with, capsys
):
    uncompiled = load_policy(policy_folder).double()
    policy = load_policy(policy_folder).double()
    compile_with(no_compiler)
    compiling.compile_layers(policy, CPU)

    compare_with_uncompiled(policy, uncompiled)
    assert compilations() == {}
    assert capsys.readouterr().err.count("torch.compile failed") == 1
