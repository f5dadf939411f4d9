"""What is wrong with an image, as an error."""

from __future__ import annotations

from dalsegno.errors import DalsegnoError


class DamagedImage(DalsegnoError):
    """What came is not what was named, or no image at all."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint=hint or "it was made or carried wrongly; build it again, or ask who did")
