"""Constants that the ranks and the tests share. This module does not import torch."""

WORLDS = (3, 2)  # numbers of processes; the processes of the second world are also in the first
# Capacity of a bucket for the model with 92 bytes of gradients: 8 + 24 + 12 fill one bucket, 48 another
KNOWN_CAP_BYTES = 40
