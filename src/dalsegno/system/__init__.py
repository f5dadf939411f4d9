"""The one door to the world: processes, hosts in namespaces, files, network, and the facts of this machine."""
