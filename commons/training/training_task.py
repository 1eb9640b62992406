"""A training task: a model with its data, metrics, cost, and shuffler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..argument_checks import require
from ..datasets import SequenceDataset
from ..datasets.sample_source import SampleSource
from ..distributed import BatchShuffler, BatchShufflerFactory, Extension, ShufflerSettings
from ..pipeline import TrainPipelineFactory
from .balance_flags import errors_name_flags, make_extensions
from .metrics import EvaluationMetrics
from .run_log import warn_once
from .training_args import TrainerArgs

Source = TypeVar("Source", bound=SampleSource)

# Added to the seed of a random dataset to draw its evaluation samples.
_EVAL_SEED_OFFSET = 1


@dataclass
class TrainingTask:
    """A model, with everything that the trainer needs to train it.

    Attributes:
        model: unsharded module on the CPU. Maps a batch to `(loss summed over loss tokens, output)`.
        train_dataset: this rank's training batches.
        eval_dataset: this rank's evaluation batches.
        metrics: evaluation metrics of the model's outputs, on the device.
        flops: function from a host batch to forward FLOPs, `[batch_size]`, or `[batch_size, columns]` with
            the columns of the model's own shuffler.
        shuffler_name: registered name of the model's own shuffler.
        shuffler_settings: keyword arguments of that shuffler.
        test_dataset: this rank's batches for an evaluation without training. None means `eval_dataset`.
        check_batch: function that raises an error if a host batch cannot be trained on.
        has_sharded_tables: whether any table is sharded. Otherwise "none" replaces TorchRec's pipelines,
            which overlap the lookups of sharded tables.
        has_cacheable_tables: whether any sharded table has a fixed vocabulary. Tables of unbounded ids have
            no cache to prefetch into, so without others "native" replaces "prefetch".
        settings: settings of the model and data by name, in the form of `settings_of`. Checkpoints store
            them, so that training does not resume with incompatible ones.
    """

    model: torch.nn.Module
    train_dataset: SequenceDataset
    eval_dataset: SequenceDataset
    metrics: EvaluationMetrics
    flops: Callable[[Any], torch.Tensor]
    shuffler_name: str
    shuffler_settings: dict[str, Any]
    test_dataset: SequenceDataset | None = None
    check_batch: Callable[[Any], None] = lambda batch: None
    has_sharded_tables: bool = True
    has_cacheable_tables: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    def check_datasets(self) -> None:
        """Raises a ValueError if the training or the evaluation set is empty."""
        for kind, dataset in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            if len(dataset) == 0:
                raise ValueError(f"the {kind} set has no samples; check the dataset's settings and files")

    def make_shuffler(self, args: TrainerArgs, *extensions: Extension) -> BatchShuffler:
        """Creates the shuffler that the arguments name, and adds `extensions`. Collective over all ranks.

        If balancing is off, it is the model's own, which then moves no samples.

        A user's own shuffler receives as keyword arguments the settings of `ShufflerSettings` that differ
        from their defaults, and the extensions that flags enable. Without such flags, its constructor need
        not accept any, because `extensions` are added after construction. Its method `get_groups`, if it has
        one, enables the extension `SampleGroups`.

        Raises:
            KeyError: the shuffler is unknown.
            ValueError: a setting is invalid, or has no effect with the others.
        """
        if not args.enable_balanced_shuffler:
            given = [*extensions, *(of for of in make_extensions(args) if of.name == "micro_batches")]
            settings = {"enabled": False, "extensions": given} | self.shuffler_settings
            return BatchShufflerFactory.create(self.shuffler_name, **settings)
        name = args.batch_shuffler or self.shuffler_name
        settings = self.shuffler_settings if name == self.shuffler_name else {}
        settings = settings | args.balance_settings
        kind, tells_groups = BatchShufflerFactory.class_of(name), ""
        if hasattr(kind, "get_groups"):
            tells_groups = f"{kind.__name__}.get_groups"
            named = args.balance_partitioner
            if named != "rebalance" and not ShufflerSettings(named, equal_rows=False).takes("groups"):
                warn_once(
                    f"TrainerArgs.balance_partitioner = {named!r} places samples one by "
                    f"one: {tells_groups} has no effect"
                )
                tells_groups = ""
        with errors_name_flags():
            if asked := make_extensions(args, tells_groups):
                settings["extensions"] = asked
            shuffler = BatchShufflerFactory.create(name, **settings)
            for extension in extensions:
                shuffler.add_extension(extension)
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
        shuffler: BatchShuffler | None = None,
    ) -> Any:
        """Creates the pipeline that `pipeline_name` names. Collective over all ranks.

        Args:
            args: settings of the run, which name the pipeline and the shuffler.
            model, optimizer, device: results of `shard_model`, and its device.
            shuffler: result of `make_shuffler`. None means a new one.

        Raises:
            KeyError: the shuffler is unknown.
            ValueError: the pipeline is unknown.
        """
        return TrainPipelineFactory.create(
            self.pipeline_name(args, device),
            model=model,
            optimizer=optimizer,
            device=device,
            batch_shuffler=shuffler or self.make_shuffler(args),
            loss_reduction="sum",
        )

    def pipeline_name(self, args: TrainerArgs, device: torch.device) -> str:
        """Returns the name of the pipeline to run. Rank 0 warns if it differs from `pipeline_type`.

        Raises:
            ValueError: the pipeline is unknown.
        """
        name = args.pipeline_type
        if name == "sw_serial":
            # recsys-examples generates gin files with this name. Its trainer runs any name that it does not
            # know, such as this one, without overlap.
            instead, reason = "none", "overlaps nothing in recsys-examples either"
        elif name in ("native", "prefetch") and not self.has_sharded_tables:
            instead, reason = "none", "overlaps the lookups of sharded tables, and this model has none"
        elif name == "prefetch" and device.type != "cuda":
            instead, reason = "native", "fills the cache of a GPU, and there is none here"
        elif name == "prefetch" and not self.has_cacheable_tables:
            instead, reason = "native", "fills a GPU's cache, which dynamic tables do not have"
        else:
            known = TrainPipelineFactory.list_available()
            expected = f"one of {', '.join(map(repr, known))}"
            require(name in known, "TrainerArgs.pipeline_type", name, expected)
            return name
        warn_once(f'TrainerArgs.pipeline_type = "{name}" {reason}: "{instead}" runs instead')
        return instead


def rank_datasets(
    train_source: SampleSource, eval_source: SampleSource, trainer: TrainerArgs, shuffle: bool
) -> tuple[SequenceDataset, SequenceDataset]:
    """Returns this rank's training and evaluation batches. `shuffle` applies only to training."""
    ranks, options = (dist.get_rank(), dist.get_world_size()), (trainer.seed, trainer.single_rank_load)
    train_dataset = SequenceDataset(train_source, trainer.train_batch_size, *ranks, shuffle, *options)
    return train_dataset, evaluation_dataset(eval_source, trainer)


def evaluation_dataset(source: SampleSource, trainer: TrainerArgs) -> SequenceDataset:
    """Returns this rank's batches of an evaluation."""
    ranks, options = (dist.get_rank(), dist.get_world_size()), (trainer.seed, trainer.single_rank_load)
    return SequenceDataset(source, trainer.eval_rows, *ranks, False, *options)


def random_sources(
    make: Callable[[int, int], Source], num_batches: int, trainer: TrainerArgs
) -> tuple[Source, Source]:
    """Returns the training and evaluation samples of a random dataset.

    `make` takes a number of samples and a seed. Each source has `num_batches` batches per rank and epoch.
    """
    batches = num_batches * dist.get_world_size()
    return (
        make(batches * trainer.train_batch_size, trainer.seed),
        make(batches * trainer.eval_rows, trainer.seed + _EVAL_SEED_OFFSET),
    )
