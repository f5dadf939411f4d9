"""Sources of facts about a node's parts, and their parsers."""
