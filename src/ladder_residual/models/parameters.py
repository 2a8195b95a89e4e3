"""Where a model's parameters lie in a checkpoint, and whether all of them are there in the shape its config calls for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .checkpoint_reader import Checkpoint
from .sharding import ShardSpec


def check_parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """ValueError unless the files hold every parameter of ``model`` (on the meta device) in its shape, and nothing else."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, parameter in model.named_parameters():
        if tied and parameter is head and parameter is not embedding:
            continue  # a model on the meta device may not have tied its head yet
        for stored, shape in stored_tensors(checkpoint, name, tuple(parameter.shape)):
            _check_shape(checkpoint, stored, shape)
            checkpoint.used.add(stored)
    checkpoint.check_all_used()
    if tied:
        checkpoint.check_tied_head()


def stored_tensors(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes under which ``checkpoint`` stores the parameter ``name``; several for stacked experts."""
    for templates in sources_of(name):
        if "{}" not in templates[0]:
            if templates[0] in checkpoint:
                return [(templates[0], shape)]
        elif templates[0].format(0) in checkpoint:
            each = (shape[1] // len(templates), shape[2])
            names = [template.format(expert) for expert in range(shape[0]) for template in templates]
            missing = next((stored for stored in names if stored not in checkpoint), None)
            if missing is not None:
                raise ValueError(f"{checkpoint.directory} has no tensor {missing}: one of {shape[0]} experts is missing")
            return [(stored, each) for stored in names]
    raise ValueError(f"{checkpoint.directory} has no tensor {name}, which its config.json calls for")


def read_parameter(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
    """A parameter, or the part ``spec`` keeps of it. Experts that are stored one by one are sharded as they are read, then stacked."""
    stored = stored_tensors(checkpoint, name, shape)
    for part, expected in stored:
        _check_shape(checkpoint, part, expected)
    if len(stored) == 1 and stored[0][1] == shape:
        return checkpoint.read(stored[0][0], spec)
    # The stack is sharded along [expert, rows, columns]; a single matrix lacks the first dim. Gate and up keep equal ranges.
    own = ShardSpec(spec.dim - 1, spec.ranges[:1]) if spec else None
    parts = [checkpoint.read(part, own) for part, _ in stored]
    per_expert = len(parts) // shape[0]
    return torch.stack([torch.cat(parts[first : first + per_expert]) for first in range(0, len(parts), per_expert)])


def _check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    found = checkpoint.shape(name)
    if found != expected:
        raise ValueError(
            f"{checkpoint.directory}: {name} has shape {list(found)}, but config.json calls for {list(expected)}; one of them is wrong"
        )


def sources_of(name: str) -> Iterator[list[str]]:
    """Where a parameter may lie in a checkpoint: alternatives, each a list of templates (``{}`` is the expert).

    transformers 5 stacks the experts of a mixture; checkpoints keep them one by one under their older names.
    """
    yield [name]
    if name == "lm_head.weight":
        yield ["embed_out.weight"]  # of gpt_neox
    if not name.startswith("model."):
        yield [f"model.{name}"]
    else:
        yield [name.removeprefix("model.")]
    head, experts, tail = name.rpartition(".experts.")
    if experts:
        stems = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
        modern, mixtral = stems.get(tail, ((), ()))
        if modern:
            yield [f"{head}.experts.{{}}.{stem}.weight" for stem in modern]
            yield [f"{head.removesuffix('.mlp')}.block_sparse_moe.experts.{{}}.{stem}.weight" for stem in mixtral]
    elif ".mlp.gate." in name:
        yield [name.replace(".mlp.gate.", ".block_sparse_moe.gate.")]
