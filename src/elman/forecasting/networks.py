"""Networks that forecast: the notes' window model, and the recurrent (latent autoregressive) one.

Both standardise with the training part's mean and spread, predict in those units and undo them, and
train with Adam on squared error, or on the Gaussian likelihood when asked for a distribution.
"""

import abc
import math
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from elman import nn as recurrent
from elman.cells import of_model
from elman.defaults import usual
from elman.errors import UserError, WorkFailed
from elman.forecasting.base import Forecaster, Paths, State, Values, Windows, features
from elman.forecasting.linear import check_window, feed_back
from elman.forecasting.progress import tell
from elman.gradients import Carry, Full, Memory, Stored
from elman.kernels import using
from elman.options import hold_numbers, whole_number
from elman.training.optimizers import Adam


@dataclass(frozen=True)
class Scale:
    """z = (x - mean) / spread, column by column, fitted on the training part alone."""

    mean: Values
    spread: Values

    @classmethod
    def of(cls, series: list[Values]) -> "Scale":
        """The mean and spread of these series together; a constant column keeps its units."""
        values = np.concatenate(series)
        spread = values.std(0)
        return cls(values.mean(0), np.where(spread > 0, spread, 1.0))

    def to(self, x: NDArray[np.float64]) -> Tensor:
        """In units of the spread, from the mean."""
        return torch.as_tensor((x - self.mean) / self.spread, dtype=torch.float32)

    def back(self, z: Tensor) -> NDArray[np.float64]:
        """In the units of the series again."""
        return z.double().numpy() * self.spread + self.mean


class _Network(Forecaster):
    """What the two networks share: scaling, training, rolling forward, sampling."""

    tau: int
    direct: int
    gaussian: bool
    epochs: int
    learning_rate: float
    batch: int
    seed: int
    net: nn.Module
    scale: Scale
    losses: list[float]
    """The mean training loss of every epoch, in scaled units."""

    @property
    def lags(self) -> int:
        return self.tau

    @property
    def samples(self) -> bool:
        return self.gaussian

    @abc.abstractmethod
    def _build(self, columns: int) -> nn.Module:
        """A fresh network whose output has `direct · columns` means (and as many log-spreads)."""

    @abc.abstractmethod
    def _pairs(self, z: Values) -> tuple[Windows, NDArray[np.float64]]:
        """Inputs and targets of one scaled series."""

    @abc.abstractmethod
    def roll_scaled(self, z: Tensor, steps: int, noise: torch.Generator | None) -> Tensor:
        """Continue scaled windows, adding the model's own noise when given a generator."""

    @usual()
    def build(self, columns: int) -> nn.Module:
        """The untrained network, the same for the same seed, leaving the global generator alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self._build(columns)

    @usual()
    def _fit(self, series: list[Values]) -> None:
        self.scale = Scale.of(series)
        self.net = self.build(series[0].shape[1])
        pairs = [self._pairs(self.scale.to(v).double().numpy()) for v in series]
        x = torch.as_tensor(np.concatenate([x for x, _ in pairs]), dtype=torch.float32)
        y = torch.as_tensor(np.concatenate([y for _, y in pairs]), dtype=torch.float32)
        shuffle = torch.Generator().manual_seed(self.seed)
        batches = DataLoader(TensorDataset(x, y), self.batch, shuffle=True, generator=shuffle)
        optimiser = Adam(self.net.parameters(), self.learning_rate)
        self.losses = []
        for epoch in range(self.epochs):
            seen = 0.0
            for xs, ys in batches:
                optimiser.zero_grad()
                loss = self._loss(self.net(xs), ys)
                if not torch.isfinite(loss):
                    raise WorkFailed(
                        f"the loss became {loss.item()} in epoch {epoch + 1}",
                        hint=f"a learning rate below {self.learning_rate}",
                    )
                loss.backward()
                optimiser.step()
                seen += loss.item() * len(xs)
            self.losses.append(seen / len(x))
            tell(f"epoch {epoch + 1} of {self.epochs}: loss {self.losses[-1]:.4g}")

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error, or the mean negative log-likelihood of N(μ, σ²), up to a constant."""
        if not self.gaussian:
            return (output - target).square().mean()
        mean, log_spread = output.chunk(2, dim=-1)
        return (log_spread + 0.5 * ((target - mean) / log_spread.exp()).square()).mean()

    def _draw(self, output: Tensor, noise: torch.Generator | None) -> Tensor:
        """Means, or draws around them; `output` is (…, direct · columns [· 2])."""
        if not self.gaussian:
            return output
        mean, log_spread = output.chunk(2, dim=-1)
        if noise is None:
            return mean
        return mean + log_spread.exp() * torch.randn(mean.shape, generator=noise)

    @usual()
    @torch.no_grad()
    def roll(self, windows: Windows, steps: int) -> Paths:
        return self.scale.back(self.roll_scaled(self.scale.to(windows), steps, None))

    @usual()
    @torch.no_grad()
    def sample(
        self, windows: Windows, steps: int, samples: int, seed: int = 0
    ) -> NDArray[np.float64]:
        if not self.gaussian:
            return super().sample(windows, steps, samples, seed)
        noise = torch.Generator().manual_seed(seed)
        z = self.scale.to(windows).repeat(samples, 1, 1)
        drawn = self.scale.back(self.roll_scaled(z, steps, noise))
        return drawn.reshape(samples, len(windows), steps, -1)

    def state(self) -> State:
        weights = {f"net.{k}": v.double().numpy() for k, v in self.net.state_dict().items()}
        scale = {"scale.mean": self.scale.mean, "scale.spread": self.scale.spread}
        return {**scale, "losses": np.array(self.losses), **weights}

    @usual()
    def restore(self, state: State) -> None:
        self.scale = Scale(state["scale.mean"], state["scale.spread"])
        self.net = self.build(len(self.scale.mean))
        self.losses = state["losses"].tolist()
        weights = {k[4:]: torch.as_tensor(v) for k, v in state.items() if k.startswith("net.")}
        self.net.load_state_dict(weights)

    def _outputs(self, columns: int) -> int:
        return self.direct * columns * (2 if self.gaussian else 1)

    def _check(self) -> None:
        hold_numbers(self)
        check_window(self.tau, self.direct)
        for name in ("hidden", "epochs", "batch"):
            whole_number(name, getattr(self, name), at_least=1, hint="e.g. 10")
        if not 0 < self.learning_rate < math.inf:
            raise UserError(f"learning_rate={self.learning_rate} must be positive", hint="try 0.01")


