"""Messages between processes: frames, handshake, encryption, a server with limits for unknown peers, and liveness.

This package uses only Python 3.9 and its standard library, because agents and keepers run in the users' environments.
"""
