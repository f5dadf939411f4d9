"""Slurm calls that do not block the coordinator and are retried while Slurm does not respond."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.names import node_list

TRIES = 5  # of a call to which Slurm does not respond
AGAIN_S = 1.0


class PatientSlurm:
    def __init__(self, client: SlurmClient) -> None:
        self._client = client

    async def look(self, job: int) -> JobInfo | None:
        """Return the job, None if Slurm no longer knows it. Retry until Slurm responds."""
        while True:
            try:
                return await asyncio.to_thread(self._client.job, job)
            except NotThere:
                return None
            except DalsegnoError:
                await asyncio.sleep(AGAIN_S)

    async def named(self, name: str) -> list[int]:
        """Return this user's jobs of this name; none if Slurm does not respond."""
        try:
            found = await asyncio.to_thread(self._client.jobs)
        except DalsegnoError:
            return []
        return [job.id for job in found if job.name == name and job.uid == os.geteuid()]

    async def slurmd_port(self) -> int:
        """Return the port of slurmd on nodes without a port of their own; 0 if Slurm does not respond."""
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
        """End the job with this exit code; return whether that worked. With an unknown libslurm only `cancel` does."""
        try:
            await asyncio.to_thread(self._client.complete, job, exit_code)
        except DalsegnoError:
            return False
        return True

    async def shrink(self, job: int, nodes: Sequence[str]) -> bool:
        """Reduce a job to these nodes. Not retried: the caller asks again."""
        try:
            await asyncio.to_thread(self._client.update, JobId=str(job), NodeList=node_list(nodes))
        except DalsegnoError:
            return False
        return True

    async def comment(self, job: int, text: str) -> bool:
        """Set the comment of a job. Not retried."""
        try:
            await asyncio.to_thread(self._client.update, JobId=str(job), Comment=text)
        except DalsegnoError:
            return False
        return True

    async def requeue(self, job: int) -> bool:
        """Requeue a batch job unless Slurm does so already, and return whether it will be queued."""
        for _ in range(TRIES):
            try:
                info = await asyncio.to_thread(self._client.job, job)
                if info.state is not JobState.COMPLETING or info.ends_at is not None:
                    await asyncio.to_thread(self._client.requeue, job)
                return True
            except DalsegnoError:
                await asyncio.sleep(AGAIN_S)
        return False
