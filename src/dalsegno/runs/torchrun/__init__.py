"""Implement `dalsegno torchrun`: torchrun's command line, executed by a Dal Segno coordinator and its agents."""
