"""Where `torch.compile` meets a module: inside a graph, or between two.

Inside a graph a call is an operator (`recurrence.compiled`), which with all that the compiler puts
around it takes longer than a small call. At `torch.nn`'s modules the compiler breaks its graph, and
they run as ever. So do these wherever a graph may break, by the short ways of `module`. A call
stays inside

- where a graph may not break: with `fullgraph=True`, for exporters, in the compiler's own branches
  and checkpoints, and where the code around the call could not go on from there;
- where graphs become CUDA graphs (`mode="reduce-overhead"`), operators and all;
- where backward passes are compiled as a whole, which would look into the module's own;
- where it is asked for: by `torch._dynamo.config.allow_rnn`, as of `torch.nn`'s modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _forward(module: Any, input: Any, hx: Any) -> Any:
    return module.forward(input, hx)


outside: Callable[..., Any] = _forward
"""A call that no compiler looks into, once `may_break` has said so."""

REASON = (
    "elman.nn's modules run between two graphs, as torch.nn's do; "
    "fullgraph=True, or torch._dynamo.config.allow_rnn = True, keeps them inside one"
)


def may_break() -> bool:
    """Whether the graph that is being traced is to break here: the compiler asks while it traces.

    What it knows of itself is not documented. Where a version of torch does not say it, graphs stay
    whole, which is right everywhere.
    """
    global outside
    from torch import _dynamo  # here, since it takes a second

    try:
        tracer = _dynamo.symbolic_convert.InstructionTranslator.current_tx()
        must_be_whole = _dynamo.symbolic_convert._get_error_on_graph_break()
        asked = _dynamo.config.allow_rnn or _dynamo.config.compiled_autograd
        if must_be_whole or asked or _is_captured(tracer) or not hasattr(_dynamo, "skip_frame"):
            return False
        if not tracer.should_compile_partial_graph():
            return False
    except AttributeError:  # no tracer: an exporter that runs the module itself
        return False
    if outside is _forward:
        outside = torch.compiler.disable(_forward, reason=REASON)
    return True


# as `torch.compiler.assume_constant_result` marks it, which would import the compiler
may_break._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _is_captured(tracer: Any) -> bool:
    """Whether graphs become CUDA graphs, and anything lies on a GPU."""
    if not torch.cuda.is_initialized():
        return False
    backend = tracer.output.compiler_fn
    settings = getattr(backend, "get_compiler_config", dict)()
    return getattr(backend, "__name__", "") == "cudagraphs" or settings.get(
        "triton.cudagraphs", False
    )
