"""The secret of a torchrun's run: made by the agent that listens, told to those of the same user, and to no one else.

torchrun has none: whoever reaches its port is in. With munge, as every Slurm cluster has it, the greeting carries the
secret sealed for our user. Without it the key is only what torchrun's own agents know of each other. Anybody can guess
that, so nothing that is unpickled may come from a node that knows no more (`private`).
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.jobs.torchrun.munge import NotSealed
from dalsegno.launch.agent.link import Refused
from dalsegno.train.frames import Message


class Sealer(Protocol):
    """munge, or its like."""

    def seal(self, data: bytes) -> str: ...

    def unseal(self, sealed: str) -> bytes:
        """NotSealed unless a process of our own user sealed it."""
        ...


@dataclass
class Keys:
    """Both sides of it. `trouble` is why the last greeting could not be used."""

    run: str
    endpoint: str
    munge: Sealer | None
    alone: bool = False  # no other node comes
    trouble: str = ""
    secret: bytes = field(default=b"", repr=False)

    @property
    def private(self) -> bool:
        """Whether only agents of our own user can know the secret."""
        return self.alone or self.munge is not None

    def make(self) -> bytes:
        self.secret = secrets.token_bytes(32) if self.private else self._derived()
        return self.secret

    def greeting(self) -> Message:
        """What whoever connects is told first. A seal of its own for each: munge opens none twice."""
        sealed = self.munge.seal(self.mark.encode() + self.secret) if self.munge else ""
        return {"run": self.mark, "sealed": sealed}

    def unlock(self, greeting: Message) -> bytes:
        """The secret, from a greeting. Who has munge takes nothing unsealed: anybody could have sent that."""
        if greeting.get("run") != self.mark:
            raise self._refuse(f"another run than `{self.run}` is at {self.endpoint}; choose another port")
        sealed = str(greeting.get("sealed") or "")
        if self.munge is None and not sealed:
            return self._derived()
        if self.munge is None:
            raise self._refuse(f"{self.endpoint} proves itself with munge, which does not answer on this node")
        if not sealed:
            raise self._refuse(f"{self.endpoint} has no munge and this node has: nobody knows who answers there")
        return self._unseal(self.munge, sealed)

    def _unseal(self, munge: Sealer, sealed: str) -> bytes:
        try:
            data = munge.unseal(sealed)
        except NotSealed as error:
            raise self._refuse(f"munge does not vouch for who answers at {self.endpoint}: {error}") from error
        mark = self.mark.encode()
        if not data.startswith(mark):
            raise self._refuse(f"what {self.endpoint} sealed is for another run")
        self.trouble = ""
        return data[len(mark) :]

    def _refuse(self, why: str) -> Refused:
        self.trouble = why
        return Refused(why)

    @property
    def mark(self) -> str:
        """A name of the run that fits everywhere, and gives nothing away."""
        return hashlib.sha256(f"torchrun\0{self.run}".encode()).hexdigest()[:16]

    def _derived(self) -> bytes:
        return hashlib.sha256(f"torchrun\0{self.run}\0{self.endpoint}".encode()).digest()
