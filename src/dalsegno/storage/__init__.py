"""Storage of a cluster: the mounts and exports of each host, scratch folders of jobs, and checks from every node."""
