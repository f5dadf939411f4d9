"""Who is asked about a node's parts, and how the answers become facts."""
