"""The output of nccl-tests: parse it, write it, and judge it by the hardware catalog."""
