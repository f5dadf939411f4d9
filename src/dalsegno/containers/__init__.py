"""Container images: import, build and store them as .sqsh files, and check the Slurm plugins that run jobs in them."""

from dalsegno.image_name import ImageKind, ImageName, parse_name

__all__ = ["ImageKind", "ImageName", "parse_name"]
