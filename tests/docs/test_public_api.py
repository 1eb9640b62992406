"""The page of the public API is that of the code."""

from ci.public_api import PAGE, make_page


def test_the_page_is_that_of_the_code():
    assert PAGE.read_text().splitlines() == make_page().splitlines(), (
        "the public API has changed: run `python -m ci.public_api`, and add a line to CHANGELOG.md"
    )
