"""Quantised checkpoints for the engine: what is kept packed stands for what loading would have dequantised, whole and on a rank of two."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from ladder_residual.distributed.world import EmulatedRank, World
from ladder_residual.engine.quantized import QuantizedWeight
from ladder_residual.engine.spec import EngineSpec, RankSizes
from ladder_residual.engine.weights import PROJECTIONS, check_weights_stack, stack_weights
from ladder_residual.generation.engine_adapter import take_weights
from ladder_residual.models.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ladder_residual.models.loading import load_model
from ladder_residual.models.quantization.linear import QuantizedLinear, holds_quantised
from tests.models.quantization.written import FORMATS, write
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")
KEPT = [name for name in FORMATS if not name.endswith("-order")]
FOR_THE_ENGINE = dict(keep_quantised=True, keep_act_order=False)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", KEPT)
def test_kept_weights_equal_the_dequantised(name, tp, tmp_path):
    write(tmp_path / name, name, layers=1)
    rank = EmulatedRank(tp, device=CPU) if tp > 1 else World()
    with pytest.warns(UserWarning, match="are dequantised to float32"):
        dense = dict(load_model(tmp_path / name, rank).named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is dequantised
        model = load_model(tmp_path / name, rank, **FOR_THE_ENGINE)
    taken = take_weights(model)
    assert not any(module.parts for module in model.modules() if isinstance(module, QuantizedLinear))
    specs = {f"{path}.weight": each.layout.spec for path, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    kept = {parameter: weight for parameter, weight in taken.items() if isinstance(weight, QuantizedWeight)}
    assert len(kept) == 7
    assert set(taken) == set(dense)
    for parameter, weight in kept.items():
        assert weight.shape == tuple(dense[parameter].shape)
        assert (weight.zeros is not None) == specs[parameter].zero_points
        torch.testing.assert_close(weight.float(), dense[parameter].detach(), rtol=1e-6, atol=0, msg=parameter)
    spec = EngineSpec.from_hf(model.config.to_dict())
    sizes = RankSizes.of(spec.shape, tp, 0)
    check_weights_stack(spec, sizes, taken)
    expected = stack_weights(spec, sizes, {parameter: tensor.detach() for parameter, tensor in dense.items()})
    found = stack_weights(spec, sizes, taken)
    for projection in PROJECTIONS:
        weight, dequantised = getattr(found.layers[0], projection), getattr(expected.layers[0], projection)
        torch.testing.assert_close(weight.float(), dequantised, rtol=1e-6, atol=0)
    assert found.nbytes_per_step < 0.6 * expected.nbytes_per_step


def _logits(world, source):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = load_model(source, world, keep_quantised=True), load_model(source, world)
        return [holds_quantised(model) for model in models], [model(torch.arange(3, 35).view(2, 16)).logits for model in models]


@pytest.mark.parametrize("name", ["fp8-block", "gptq-128"])
def test_two_ranks_compute_with_kept_weights_what_they_compute_with_dequantised(name, tmp_path):
    write(tmp_path / name, name, attention_bias=True)  # the output projection's is added once
    for held, (kept, dense) in run_on_ranks(2, _logits, tmp_path / name):
        assert held == [True, False]
        torch.testing.assert_close(kept, dense, rtol=1e-5, atol=1e-5)


def test_act_order_is_dequantised(tmp_path):
    write(tmp_path / "src", "gptq-order", layers=1)
    with pytest.warns(UserWarning, match="are dequantised to float32"):
        model = load_model(tmp_path / "src", **FOR_THE_ENGINE)
    assert not holds_quantised(model)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapter_is_merged_into_what_the_engine_takes(tp, tmp_path):
    write(tmp_path / "base", "fp8-channel", layers=1)
    rank = EmulatedRank(tp, device=CPU) if tp > 1 else World()
    with pytest.warns(UserWarning, match="are dequantised to float32"):
        whole = dict(load_model(tmp_path / "base").named_parameters())
    name = "model.layers.0.mlp.down_proj.weight"
    rows, columns = whole[name].shape
    tall, wide = torch.randn(rows, 4), torch.randn(4, columns)
    (tmp_path / "adapter").mkdir()
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text(json.dumps(fields))
    path = "base_model.model." + name.removesuffix(".weight")
    save_file({f"{path}.lora_A.weight": wide, f"{path}.lora_B.weight": tall}, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    with pytest.warns(UserWarning, match="are dequantised to float32"):
        taken = take_weights(load_model(tmp_path / "adapter", rank, **FOR_THE_ENGINE))
    assert all(isinstance(weight, torch.Tensor) for weight in taken.values())
    merged = (whole[name].detach() + 2 * tall @ wide)[:, : columns // tp]  # of rank 0
    torch.testing.assert_close(taken[name], merged)
