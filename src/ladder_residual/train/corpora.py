"""The corpora that a recipe names. No torch: a recipe whose text is missing is refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..data.corpus import Corpus
from .recipe import Recipe


def open_corpus(recipe: Recipe, part: Literal["train", "valid"], verify: Literal["sizes", "checksums"] = "sizes") -> Corpus:
    """``data.train`` or ``data.valid``."""
    path, key = getattr(recipe.data, part), f"data.{part}"
    if not path:
        raise ValueError(f"the recipe names no {key}: a directory written by `ladder data prepare`")
    try:
        corpus = Corpus.open(Path(path), verify)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    vocabulary = recipe.model.shape().vocab_size
    if corpus.vocab_size > vocabulary:
        raise ValueError(
            f"{key}: {path} has a vocabulary of {corpus.vocab_size}, but model.vocab_size is {vocabulary}: raise it"
        )
    return corpus


def check_corpora(recipe: Recipe) -> None:
    open_corpus(recipe, "train")
    if recipe.data.valid:
        open_corpus(recipe, "valid")
