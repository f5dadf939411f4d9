"""Images, how they become one .sqsh file and where those are kept; and the plugins by which jobs run in them."""

from dalsegno.image_name import ImageName, Kind, parse_name

__all__ = ["ImageName", "Kind", "parse_name"]
