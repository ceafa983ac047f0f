"""An update captured in a CUDA graph does what the update does."""

import threading

import pytest
import torch

from elman import nn
from elman.errors import UserError
from elman.training.graphed import Graphed, tensors_of

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def test_only_work_on_a_gpu_can_be_captured():
    with pytest.raises(UserError, match="an input is on cpu"):
        Graphed(lambda x: (x,), (torch.zeros(1),), changes=())


def training(momentum=0.0):
    """A small model on the GPU, and its update."""
    torch.manual_seed(0)
    model = nn.RNN(5, 16, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def update(x, h):
        optimizer.zero_grad(set_to_none=True)
        ys, h = model(x, h)
        loss = ys.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach(), h.detach()

    return model, optimizer, update


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_replayed_update_is_the_update_and_capturing_it_changes_nothing(momentum):
    windows = torch.randint(5, (6, 7, 3), device="cuda")
    ends = []
    for graphed in (False, True):
        model, optimizer, update = training(momentum)
        h = torch.zeros(1, 3, 16, device="cuda")
        loss, h = update(windows[0], h)  # an optimizer makes its state at the first step
        if graphed:
            update = Graphed(update, (windows[1], h), changes=tensors_of(model, optimizer))
        for x in windows[1:]:
            loss, h = update(x, h)
        ends.append([loss.clone(), h.clone(), *model.parameters()])
    for eager, replayed in zip(*ends, strict=True):
        torch.testing.assert_close(eager, replayed)


@pytest.mark.gpu
@on_gpu
def test_another_shape_is_refused():
    model, optimizer, update = training()
    x, h = torch.zeros(7, 3, dtype=torch.long, device="cuda"), torch.zeros(1, 3, 16, device="cuda")
    step = Graphed(update, (x, h), changes=tensors_of(model, optimizer))
    with pytest.raises(UserError, match="captured for"):
        step(x[:2], h)


@pytest.mark.gpu
@on_gpu
def test_other_threads_go_on_while_an_update_is_captured():
    done, fetched, problems = threading.Event(), 0, list[Exception]()

    def fetch():
        nonlocal fetched
        while not done.is_set():
            try:
                batch = torch.ones(1 << 16).pin_memory()
                assert batch.cuda(non_blocking=True).sum().item() == 1 << 16
                fetched += 1
            except Exception as problem:  # raised again below
                problems.append(problem)
                return

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        model, optimizer, update = training()
        x, h = torch.randint(5, (7, 3), device="cuda"), torch.zeros(1, 3, 16, device="cuda")
        for _ in range(10):
            step = Graphed(update, (x, h), changes=tensors_of(model, optimizer))
            assert step(x, h)[0].isfinite()
    finally:
        done.set()
        thread.join()
    if problems:
        raise problems[0]
    assert fetched > 0
