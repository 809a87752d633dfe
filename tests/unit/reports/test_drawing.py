# SPDX-License-Identifier: Apache-2.0
"""The palette as colour-blind eyes see it, and charts drawn without a browser."""

import re
from itertools import combinations

import numpy as np
import pytest

from verl_ext.reports.drawing import DARK, DARK_OF, GROUND, LIGHT, MARKERS, axis, colours, curves, line_rows, thinned

from verl_ext.reports.drawing import Chart, save  # isort: skip

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def linear(colour):
    """sRGB to linear RGB."""
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Linear RGB to CIE L*a*b* under D65."""
    to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                       [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def ciede2000(one, other):
    """Colour difference by CIE 142-2001 (Sharma, Wu and Dalal 2005), all weights 1."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + 25**7))
    c1, c2 = np.hypot(g * a1, b1), np.hypot(g * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, g * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    middle = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    t = (1 - 0.17 * np.cos(np.radians(middle - 30)) + 0.24 * np.cos(np.radians(2 * middle))
         + 0.32 * np.cos(np.radians(3 * middle + 6)) - 0.20 * np.cos(np.radians(4 * middle - 63)))  # fmt: skip
    dl = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2))
    dc, dh = (c2 - c1) / (1 + 0.045 * chroma), hue / (1 + 0.015 * chroma * t)
    turned = np.radians(60 * np.exp(-(((middle - 275) / 25) ** 2)))
    rotation = -2 * np.sqrt(chroma**7 / (chroma**7 + 25**7)) * np.sin(turned)
    return np.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


@pytest.mark.parametrize("one, other, difference", [
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
    ((50, -1.0, 2.0), (50, 0, 0), 2.3669),
    ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
])  # fmt: skip
def test_the_difference_is_that_of_the_published_pairs(one, other, difference):
    assert ciede2000(one, other) == pytest.approx(difference, abs=1e-4)


def nearest(palette, eye):
    seen = [lab(np.array(EYES[eye]) @ linear(colour)) for colour in palette]
    return min(ciede2000(a, b) for a, b in combinations(seen, 2))


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_any_two_colours_are_told_apart(palette, eye):
    assert nearest(palette, eye) >= 12


def test_the_measure_finds_colours_that_are_not_told_apart():
    assert nearest(("#b5523b", "#4f8f4f"), "normal") > 40 > 12 > nearest(("#c2185b", "#4c4c4c"), "protanopia")


@pytest.mark.parametrize("palette, ground", [(LIGHT, GROUND), (DARK, DARK_OF[GROUND])])
def test_the_first_colours_stand_out_as_lines(palette, ground):
    def luminance(colour):
        return linear(colour) @ [0.2126, 0.7152, 0.0722] + 0.05

    contrasts = [luminance(colour) / luminance(ground) for colour in palette[:7]]
    assert min(max(c, 1 / c) for c in contrasts) > 2.2


def test_a_name_keeps_its_colour_and_marker_where_others_are_missing(tmp_path):
    order = colours(["a", "b", "c"])
    few = {name: order[name] for name in ("a", "c")}
    spec = curves(line_rows("c", [0, 1], [0, 1]), axis("x", "x"), axis("y", "y"), few)
    assert spec["encoding"]["color"]["scale"] == {"domain": ["a", "c"], "range": [LIGHT[0], LIGHT[2]]}
    shape = next(layer["encoding"]["shape"] for layer in spec["layer"] if "shape" in layer.get("encoding", {}))
    assert shape["scale"] == {"domain": ["a", "c"], "range": [MARKERS[0], MARKERS[2]]}


def test_charts_as_png_and_svg(tmp_path):
    chart = Chart("a", "A title", "", curves(line_rows("one", [0, 1, 2], [0.1, 0.4, 0.2]), axis("x", "rollouts"),
                                             axis("y", "success"), colours(["one"]), rule=0.3))  # fmt: skip
    assert save([chart], tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = save([chart, chart], tmp_path / "a.svg").read_text()
    assert svg.count(">A title<") == 2 and svg.count(">one<") == 2 and LIGHT[0] in svg
    assert save([], tmp_path / "none.svg").read_text().count("Nothing was logged yet") >= 1


@pytest.mark.parametrize("n, most", [(1, 400), (400, 400), (401, 400), (10_000, 400), (7, 3)])
def test_a_long_series_is_thinned_to_means_of_blocks(n, most):
    x, y = thinned(list(range(n)), [2.0] * n, most=most)
    assert len(x) == len(y) <= most and set(y) == {2.0} and x == sorted(x) and 0 <= x[0] <= x[-1] < n
    assert n > most or x == list(range(n))


def test_markers_are_few_and_at_both_ends():
    for n in range(1, 100):
        marks = [row["mark"] for row in line_rows("a", list(range(n)), [0.0] * n)]
        assert marks[0] or n == 1 or marks[-1]
        assert marks[-1] and 1 <= sum(marks) <= 15 and (n < 3 or marks[0])


def test_no_colour_of_the_charts_is_without_a_counterpart_in_the_dark():
    from verl_ext.reports.drawing import CONFIG

    assert set(re.findall("#[0-9a-f]{6}", repr(CONFIG))) <= set(DARK_OF)
