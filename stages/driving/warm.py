"""Libraries are loaded once for several stages: the pipeline loads them, and forks each stage.

To load torch and transformers takes a core some ten seconds, and the run on the built-in world has
six stages that do; the others load numpy and scipy. Nothing but imports happens before the fork,
so a stage finds what a new interpreter would give it. Where there is an accelerator each stage has
an interpreter of its own: a driver that some import has woken does not survive a fork.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from stages.driving.start import load
from stages.running.signals import handled_signals
from stages.settings.checks import in_one_line

PR_SET_PDEATHSIG = 1  # of Linux, where alone stages are forked
DRIVERS = ("nvidia*", "nvmap", "dxg", "kfd", "accel*")


def can_be_forked() -> bool:
    """Whether stages may be forked on this machine: Linux, and no accelerator."""
    has_driver = any(any(Path("/dev").glob(pattern)) for pattern in DRIVERS)
    return sys.platform == "linux" and not has_driver


def loaded(module: str) -> ModuleType:
    """A stage's module. A Ctrl-C while its libraries load ends this process with one line."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return load(module)
    finally:
        signal.signal(signal.SIGINT, handler)


def fork(
    module: ModuleType, arguments: Sequence[str], environment: Mapping[str, str]
) -> BaseProcess:
    """Start a stage in a fork of this process."""
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(module, arguments, environment, os.getpid())
    )
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())  # until the stage handles them
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
    return process


def _run(
    module: ModuleType, arguments: Sequence[str], environment: Mapping[str, str], parent: int
) -> None:
    """The stage, in its process. It dies with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    os.environ.update(environment)
    for number in handled_signals():
        is_ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
    with in_one_line():
        module.main(arguments)
