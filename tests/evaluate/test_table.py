"""Results side by side."""

import pytest

from ladder_residual.evaluate.table import side_by_side


def test_side_by_side(standard, converted):
    page = side_by_side({"before": standard, "zero-shot": converted, "again": standard}, metric="acc")
    lines = page.splitlines()
    assert lines[0] == "| task | shots | rows | before | zero-shot | again |"
    assert any(line.startswith("| arc_easy, acc | 3 | 6 |") for line in lines)
    assert any(line.startswith("| wikitext, word_perplexity | 0 | 2 |") for line in lines)
    assert any(line.startswith("| average |") for line in lines)
    cells = next(line for line in lines if line.startswith("| piqa, acc |")).split(" | ")
    assert cells[3].endswith("± 22.4")
    assert cells[5] == "**50.0 (+0.0 ± 0.0)** |"  # the same model again: no difference, within one error
    assert "| arc_easy, acc_norm |" in side_by_side({"a": standard, "b": converted})
    with pytest.raises(ValueError, match="at least two"):
        side_by_side({"a": standard})
    with pytest.raises(ValueError, match="no task in common"):
        side_by_side(
            {"a": standard, "b": {**standard, "rows": [], "perplexity": None} | {"perplexity": None}} | {"c": {"rows": []}}
        )
