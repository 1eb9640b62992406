"""Types that an extension takes apart are refused without it, by an error that names the import."""

import subprocess

from tests.rank_server import forked_python

PROGRAM = """
import torch
from tensordict import NonTensorStack, TensorDict, tensorclass
from tensordict import MemoryMappedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from commons.sequence_batch import BaseBatch
from tests.commons.sequence_batch.internals import Rows

@tensorclass
class Tagged:
    id: torch.Tensor

class Titled(dict):
    pass

ids = torch.arange(4)
kinds = {
    "TensorDict": TensorDict({"ids": ids}, [4]),
    "tensorclass": Tagged(ids, batch_size=[4]),
    "texts": NonTensorStack(*"abcd"),
    "mapped": MemoryMappedTensor.from_tensor(ids),
    "keyed": KeyedTensor(["a"], [1], ids[:, None]),
    "jagged": torch.nested.nested_tensor([ids, ids], layout=torch.jagged),
    "strided": torch.nested.nested_tensor([ids, ids]),
}
for kind, value in kinds.items():
    titled = Titled(ids=ids)
    titled.more = value
    features = KeyedJaggedTensor(["a"], ids, lengths=torch.ones(4).int())
    for name, use in {
        "field": lambda: Rows({"ids": ids, "more": value}).fields,
        "batch": lambda: Rows(value).fields,
        "shared": lambda: kind == "strided" or Rows({"ids": ids, "more": value}, ["more"]).fields,
        "attribute": lambda: Rows(titled).check(),
        "labels": lambda: BaseBatch(features, 4, {}, labels=value),
    }.items():
        try:
            use()
        except TypeError as error:
            is_plain = (kind, name) == ("strided", "attribute")
            told = "attribute of a" if is_plain else "import commons.extensions.more_kinds"
            assert told in str(error), (kind, name, error)
        else:
            assert (kind, name) == ("strided", "shared"), (kind, name)
"""


def test_types_of_an_extension_are_refused_without_it(tmp_path):
    (file := tmp_path / "program.py").write_text(PROGRAM)
    command = [*forked_python(fresh=True), str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
