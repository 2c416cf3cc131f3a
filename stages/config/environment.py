"""Environment variables that accelerate and launchers read."""

import os
from collections.abc import Sequence

from stages.config.errors import UserError

# What accelerate and peft read from the environment, and torch's launcher.
READ_BY_LIBRARIES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "PET_")
# Where the processes of a launch meet.
RENDEZVOUS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_on(name: str) -> bool:
    """Return whether an environment variable says yes, as accelerate reads it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")


def forget_variables(keep: Sequence[str]) -> None:
    """Remove what accelerate and torch's launcher read from the environment, except for `keep`.

    ACCELERATE_GRADIENT_ACCUMULATION_STEPS=16 would divide every loss by 16, and PET_NNODES=2 would
    wait for a second machine.
    """
    for name in list(os.environ):
        if name.startswith(READ_BY_LIBRARIES) and name not in keep:
            del os.environ[name]


def is_one_of_several() -> bool:
    """Return whether this process is one of several in a launch."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_processes() -> int:
    """Return the number of processes of this launch; 1 without a launcher.

    Raises UserError if the environment declares several processes, as some pods do, but not the
    address at which they meet.
    """
    is_single_process = (
        os.environ.get("RANK", "0") == "0"
        and os.environ.get("WORLD_SIZE", "1") == "1"
        and "LOCAL_RANK" not in os.environ
    )
    if is_single_process:
        return 1

    present = {name: os.environ[name] for name in RENDEZVOUS_VARIABLES if name in os.environ}
    missing = [
        name
        for name in RENDEZVOUS_VARIABLES
        if name not in present or not (present[name].isdigit() or name == "MASTER_ADDR")
    ]
    if missing:
        raise UserError(
            f"the environment has {', '.join(present)}, as for one of several processes, but no"
            f" launcher has set {', '.join(missing)}: unset the former, and use GPUS= to start"
            " several processes"
        )
    return int(present["WORLD_SIZE"])
