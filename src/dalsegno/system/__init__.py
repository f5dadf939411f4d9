"""Access to the operating system: processes, hosts in namespaces, files, network, and facts about this machine."""
