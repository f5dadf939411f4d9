"""Images: what they are called, how they become one .sqsh file, and where those are kept."""

from dalsegno.image_name import ImageName, Kind, parse_name

__all__ = ["ImageName", "Kind", "parse_name"]
