"""How long an all-reduce takes: one ``Link``, one parser of its names, one table of measurements. Nothing here imports torch.

>>> parse_link("24us").us(16384, ranks=8)
24.0
"""

from .emulation import Emulation, parse_emulation
from .link import Link
from .parse import parse_link

__all__ = ["Emulation", "Link", "parse_emulation", "parse_link"]
