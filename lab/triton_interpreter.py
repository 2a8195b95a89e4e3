"""Kernels on Triton's CPU interpreter, for tests and for ``lab.runs.engine_interpreted``."""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """Triton 3.6's interpreter converts one-element arrays with int(), which numpy 2.4 refuses. And it replaces all functions of the
    language once more at each call of a device function, a third of the time of our kernels: once a kernel is enough. Half of what is
    left describes the types of results anew: those of a shape are described once. Its E4M3 has no NaN and loses a carry as it rounds:
    torch converts instead."""
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    if hasattr(patch_tensor, "mended"):
        return

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        replaced = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if replaced else patch_language(function)

    with_index.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor, interpreter._patch_lang = with_index, once
    _remember_shapes(tl.core)
    number_type = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(type: Any) -> Any:
        if (name := type.scalar.name) not in known:
            known[name] = number_type(type)
        return known[name]

    interpreter._get_np_dtype = numpy_type
    convert = interpreter._convert_float

    def convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv:
            values = torch.from_numpy(values.view("uint8")).view(torch.float8_e4m3fn).float().numpy()
            return values.view("uint32") if target == tl.float32 else convert(values, tl.float32, target, rounding_mode)
        return convert(values, source, target, rounding_mode)

    interpreter._convert_float = convert_float


def _remember_shapes(core: Any) -> None:
    """What ``block_type`` and ``tensor`` make of a shape, which is the same for every tensor of it."""
    block_type, tensor = core.block_type, core.tensor
    make_type, make_tensor = block_type.__init__, tensor.__init__
    types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def described_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = types[key]
        self.name = f"<{text}, {element_ty}>"

    def described_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[key]

    block_type.__init__, tensor.__init__ = described_type, described_tensor
