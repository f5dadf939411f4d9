"""How many NVLinks a GPU of a kind has when all of them are up."""

from __future__ import annotations

from dalsegno.errors import NotThere
from dalsegno.hardware import find_gpu

_ONE_WAY_GBYTES_PER_S = {"NVLink 2": 25, "NVLink 3": 25, "NVLink 4": 25, "NVLink 5": 50}


def nvlinks_of(model: str) -> int:
    """By Slurm's type (h100) or the catalog's name; 0 for one without, or one that the catalog does not know."""
    try:
        gpu = find_gpu(model)
    except NotThere:
        return 0
    each = _ONE_WAY_GBYTES_PER_S.get(gpu.link)
    return round(gpu.link_gbytes_per_s / each) if each and gpu.link_gbytes_per_s else 0
