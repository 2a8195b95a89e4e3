"""Kernels on Triton's CPU interpreter, for tests and for ``lab.runs.engine_interpreted``."""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """Triton 3.6's interpreter converts one-element arrays with int(), which numpy 2.4 refuses. And it replaces all functions of the
    language once more at each call of a device function, a third of the time of our kernels: once a kernel is enough."""
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
