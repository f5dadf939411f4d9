"""Access to the operating system: processes, virtual hosts, files, network, and facts about this machine."""
