"""`dalsegno bench read`: exit codes, plots, JSON, wrong usage, and untrusted text in the output."""

import json
import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from dalsegno.bench.picture import Box, Label, Picture, Stroke, to_png, to_svg
from dalsegno.bench.plot import Curve, draw, draw_text
from dalsegno.cli.main import cli
from dalsegno.cli.measure.bench_read import command
from dalsegno.errors import DalsegnoError, UsageError

RECORDED = Path(__file__).parents[1] / "recorded"
P5 = str(RECORDED / "nccl-tests-2.13/2x-p5.48xlarge.txt")
OCI_1, OCI_2 = (str(RECORDED / f"nccl-tests-2.13/{nodes}x-BM.GPU4.8.txt") for nodes in (1, 2))


def read(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(command, list(words), input=text, standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "code", "level"),
    [([P5, "--instance", "p5.48xlarge"], 0, "PASS"), ([OCI_1], 0, "PASS"), ([OCI_2], 3, "DEGRADED"),
     ([P5], 5, "UNKNOWN"), ([OCI_1, "--nodes", "4"], 1, "FAIL"), ([P5, "--instance", "p4d.24xlarge"], 4, "IMPOSSIBLE"),
     ([OCI_1, OCI_2], 3, "DEGRADED"), ([OCI_2, "--instance", "p5.48xlarge"], 5, "UNKNOWN")],
)  # fmt: skip
def test_exit_code_is_that_of_the_worst_verdict(words: list[str], code: int, level: str):
    shown = read(*words)
    assert shown.return_value == code
    assert any(line.startswith(level) for line in shown.output.splitlines())


def test_an_instance_type_with_another_gpu_than_the_log_lists_is_not_judged():
    shown = read(OCI_2, "--instance", "p5.48xlarge")
    assert "the output lists NVIDIA A100-SXM4-40GB, but p5.48xlarge has H100" in shown.stdout
    assert "With these GPUs there are" in shown.stderr and "BM.GPU4.8" in shown.stderr
    assert read(OCI_2, "--instance", "BM.GPU4.8").return_value == 3


def test_command_is_reached_through_the_group_of_benchmarks():
    assert CliRunner().invoke(cli, ["bench", "read", OCI_1], standalone_mode=False).return_value == 0
    assert "read " in CliRunner().invoke(cli, ["bench", "--help"]).output


def test_standard_input_is_read():
    assert read("-", text=Path(OCI_1).read_text()).return_value == 0


def test_json_has_verdict_findings_and_rows():
    answer = json.loads(read(OCI_2, "--json").stdout)
    (table,) = answer["tables"]
    assert answer["level"] == table["level"] == "DEGRADED"
    assert (table["instance"], table["nodes"], table["busbw"], table["expected"]) == ("BM.GPU4.8", 2, 164.07, 185.0)
    assert table["rows"][0]["in_place"]["busbw"] == 165.21 and table["hints"]


def test_its_own_json_is_read_with_the_same_verdict(tmp_path: Path):
    report = tmp_path / "report.json"
    listed_by_process = str(RECORDED / "nccl-tests-2.19.6/all_reduce.json")
    for words in ([listed_by_process], [OCI_1, OCI_2]):
        report.write_text(read(*words, "--json").stdout)
        again = json.loads(read(str(report), "--json").stdout)["tables"]
        for first, second in zip(json.loads(report.read_text())["tables"], again, strict=True):
            assert {**first, "file": ""} == {**second, "file": ""}
    report.write_text(json.dumps(again[1]))  # what `bench all_reduce --json` prints
    assert read(str(report)).return_value == 3


def test_damaged_json_of_its_own_is_no_traceback(tmp_path: Path):
    for row in ({}, 1, {"size": "x", "in_place": 3}, {"size": 8, "in_place": {"busbw": "nan", "iterations": []}}):
        (tmp_path / "odd.json").write_text(json.dumps({"test": 3, "rows": [row], "devices": [4], "wrong": []}))
        assert read(str(tmp_path / "odd.json")).return_value in (1, 5)


def test_earlier_results_raise_what_is_expected(tmp_path: Path):
    better = tmp_path / "better.out"
    better.write_text(Path(OCI_1).read_text().replace("232.83", "290.00").replace("233.00", "291.00"))
    words = [word for _ in range(5) for word in ("--history", str(better))]
    assert read(OCI_1, *words).return_value == 1


