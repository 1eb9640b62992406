"""Names that `commons.distributed` does not export: the one place where tests know its files."""

from commons.distributed.channel import Channel, raised_on
from commons.distributed.empty_rank import check_runs_copies
from commons.distributed.exchange import route_of
from commons.distributed.extension import Place
from commons.distributed.loaded_memory import LoadedBatch
from commons.distributed.loss_reduction import MeanOfNoneError, loss_sum
from commons.distributed.placement import (
    arguments_of,
    compile_from_scratch,
    make_plan,
    place,
    place_at_home,
    place_rows,
    relative_speeds,
    token_tolerance,
    warm_up,
)
from commons.distributed.plan_ahead import PlanAhead
from commons.distributed.rank_group import RankGroup, ranks_per_node
from commons.distributed.row_table import RowTable
from commons.distributed.shuffler_settings import EXCHANGE_NAMES
from commons.distributed.step import Step
