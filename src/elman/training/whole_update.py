"""An update in one go: what every way of running one has."""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from elman import cells
from elman.language_model import LanguageModel, Masks, State
from elman.training.segments import Cut
from elman.training.state import CarriedState

if TYPE_CHECKING:
    from elman.training.loop import Training

Outcome = Callable[[], tuple[float, float]]
"""Gives (nats, ‖g‖), waiting for them where it must."""

Moved = tuple[LanguageModel, torch.optim.Optimizer, float | None]
"""What an update moves: a model, by an optimizer, so far at most."""


class Read(NamedTuple):
    """One window of an update, x and y (batch, time)."""

    x: Tensor
    y: Tensor
    masks: Masks
    fresh: bool = False  # the state before it is the state before any text
    weight: float = 1.0  # of its mean nats in the loss of the update
    cut: Cut | None = None

    def of(self, rows: slice) -> "Read":
        """Some rows of it."""
        return self._replace(x=self.x[rows], y=self.y[rows], masks=self.masks.of(rows))


class WholeUpdate(abc.ABC):
    """`update(reads, rate)` moves the weights, and `state` goes on by itself.

    A loss or norm that is not finite changes neither weights nor state.
    """

    name: ClassVar[str]
    late: int = 0
    """How many updates may follow before an outcome has to be asked for. Once one has failed, those
    that follow change nothing, until `forgive`."""
    averages: bool = False
    """Whether it takes the weights into their average itself, as much as `average` has told it."""

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        batch: int,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = cells.of_model(model.cell).state_sizes(model.hidden_size)
        shapes = [(model.shape.layers, batch, n) for n in sizes]
        self.held = [model.bias_q.detach().new_zeros(shape) for shape in shapes]
        self.state: State = (self.held[0], self.held[1]) if len(shapes) == 2 else self.held[0]
        """After the last update, as the model takes it; overwritten by the next."""

    @staticmethod
    @abc.abstractmethod
    def refuses(training: "Training") -> str | None:
        """Why this way does not suit the training; None if it does."""

    @classmethod
    @abc.abstractmethod
    def of(cls, training: "Training") -> "WholeUpdate":
        """This way, for the updates of a training."""

    @abc.abstractmethod
    def __call__(self, reads: Sequence[Read], rate: float) -> Outcome:
        """From the state that it was told to start from."""

    def start_from(self, state: State) -> None:
        """Go on from `state`; None is the state before any text."""
        if state is self.state:
            return
        given = list(CarriedState(state).state_dict().values()) if state is not None else []
        for i, held in enumerate(self.held):
            if state is None:
                self._forget(held)
            elif given[i] is not held:
                held.copy_(given[i])

    def _forget(self, held: Tensor) -> None:
        held.zero_()

    def average(self, share: float) -> None:
        """How much of the weights the next call takes in, where it `averages`."""
        del share

    def look_again(self) -> None:
        """Something about the model has changed: its weights may lie elsewhere."""
        return

    def look_back(self, read: Read) -> None:
        """Put the gradient of a failed update into `.grad` again, if later ones wrote over it."""
        del read

    def forgive(self) -> None:
        """Let updates change something again, where a failure has stopped them."""
        return


def moved_by(training: "Training") -> Moved:
    """What every update moves, and how far at most."""
    return training.model, training.optimizer, training.settings.optimisation.clip
