"""What SFT, reward model and DPO share: the begin of their loop, their batches and rates."""

import math
from collections.abc import Sequence

from accelerate import Accelerator
from transformers import PreTrainedModel

from stages.models.lora import adapt
from stages.models.policy import PolicyModel
from stages.runs import Run
from stages.settings.checks import check_dealt, check_filled
from stages.training.learner import Learner
from stages.training.loop import make_optimizer, set_learning_rate, use_gradient_checkpointing
from stages.training.sharding import prepare
from stages.training.state import Order, State


def check_batch(name: str, batch_size: int, rows: int, accelerator: Accelerator) -> None:
    """Raise UserError if a global batch cannot be filled or divided among the processes."""
    check_filled(name, batch_size, rows)
    check_dealt(name, batch_size, accelerator.num_processes)


def begin_supervised(
    run: Run,
    accelerator: Accelerator,
    network: PolicyModel | PreTrainedModel,
    rows: int,
    together: Sequence[Sequence[int]] = (),
) -> State:
    """The loop of a stage that learns `rows` rows of a data set, where it was left.

    `together` are rows that stay neighbours in its order, as in `batch_rows`. The
    stage's own settings section says how; the network gets an adapter if the settings say so.
    """
    config, settings = run.config, getattr(run.config, run.stage)
    model = network.model if isinstance(network, PolicyModel) else network
    adapt(model, config, run.stage)
    use_gradient_checkpointing(model, config.memory)
    optimizer = make_optimizer(network.parameters(), settings.learning_rate, config.optimizer)
    trained, optimizer = prepare(accelerator, network, optimizer)
    learner = Learner(
        stage=run.stage,
        accelerator=accelerator,
        trained=trained,
        optimizer=optimizer,
        microbatch_size=config.memory.microbatch_size,
    )
    size = settings.batch_size
    order = Order(
        rows=rows, batch_size=size, seed=config.seed, purpose=run.stage, together=together
    )
    state = State(
        run=run,
        learner=learner,
        updates=settings.epochs * rows // size,
        order=order,
        dropout=getattr(settings, "dropout", 0.0),
    )
    state.load()
    return state


def set_rate(state: State, learning_rate: float) -> float:
    """Set and return this update's learning rate: warm-up, then a cosine."""
    warmup_fraction = state.run.config.optimizer.warmup_fraction
    rate = learning_rate * cosine_rate(state.update, state.updates, warmup_fraction)
    set_learning_rate(state.learner.optimizer, rate)
    return rate


def cosine_rate(update: int, updates: int, warmup_fraction: float) -> float:
    """Share of the learning rate at an update counted from 0: linear warm-up, cosine to 0."""
    warmup = round(warmup_fraction * updates)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))
