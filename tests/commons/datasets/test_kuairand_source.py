import json
import re

import pytest

from commons.datasets import SequenceDataset, UserSequences, UserSequenceSource, check_ids
from commons.datasets.kuairand_preprocess import main
from tests.commons.datasets.kuairand_files import write_kuairand_1k


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    out = tmp_path_factory.mktemp("kuairand")
    write_kuairand_1k(out / "raw", num_events=600, num_users=12, num_videos=200)
    main(["--dataset", "kuairand-1k", "--raw", str(out / "raw"), "--out", str(out)])
    return out


def source(prepared, split="train", longest=20):
    return UserSequenceSource(UserSequences.open(prepared, "kuairand-1k"), split, longest)


def test_labels_are_the_bits_of_the_tasks(prepared):
    samples = source(prepared)
    labels = set()
    for index in range(len(samples)):
        assert (samples[index].labels == samples[index].actions - 1).all()
        labels |= set(samples[index].labels.tolist())
    assert labels <= set(range(256))
    assert len(labels) > 4


def test_histories_are_cut_to_the_newest_items(prepared):
    whole, cut = source(prepared, longest=10_000), source(prepared)
    for index in range(len(cut)):
        assert cut[index].items.tolist() == whole[index].items[-20:].tolist()


def test_the_spec_has_the_tasks(prepared):
    samples = source(prepared, "eval")
    spec = samples.spec
    assert (spec.num_tasks, spec.num_classes, spec.positive_class) == (8, 256, None)
    assert spec.vocab_sizes["action"] == 257
    large = {table.table_name for table in spec.tables if table.sharding_type == "model_parallel"}
    assert large == {"user_id", "video_id"}
    for batch in SequenceDataset(samples, batch_size=4):
        check_ids(batch, spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tasks": 7}, "num_tasks = 7 does not go with num_classes = 256"),
        ({"num_tasks": 0}, "num_tasks = 0 does not go with"),
        ({"num_tasks": "8"}, "meta.json is malformed"),
        ({"dataset": "kuairand-pure"}, "it is of 'kuairand-pure'"),
    ],
)
def test_a_malformed_file_is_named_with_the_command_that_prepares_it(changes, message, prepared, tmp_path):
    meta = json.loads((prepared / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta | changes))
    (tmp_path / "sequences.parquet").write_bytes((prepared / "sequences.parquet").read_bytes())
    command = f"python -m commons.datasets.kuairand_preprocess --dataset kuairand-1k --out {tmp_path}"
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        UserSequences.open(tmp_path, "kuairand-1k")
    assert command in str(raised.value)


def test_a_dataset_that_nothing_prepares_is_an_error(prepared):
    with pytest.raises(ValueError, match=r"dataset = 'kuairand-2k': expected one of \['kuairand-1k',"):
        UserSequences.open(prepared, "kuairand-2k")
