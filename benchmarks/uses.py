"""elman.nn against torch.nn, used as programs use them: not the same call over and over.

    python benchmarks/uses.py [--device cpu|cuda] [--seed S] [--only WORD] [--quick] [--busy]
        [--seconds S] [--json FILE]

A short way that has been found for one call must not be slow, nor wrong, at the next, which is
another: of another shape, with weights that have moved, from another thread. Every use is run for
three modules drawn at random, `torch.nn`'s and ours with the same weights taking turns; the
number is the median over the turns of torch's time by ours, above 1 where ours is faster. What
comes out is compared in the same run, gradients included: a use that differs, or fails, is listed
at the end, and the program ends with an error; one that torch.nn itself refuses is named. On a GPU
both run as torch runs them by default, so the numbers are those of TF32; sizes reach further there,
and half precision is drawn.
`--busy` is for a machine with other work: one thread, and processor time.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import elman.nn
import grid
from grid import DTYPES, MODULES, seconds

Run = Callable[[], Sequence[Tensor | None]]


class Case(NamedTuple):
    """A module and what it reads."""

    cell: str
    width: int
    H: int
    B: int
    T: int
    layers: int
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        return (
            f"{self.cell} I={self.width} H={self.H} B={self.B} T={self.T} "
            f"layers={self.layers} {self.dtype}"
        )

    @property
    def where(self) -> dict[str, Any]:
        return {"dtype": DTYPES[self.dtype], "device": self.device}

    def inputs(self, steps: int = 0, rows: int = 0) -> Tensor:
        size = steps or self.T, rows or self.B, self.width
        return torch.randn(*size, generator=torch.Generator().manual_seed(1)).to(**self.where)

    def state(self, rows: int = 0) -> Any:
        h = torch.full((self.layers, rows or self.B, self.H), 0.1, **self.where)
        return (h, h.clone()) if self.cell == "lstm" else h

    def module(self, package: Any) -> Any:
        return getattr(package, MODULES[self.cell])(self.width, self.H, self.layers, **self.where)


def _gradients(ys: Tensor, *wanted: Tensor) -> list[Tensor | None]:
    loss = (ys * torch.linspace(-1, 1, ys.shape[-1], dtype=ys.dtype, device=ys.device)).sum()
    return [ys.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def _both(module: Any, x: Tensor, state: Any = None) -> list[Tensor | None]:
    return _gradients(module(x, state)[0], *module.parameters())


def two_shapes(case: Case, module: Any) -> Run:
    long, short = case.inputs(), case.inputs(max(1, case.T // 2), case.B + 1)
    return lambda: [*_both(module, long), *_both(module, short)]


def two_shapes_without_a_gradient(case: Case, module: Any) -> Run:
    long, short = case.inputs(), case.inputs(max(1, case.T // 2), case.B + 1)

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [module(long)[0], module(short)[0]]

    return run


def training_and_evaluation(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        found = _both(module.train(), x)
        with torch.no_grad():
            return [*found, module.eval()(x)[0]]

    return run


def optimizer_between_calls(case: Case, module: Any) -> Run:
    x, optimizer = case.inputs(), torch.optim.SGD(module.parameters(), lr=1e-3)

    def run() -> list[Tensor]:
        optimizer.zero_grad()
        ys = module(x)[0]
        ys.square().mean().backward()
        optimizer.step()
        return [ys.detach()]

    return run


def data_replaced(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        for p in module.parameters():
            p.data = p.data.clone()
        return _both(module, x)

    return run


def functional_call(case: Case, module: Any) -> Run:
    x = case.inputs()
    weights = {n: (p.detach() * 0.9).requires_grad_() for n, p in module.named_parameters()}

    def run() -> list[Tensor | None]:
        ys = torch.func.functional_call(module, weights, (x,))[0]
        return _gradients(ys, *weights.values())

    return run


class _Halved(torch.nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return 0.5 * W


def parametrized(case: Case, module: Any) -> Run:
    parametrize.register_parametrization(module, "weight_hh_l0", _Halved())
    x = case.inputs()
    return lambda: _both(module, x)


def transposed_input(case: Case, module: Any) -> Run:
    x = case.inputs().transpose(0, 1).contiguous()
    return lambda: _both(module, x.transpose(0, 1))


def expanded_input(case: Case, module: Any) -> Run:
    x = case.inputs()[:1].expand(case.T, -1, -1)
    return lambda: _both(module, x)


def strided_input(case: Case, module: Any) -> Run:
    x = torch.cat([case.inputs(), case.inputs()], -1)[..., ::2]
    return lambda: _both(module, x)


def transposed_without_a_gradient(case: Case, module: Any) -> Run:
    x = case.inputs().transpose(0, 1).contiguous()

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [module(x.transpose(0, 1))[0]]

    return run


def expanded_state(case: Case, module: Any) -> Run:
    x = case.inputs()
    zero = torch.zeros(1, 1, 1, **case.where).expand(case.layers, case.B, case.H)
    state = (zero, zero) if case.cell == "lstm" else zero
    return lambda: _both(module, x, state)


def state_with_a_gradient(case: Case, module: Any) -> Run:
    x, state = case.inputs(), case.state()
    h = state[0] if case.cell == "lstm" else state
    h.requires_grad_()
    return lambda: _gradients(module(x, state)[0], h, *module.parameters())


def only_inputs_want_a_gradient(case: Case, module: Any) -> Run:
    module.requires_grad_(False)
    x = case.inputs().requires_grad_()
    return lambda: _gradients(module(x)[0], x)


def one_weight_frozen(case: Case, module: Any) -> Run:
    module.weight_ih_l0.requires_grad_(False)
    x = case.inputs()
    wanted = [p for p in module.parameters() if p.requires_grad]
    return lambda: _gradients(module(x)[0], *wanted)


def inference_mode(case: Case, module: Any) -> Run:
    x = case.inputs()

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [module(x)[0]]

    return run


def last_batch_smaller(case: Case, module: Any) -> Run:
    batches = [case.inputs()] * 3 + [case.inputs(rows=max(1, case.B // 3))]
    return lambda: [t for x in batches for t in _both(module, x)]


def state_carried_over(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        ys, last = module(x, case.state())
        last = tuple([s.detach() for s in last]) if case.cell == "lstm" else last.detach()
        return [*_gradients(ys, *module.parameters()), *_both(module, x, last)]

    return run


def one_step_after_another(case: Case, module: Any) -> Run:
    xs = case.inputs(8)

    @torch.no_grad()
    def run() -> list[Tensor]:
        state, found = None, []
        for x in xs.split(1):
            ys, state = module(x, state)
            found.append(ys)
        return found

    return run


def fifty_modules(case: Case, module: Any) -> Run:
    modules, x = [copy.deepcopy(module) for _ in range(50)], case.inputs(1)

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [m(x)[0] for m in modules]

    return run


def _in_threads(runs: Sequence[Run]) -> Run:
    def run() -> list[Tensor | None]:
        found: dict[int, Sequence[Tensor | None]] = {}

        def work(i: int) -> None:
            for _ in range(4):
                found[i] = runs[i]()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [t for i in sorted(found) for t in found[i]]

    return run


def four_threads(case: Case, module: Any) -> Run:
    modules, x = [copy.deepcopy(module) for _ in range(4)], case.inputs()
    return _in_threads([lambda m=m: _both(m, x) for m in modules])


def four_threads_share_a_module(case: Case, module: Any) -> Run:
    inputs = [case.inputs(case.T + i) for i in range(4)]
    return _in_threads([lambda x=x: _both(module, x) for x in inputs])


def weights_copied_in(case: Case, module: Any) -> Run:
    x, known = case.inputs(), {n: t.clone() for n, t in module.state_dict().items()}

    def run() -> list[Tensor | None]:
        module.load_state_dict(known)
        return _both(module, x)

    return run


def outputs_unread(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        last = module(x)[1]
        h = last[0] if case.cell == "lstm" else last
        return _gradients(h, *module.parameters())

    return run


def last_output_alone(case: Case, module: Any) -> Run:
    x = case.inputs()
    return lambda: _gradients(module(x)[0][-1], *module.parameters())


def input_that_is_a_parameter(case: Case, module: Any) -> Run:
    x = torch.nn.Parameter(case.inputs())
    return lambda: _gradients(module(x)[0], x, *module.parameters())


def state_that_is_a_parameter(case: Case, module: Any) -> Run:
    x = case.inputs()
    first = torch.nn.Parameter(torch.full((case.layers, 1, case.H), 0.1, **case.where))

    def run() -> list[Tensor | None]:
        h = first.expand(-1, case.B, -1)
        ys = module(x, (h, h) if case.cell == "lstm" else h)[0]
        return _gradients(ys, first, *module.parameters())

    return run


def all_frozen(case: Case, module: Any) -> Run:
    module.requires_grad_(False)
    x = case.inputs()
    return lambda: [module(x)[0]]


def many_batch_sizes(case: Case, module: Any) -> Run:
    batches = [case.inputs(rows=1 + (7 * i) % 17) for i in range(16)]

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [module(x)[0] for x in batches]

    return run


def many_lengths(case: Case, module: Any) -> Run:
    batches = [case.inputs(1 + (7 * i) % 17) for i in range(16)]
    return lambda: [t for x in batches for t in _both(module, x)]


def many_lengths_batch_first(case: Case, module: Any) -> Run:
    module.batch_first = True
    batches = [case.inputs(1 + (7 * i) % 17).transpose(0, 1).contiguous() for i in range(16)]
    return lambda: [t for x in batches for t in _both(module, x)]


def _packs(case: Case) -> list[Any]:
    draw = torch.Generator().manual_seed(2)
    found = []
    for _ in range(4):
        lengths = torch.randint(1, case.T + 1, (case.B,), generator=draw)
        found.append(pack_padded_sequence(case.inputs(), lengths, enforce_sorted=False))
    return found


def many_packs(case: Case, module: Any) -> Run:
    packs = _packs(case)
    return lambda: [t for x in packs for t in _gradients(module(x)[0].data, *module.parameters())]


def many_packs_without_a_gradient(case: Case, module: Any) -> Run:
    packs = _packs(case)

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [module(x)[0].data for x in packs]

    return run


def autocast_now_and_then(case: Case, module: Any) -> Run:
    x = case.inputs()

    @torch.no_grad()
    def run() -> list[Tensor]:
        with torch.autocast(case.device, torch.bfloat16):
            ys = module(x)[0]
        return [ys.to(x.dtype) * 0, module(x)[0]]

    return run


def weights_that_lie_across(case: Case, module: Any) -> Run:
    for p in module.parameters():
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t()
    x = case.inputs()
    return lambda: _both(module, x)


def weight_norm(case: Case, module: Any) -> Run:
    torch.nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    x = case.inputs()
    return lambda: _both(module, x)


def checkpointed(case: Case, module: Any) -> Run:
    x = case.inputs().requires_grad_()

    def run() -> list[Tensor | None]:
        ys = checkpoint(lambda x: module(x)[0], x, use_reentrant=False)
        return _gradients(ys, x, *module.parameters())

    return run


def gradient_of_a_gradient(case: Case, module: Any) -> Run:
    x = case.inputs().requires_grad_()

    def run() -> list[Tensor | None]:
        with torch.backends.cudnn.flags(enabled=False):  # it gives none
            ys = module(x)[0]
        (dx,) = torch.autograd.grad(ys.square().sum(), x, create_graph=True)
        return [dx.detach(), *torch.autograd.grad(dx.square().sum(), [*module.parameters()])]

    return run


def gradient_of_a_gradient_of_packs(case: Case, module: Any) -> Run:
    packs = _packs(case)
    for pack in packs:
        pack.data.requires_grad_()

    def run() -> list[Tensor | None]:
        found = list[Tensor | None]()
        for pack in packs:
            with torch.backends.cudnn.flags(enabled=False):
                loss = module(pack)[0].data.square().sum()
            (dx,) = torch.autograd.grad(loss, pack.data, create_graph=True)
            found += torch.autograd.grad(dx.square().sum(), [*module.parameters()])
        return found

    return run


def compiled(case: Case, module: Any) -> Run:
    x, whole = case.inputs(), torch.compile(module, backend="aot_eager")
    return lambda: _gradients(whole(x)[0], *module.parameters())


def compiled_without_a_gradient(case: Case, module: Any) -> Run:
    x, whole = case.inputs(), torch.compile(module, backend="aot_eager")

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [whole(x)[0]]

    return run


class _Surrounded(torch.nn.Module):
    """A module between two layers, as most are."""

    def __init__(self, case: Case, module: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before = torch.nn.Linear(case.width, case.width, **case.where)
        self.module = module
        self.after = torch.nn.Linear(case.H, 10, **case.where)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.before(x))
        ys, _ = self.module(x)
        return torch.nn.functional.gelu(self.after(ys))


def a_model_compiled(case: Case, module: Any) -> Run:
    model = _Surrounded(case, module)
    x, whole = case.inputs(), torch.compile(model)
    return lambda: _gradients(whole(x), *model.parameters())


def a_model_compiled_without_a_gradient(case: Case, module: Any) -> Run:
    x, whole = case.inputs(), torch.compile(_Surrounded(case, module))

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [whole(x)]

    return run


def two_backward_passes(case: Case, module: Any) -> Run:
    x, weights = case.inputs(), [*module.parameters()]

    def run() -> list[Tensor | None]:
        ys = module(x)[0]
        first = torch.autograd.grad(ys.sum(), weights, retain_graph=True)
        return [*first, *torch.autograd.grad(ys.square().sum(), weights)]

    return run


def no_rows(case: Case, module: Any) -> Run:
    x = case.inputs()[:, :0]
    return lambda: [module(x)[0]]


def made_anew(case: Case, module: Any) -> Run:
    x = case.inputs()

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [copy.deepcopy(module)(x)[0]]

    return run


def constructed(case: Case, module: Any) -> Run:
    kind, x = type(module), case.inputs()

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [0 * kind(case.width, case.H, case.layers, **case.where)(x)[0]]

    return run


def gradients_by_torch_func(case: Case, module: Any) -> Run:
    x = case.inputs()
    weights = {n: p.detach() for n, p in module.named_parameters()}

    def loss(w: Any) -> Tensor:
        return torch.func.functional_call(module, w, (x,))[0].square().sum()

    return lambda: [*torch.func.grad(loss)(weights).values()]


def within_a_model(case: Case, module: Any) -> Run:
    torch.manual_seed(3)
    embedding = torch.nn.Embedding(30, case.width, **case.where)
    output = torch.nn.Linear(case.H, 30, **case.where)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(30, (case.T, case.B), generator=draw).to(case.device)
    wanted = [*embedding.parameters(), *module.parameters(), *output.parameters()]

    def run() -> list[Tensor | None]:
        o = output(module(embedding(ids))[0])
        loss = torch.nn.functional.cross_entropy(o.flatten(0, 1), ids.flatten())
        return [o.detach(), *torch.autograd.grad(loss, wanted)]

    return run


def gradients_accumulated(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        module.zero_grad(set_to_none=False)
        for _ in range(2):
            module(x)[0].square().mean().backward()
        return [p.grad.clone() for p in module.parameters()]

    return run


def anomaly_mode(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is on
            with torch.autograd.detect_anomaly():
                return _both(module, x)

    return run


def saved_elsewhere(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        with torch.autograd.graph.save_on_cpu():
            return _both(module, x)

    return run


def autocast_training(case: Case, module: Any) -> Run:
    x = case.inputs()

    def run() -> list[Tensor | None]:
        with torch.autocast(case.device, torch.bfloat16):
            ys = module(x)[0]
        return [ys.detach().to(x.dtype), *_gradients(ys.to(x.dtype), *module.parameters())[1:]]

    return run


def gradients_clipped(case: Case, module: Any) -> Run:
    x, optimizer = case.inputs(), torch.optim.SGD(module.parameters(), lr=1e-3)

    def run() -> list[Tensor]:
        optimizer.zero_grad()
        ys = module(x)[0]
        ys.square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return [ys.detach(), norm]

    return run


def other_dtypes(case: Case, module: Any) -> Run:
    x, own = case.inputs(), DTYPES[case.dtype]
    other = torch.float32 if own == torch.float64 else torch.float64

    @torch.no_grad()
    def run() -> list[Tensor]:
        found = [module(x)[0], module.to(other)(x.to(other))[0]]
        module.to(own)
        return found

    return run


def a_pair_of_modules(case: Case, module: Any) -> Run:
    """An encoder's last state is where a decoder begins."""
    x, decoder = case.inputs(), copy.deepcopy(module)
    short = case.inputs(max(1, case.T // 3))
    wanted = [*module.parameters(), *decoder.parameters()]
    return lambda: _gradients(decoder(short, module(x)[1])[0], *wanted)


def a_step_with_a_gradient(case: Case, module: Any) -> Run:
    """A loop of one's own over time, as for attention or teacher forcing."""
    xs = case.inputs(8)

    def run() -> list[Tensor | None]:
        state, found = None, []
        for x in xs.split(1):
            ys, state = module(x, state)
            found.append(ys)
        return _gradients(torch.cat(found), *module.parameters())

    return run


def on_another_stream(case: Case, module: Any) -> Run:
    x, stream = case.inputs(), torch.cuda.Stream()

    def run() -> list[Tensor | None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = _both(module, x)
        torch.cuda.current_stream().wait_stream(stream)
        return found

    return run


def on_two_streams(case: Case, module: Any) -> Run:
    x, streams = case.inputs(), [torch.cuda.Stream() for _ in range(2)]
    modules = [copy.deepcopy(module) for _ in streams]

    def run() -> list[Tensor | None]:
        found = list[Tensor | None]()
        for stream, one in zip(streams, modules, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found += _both(one, x)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return found

    return run


def in_a_graph_of_ones_own(case: Case, module: Any) -> Run:
    x, side = case.inputs(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _both(module, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _both(module, x)

    def run() -> list[Tensor | None]:
        graph.replay()
        return found

    return run


def read_after_every_call(case: Case, module: Any) -> Run:
    x, optimizer = case.inputs(), torch.optim.SGD(module.parameters(), lr=1e-4)

    def run() -> list[Tensor]:
        optimizer.zero_grad()
        ys = module(x)[0]
        loss = ys.square().mean()
        loss.backward()
        optimizer.step()
        return [torch.tensor(loss.item())]

    return run


def batches_from_the_host(case: Case, module: Any) -> Run:
    batches = [case._replace(device="cpu").inputs().pin_memory() for _ in range(4)]

    def run() -> list[Tensor | None]:
        return [t for x in batches for t in _both(module, x.to(case.device, non_blocking=True))]

    return run


def one_row_a_step(case: Case, module: Any) -> Run:
    xs = case.inputs(8, 1)[:, 0]

    @torch.no_grad()
    def run() -> list[Tensor]:
        state, found = None, []
        for x in xs.split(1):
            ys, state = module(x, state)
            found.append(ys)
        return found

    return run


def _reading_ids(case: Case, module: Any, steps: int = 0) -> Callable[..., Any]:
    """The module over the same tokens at every call: one-hot rows for torch.nn, ids for ours."""
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(case.width, (steps or case.T, case.B), generator=chance).to(case.device)
    if isinstance(module, torch.nn.RNNBase):
        one_hot = torch.nn.functional.one_hot
        return lambda state=None: module(one_hot(ids, case.width).to(DTYPES[case.dtype]), state)
    return lambda state=None: module(ids, state)


def ids_for_one_hot_rows(case: Case, module: Any) -> Run:
    read = _reading_ids(case, module)
    return lambda: _gradients(read(case.state())[0], *module.parameters())


def ids_without_a_gradient(case: Case, module: Any) -> Run:
    read = _reading_ids(case, module)

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [read()[0]]

    return run


def ids_under_autocast(case: Case, module: Any) -> Run:
    read = _reading_ids(case, module)

    def run() -> list[Tensor | None]:
        with torch.autocast(case.device, torch.bfloat16):
            ys = read()[0]
        return _gradients(ys.float(), *module.parameters())

    return run


def ids_one_step_after_another(case: Case, module: Any) -> Run:
    read = _reading_ids(case, module, steps=1)

    @torch.no_grad()
    def run() -> list[Tensor]:
        state, found = None, []
        for _ in range(8):
            ys, state = read(state)
            found.append(ys)
        return found

    return run


USES: tuple[Callable[[Case, Any], Run], ...] = (
    *(two_shapes, two_shapes_without_a_gradient, training_and_evaluation, last_batch_smaller),
    *(optimizer_between_calls, data_replaced, weights_copied_in, functional_call, parametrized),
    *(transposed_input, transposed_without_a_gradient, expanded_input, strided_input),
    *(expanded_state, state_with_a_gradient, state_carried_over, one_step_after_another),
    *(only_inputs_want_a_gradient, one_weight_frozen, inference_mode),
    *(fifty_modules, four_threads, four_threads_share_a_module),
    *(outputs_unread, last_output_alone, within_a_model, gradients_accumulated, all_frozen),
    *(input_that_is_a_parameter, state_that_is_a_parameter, weights_that_lie_across, weight_norm),
    *(many_batch_sizes, many_lengths, many_lengths_batch_first, one_row_a_step, no_rows),
    *(many_packs, many_packs_without_a_gradient, autocast_now_and_then, made_anew, constructed),
    *(checkpointed, saved_elsewhere, anomaly_mode, two_backward_passes, gradient_of_a_gradient),
    *(gradient_of_a_gradient_of_packs, gradients_by_torch_func, compiled),
    *(compiled_without_a_gradient, autocast_training, gradients_clipped, other_dtypes),
    *(a_pair_of_modules, a_step_with_a_gradient),
    *(a_model_compiled, a_model_compiled_without_a_gradient),
)
ON_A_GPU = (
    *(on_another_stream, on_two_streams, in_a_graph_of_ones_own, read_after_every_call),
    batches_from_the_host,
)
WITH_IDS = (
    *(ids_for_one_hot_rows, ids_without_a_gradient, ids_under_autocast),
    ids_one_step_after_another,
)  # last, so that a seed draws the cases before them as it did
# What the two may differ by, as a share of the largest number: on a GPU float32 runs in TF32.
ALIKE = {"cpu": {}, "cuda": {"float32": 1e-2, "bfloat16": 6e-2, "float16": 1e-2}}
NARROW = 6e-2  # where a use itself computes in bfloat16


def drawn(seed: int, device: str = "cpu") -> list[tuple[Callable[[Case, Any], Run], Case]]:
    draw = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(low * (high / low) ** draw.random())

    dtypes = ("float32",) * 3 + (("float64",) if device == "cpu" else ("bfloat16", "float16"))
    widest, rows, steps = (300, 40, 40) if device == "cpu" else (1200, 200, 120)
    cases = []
    for use in (*USES, *(ON_A_GPU if device == "cuda" else ()), *WITH_IDS):
        for cell in MODULES:
            layers, dtype = draw.choice((1, 1, 2)), draw.choice(dtypes)
            sizes = between(4, 200), between(8, widest), between(1, rows), between(2, steps)
            cases.append((use, Case(cell, *sizes, layers, dtype, device)))
    return cases


def same(found: Sequence[Sequence[Tensor | None]], most: float | None) -> None:
    for theirs, ours in zip(*found, strict=True):
        if theirs is None or ours is None:
            assert theirs is ours, "one has no gradient here"
        elif theirs.numel():
            scale = float(theirs.abs().amax())
            rtol, atol = (
                (1e-4, 2e-5 * (scale + 1)) if most is None else (0.0, most * (scale + 1e-3))
            )
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


class Refused(Exception):
    """torch.nn does not take this, and ours does."""


def measure(use: Callable[[Case, Any], Run], case: Case, rounds: int, slot: float) -> float:
    """torch's time by ours, once both have been seen to give the same."""
    torch.manual_seed(0)
    peer = case.module(torch.nn)
    mine = case.module(elman.nn)
    mine.load_state_dict(peer.state_dict())
    ours = use(case, mine)
    try:
        runs = [use(case, peer), ours]
        theirs = runs[0]()
    except RuntimeError as error:
        ours()
        raise Refused(" ".join(str(error).split())) from error
    narrow = use in (autocast_training, ids_under_autocast)
    most = NARROW if narrow else ALIKE[case.device].get(case.dtype)
    same([theirs, ours()], most)
    for _ in range(7):
        same([run() for run in runs], most)
    calls = [max(1, round(slot / seconds(run, 2, case.device))) for run in runs]
    ratios = []
    for i in range(rounds):
        order = (0, 1) if i % 2 else (1, 0)
        times = {k: seconds(runs[k], calls[k], case.device) for k in order}
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="uses whose name contains this")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--quick", action="store_true", help="shorter turns")
    parser.add_argument("--busy", action="store_true", help="one thread, processor time")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    if options.busy:
        grid.clock = time.process_time
        torch.set_num_threads(1)
    rounds, slot = (5, 0.015) if options.quick else (9, 0.03)
    rows, wrong, end = [], [], time.monotonic() + options.seconds
    for use, case in drawn(options.seed, options.device):
        name = use.__name__.replace("_", " ")
        if options.only not in name or time.monotonic() > end:
            continue
        try:
            ratio = measure(use, case, rounds, slot)
        except Refused as error:
            print(f"   ---  {name}: {case}: torch.nn says {str(error)[:90]}", flush=True)
            continue
        except Exception as error:
            wrong.append(f"{name}: {case}: {type(error).__name__}: {' '.join(str(error).split())}")
            print(" wrong", wrong[-1], flush=True)
            continue
        rows.append({"use": name, **case._asdict(), "ratio": ratio})
        print(f"{ratio:6.2f}  {name}: {case}{'  <' if ratio < 1 else ''}", flush=True)
    ratios = [row["ratio"] for row in rows]
    mean = statistics.geometric_mean(ratios)
    print(f"{len(rows)} cases, {mean:.2f}, least {min(ratios):.2f}, {len(wrong)} wrong")
    if options.json:
        record = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
