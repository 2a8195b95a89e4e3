"""Forward and backward of a training step as one CUDA graph.

A small model's step is thousands of short kernels: Python cannot start them as fast as a large GPU runs them (measured on an H200,
135M parameters, 32,768 tokens a step: 160 ms a step where the kernels alone take under 70). Recorded once, they are replayed
without Python. Inputs, counts and the weight of the hidden states live in fixed buffers; another wiring, another shape, or the end
of hidden-state matching records anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .objective import Counts

_WARM_UP = 3  # passes that compile, choose kernels and allocate, before one is recorded

Loss = Callable[[dict[str, Tensor], Counts, "Tensor | float"], dict[str, Tensor]]


class GraphedStep:
    """``loss(inputs, counts, hidden_weight)`` gives the parts of the loss; ``run`` leaves gradients in the parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.loss = loss
        self.key: Any = None
        self.recorded: Any = None  # the graph, the gradients and the parts of the loss that it writes

    def run(self, key: Any, inputs: dict[str, Tensor], counts: Counts, hidden_weight: float) -> dict[str, Tensor]:
        key = (key, hidden_weight > 0, tuple((name, value.shape) for name, value in inputs.items()))
        if key != self.key:
            self._record(inputs, counts, hidden_weight)
            self.key = key
        for name, value in inputs.items():
            self.inputs[name].copy_(value)
        for ours, given in zip(self.counts, counts, strict=True):
            ours.copy_(given)
        self.hidden_weight.fill_(hidden_weight)
        graph, gradients, parts = self.recorded
        graph.replay()
        for parameter, gradient in gradients:
            parameter.grad = gradient  # the Trainer forgets gradients after each step; the graph writes to the same memory
        return {name: value.clone() for name, value in parts.items()}

    def _record(self, inputs: dict[str, Tensor], counts: Counts, hidden_weight: float) -> None:
        self.key = self.recorded = None  # its memory is needed now
        torch.cuda.empty_cache()
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        self.counts = Counts(*(value.clone() for value in counts))
        self.hidden_weight = torch.full((), hidden_weight, device=counts.tokens.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._pass(hidden_weight > 0)
        torch.cuda.current_stream().wait_stream(side)
        self._forget()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parts = self._pass(hidden_weight > 0)
        gradients = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        self.recorded = (graph, gradients, parts)

    def _pass(self, matching: bool) -> dict[str, Tensor]:
        self._forget()
        parts = self.loss(self.inputs, self.counts, self.hidden_weight if matching else 0.0)
        parts["loss"].backward()
        return {name: value.detach() for name, value in parts.items()}

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
