"""Whether nodes answer, asked before srun is told to start something there.

srun needs up to twelve seconds to find out that one does not, and then ends what it has started on all the others.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable

from dalsegno.slurm.facts import NodeInfo

QUIET_PORT = 9  # where nobody listens, a kernel that lives says so, and slurmd's log has nothing to complain of
QUIET_S = 0.3
PATIENT_S = 2.0  # long enough for a first packet that was lost
AT_ONCE = 200  # connections
_NOT_THERE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT)


async def unreachable(nodes: Iterable[NodeInfo], slurmd_port: Callable[[], Awaitable[int]]) -> list[str]:
    """Those whose host answers on no port; of one that cannot be asked nothing is said.

    Where a firewall swallows what is for nobody, slurmd itself is asked: on its node's port, or on that of all.
    """
    suspects = await _silent([(node, QUIET_PORT) for node in nodes if node.address], QUIET_S)
    if not suspects:
        return []
    usual = await slurmd_port()
    asked = [(node, node.port or usual) for node in suspects]
    return [node.name for node in await _silent([each for each in asked if each[1]], PATIENT_S)]


async def _silent(asked: list[tuple[NodeInfo, int]], within_s: float) -> list[NodeInfo]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def answers(node: NodeInfo, port: int) -> bool:
        async with turn:
            return await _answers(node.address, port, within_s)

    answered = await asyncio.gather(*(answers(*each) for each in asked))
    return [node for (node, _), there in zip(asked, answered, strict=True) if not there]


async def _answers(host: str, port: int, within_s: float) -> bool:
    """A refusal is an answer too, and what is our own fault says nothing of the host."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), within_s)
    except asyncio.TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _NOT_THERE
    writer.close()
    return True
