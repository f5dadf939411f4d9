"""Constants of the ranks and the tests, without torch."""

WORLDS = (3, 2)  # numbers of processes; those of the second are also in the first
KNOWN_CAP_BYTES = 40  # of the model with 92 bytes of gradients: 8 + 24 + 12 fill a bucket, 48 another
