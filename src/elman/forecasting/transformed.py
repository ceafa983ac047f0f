"""What forecasters have in common that forecast something made of the series, and turn it back."""

from dataclasses import dataclass

from elman.forecasting.base import Forecaster, State


@dataclass
class Transformed(Forecaster):
    """Any forecaster, on another series: all that is learned is its own."""

    inner: Forecaster

    @property
    def learned(self) -> int:
        return self.inner.learned

    def state(self) -> State:
        return self.inner.state()

    def restore(self, state: State) -> None:
        self.inner.restore(state)