def test_plots_are_written(tmp_path: Path):
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    read(P5, "--instance", "p5.48xlarge", "--svg", str(svg), "--png", str(png))
    texts = [each.text or "" for each in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "all_reduce, 2 x p5.48xlarge" in texts and "expected at least 440" in texts
    width, height, pixels = decode(png.read_bytes())
    assert (width, height) == (1520, 840) and len(set(pixels)) > 3


@pytest.mark.parametrize(
    ("words", "what"),
    [(["missing.out"], "no file `missing.out`"), (["."], "`.` is a folder"),
     ([P5, "--svg", "/no/where/a.svg"], "cannot be written"), ([P5, "--png", "/tmp"], "`/tmp` is a folder"),
     ([P5, "--test", "allreduce"], "no test `allreduce`"), ([P5, "--instance", "p5.48"], "no instance type")],
)  # fmt: skip
def test_wrong_usage_is_an_error_with_a_hint(words: list[str], what: str):
    error = read(*words).exception
    assert isinstance(error, DalsegnoError) and what in error.what and error.hint


def test_file_without_a_table_is_an_error(tmp_path: Path):
    other = tmp_path / "train.log"
    other.write_bytes(b"\xff\xfe\x00epoch 1\n")
    error = read(str(other)).exception
    assert isinstance(error, DalsegnoError) and not isinstance(error, UsageError)


def test_readable_files_are_shown_before_the_error_of_another(tmp_path: Path):
    empty = tmp_path / "empty.out"
    empty.write_text("")
    for words in ([OCI_1, str(empty)], [str(empty), OCI_1, "missing.out"]):
        shown = read(*words)
        assert "PASS  all_reduce, 1 x BM.GPU4.8" in shown.stdout
        assert isinstance(shown.exception, DalsegnoError) and "empty.out" in shown.exception.what
    assert "missing.out" in shown.stderr
    assert len(json.loads(read(OCI_1, str(empty), "--json").stdout)["tables"]) == 1


def test_an_unknown_instance_type_is_wrong_usage():
    error = read(OCI_1, "--instance", "p5.48").exception
    assert isinstance(error, UsageError) and error.exit_code == 2 and "did you mean" in error.hint


def test_escape_sequences_in_a_log_do_not_reach_the_terminal(tmp_path: Path):
    evil = tmp_path / "evil\x1b[2J.out"
    text = (
        Path(OCI_1)
        .read_text()
        .replace("compute-permanent-node-454", "a\x1b]0;title\x07b")
        .replace("float", "fl\x1b[31mt")
    )
    evil.write_text(text.replace("# Out of bounds", "# error: \x1b[2Jgone\u202e\n# Out of bounds"))
    for words in ([str(evil)], [str(evil), "--json"]):
        shown = read(*words)
        assert "\x1b" not in shown.output and "\u202e" not in shown.output


def test_a_very_long_table_is_shown_by_its_best_rows(tmp_path: Path):
    log = tmp_path / "long.out"
    lines = Path(OCI_1).read_text().splitlines()
    log.write_text("\n".join([*lines[:15], *[lines[15]] * 5000, *lines[16:]]))
    shown = read(str(log))
    assert shown.stdout.count("10737418240") == 1 and "5000 rows" in shown.stderr


# Pictures


def test_a_table_with_one_row_is_drawn_as_a_point(tmp_path: Path):
    svg = tmp_path / "one.svg"
    read(OCI_1, "--svg", str(svg), "--png", str(tmp_path / "one.png"))
    texts = [each.text or "" for each in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "all_reduce, 1 x BM.GPU4.8" in texts and {"4 GiB", "8 GiB", "16 GiB"} <= set(texts)
    (point,) = squares(draw([Curve("one", ((8 << 30, 100.0),))]))
    assert (point.x, point.y) == (70 + 670 / 2 - 3, 36 - 3)


def test_tables_with_one_row_are_drawn_beside_longer_ones():
    longer = Curve("many", ((1 << 20, 10.0), (1 << 30, 100.0)))
    assert len(squares(draw([longer, Curve("one", ((1 << 25, 50.0),))]))) == 3
    assert "o one" in draw_text([longer, Curve("one", ((1 << 25, 50.0),))])


def squares(picture: Picture) -> list[Box]:
    """Return the point markers."""
    return [each for each in picture.shapes if isinstance(each, Box) and (each.width, each.height) == (6, 6)]


def decode(data: bytes) -> tuple[int, int, list[bytes]]:
    """Return width, height and rows of a PNG file, after verifying the checksums of its chunks."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(name + content)
        parts[name] = content
        at += 12 + length
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    raw = zlib.decompress(parts[b"IDAT"])
    stride = 1 + 3 * width
    assert len(raw) == stride * height
    return width, height, [raw[row * stride + 1 : (row + 1) * stride] for row in range(height)]


def test_png_has_the_pixels_of_its_shapes():
    picture = Picture(10, 10, (Box(2, 3, 4, 2, "#ff0000"), Stroke(((0, 9), (9, 9)), "#0000ff")))
    _, _, rows = decode(to_png(picture, scale=1))
    assert rows[3] == b"\xff" * 6 + b"\xff\x00\x00" * 4 + b"\xff" * 12
    assert b"\x00\x00\xff" in b"".join(rows[8:])


def test_shapes_outside_of_the_picture_are_cut_off():
    shapes = (
        Box(-5, -5, 100, 7, "#000000"),
        Label(-20, 5, "far \u2603 away"),
        Stroke(
            ((-50, -50), (50, 50)),
        ),
    )
    width, height, _ = decode(to_png(Picture(8, 8, shapes)))
    assert (width, height) == (16, 16)


def test_text_in_svg_is_escaped():
    svg = to_svg(Picture(10, 10, (Label(0, 0, '</text><script>"'), Box(0, 0, 1, 1, "#fff000", title="<b>\x1b"))))
    assert "<script>" not in svg and "\x1b" not in svg
    ElementTree.fromstring(svg)


def test_plot_in_text_marks_each_curve_and_the_expectation():
    curve = Curve("all_reduce", ((1 << 20, 10.0), (1 << 30, 100.0)), expected=80)
    other = Curve("all_gather", ((1 << 20, 5.0), (1 << 30, 50.0)))
    lines = draw_text([curve, other]).splitlines()
    assert lines[1] == "    100 |" + " " * 63 + "*" and lines[6].endswith("o")
    assert lines[3] == "     80 |" + "-" * 64
    assert lines[-1] == "* all_reduce; o all_gather; - expected at least"


def test_single_sizes_and_zeros_can_be_plotted():
    assert draw_text([Curve("one", ((8, 1.0),))]) == ""
    assert draw_text([Curve("zeros", ((8, 0.0), (16, 0.0)))])
    assert to_svg(draw([])) and to_png(draw([Curve("zeros", ((8, 0.0), (16, 0.0)))]))
