"""One recurrent network over many series: scaled window by window, quantiles of the whole horizon.

The network reads the last τ values of a series, each less the value where the window ends (or one
season before) and in units of the window's own spread, together with whatever inputs there are.
From its last state one head speaks about all steps of the horizon at once: the median and the
distances to the other quantiles, trained by the pinball loss through the whole window.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elman import nn as recurrent
from elman.cells import of_model
from elman.defaults import usual
from elman.errors import UserError, WorkFailed
from elman.forecasting.base import (
    Forecaster,
    Inputs,
    Paths,
    State,
    Values,
    Windows,
    as_values,
    check_origins,
)
from elman.forecasting.linear import check_window
from elman.forecasting.progress import tell
from elman.gradients import Carry, Full, Memory, Stored
from elman.kernels import using
from elman.options import hold_numbers, whole_number
from elman.training.optimizers import Adam

QUANTILES = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.975)
_MIDDLE = QUANTILES.index(0.5)


class _Reader(nn.Module):
    """Recurrent layers over a window, and a head that sees their last state and future inputs."""

    def __init__(
        self, layers: nn.Module, hidden: int, steps: int, future: int, static: int
    ) -> None:
        super().__init__()
        self.steps, self.layers = steps, layers
        width = 2 * hidden
        self.context = nn.Linear(hidden + static, steps * hidden)
        self.inner = nn.Linear(hidden + future, width)
        self.head = nn.Linear(width, len(QUANTILES))

    def forward(self, x: Tensor, future: Tensor, static: Tensor) -> Tensor:
        """(batch, steps, quantiles), never crossing."""
        state = self.layers(x)[0][:, -1]
        context = self.context(torch.cat([state, static], dim=1)).view(len(x), self.steps, -1)
        out = self.head(torch.relu(self.inner(torch.cat([context, future], dim=2))))
        middle = out[..., _MIDDLE : _MIDDLE + 1]
        gaps = nn.functional.softplus(out)
        above = middle + gaps[..., _MIDDLE + 1 :].cumsum(-1)
        below = middle - gaps[..., :_MIDDLE].flip(-1).cumsum(-1).flip(-1)
        return torch.cat([below, middle, above], dim=-1)


class _Panel:
    """Series and inputs laid end to end, so that any set of windows is one lookup."""

    def __init__(self, series: list[Values], inputs: list[Inputs]) -> None:
        if any(v.shape[1] != 1 for v in series):
            raise UserError("Global models series of one column", hint="pass columns as series")
        self.lengths = np.array([len(v) for v in series])
        self.y = np.concatenate([v[:, 0] for v in series])
        self.past = np.concatenate([i.past for i in inputs])
        self.known = np.concatenate([i.known for i in inputs])
        self.static = np.stack([i.static for i in inputs])
        self.first = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        rows = [len(i.known) for i in inputs]
        self.first_known = np.concatenate([[0], np.cumsum(rows)[:-1]]).astype(int)

    def ends(self, tau: int, ahead: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Every origin with τ values before it and `ahead` after it: whose, and where."""
        counts = np.maximum(self.lengths - ahead - tau + 1, 0)
        owner = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        return owner, within + tau

    def values(self, owner: Any, start: Any, count: int) -> NDArray[np.float64]:
        """`count` values of each series from `start` on."""
        return self.y[(self.first[owner] + start)[:, None] + np.arange(count)]

    def knowns(self, owner: Any, start: Any, count: int) -> NDArray[np.float64]:
        return self.known[(self.first_known[owner] + start)[:, None] + np.arange(count)]

    def pasts(self, owner: Any, start: Any, count: int) -> NDArray[np.float64]:
        return self.past[(self.first[owner] + start)[:, None] + np.arange(count)]


class _Windows(NamedTuple):
    """Scaled inputs of some windows, and the base and unit that undo the scaling."""

    x: Tensor  # (windows, τ, channels)
    future: Tensor  # (windows, steps ahead, known inputs)
    static: Tensor
    base: NDArray[np.float64]
    unit: NDArray[np.float64]


