"""Fixtures of the tests that need hosts with a real sshd."""

from __future__ import annotations

from tests.ssh.hosts import ssh_hosts

__all__ = ["ssh_hosts"]
