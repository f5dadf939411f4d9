"""Messages between processes: framing, handshake and sealing, the bounded server for unknown peers, and liveness.

This room uses only the standard library of Python 3.9, because agents and keepers run in the users' environments.
"""
