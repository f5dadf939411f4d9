"""`dalsegno torchrun`: torchrun's own command line, with our coordinator and our agents behind it."""
