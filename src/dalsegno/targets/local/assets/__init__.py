"""Stand-alone programs that a local cluster puts on its nodes."""
