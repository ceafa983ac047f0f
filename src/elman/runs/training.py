"""Training in a run folder: every record kept, checkpoints in time, the result at the end."""

import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from elman.files import write_text
from elman.runs.card import model_card
from elman.runs.folder import Run
from elman.runs.log import Log, writing
from elman.scoring import metrics
from elman.training import Record, Result, Training, Validation
from elman.training.interrupts import whole


def train(
    run: Run,
    training: Training,
    *,
    every_steps: int = 0,
    every_seconds: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
    remarks: Callable[[Record], Iterable[Record]] = lambda record: (),
) -> Iterator[Record]:
    """Train to the end, or until `stop()`, keeping the folder in step; yields every record.

    The `remarks` on a record, such as a sample of the model's writing, are kept and yielded after
    it. A checkpoint is written every so many updates, every so many seconds, with each better
    validation, when stopped, where the loop over the records is left, and at the end. A run that
    this one replaces is deleted with the first that is due; where the training fails before that,
    it is put back. Ctrl-C stops it between two records, and training again goes on from there.
    """
    return whole(_records(run, training, every_steps, every_seconds, stop, remarks))


def _records(
    run: Run,
    training: Training,
    every_steps: int,
    every_seconds: float,
    stop: Callable[[], bool],
    remarks: Callable[[Record], Iterable[Record]],
) -> Generator[Record, None, None]:
    saved_at, agree, stopped = time.monotonic(), training.processes.agree, False
    with run.owned(), _given_up_if_it_fails(run), writing(run.path, run.writes) as log:
        for record in training.records():
            told = [record, *(remarks(record) if run.writes else ())]
            log.append(*told)
            better = isinstance(record, Validation) and record.improved
            late = every_seconds > 0 and time.monotonic() - saved_at >= every_seconds
            late, stopped = agree(late and run.writes, stop())
            if better or late or (every_steps and training.step % every_steps == 0):
                _checkpoint(run, training, log, better)
                run.forget_replaced()
                saved_at = time.monotonic()
            try:
                yield from told
            except GeneratorExit:  # the loop was left, unless Python itself ends
                if training.processes.size == 1 and not sys.is_finalizing():
                    _checkpoint(run, training, log, better=False)
                raise
            if stopped:
                break
        _checkpoint(run, training, log, better=False)
        if not stopped:
            run.forget_replaced()


def tell(run: Run, training: Training, record: Record) -> None:
    """Add a record between two others, with a checkpoint that has it."""
    with run.owned(), writing(run.path, run.writes) as log:
        log.append(record)
        _checkpoint(run, training, log, better=False)


def conclude(run: Run, training: Training) -> Result | None:
    """Score the run's weights on the part that is reported; add that to the record and the card.

    The score is by the definition: one lane, the state never reset. None where nothing is held out.
    """
    if not run.writes:
        return None
    with run.owned():
        result = _result(run, training)
        if result is not None:
            with writing(run.path, run.writes) as log:
                log.append(result)
        write_text(run.path / "README.md", model_card(run))
    return result


@contextmanager
def _given_up_if_it_fails(run: Run) -> Iterator[None]:
    try:
        yield
    except (Exception, KeyboardInterrupt):
        run.give_up()
        raise


def _result(run: Run, training: Training) -> Result | None:
    parts = run.splits()
    if len(parts.reported) == 0:
        return None
    score = metrics.evaluate(run.load_model(training.device), parts.reported)
    return Result(
        step=_step_of(run, training),
        tokens=score.tokens,
        nats_per_token=score.nats_per_token,
        perplexity=score.perplexity,
        bits_per_char=score.bits_per_char(parts.predicted_characters),
        part=parts.part,
    )


def _step_of(run: Run, training: Training) -> int:
    """After which update the run's weights were as they are; never validated, the last are best."""
    chosen = run.config.shown.weights == "best" and math.isfinite(training.best)
    return training.best_step if chosen else training.step


def _checkpoint(run: Run, training: Training, log: Log, better: bool) -> None:
    length = log.write_all()
    run.restore()
    if better or math.isinf(training.best):  # never validated: the latest weights are the best
        run.save_best(training)
    run.save_state(training, length)
