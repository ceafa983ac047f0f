"""A stepper says what the module would have said, one token at a time."""

import copy

import pytest
import torch

from elman import nn
from elman.errors import UserError
from elman.language_model.stepper import Stepper


@pytest.mark.parametrize("module", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "batch_first": True}, {"bias": False}])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_steps_are_the_modules_own(module, rows, options, kernel, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    torch.manual_seed(0)
    rnn, out = module(7, 19, dtype=torch.float64, **options).eval(), torch.nn.Linear(19, 5).double()
    ids = torch.randint(7, (6, rows))
    turned = ids.T if rnn.batch_first else ids
    _, start = rnn(turned[:, :1] if rnn.batch_first else turned[:1])
    start = tuple(s.detach() for s in start) if isinstance(start, tuple) else start.detach()
    hs, last = rnn(turned, start)
    logits = out(hs).transpose(0, 1) if rnn.batch_first else out(hs)
    step = Stepper(rnn, out, start, rows)
    for t in range(6):
        torch.testing.assert_close(step(ids[t]), logits[t], rtol=1e-12, atol=1e-12)
    pairs = zip(step.state, last, strict=True) if module is nn.LSTM else [(step.state, last)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("module", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_state_can_be_read_reordered_and_set(module, kernel, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    rnn, out = module(7, 19, num_layers=2).eval(), torch.nn.Linear(19, 5)
    step, rows = Stepper(rnn, out, rows=3), torch.tensor([2, 0, 2])
    step(torch.tensor([1, 2, 3]))
    before = step.state
    after = step(torch.tensor([4, 5, 6]))
    turned = tuple(s[:, rows] for s in before) if module is nn.LSTM else before[:, rows]
    step.state = turned
    again = step(torch.tensor([4, 5, 6])[rows])
    torch.testing.assert_close(again, after[rows])
    step.state = before
    assert torch.equal(step(torch.tensor([4, 5, 6])), after), "what was read is a copy"
    step.state = None
    fresh = Stepper(rnn, out, rows=3)
    assert torch.equal(step(torch.tensor([4, 5, 6])), fresh(torch.tensor([4, 5, 6])))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.mark.parametrize("module", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [0, 2, 20])
def test_a_beam_goes_on_from_the_rows_it_names(module, kernel, device, steps, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    rnn = module(7, 19, num_layers=2, device=device).eval()
    out = torch.nn.Linear(19, 5, device=device)
    step, other, rows = (
        Stepper(rnn, out, rows=3),
        Stepper(rnn, out, rows=3),
        torch.tensor([2, 0, 2]),
    )
    for ids in torch.randint(7, (steps, 3)):
        step(ids)
        other(ids)
    before = step.state
    step.take(rows)
    if steps:
        turned = tuple(s[:, rows] for s in before) if module is nn.LSTM else before[:, rows]
        other.state = turned
    for _ in range(2):
        assert torch.equal(step(torch.tensor([4, 5, 6])), other(torch.tensor([4, 5, 6])))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_beam_names_as_many_rows_as_there_are(kernel, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    given = torch.randn(1, 3, 19)
    step = Stepper(nn.RNN(7, 19).eval(), torch.nn.Linear(19, 5), given, rows=3)
    kept = given.clone()
    step.take(torch.tensor([1, 1, 0]))
    assert torch.equal(given, kept), "what was given is the caller's"
    for rows in ([0, 1], [0, 1, 2, 2], [[0, 1, 2]]):
        with pytest.raises(UserError, match="as many as there are"):
            step.take(torch.tensor(rows))


@pytest.mark.parametrize("module", [nn.RNN, nn.LSTM])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("part", [(slice(None), slice(1)), (slice(1),), (..., slice(5))])
def test_a_state_of_other_rows_layers_or_units_is_refused(module, kernel, part, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    step = Stepper(module(7, 19, num_layers=2).eval(), torch.nn.Linear(19, 5), rows=3)
    step(torch.tensor([1, 2, 3]))
    state = step.state
    wrong = tuple(s[part] for s in state) if module is nn.LSTM else state[part]

    def go_on() -> None:
        step.state = wrong
        step(torch.tensor([1, 2, 3]))

    with pytest.raises(UserError, match="shape"):
        go_on()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_copy_goes_on_by_itself(copied, kernel, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", kernel)
    torch.manual_seed(0)
    one = Stepper(nn.LSTM(7, 19, num_layers=2).eval(), torch.nn.Linear(19, 5), rows=2)
    one(torch.tensor([1, 2]))
    two, three = copied(one), copied(one)
    wanted = two(torch.tensor([3, 4]))
    for _ in range(3):
        two(torch.tensor([5, 6]))
    assert torch.equal(one(torch.tensor([3, 4])), wanted)
    assert torch.equal(three(torch.tensor([3, 4])), wanted)


def test_ids_must_be_one_per_row():
    step = Stepper(nn.RNN(7, 8).eval(), torch.nn.Linear(8, 5), rows=2)
    with pytest.raises(UserError, match="2 rows"):
        step(torch.tensor([1]))
    with pytest.raises(UserError, match="2 rows"):
        step(torch.tensor([[1, 2]]))


def test_a_stepper_reads_the_weights_as_they_are_now():
    rnn, out = nn.RNN(7, 8).eval(), torch.nn.Linear(8, 5)
    step = Stepper(rnn, out)
    with torch.no_grad():
        for p in (*rnn.parameters(), *out.parameters()):
            p.zero_()
    assert torch.equal(step(torch.tensor([2])), torch.zeros(1, 5))


def test_ids_outside_the_input_are_refused():
    step = Stepper(nn.RNN(7, 8).eval(), torch.nn.Linear(8, 5))
    with pytest.raises(IndexError, match="7 inputs"):
        step(torch.tensor([7]))


def test_a_module_that_changes_its_type_leaves_its_stepper_as_it_was():
    torch.manual_seed(0)
    rnn, out = nn.LSTM(7, 300).eval(), torch.nn.Linear(300, 5)
    one, two = Stepper(rnn, out), Stepper(rnn, out)
    wanted = [one(torch.tensor([i])) for i in range(7)]
    if one._steps is None:
        pytest.skip("the cpu kernel was not built")
    rnn.double()
    out.double()
    filled = [torch.full((1200, 300), torch.nan) for _ in range(8)]  # where the weights once were
    assert all(torch.equal(two(torch.tensor([i])), logits) for i, logits in enumerate(wanted))
    assert len(filled) == 8


@pytest.mark.parametrize("module", [nn.RNN, nn.LSTM])
def test_weights_may_move_to_memory_that_processes_share(module):
    torch.manual_seed(0)
    rnn, out = module(7, 300, num_layers=2).eval(), torch.nn.Linear(300, 5)
    one, two = Stepper(rnn, out), Stepper(rnn, out)
    wanted = [one(torch.tensor([i])) for i in range(7)]
    rnn.share_memory()
    out.share_memory()
    filled = [torch.full((1200, 300), torch.nan) for _ in range(8)]  # where the weights once were
    assert all(torch.equal(two(torch.tensor([i])), logits) for i, logits in enumerate(wanted))
    with torch.no_grad():
        out.weight.zero_()
        out.bias.zero_()
    assert torch.equal(two(torch.tensor([1])), torch.zeros(1, 5)), "they are read where they lie"
    assert len(filled) == 8
