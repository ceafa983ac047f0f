"""Looking at a model without changing it, and seeing what its owner has changed about it.

What goes round a module's own call, or reads weights where they lie, asks here first: there may be
hooks, and weights that are computed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients; every part's mode is put back afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def weights_of(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """These weights as they are used.

    Those that a parametrization computes, or that are pruned, are no parameters, and no state dict
    has them by their names.
    """
    with evaluating(module):  # in training, spectral_norm goes on whenever it is asked
        return {name: attrgetter(name)(module).detach() for name in names}
