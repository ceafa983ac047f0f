"""Several processes that train one model, and lanes that belong to none of them.

    lanes of the batch    0  1  2  3  4  5  6  7  8  9     they belong to the text
    groups of lanes      [0  1  2][3  4  5][6  7][8  9]    they belong to the run: lane_groups=4
    processes             ────── 0 ──────  ──── 1 ────     they come and go

`torchrun` starts them and torch.distributed connects them (gloo between CPUs, nccl between GPUs);
every process has the whole model and some of the lanes, with their state. Nothing random depends on
a process: what is drawn for a batch is drawn for all its lanes, by all processes alike, and each
takes the rows of its own.

**The sum of the gradients.** With `lane_groups=0` each process reads its lanes at once and the sums
are torch's all-reduce: the fastest, and another number of processes rounds differently. With
`lane_groups=G` each group of lanes is read by itself, by whichever process has it, and groups are
added pairwise in a tree that depends on G alone:

    g = ((g₀ + g₁) + (g₂ + g₃)) + …          g_i: the gradient of group i

so that 1, 4 or 3 processes, one after the other, end in the same weights to the last bit (on one
kind of device). A process adds what it can of the tree, then every process gets its slice of all
that is left, adds that, and hands it round: 2 (W-1)/W of the weights sent by each of W processes,
as in an all-reduce.
"""

import atexit
import gc
import importlib
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from elman.errors import UserError, WorkFailed
from elman.text.batches import shares

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The name of one and the same function since torch 2.13, and before."""
PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others before it gives them up."""


# ---------------------------------------------------------------------- a sum in a fixed tree


class Node(NamedTuple):
    """The sum of the groups from `start` on, `size` of them: a power of two that divides start."""

    start: int
    size: int


def nodes_of(groups: range) -> list[Node]:
    """The largest nodes of the tree that consecutive groups fill.

    >>> nodes_of(range(1, 5))
    [Node(start=1, size=1), Node(start=2, size=2), Node(start=4, size=1)]
    """
    nodes: list[Node] = []
    for group in groups:
        nodes.append(Node(group, 1))
        while len(nodes) > 1 and _are_halves(*nodes[-2:]):
            nodes[-2:] = [Node(nodes[-2].start, 2 * nodes[-2].size)]
    return nodes


def _are_halves(left: Node, right: Node) -> bool:
    return left.size == right.size and left.start % (2 * left.size) == 0


@final
class Tree:
    """Adds gradients in the order of the tree, as they come, each group after the one before it."""

    def __init__(self) -> None:
        self.nodes: list[tuple[Node, Tensor]] = []

    def add(self, node: Node, value: Tensor) -> None:
        """Take in the next node; `value` may be overwritten."""
        self.nodes.append((node, value))
        while len(self.nodes) > 1 and _are_halves(self.nodes[-2][0], self.nodes[-1][0]):
            (left, a), (_, b) = self.nodes[-2:]
            self.nodes[-2:] = [(Node(left.start, 2 * left.size), a.add_(b))]

    def total(self) -> Tensor:
        """The sum of all: what is left is added from the last to the first."""
        values = [value for _, value in self.nodes]
        while len(values) > 1:
            last = values.pop()
            values[-1].add_(last)
        return values[0]


# ---------------------------------------------------------------------- the processes


