"""Messages between processes: framing, handshake and sealing, and the bounded server for unknown peers.

Pure Python 3.9: agents and keepers run in the users' own environments.
"""
