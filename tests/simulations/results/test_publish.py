from pathlib import Path

import pytest
from PIL import Image

from simulations.results.publish import publish


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- begin x -->\nold\n<!-- end x -->\nAfter \\1.\n")
    figure = tmp_path / "out" / "curve.png"
    figure.parent.mkdir()
    Image.effect_noise((64, 32), 40).convert("RGB").save(figure)
    for _ in range(2):  # again and again, with the same result
        publish(page, "x", "| new \\1 |\n", {"A curve": figure})
        assert page.read_text() == (
            "Before.\n<!-- begin x -->\n\n| new \\1 |\n\n"
            "![A curve](images/x_curve.png)\n\n<!-- end x -->\nAfter \\1.\n"
        )
    with Image.open(tmp_path / "images" / "x_curve.png") as shown:
        assert shown.size == (64, 32)
        assert shown.mode == "P"


@pytest.mark.parametrize("text", ["", "<!-- begin x -->", "<!-- end x -->" * 2])
def test_a_page_without_its_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="begin x"):
        publish(page, "x", "new")
    assert page.read_text() == text
