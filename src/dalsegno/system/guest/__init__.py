"""The first process of a host. It uses only the standard library, because every host of a cluster runs one."""
