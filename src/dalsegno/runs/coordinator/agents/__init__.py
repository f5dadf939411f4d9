"""The agents of a run: connections, messages, liveness and hangs."""
