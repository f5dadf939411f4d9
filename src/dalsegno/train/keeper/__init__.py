"""The keeper: one process per node and run that manages the node's snapshots while training runs.

The keeper computes the snapshots' checksums and sends each rank's own part to a buddy node. It stores the copies that
another node sends, and fetches the snapshots of a rank that moves to this node. The run agent controls it. Modules are
imported on first use, so that `holdings` does not import torch.
"""

from __future__ import annotations

import socket


def serve(agent: str, listener: socket.socket) -> None:
    """Run the keeper of the agent's node until the agent ends. `agent` is the name of its abstract Unix socket."""
    from dalsegno.train.keeper.service import serve as serve_until_the_end

    serve_until_the_end(agent, listener)
