"""Choosing which layers of a pretrained model to convert, and healing it afterwards: ``ladder convert --wiring auto``, ``ladder adapt``."""
