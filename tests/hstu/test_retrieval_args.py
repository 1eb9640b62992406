import pytest

from hstu.models import RetrievalConfig
from hstu.training.model_args import RetrievalArgs


def test_the_model_is_scored_as_the_file_says():
    assert RetrievalArgs(num_negatives=8).config() == RetrievalConfig(temperature=0.05, l2_norm_eps=1e-6)
    assert RetrievalArgs(8, temperature=0.3).config() == RetrievalConfig(temperature=0.3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_negatives": 0}, "RetrievalArgs.num_negatives = 0: expected at least 1"),
        ({"temperature": 0}, "RetrievalArgs.temperature = 0: expected a finite number above 0"),
        ({"l2_norm_eps": -1e-6}, "RetrievalArgs.l2_norm_eps = -1e-06: expected a finite number above 0"),
        ({"eval_metrics": ("AUC",)}, "RetrievalArgs.eval_metrics = 'AUC': expected HitRate@k, HR@k"),
    ],
)
def test_a_bad_setting_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        RetrievalArgs(**{"num_negatives": 8, **wrong})
