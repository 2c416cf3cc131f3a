"""Code that SFT, reward model and DPO share: the start of their loop, batches, learning rates."""

from collections.abc import Sequence

from accelerate import Accelerator
from transformers import PreTrainedModel

from stages.config.fitting import check_batch_divides, check_batch_not_larger_than_data
from stages.config.sections import Supervised
from stages.models.lora import adapt
from stages.models.policy import PolicyModel
from stages.runs.run import Run
from stages.training.accelerator import prepare
from stages.training.memory import MemoryBudget, use_gradient_checkpointing
from stages.training.optimizer import cosine_rate, make_optimizer, set_learning_rate
from stages.training.state import Order, State
from stages.training.step import Learner


def check_batch(stage: str, batch_size: int, rows: int, accelerator: Accelerator) -> None:
    """Raise UserError if there are too few rows for a batch, or if processes cannot divide it."""
    check_batch_not_larger_than_data(stage, batch_size, rows)
    check_batch_divides(stage, batch_size, accelerator.num_processes)


def begin_supervised(
    run: Run,
    accelerator: Accelerator,
    budget: MemoryBudget,
    network: PolicyModel | PreTrainedModel,
    settings: Supervised,
    rows: int,
    groups: Sequence[Sequence[int]] = (),
    dropout: float = 0.0,
) -> State:
    """Return the training loop of a stage, at the update where an earlier attempt left it.

    It goes through the `rows` rows of a data set for `settings.epochs` epochs; the rows of each of
    the `groups` stay neighbors, as in `batch_rows`. The network gets an adapter (LoRA) and gradient
    checkpointing if the settings say so.
    """
    config = run.config
    model = network.model if isinstance(network, PolicyModel) else network
    adapt(model, config, run.stage)
    use_gradient_checkpointing(model, config.memory)
    optimizer = make_optimizer(network.parameters(), settings.learning_rate, config.optimizer)
    trained, prepared_optimizer = prepare(accelerator, network, optimizer)
    state = State(
        run=run,
        learner=Learner(
            stage=run.stage,
            accelerator=accelerator,
            budget=budget,
            trained=trained,
            optimizer=prepared_optimizer,
        ),
        updates=settings.epochs * rows // settings.batch_size,
        order=Order(
            rows=rows,
            batch_size=settings.batch_size,
            seed=config.seed,
            purpose=run.stage,
            groups=groups,
        ),
        dropout=dropout,
    )
    state.load()
    return state


def set_rate(state: State, learning_rate: float) -> float:
    """Set and return this update's learning rate: a linear warm-up, then a cosine to 0."""
    share = cosine_rate(state.update, state.updates, state.run.config.optimizer.warmup_fraction)
    rate = learning_rate * share
    set_learning_rate(state.learner.optimizer, rate)
    return rate
