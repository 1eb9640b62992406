"""What a model brings to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commons.datasets import SequenceDataset
from commons.distributed import BatchShuffler, BatchShufflerFactory
from commons.pipeline import TrainPipelineFactory
from commons.training.evaluation_metrics import EvaluationMetrics
from commons.training.rank_zero_log import warn_once
from commons.training.training_args import TrainerArgs


@dataclass
class TrainingTask:
    """What a model brings to the trainer.

    Attributes:
        model: batch to `(loss summed over loss tokens, output)`, on the CPU and not sharded.
        train_dataset: this rank's training batches.
        eval_dataset: this rank's evaluation batches.
        metrics: of the model's outputs in evaluation; made for the device.
        flops: host batch to forward FLOPs `[batch_size]`.
        shuffler_name: registered name of the model's own shuffler.
        shuffler_settings: what that one is created with.
        check_batch: raises if a host batch cannot be trained on.
        has_sharded_tables: False for a model whose tables are all replicated: TorchRec's pipeline, which
            overlaps the lookups of sharded tables, has nothing to do for it, and "none" runs instead.
        has_cacheable_tables: False for a model whose sharded tables are all of unbounded ids: they are not
            fetched into a cache, and "native" runs instead of "prefetch".
    """

    model: torch.nn.Module
    train_dataset: SequenceDataset
    eval_dataset: SequenceDataset
    metrics: EvaluationMetrics
    flops: Callable[[Any], torch.Tensor]
    shuffler_name: str
    shuffler_settings: dict[str, Any]
    check_batch: Callable[[Any], None] = lambda batch: None
    has_sharded_tables: bool = True
    has_cacheable_tables: bool = True

    def check_datasets(self) -> None:
        """Raises a ValueError if there is nothing to train on, or to evaluate."""
        for kind, dataset in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            if len(dataset) == 0:
                raise ValueError(f"the {kind} set has no samples; check the dataset's settings and files")

    def make_shuffler(self, args: TrainerArgs) -> BatchShuffler:
        """The shuffler that the arguments ask for. Collective over all ranks.

        A user's own shuffler gets the `balance_*` settings and those of micro-batches that are not the
        default, as keyword arguments.

        Raises:
            KeyError: an unknown name.
            ValueError: settings that have no effect together.
        """
        if not args.enable_balanced_shuffler:
            return BatchShufflerFactory.create(
                "identity", get_workloads=self.flops, **args.micro_batch_settings
            )
        name = args.batch_shuffler or self.shuffler_name
        settings = self.shuffler_settings if name == self.shuffler_name else {}
        shuffler = BatchShufflerFactory.create(
            name, **settings, **args.balance_settings, **args.micro_batch_settings
        )
        if args.single_rank_load and shuffler.group.num_ranks < dist.get_world_size():
            raise ValueError(
                f"TrainerArgs.single_rank_load: batch shuffler {name!r} balances among "
                f"{shuffler.group.num_ranks} of {dist.get_world_size()} ranks; the others would get nothing"
            )
        return shuffler

    def make_pipeline(
        self,
        args: TrainerArgs,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> Any:
        """The pipeline that the arguments ask for, or the nearest there is. Collective over all ranks.

        Args:
            args: of them, `pipeline_type` and what `make_shuffler` takes.
            model, optimizer: as `shard_model` returns them.
            device: of this rank.

        Raises:
            KeyError: an unknown pipeline or shuffler.
        """
        return TrainPipelineFactory.create(
            self.pipeline_name(args, device),
            model=model,
            optimizer=optimizer,
            device=device,
            batch_shuffler=self.make_shuffler(args),
            loss_reduction="sum",
        )

    def pipeline_name(self, args: TrainerArgs, device: torch.device) -> str:
        """The pipeline that runs; a warning on rank 0 says if it is not the one that the arguments name."""
        name = args.pipeline_type
        if name == "sw_serial":
            # Their script that generates gin files offers it; their training runs names it does not know
            # without overlap, and this is one of them.
            instead, reason = "none", "overlaps nothing in recsys-examples either"
        elif name in ("native", "prefetch") and not self.has_sharded_tables:
            instead, reason = "none", "overlaps the lookups of sharded tables, and this model has none"
        elif name == "prefetch" and device.type != "cuda":
            instead, reason = "native", "fills the cache of a GPU, and there is none here"
        elif name == "prefetch" and not self.has_cacheable_tables:
            instead, reason = (
                "native",
                "fills a GPU's cache, which dynamic tables have none of",
            )
        else:
            return name
        warn_once([f'TrainerArgs.pipeline_type = "{name}" {reason}: "{instead}" runs instead'])
        return instead