@final
class Processes:
    """The processes of one training, seen from one of them; `ALONE` is the only one there is.

    `Processes.from_environment()` joins those that torchrun has started.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.restarted = False
        """Whether torchrun has started these again, after a failure or with fewer machines."""

    @classmethod
    def from_environment(cls) -> "Processes":
        """Join the processes that torchrun has started; alone where it has not."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return ALONE
        if CURRENT:
            return CURRENT[0]
        _forestall_keeping()
        kept, rank, size = next(iter(dist.rendezvous("env://", timeout=PATIENCE)))
        store = _met(kept, rank, size)
        joined = cls(rank, size, dist.PrefixStore("elman", store))
        joined.restarted = rank == 0 and kept.add("elman-rounds", 1) > 1
        CURRENT.append(joined)
        atexit.register(leave)
        with _losses():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=PATIENCE,
            )
        joined.restarted = joined.agree(joined.restarted or _restarts_so_far() > 0)[0]
        return joined

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    @property
    def connected(self) -> bool:
        """Whether torchrun started it, even as the only one."""
        return self._store is not None

    def place(self, device: str) -> str:
        """Where this process computes: of several GPUs of a machine, each process takes one."""
        if device == "cuda" and self.connected:
            return f"cuda:{int(os.environ['LOCAL_RANK']) % max(torch.cuda.device_count(), 1)}"
        return device

    # ------------------------------------------------------------------ what they tell each other

    def told(self, text: str) -> str:
        """What the first process says here, whatever the others would have said."""
        if self.size == 1:
            return text
        key = f"told-{self._next()}"
        if self.first:
            self._store.set(key, text)
        return self._store.get(key).decode()

    def _next(self) -> int:
        self._said = getattr(self, "_said", 0) + 1
        return self._said

    def agree(self, *wishes: bool) -> list[bool]:
        """Which of the wishes any process has."""
        if self.size == 1:
            return list(wishes)
        votes = torch.tensor(wishes, dtype=torch.int64, device="cpu")
        with _losses():
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes.tolist()]

    def wait(self) -> None:
        """Until all of them are here."""
        self.agree(False)

    def fails_first(self) -> bool:
        """Whether nobody has reported a failure yet: the one that does so speaks for all."""
        if self.size == 1:
            return True
        try:
            return self._store.add("failed", 1) == 1
        except RuntimeError:  # the process that kept the count is gone, too
            return self.first

    def gathered(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The parts of all processes, which have these sizes along `dim`, as one tensor."""
        if self.size == 1:
            return tensor
        widest = max(sizes)
        padded = tensor.new_zeros(*tensor.shape[:dim], widest, *tensor.shape[dim + 1 :])
        padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [torch.empty_like(padded) for _ in sizes]
        with _losses():
            dist.all_gather(parts, padded)
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim)

    def numbers(self, mine: float) -> list[float]:
        """One number of each process, in their order."""
        number = torch.tensor([mine], dtype=torch.float64, device="cpu")
        return self.gathered(number, 0, [1] * self.size).tolist()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place, in the order that torch likes best."""
        if self.connected:
            with _losses():
                dist.all_reduce(tensor)
        return tensor


CURRENT: list[Processes] = []
"""The processes that this one has joined, if it has."""
ALONE = Processes()


def leave() -> None:
    """Take leave of the other processes, so that nobody waits for this one.

    The threads of gloo end with the last reference to the group. One that still lets go of a tensor
    while Python shuts down aborts the process, whose work was done: so cycles that hold the group,
    as those of a DistributedDataParallel, are collected here.
    """
    if CURRENT:
        CURRENT.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def _met(store: Any, rank: int, size: int) -> Any:
    """A part of torchrun's store that only these processes know, once all of them are here.

    torchrun keeps one store over restarts, and in it the addresses of processes that are dead. So
    each process writes a name of its own under its rank; the first answers every name it finds
    with that of the meeting, until each of the others has come to it.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE.total_seconds()
    if rank > 0:
        store.set(f"elman-here-{rank}", mine)
        meeting = store.get(f"elman-meeting-of-{mine}").decode()
        store.set(f"{meeting}-{rank}", "")
        return dist.PrefixStore(meeting, store)
    absent = set(range(1, size))
    while absent:
        for other in sorted(absent):
            if store.check([f"{mine}-{other}"]):
                absent.discard(other)
            elif store.check([f"elman-here-{other}"]):
                name = store.get(f"elman-here-{other}").decode()
                store.set(f"elman-meeting-of-{name}", mine)
        if absent and time.monotonic() > deadline:
            raise WorkFailed(
                f"process {min(absent)} of {size} has not come", hint="is its machine reachable?"
            )
        time.sleep(0.01 if absent else 0)
    return dist.PrefixStore(mine, store)


def _restarts_so_far() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def fails_first() -> bool:
    """As `Processes.fails_first`, of processes that have not met."""
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=10))))
        return store.add(f"elman-failed-{_restarts_so_far()}", 1) == 1
    except (RuntimeError, ValueError):  # torchrun's store is gone, and its owner has failed
        return True


def _forestall_keeping() -> None:
    """Load what would keep the group for ever, had it been loaded after the group was made.

    `torch.distributed.nn.functional`, which every optimizer of torch loads, has functions with
    `group=group.WORLD`: the group of the moment in which they are defined.
    """
    importlib.import_module("torch.distributed.nn.functional")


class _losses:  # noqa: N801 - reads as a verb: with _losses(): …
    """What torch says about a connection that broke, in words."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, RuntimeError):
            raise WorkFailed(
                f"another process of this training is gone: {str(problem).splitlines()[0][:200]}",
                hint="its own message says why",
            ) from problem


# ---------------------------------------------------------------------- their lanes


class Lanes(NamedTuple):
    """One group of lanes, as the process that has it sees it."""

    group: int
    rows: slice  # of the lanes of this process
    part: float  # of all lanes of the batch


@final
class LaneGroups:
    """Which lanes this process has, in which groups, and the sum over everybody's.

    `groups` is the run's number of them (0: one for each process).
    """

    def __init__(self, batch: int, groups: int, processes: Processes) -> None:
        self.processes, self.exact = processes, groups > 0
        self.count = groups or processes.size
        if self.count > batch:
            raise UserError(
                f"batch_size={batch} cannot be cut into {self.count} groups of lanes",
                hint=f"batch_size={self.count} or more, or fewer processes or groups of lanes",
            )
        if processes.size > self.count:
            raise UserError(
                f"lane_groups={groups} cannot be shared by {processes.size} processes",
                hint=f"at most {groups} processes; or a run with lane_groups={processes.size} or "
                "more, or with lane_groups=0",
            )
        lanes = shares(batch, self.count)
        self.owners = [range(s.start, s.stop) for s in shares(self.count, processes.size)]
        mine = self.owners[processes.rank]
        first = lanes[mine.start].start
        self.batch, self.rows = batch, slice(first, lanes[mine.stop - 1].stop)
        self.own = [
            Lanes(
                g,
                slice(lanes[g].start - first, lanes[g].stop - first),
                (lanes[g].stop - lanes[g].start) / batch,
            )
            for g in mine
        ]
        self.sizes = [lanes[o.stop - 1].stop - lanes[o.start].start for o in self.owners]

    @property
    def divided(self) -> bool:
        """Whether a batch is read in more than one part, here or elsewhere."""
        return self.exact or self.processes.size > 1

    def of(self, lanes: int) -> list[slice]:
        """So many other lanes, as those of a validation, in as many groups: this process's."""
        parts = shares(lanes, self.count)
        return [parts[mine.group] for mine in self.own]

    def numbers(self, mine: Iterable[float]) -> list[float]:
        """One number of each group, from all processes, in the order of the groups."""
        values = torch.tensor(list(mine), dtype=torch.float64, device="cpu")
        return self.processes.gathered(values, 0, [len(o) for o in self.owners]).tolist()

    def total(self, tree: Tree) -> Tensor:
        """The sum over all groups, of which this process has added its own to a tree."""
        if not self.exact:
            return self.processes.all_reduce(tree.total())
        if self.processes.size == 1:
            return tree.total()
        return self._exchanged([value for _, value in tree.nodes])

    def _exchanged(self, mine: list[Tensor]) -> Tensor:
        """Slice i of all nodes goes to process i, which adds them and hands the sum to all."""
        size, length = self.processes.size, len(mine[0])
        nodes = [nodes_of(owner) for owner in self.owners]
        most, piece = max(map(len, nodes)), -(-length // size)
        sent = mine[0].new_zeros(size, most, piece)
        for i, value in enumerate(mine):
            whole, rest = divmod(length, piece)
            sent[:whole, i] = value[: whole * piece].view(whole, piece)
            if rest:
                sent[whole, i, :rest] = value[whole * piece :]
        received, total = torch.empty_like(sent), sent.new_empty(size * piece)
        with _losses():
            dist.all_to_all_single(received, sent)
            tree = Tree()
            for theirs, values in zip(nodes, received, strict=True):
                for node, value in zip(theirs, values, strict=False):
                    tree.add(node, value)
            getattr(dist, ALL_GATHER)(total, tree.total())
        return total[:length]


@final
class GradientSum:
    """Gradients of groups of lanes, summed into `.grad`, and the nats that go with them.

    The nats of each group travel with the gradients, as two numbers with a place of their own: the
    sum with everybody else's zeros is exact, and so no second message is needed.
    """

    def __init__(self, groups: LaneGroups, parameters: Sequence[Tensor]) -> None:
        self.groups, self.parameters, self.tree = groups, parameters, Tree()

    def add(self, lanes: Lanes, nats: float | Tensor) -> None:
        """Take in `.grad`, the gradient of a mean over these lanes, and the sum of their nats."""
        gradients = [_gradient(p).reshape(-1) for p in self.parameters]
        vector = torch.cat([g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients])
        vector = vector.mul_(lanes.part)
        exact = torch.as_tensor(nats, dtype=torch.float64, device=vector.device)
        high = exact.to(vector.dtype)
        numbers = vector.new_zeros(self.groups.count, 2)
        numbers[lanes.group, 0] = high
        numbers[lanes.group, 1] = exact - high
        self.tree.add(Node(lanes.group, 1), torch.cat([vector, numbers.view(-1)]))

    def finish(self) -> Tensor:
        """Leave the sum over all groups in `.grad`; returns that of the nats, in float64."""
        total = self.groups.total(self.tree)
        sizes = [p.numel() for p in self.parameters]
        *vectors, numbers = total.split([*sizes, 2 * self.groups.count])
        for parameter, vector in zip(self.parameters, vectors, strict=True):
            if parameter.grad is not None:
                parameter.grad = vector.view_as(parameter).to(parameter.dtype)
        return numbers.double().view(-1, 2).sum()


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
