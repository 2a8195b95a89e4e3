"""One order of steps for training and adaptation: what comes out computes what went in."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ladder_residual import rewire
from ladder_residual.train.model import ModelWithLoss
from ladder_residual.train.parallelize import parallelize
from tests.ranks import run_on_ranks
from tests.tiny_models import clone, random_ids, tiny_model

BATCH = {"input_ids": random_ids(2, 9), "labels": random_ids(2, 9)}


def step(root):
    root(BATCH, 16.0).total.backward()
    gradients = {name: parameter.grad for name, parameter in root.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}


def sharded_step(world, family):
    model = rewire(tiny_model(family), "ladder").train()
    alone = ModelWithLoss(clone(model), z_loss=0.0, chunk=64, compiled=False)
    root = ModelWithLoss(model, z_loss=0.0, chunk=64, compiled=False)
    parallelize(model, root=root, checkpoint_activations=family == "llama", data_mesh=init_device_mesh("cpu", (world.size,)))
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
    expected = step(alone)
    return max((grad - expected[name]).abs().max().item() for name, grad in step(root).items())


@pytest.mark.parametrize("family", ["llama", "olmo2"])  # the second applies a layer's last norm in the next layer
def test_shards_compute_the_same_gradients(family):
    assert max(run_on_ranks(2, sharded_step, family)) < 1e-5


def test_without_options_nothing_changes():
    model = rewire(tiny_model("llama"), "ladder").train()
    before = dict(model.named_parameters())
    parallelize(model)
    assert dict(model.named_parameters()) == before
    assert not model.is_gradient_checkpointing
    torch.testing.assert_close(model(BATCH["input_ids"]).logits, clone(model)(BATCH["input_ids"]).logits)
