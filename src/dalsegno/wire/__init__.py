"""Messages between processes: framing, handshake and sealing, the bounded server for unknown peers, and liveness.

Pure Python 3.9: agents and keepers run in the users' own environments.
"""