@final
@dataclass
class Global(Forecaster):
    """A recurrent network shared by all series: quantiles of `direct` steps ahead, with inputs.

    `difference` m > 0 forecasts the change from the value m steps before (the season's, or 1): the
    network then only has to learn how the next season differs from the last one.
    """

    direct: int
    cell: str = "lstm"
    tau: int = 48
    hidden: int = 40
    num_layers: int = 1
    difference: int = 0
    updates: int = 400
    learning_rate: float = 0.005
    batch: int = 128
    seed: int = 0
    carry: Carry = field(default_factory=Full)
    memory: Memory = field(default_factory=Stored)
    kernel: str | None = None
    """Which kernel trains it, or `auto`; None: the one that ELMAN_KERNELS names."""
    net: _Reader = field(init=False, repr=False)
    losses: list[float] = field(init=False, repr=False)
    _centre: Values = field(init=False, repr=False)
    _unit: Values = field(init=False, repr=False)

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_window(self.tau, self.direct)
        of_model(self.cell)
        for name in ("hidden", "num_layers", "updates", "batch"):
            whole_number(name, getattr(self, name), at_least=1, hint="e.g. 40")
        if not 0 < self.learning_rate < math.inf:
            raise UserError(
                f"learning_rate={self.learning_rate} must be positive", hint="try 0.005"
            )
        if not 0 <= self.difference <= self.tau:
            raise UserError(
                f"difference={self.difference} must lie between 0 and tau={self.tau}",
                hint="the season, and tau at least as long",
            )

    @property
    def lags(self) -> int:
        return self.tau

    @property
    def reads_inputs(self) -> bool:
        return True

    def _fit(self, series: list[Values]) -> None:
        self._fit_with(series, [Inputs.none(v) for v in series])

    def _fit_with(self, series: list[Values], inputs: list[Inputs]) -> None:
        with using(self.kernel):
            for _ in self.training(series, inputs):
                pass

    def training(self, series: list[Values], inputs: list[Inputs]) -> Iterator[float]:
        """Fit, yielding the mean loss after every tenth of the updates."""
        panel = _Panel(series, inputs)
        self._set_scale(panel.known, panel.past, panel.static)
        self.net = self._built(*(a.shape[1] for a in (panel.known, panel.past, panel.static)))
        owner, ends = panel.ends(self.tau, self.direct)
        if not len(ends):
            raise UserError(
                f"no series is longer than tau={self.tau} and {self.direct} steps ahead",
                hint="a smaller tau or horizon",
            )
        draw = np.random.default_rng(self.seed)
        optimiser = Adam(self.net.parameters(), self.learning_rate)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.updates)
        self.losses, recent, every = [], [], max(1, self.updates // 10)
        for update in range(self.updates):
            chosen = draw.integers(len(ends), size=min(self.batch, len(ends)))
            recent.append(self._update(optimiser, panel, owner[chosen], ends[chosen]))
            if not math.isfinite(recent[-1]):
                raise WorkFailed(
                    f"the loss became {recent[-1]} in update {update + 1}",
                    hint=f"a learning rate below {self.learning_rate}",
                )
            decay.step()
            if (update + 1) % every == 0:
                self.losses.append(float(np.mean(recent)))
                recent = []
                tell(f"update {update + 1} of {self.updates}: loss {self.losses[-1]:.4g}")
                yield self.losses[-1]

    @usual()
    def _update(
        self, optimiser: torch.optim.Optimizer, panel: _Panel, owner: Any, ends: Any
    ) -> float:
        """The loss on these windows, and a step down it where it is a number."""
        loss = self._loss(panel, owner, ends)
        if torch.isfinite(loss):
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            optimiser.step()
        return loss.item()

    def _loss(self, panel: _Panel, owner: Any, ends: Any) -> Tensor:
        """The pinball loss over all steps and quantiles, in units of each window's spread."""
        read = self._windows(panel, owner, ends)
        target = panel.values(owner, ends, self.direct)
        z = torch.as_tensor((target - read.base) / read.unit[:, None], dtype=torch.float32)
        miss = z[..., None] - self.net(read.x, read.future, read.static)
        levels = torch.tensor(QUANTILES)
        return torch.maximum(levels * miss, (levels - 1) * miss).mean()

    def _set_scale(self, known: Values, past: Values, static: Values) -> None:
        columns = [known, past, static]
        self._centre = np.concatenate([c.mean(0) for c in columns])
        spread = np.concatenate([c.std(0) for c in columns])
        self._unit = np.where(spread > 0, spread, 1.0)

    @usual()
    def _built(self, known: int, past: int, static: int) -> _Reader:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            width = 1 + (self.difference > 0) + known + past
            layers = recurrent.of(
                of_model(self.cell).name,
                width,
                self.hidden,
                self.num_layers,
                batch_first=True,
                carry=self.carry,
                memory=self.memory,
            )
            return _Reader(layers, self.hidden, self.direct, known, static)

    def _windows(self, panel: _Panel, owner: Any, ends: Any) -> _Windows:
        start = ends - self.tau
        y = panel.values(owner, start, self.tau)
        channels, base, unit = self._scaled(y)
        k, p = panel.known.shape[1], panel.past.shape[1]
        parts = [channels]
        future = np.zeros((len(y), self.direct, 0))
        if k:
            around = panel.knowns(owner, start + 1, self.tau + self.direct - 1)
            around = (around - self._centre[:k]) / self._unit[:k]
            parts.append(around[:, : self.tau])
            future = around[:, self.tau - 1 :]
        if p:
            seen = panel.pasts(owner, start, self.tau)
            parts.append((seen - self._centre[k : k + p]) / self._unit[k : k + p])
        static = (panel.static[owner] - self._centre[k + p :]) / self._unit[k + p :]
        read = (np.concatenate(parts, axis=2), future, static)
        x, ahead, fixed = (torch.as_tensor(a, dtype=torch.float32) for a in read)
        return _Windows(x, ahead, fixed, base, unit)

    def _scaled(
        self, y: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """What the network reads of the values themselves; the forecast is base + unit · output."""
        m = self.difference
        if m:
            changes = np.zeros_like(y)
            changes[:, m:] = y[:, m:] - y[:, :-m]
            base = y[:, [self.tau - m + k % m for k in range(self.direct)]]
            moves = changes[:, m:] if m < self.tau else y - y.mean(1, keepdims=True)
        else:
            changes = y[:, :0]
            base = y.mean(1, keepdims=True).repeat(self.direct, 1)
            moves = y - base[:, :1]
        size, floor = np.sqrt((moves**2).mean(1)), np.abs(y).mean(1) * 1e-3
        unit = np.where(size > floor, size, np.where(floor > 0, floor, 1.0))
        level = y[:, -1:] if m else base[:, :1]
        channels = [(y - level) / np.maximum(unit, y.std(1))[:, None]]
        if m:
            channels.append(changes / unit[:, None])
        return np.stack(channels, axis=2), base, unit

    @usual()
    @torch.no_grad()
    def quantiles(
        self,
        values: Values,
        origins: Sequence[int],
        steps: int,
        levels: Sequence[float],
        inputs: Inputs | None = None,
    ) -> NDArray[np.float64]:
        values, given = as_values(values), inputs or Inputs.none(values)
        if not 1 <= steps <= self.direct:
            raise UserError(
                f"steps={steps} must lie between 1 and {self.direct}, the horizon of the fit",
                hint="fit again for a longer horizon",
            )
        at = np.asarray(origins)
        check_origins(at, self.tau, len(values))
        if given.known.shape[1]:
            given.check(int(at.max()) + self.direct)
        panel, rows = _Panel([values], [given]), []
        for some in np.array_split(at, max(1, math.ceil(len(at) / 512))):
            read = self._windows(panel, np.zeros_like(some), some)
            z = self.net(read.x, read.future, read.static).double().numpy()
            rows.append(read.base[..., None] + read.unit[:, None, None] * z)
        quantiles = np.concatenate(rows)[:, :steps]
        wanted = _interpolated(quantiles, np.asarray(levels))
        return wanted[:, :, None]

    def forecasts(
        self, values: Values, origins: Sequence[int], steps: int, inputs: Inputs | None = None
    ) -> Paths:
        return self.quantiles(values, origins, steps, [0.5], inputs)[..., 0]

    def roll(self, windows: Windows, steps: int) -> Paths:
        return np.concatenate([self.forecasts(w, [len(w)], steps) for w in windows])

    def state(self) -> State:
        weights = {f"net.{k}": v.double().numpy() for k, v in self.net.state_dict().items()}
        sizes = [
            self.net.inner.in_features - self.hidden,
            self.net.context.in_features - self.hidden,
        ]
        return {
            "centre": self._centre,
            "unit": self._unit,
            "sizes": np.array(sizes, dtype=np.float64),
            "losses": np.array(self.losses),
            **weights,
        }

    @usual()
    def restore(self, state: State) -> None:
        self._centre, self._unit = state["centre"], state["unit"]
        known, static = (int(n) for n in state["sizes"])
        self.net = self._built(known, len(self._centre) - known - static, static)
        self.losses = state["losses"].tolist()
        weights = {k[4:]: torch.as_tensor(v) for k, v in state.items() if k.startswith("net.")}
        self.net.load_state_dict(weights)


def _interpolated(
    quantiles: NDArray[np.float64], levels: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Quantiles between the ones that were learned; outside them, extended in proportion."""
    grid = np.array(QUANTILES)
    at = np.clip(np.searchsorted(grid, levels) - 1, 0, len(grid) - 2)
    share = (levels - grid[at]) / (grid[at + 1] - grid[at])
    return quantiles[..., at] + share * (quantiles[..., at + 1] - quantiles[..., at])
