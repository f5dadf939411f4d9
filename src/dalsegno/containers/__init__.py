"""Images, how they become one .sqsh file and where those are kept; and the plugins by which jobs run in them."""

from dalsegno.image_name import ImageKind, ImageName, parse_name

__all__ = ["ImageKind", "ImageName", "parse_name"]
