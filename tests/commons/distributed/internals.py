"""Names that `commons.distributed` does not export: the one place where tests know its files."""

from commons.distributed.counting import LoadedBatch
from commons.distributed.exchange import Step, route_of
from commons.distributed.extension import Place
from commons.distributed.loss import MeanOfNoneError, check_runs_copies, loss_sum
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
from commons.distributed.plan import RowTable
from commons.distributed.plan_ahead import PlanAhead
from commons.distributed.ranks import Channel, RankGroup, raised_on, ranks_per_node
from commons.distributed.settings import EXCHANGE_NAMES
