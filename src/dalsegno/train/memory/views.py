"""View the bytes of a slot as tensors."""

from __future__ import annotations

import torch

from dalsegno.train.memory.layout import PlacedPiece

_PARTS = 2  # number of parts of a snapshot


def view(body: torch.Tensor, piece: PlacedPiece) -> torch.Tensor:
    """Return the tensor of one piece. `body` contains the bytes of its part after the head."""
    raw = body[piece.at : piece.at + piece.length]
    return raw.view(getattr(torch, piece.dtype)).view(piece.shape)


class Views:
    """The cached views of one mapping. Creating a thousand of them takes milliseconds, and they rarely change."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self._known: dict[int, tuple[tuple[PlacedPiece, ...], list[torch.Tensor]]] = {}

    def of(self, pieces: tuple[PlacedPiece, ...], body_at: int) -> list[torch.Tensor]:
        known = self._known.get(body_at)
        if known is None or known[0] is not pieces:
            if len(self._known) >= _PARTS:
                self._known.clear()
            body = self.whole[body_at:]
            known = self._known[body_at] = (pieces, [view(body, piece) for piece in pieces])
        return known[1]
