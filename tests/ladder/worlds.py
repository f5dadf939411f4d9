"""What the ranks and the tests agree on; no torch."""

WORLDS = (3, 2)  # processes; who is in the second is also in the first
KNOWN_CAP_BYTES = 40  # of the model with 92 bytes of gradients: 8 + 24 + 12 fill a bucket, 48 another
