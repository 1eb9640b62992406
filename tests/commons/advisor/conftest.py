import pytest

from commons.advisor import prediction

STEPS = 16


@pytest.fixture(autouse=True, scope="package")
def few_steps():
    """Enough for all but the means to be stable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "FEWEST_STEPS", STEPS)
        patch.setattr(prediction, "MOST_STEPS", STEPS)
        yield
