"""Triton if it is installed; otherwise stand-ins that let the kernel files import and fail only when a kernel is called.

CUDA builds of torch bring Triton along; CPU builds do not, and nothing in the package may need it to be imported.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda as tl_cuda

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False

    class _Missing:
        """Answers every attribute with itself and refuses to be launched."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and callable(args[0]):
                return self  # used as a decorator
            raise ModuleNotFoundError("this kernel needs triton, which comes with CUDA builds of torch", name="triton")

        def __getitem__(self, grid: Any) -> Any:
            return self

    triton = tl = tl_cuda = _Missing()


def mend_interpreter() -> None:
    """Triton 3.6's interpreter converts one-element arrays with int(), which numpy 2.4 refuses. For those who run kernels on it."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if hasattr(original, "mended"):
        return

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched


__all__ = ["HAVE_TRITON", "mend_interpreter", "tl", "tl_cuda", "triton"]
