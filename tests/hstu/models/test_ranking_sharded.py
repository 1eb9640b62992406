import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.hstu.hstu_samples import Sample, hstu_batch, ranking_model

EMPTY = Sample([], [], [], [], 0, [])
FULL = Sample(user=[3], tags=[1, 2], items=[5, 6, 7], actions=[0, 1, 2], num_candidates=1, labels=[2])


def train_with_an_empty_rank() -> tuple[int, list[torch.Tensor]]:
    """Trains 3 steps; how many lookups were pipelined, and the dense parameters."""
    device = torch.device("cpu")
    model = DistributedModelParallel(ranking_model(), device=device)
    dense = [parameter for name, parameter in model.named_parameters() if "dense." in name]
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(dense, lr=0.1), device)
    batches = iter([hstu_batch([FULL if dist.get_rank() else EMPTY] * 2) for _ in range(3)])
    for _ in range(3):
        pipeline.progress(batches)
    return len(pipeline._pipelined_modules), [parameter.detach() for parameter in dense]


def test_an_empty_rank_keeps_in_step_and_all_lookups_are_pipelined(pools):
    (num_pipelined, first), (_, second) = pools(2).run(train_with_an_empty_rank)
    assert num_pipelined == 2  # sharded tables of two widths
    for of_first, of_second in zip(first, second, strict=True):
        assert torch.equal(of_first, of_second)
        assert of_first.isfinite().all()
