"""A drawing of rectangles, lines and labels as a value, written as SVG or as PNG. Pure.

    picture = Picture(640, 400, (Box(0, 0, 640, 400, "#ffffff"), Label(10, 20, "text")))
    text, data = to_svg(picture), to_png(picture)

PNG needs no library: the pixels are set here and compressed with zlib. Labels use a font of 5 x 7 pixels, in ASCII.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise

from dalsegno.printable import in_html

BLACK = "#222222"
GREY = "#dddddd"


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""  # shown by browsers when the pointer rests on it


@dataclass(frozen=True)
class Stroke:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str = BLACK
    width: int = 1
    dashed: bool = False


@dataclass(frozen=True)
class Label:
    """A text on one line. `x` is its left end, middle or right end, as `align` says; `y` is its baseline."""

    x: float
    y: float
    text: str
    align: float = 0.0  # which point of the text is at `x`: 0 left end, 0.5 middle, 1 right end
    colour: str = BLACK


@dataclass(frozen=True)
class Picture:
    """Shapes in the order in which they are drawn."""

    width: int
    height: int
    shapes: tuple[Box | Stroke | Label, ...]


def to_svg(picture: Picture) -> str:
    """Return the picture as an SVG document. Text is escaped."""
    width, height = picture.width, picture.height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, *map(_svg_shape, picture.shapes), "</svg>", ""])


def _svg_shape(shape: Box | Stroke | Label) -> str:
    if isinstance(shape, Box):
        title = f"<title>{in_html(shape.title)}</title>" if shape.title else ""
        size = f'width="{shape.width:.1f}" height="{shape.height:.1f}"'
        return f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" {size} fill="{in_html(shape.colour)}">{title}</rect>'
    if isinstance(shape, Label):
        anchor = {0.5: "middle", 1.0: "end"}.get(shape.align, "start")
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{anchor}" fill="{in_html(shape.colour)}"'
        return f"<text {place}>{in_html(shape.text)}</text>"
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
    dashes = ' stroke-dasharray="6 4"' if shape.dashed else ""
    look = f'fill="none" stroke="{in_html(shape.colour)}" stroke-width="{shape.width}"'
    return f'<polyline points="{points}" {look}{dashes}/>'


def to_png(picture: Picture, scale: int = 2) -> bytes:
    """Return the picture as a PNG file, drawn `scale` times as large."""
    raster = _Raster(picture.width * scale, picture.height * scale)
    for shape in picture.shapes:
        if isinstance(shape, Box):
            raster.fill(shape.x * scale, shape.y * scale, shape.width * scale, shape.height * scale, _rgb(shape.colour))
        elif isinstance(shape, Stroke):
            points = [(x * scale, y * scale) for x, y in shape.points]
            raster.stroke(points, _rgb(shape.colour), shape.width * scale, shape.dashed)
        else:
            raster.text(shape, scale)
    return raster.encode()


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour.removeprefix("#"))


class _Raster:
    """Pixels in rows of red, green and blue. Shapes are clipped at the edges."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._rows = [bytearray(b"\xff" * 3 * width) for _ in range(height)]

    def fill(self, x: float, y: float, width: float, height: float, rgb: bytes) -> None:
        left, right = max(0, round(x)), min(self._width, round(x + width))
        if right <= left:
            return
        for row in self._rows[max(0, round(y)) : max(0, round(y + height))]:
            row[3 * left : 3 * right] = rgb * (right - left)

    def stroke(self, points: list[tuple[float, float]], rgb: bytes, width: int, dashed: bool) -> None:
        done = 0  # pixels drawn on all segments so far, so that the dash pattern continues across points
        for (x1, y1), (x2, y2) in pairwise(points):
            steps = max(1, round(max(abs(x2 - x1), abs(y2 - y1))))
            for step in range(steps + 1):
                if not dashed or (done + step) % 20 < 12:
                    x, y = x1 + (x2 - x1) * step / steps, y1 + (y2 - y1) * step / steps
                    self.fill(x - width / 2, y - width / 2, width, width, rgb)
            done += steps

    def text(self, label: Label, scale: int) -> None:
        rgb, advance = _rgb(label.colour), 6 * scale
        x = label.x * scale - label.align * advance * len(label.text)
        top = label.y * scale - 8 * scale
        for letter in label.text:
            code = ord(letter) if 32 <= ord(letter) < 127 else ord("?")
            for column, bits in enumerate(_FONT[5 * (code - 32) : 5 * (code - 31)]):
                for row in range(7):
                    if bits >> row & 1:
                        self.fill(x + column * scale, top + row * scale, scale, scale, rgb)
            x += advance

    def encode(self) -> bytes:
        header = struct.pack(">IIBBBBB", self._width, self._height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
        data = zlib.compress(b"".join(b"\x00" + row for row in self._rows), 6)  # each row begins with 0: no filter
        parts = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in parts)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


# The printable characters of ASCII: five columns each, with the lowest bit at the top.
_FONT = bytes.fromhex(
    "0000000000" "00005f0000" "0007000700" "147f147f14" "242a7f2a12" "2313086462" "3649552250" "0005030000"
    "001c224100" "0041221c00" "14083e0814" "08083e0808" "0050300000" "0808080808" "0060600000" "2010080402"
    "3e5149453e" "00427f4000" "4261514946" "2141454b31" "1814127f10" "2745454539" "3c4a494930" "0171090503"
    "3649494936" "064949291e" "0036360000" "0056360000" "0814224100" "1414141414" "0041221408" "0201510906"
    "324979413e" "7e1111117e" "7f49494936" "3e41414122" "7f4141221c" "7f49494941" "7f09090901" "3e4149497a"
    "7f0808087f" "00417f4100" "2040413f01" "7f08142241" "7f40404040" "7f020c027f" "7f0408107f" "3e4141413e"
    "7f09090906" "3e4151215e" "7f09192946" "4649494931" "01017f0101" "3f4040403f" "1f2040201f" "3f4038403f"
    "6314081463" "0708700807" "6151494543" "007f414100" "0204081020" "0041417f00" "0402010204" "4040404040"
    "0001020400" "2054545478" "7f48444438" "3844444420" "384444487f" "3854545418" "087e090102" "0c5252523e"
    "7f08040478" "00447d4000" "2040443d00" "7f10284400" "00417f4000" "7c04180478" "7c08040478" "3844444438"
    "7c14141408" "081414187c" "7c08040408" "4854545420" "043f444020" "3c4040207c" "1c2040201c" "3c4030403c"
    "4428102844" "0c5050503c" "4464544c44" "0008364100" "00007f0000" "0041360800" "1008081008"
)  # fmt: skip
