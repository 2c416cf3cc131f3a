"""How far a stage is and what it learns, on a terminal or in a log, and signals that stop it.

A stage that is to stop finishes what is under way; then `Stopped` is raised. The loops ask for it
between two updates or parts. One process has one set of signals, so this module keeps what has been
asked. Standard library only, but for the bar, which is tqdm's.
"""

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from stages.config.checks import print_nowhere, say_error

T = TypeVar("T")
Note = Callable[[int, float], None]
Numbers = Callable[[], Mapping[str, Any]]
SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_NOTES = 2.0
SECONDS_BEFORE_BAR = 1.0
COLUMNS = 80
BAR = 34  # columns of a bar that numbers leave to it, its counts and its time
# Metrics and results that a terminal shows of a stage, and how; the first matter most. EV: share
# of the variance of returns that the critic explains.
SHOWN = {
    "objective/scores": "score {:.2f}",
    "objective/kl": "KL {:.1f}",
    "loss/train": "loss {:.3f}",
    "accuracy/train": "accuracy {:.0%}",
    "rewards/accuracies": "accuracy {:.0%}",
    "accuracy": "{:.1%} of held-out pairs right",
    "loss": "held-out loss {:.3f}",
    "loss/validation": "held-out loss {:.3f}",
    "rougeL": "ROUGE-L {:.3f}",
    "mean_before": "mean score of the references was {:.2f}",
    "policy/response_length": "length {:.1f}",
    "policy/eos_rate": "end {:.0%}",
    "val/explained_variance": "EV {:.2f}",
}


def progress(
    items: Iterable[T],
    label: str,
    total: int,
    done: int = 0,
    note: Note | None = None,
    numbers: Numbers = dict,
) -> Iterator[T]:
    """Pass the items on; show how many are done and how long the rest takes.

    `done` of the `total` were done before. Every few seconds `note` gets the number of items that
    are done and the seconds that are left. `numbers` are the metrics to watch, as they are by then.
    """
    started = last_line = last_note = time.monotonic()
    bar = _bar(items, label, total, done) if sys.stderr.isatty() else None
    for count, item in enumerate(items if bar is None else bar, start=1):
        yield item
        now = time.monotonic()
        left = (now - started) / count * (total - done - count)
        if note is not None and now - last_note >= SECONDS_BETWEEN_NOTES:
            note(done + count, left)
            last_note = now
        if bar is not None:
            shown = with_numbers("", numbers(), COLUMNS - len(label) - BAR)
            bar.set_postfix_str(shown, refresh=False)
        elif now - last_line >= SECONDS_BETWEEN_LINES and done + count < total:
            _say(f"{label}: {done + count}/{total}, {left:.0f} s left", numbers())
            last_line = now


def say_result(stage: str, seconds: float, results: Mapping[str, Any]) -> None:
    """One line about a stage that has finished; nothing where no result is one to look at."""
    if not results.keys().isdisjoint(SHOWN):
        _say(f"{stage}: done in {seconds:.0f} s", results)


def with_numbers(start: str, numbers: Mapping[str, Any], width: int) -> str:
    """A text and as many of the numbers in `SHOWN` as there is room for."""
    known = ((form, numbers.get(name)) for name, form in SHOWN.items())
    parts = [form.format(value) for form, value in known if isinstance(value, int | float)]
    if "loss/value_avg" in numbers and "loss/policy_avg" not in numbers:
        parts.insert(0, "the critic learns alone")
    while parts and len(text := f"{start}: {', '.join(parts)}".removeprefix(": ")) > width:
        parts.pop()
    return text if parts else start


def _say(start: str, numbers: Mapping[str, Any]) -> None:
    print(with_numbers(start, numbers, COLUMNS), file=sys.stderr, flush=True)


def _bar(items: Iterable[T], label: str, total: int, done: int) -> Any:
    from tqdm import tqdm

    shown = "{desc}: {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
    form = {"ncols": COLUMNS, "bar_format": shown, "delay": SECONDS_BEFORE_BAR}
    return tqdm(items, desc=label, total=total, initial=done, **form)


def folded(text: str, more: str = "    ") -> list[str]:
    """A text in lines of at most 80 columns; `more` stands before each but the first."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent=more, break_on_hyphens=False)


def told(who: str, text: str) -> str:
    """What somebody says, in lines that begin with the name, if it is short: logs are searched."""
    mark = f"{who}: "
    return "\n".join(folded(mark + text, mark if len(mark) <= COLUMNS / 2 else "    "))


# -- signals ---------------------------------------------------------------------------------------

SETTLE_SECONDS = 2.0
"""What drives a process passes a signal on that it already had from the terminal or with its group.
Within this time it counts as the same signal."""
ANSWER = "{}: finishes the update or batch that is under way; a second one stops now\n"
CALLER_SAYS_STOP = "CALLER_SAYS_STOP"
"""Set by a caller that says itself how its whole work goes on, so that a stop is one line."""
GOES_ON_WITH = "GOES_ON_WITH"
"""Set by a caller: the command with which its whole work goes on."""
_asked: list[tuple[int, float]] = []  # signal and monotonic time, at most one
_finishing: list[int] = []  # one item for each thing under way that is to be finished first


class Stopped(BaseException):
    """A signal has stopped the stage, which can go on; like KeyboardInterrupt, no Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_asked() -> int:
    """The number of the signal that asked this process to stop, or 0."""
    return _asked[0][0] if _asked else 0


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a stage: Ctrl-C, SIGTERM, and a terminal that closes, unless `nohup`
    has that ignored.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return always if ignored else (*always, signal.SIGHUP)


def ask_to_stop(number: int) -> bool:
    """Note a signal; False if it is the second one, which ends the process at once. Raises Stopped
    if nothing is under way that must be finished first.
    """
    if _asked:
        first, since = _asked[0]
        passed_on = number == first and number != signal.SIGINT  # Ctrl-C may be pressed twice
        echo = passed_on or int(os.environ.get("WORLD_SIZE", "1")) > 1
        return echo and time.monotonic() - since < SETTLE_SECONDS
    _asked.append((number, time.monotonic()))
    if not _finishing:
        raise Stopped(number)
    if os.environ.get("RANK", "0") == "0" and CALLER_SAYS_STOP not in os.environ:
        answer_at_once(number)
    return True


def answer_at_once(number: int) -> None:
    """Say on stderr that a signal has come, and what happens now; in a handler, nothing waits."""
    leave_closed_terminal()
    with suppress(OSError):
        os.write(2, ANSWER.format(signal.Signals(number).name).encode())


def say_if_killed(stage: str, status: int) -> None:
    """Say on stderr that a stage was killed: it could not say so itself."""
    if status == 128 + signal.SIGKILL:
        killed = f"stage {stage} was killed (SIGKILL), by somebody or for lack of memory"
        say_error(f"error: {killed}: the same command, without REPLACE, goes on")


def leave_closed_terminal() -> None:
    """Where the terminal has closed, print nowhere: an error there would end what is finishing."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.write(stream.fileno(), b"")
        except OSError:
            print_nowhere(stream)


def forget_signals() -> None:
    """Forget all signals, for the next stage in this process."""
    _asked.clear()
    _finishing.clear()


@contextmanager
def finishing_first() -> Iterator[None]:
    """A context that no signal interrupts; the code in it must call `stop_asked` often enough."""
    _finishing.append(1)
    try:
        yield
    finally:
        del _finishing[-1:]
