"""The arms that the benchmarks of the shuffle stage compare."""

from __future__ import annotations

from typing import Any

# By name, the settings of a shuffler; the first moves everything everywhere.
ARMS: dict[str, dict[str, Any]] = {
    "all_gather, Karmarkar–Karp": {"exchange": "all_gather", "partitioner": "karmarkar_karp"},
    "all_to_all, Karmarkar–Karp": {"exchange": "all_to_all", "partitioner": "karmarkar_karp"},
    "all_to_all, rebalance": {"exchange": "all_to_all", "partitioner": "rebalance"},
    "all_to_all, refined": {"exchange": "all_to_all", "partitioner": "refined"},
}
