"""The keeper: one process on each node that looks after its snapshots, beside the training.

It makes their checksums, sends what only one rank has to a buddy node, keeps what another node sends, and fetches what
a rank needs that comes to live here. Its master is the run agent. Nothing is loaded before it is asked for: what is
held (`holdings`) can be read without torch.
"""

from __future__ import annotations

import socket


def serve(agent: str, listener: socket.socket) -> None:
    """Be the keeper of that agent's node (its abstract Unix socket, by name), until the agent goes."""
    from dalsegno.train.keeper.service import serve as serve_until_the_end

    serve_until_the_end(agent, listener)
