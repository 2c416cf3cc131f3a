"""Checks that settings fit the data, the processes and the model."""

from stages.config.errors import UserError


def check_batch_not_larger_than_data(section: str, batch_size: int, rows: int) -> None:
    """Raise UserError if a stage's batch is larger than the number of rows."""
    if batch_size > rows:
        raise UserError(
            f"{section}.batch_size is {batch_size} but there are only {rows} rows: lower it"
        )


def check_batch_divides(
    section: str, batch_size: int, processes: int, num_minibatches: int = 1, samples: int = 1
) -> None:
    """Raise UserError if a batch cannot be divided into equal minibatches for all processes.

    The `samples` of a query stay together.
    """
    if batch_size % (processes * num_minibatches * samples) == 0:
        return
    factors = f"{processes} (processes)"
    if num_minibatches > 1:
        factors += f" times {section}.num_minibatches={num_minibatches}"
    if samples > 1:
        factors += f" times {section}.samples_per_query={samples}"
    raise UserError(f"{section}.batch_size is {batch_size}: it must be divisible by {factors}")


def check_context_length(positions: int, query: int, response: int, setting: str) -> None:
    """Raise UserError if a model has fewer positions than query and response have tokens."""
    if query + response > positions:
        raise UserError(
            f"{setting} is {response}, after queries of up to {query} tokens, but the model has "
            f"{positions} positions: lower it, or data.max_query_tokens"
        )
