"""Slurm, asked and told without blocking the coordinator, and again where it does not answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.names import node_list

TRIES = 5  # of a word to Slurm that does not answer
AGAIN_S = 1.0


class PatientSlurm:
    def __init__(self, client: SlurmClient) -> None:
        self._client = client

    async def look(self, job: int) -> JobInfo | None:
        """None if Slurm knows it no more. Slurm not answering is no answer: asked again until it does."""
        while True:
            try:
                return await asyncio.to_thread(self._client.job, job)
            except NotThere:
                return None
            except DalsegnoError:
                await asyncio.sleep(AGAIN_S)

    async def named(self, name: str) -> list[int]:
        """Return this user's jobs of this name; none if Slurm does not say."""
        try:
            found = await asyncio.to_thread(self._client.jobs)
        except DalsegnoError:
            return []
        return [job.id for job in found if job.name == name and job.uid == os.geteuid()]

    async def slurmd_port(self) -> int:
        """On which slurmd listens, but for nodes with a port of their own; 0 if Slurm does not say."""
        try:
            port = (await asyncio.to_thread(self._client.config)).get("SlurmdPort", "")
        except DalsegnoError:
            return 0
        return int(port) if port.isdigit() else 0

    async def cancel(self, job: int) -> None:
        for _ in range(TRIES):
            try:
                return await asyncio.to_thread(self._client.cancel, job)
            except DalsegnoError:
                await asyncio.sleep(AGAIN_S)
        return None

    async def complete(self, job: int, exit_code: int) -> bool:
        """Whether it was ended so; a Slurm whose library is another than we know can still be told to cancel it."""
        try:
            await asyncio.to_thread(self._client.complete, job, exit_code)
        except DalsegnoError:
            return False
        return True

    async def shrink(self, job: int, nodes: Sequence[str]) -> bool:
        """Leave a job only these of its nodes. Not tried again: whoever wants it will ask again."""
        try:
            await asyncio.to_thread(self._client.update, JobId=str(job), NodeList=node_list(nodes))
        except DalsegnoError:
            return False
        return True

    async def comment(self, job: int, text: str) -> bool:
        """Not tried again either."""
        try:
            await asyncio.to_thread(self._client.update, JobId=str(job), Comment=text)
        except DalsegnoError:
            return False
        return True

    async def requeue(self, job: int) -> bool:
        """Have a batch job wait in the queue again, unless Slurm sees to that already; whether it will."""
        for _ in range(TRIES):
            try:
                info = await asyncio.to_thread(self._client.job, job)
                if info.state is not JobState.COMPLETING or info.ends_at is not None:
                    await asyncio.to_thread(self._client.requeue, job)
                return True
            except DalsegnoError:
                await asyncio.sleep(AGAIN_S)
        return False
