"""Choosing the layers of a pretrained model to convert (``ladder convert --wiring auto``), and recovering its quality afterwards
(``ladder adapt``; papers call it healing)."""
