"""Loss against the number of converted layers, as ``ladder convert --wiring auto`` measured it (``selection.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.charts import Chart, Series

ORDERS = {"ours": "our choice", "last-k": "last k", "first-k": "first k", "every-other": "every other"}
UNSEEN = ("held-out", "wikitext2")  # texts that had no say in the choice, best first


def selection_chart(document: Mapping[str, Any], *, key: str = "selection", title: str = "") -> Chart:
    text = next((text for text in UNSEEN if text in document["curves"]), next(iter(document["curves"])))
    curves, original = document["curves"][text], float(document["original"][text])
    series = [
        Series(name, [(0.0, original), *((float(point["k"]), float(point["loss"])) for point in curves[order])], colour=index)
        for index, (order, name) in enumerate(ORDERS.items())
    ]
    title = title or f"Loss before retraining, {text} text"
    note = "Measured, before any retraining; lower is better."
    return Chart(key, title, "converted layers", "loss (nats per token)", series, note=note)
