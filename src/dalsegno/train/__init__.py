"""The library inside a training script. Nothing here is loaded before it is asked for: `contract` costs no torch."""
