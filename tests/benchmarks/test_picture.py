"""The demo's picture can be read: nothing in it is cut off, or lies over something else."""

from itertools import combinations

import matplotlib.image
import pytest
from matplotlib.text import Text

from benchmarks.demo.picture import HEIGHT, WIDTH, draw, make_figure
from benchmarks.harness import read_result


@pytest.mark.parametrize("model", ["hstu", "sid_gr"])
def test_texts_are_within_the_picture_and_apart(model):
    figure = make_figure(read_result(f"demo/{model}/summary"))
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = {text: text.get_window_extent(renderer) for text in texts}
    assert len(boxes) > 10
    for text, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= WIDTH and box.y1 <= HEIGHT, text.get_text()
    for (one, box), (other, other_box) in combinations(boxes.items(), 2):
        assert not box.overlaps(other_box), (one.get_text(), other.get_text())


def test_the_file_has_the_size_that_a_page_shows(tmp_path):
    draw(read_result("demo/hstu/summary"), tmp_path / "balance.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "balance.png").shape
    assert (width, height) == (WIDTH, HEIGHT) == (1200, 700)
