"""The nodes of a run: request, watch and release them."""