@final
@dataclass
class Window(_Network):
    """The notes' multilayer perceptron on the τ newest values: no hidden state.

    x̂_{t+1} = W_2 relu(W_1 [x_{t-τ+1}, …, x_t] + b_1) + b_2, Xavier weights. The defaults are the
    notes' settings of 8.1.
    """

    tau: int = 4
    hidden: int = 10
    direct: int = 1
    gaussian: bool = False
    epochs: int = 5
    learning_rate: float = 0.01
    batch: int = 16
    seed: int = 0
    net: nn.Module = field(init=False, repr=False)
    scale: Scale = field(init=False, repr=False)
    losses: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()

    def _build(self, columns: int) -> nn.Module:
        net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(self.tau * columns, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self._outputs(columns)),
        )
        for layer in net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        return net

    def _pairs(self, z: Values) -> tuple[Windows, NDArray[np.float64]]:
        x, y = features(z, self.tau, self.direct)
        return x, y.reshape(len(y), -1)

    def roll_scaled(self, z: Tensor, steps: int, noise: torch.Generator | None) -> Tensor:
        columns = z.shape[2]

        def ahead(windows: NDArray[np.float32]) -> NDArray[np.float32]:
            drawn = self._draw(self.net(torch.as_tensor(windows)), noise)
            return drawn.reshape(len(windows), -1, columns).numpy()

        return torch.as_tensor(feed_back(z.numpy(), steps, ahead))


class _StateReader(nn.Module):
    """Recurrent layers over a window, and a linear head on every hidden state."""

    def __init__(self, layers: nn.Module, outputs: int, hidden: int) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


@final
@dataclass
class Recurrent(_Network):
    """The latent autoregressive model: h_t = g(h_{t-1}, x_t), x̂_{t+1} = W h_t + b.

    It reads the `tau` newest values from h = 0, then feeds its predictions back through the same
    state. Trained on every window of the series, with a prediction at every step of the window.
    """

    cell: str = "gru"
    tau: int = 32
    hidden: int = 32
    num_layers: int = 1
    direct: int = 1
    gaussian: bool = False
    epochs: int = 30
    learning_rate: float = 0.01
    batch: int = 64
    seed: int = 0
    carry: Carry = field(default_factory=Full)
    memory: Memory = field(default_factory=Stored)
    kernel: str | None = None
    """Which kernel trains it, or `auto`; None: the one that ELMAN_KERNELS names."""
    net: nn.Module = field(init=False, repr=False)
    scale: Scale = field(init=False, repr=False)
    losses: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()
        whole_number("num_layers", self.num_layers, at_least=1, hint="e.g. 2")
        of_model(self.cell)

    def _build(self, columns: int) -> nn.Module:
        layers = recurrent.of(
            of_model(self.cell).name,
            columns,
            self.hidden,
            self.num_layers,
            batch_first=True,
            carry=self.carry,
            memory=self.memory,
        )
        return _StateReader(layers, self._outputs(columns), self.hidden)

    def _fit(self, series: list[Values]) -> None:
        with using(self.kernel):
            super()._fit(series)

    def _pairs(self, z: Values) -> tuple[Windows, NDArray[np.float64]]:
        """Windows of τ values, and for each of their steps the `direct` values that follow it."""
        x, _ = features(z, self.tau, self.direct)
        _, ahead = features(z, 1, self.direct)
        targets = ahead.reshape(len(ahead), -1)
        follows = np.arange(len(x))[:, None] + np.arange(self.tau)
        return x, targets[follows]

    def roll_scaled(self, z: Tensor, steps: int, noise: torch.Generator | None) -> Tensor:
        columns, state, paths = z.shape[2], None, []
        assert isinstance(self.net, _StateReader)
        while sum(p.shape[1] for p in paths) < steps:
            hs, state = self.net.layers(z, state)
            drawn = self._draw(self.net.head(hs[:, -1]), noise)
            z = drawn.reshape(len(drawn), -1, columns)
            paths.append(z)
        return torch.cat(paths, dim=1)[:, :steps]
