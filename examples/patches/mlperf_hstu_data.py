"""Writes random data for MLPerf Training's HSTU to `DLRM_DATA_PATH`, as its preprocessor lays them out."""

import os
from pathlib import Path

import numpy as np
import polars as pl

root = Path(os.environ["DLRM_DATA_PATH"])
users, days, items, random = 300, 60, 5000, np.random.default_rng(0)
lengths = random.lognormal(5.5, 1.2, users).clip(40, 4000).astype(int)
events = pl.DataFrame({"uid": np.repeat(np.arange(users), lengths), "session_id": 0}).with_columns(
    item_ids=random.integers(items, size=lengths.sum()),
    timestamps=np.concatenate([np.sort(random.integers(days * 86400, size=n)) for n in lengths]),
    event_types=random.choice([0, 1], lengths.sum(), p=[0.98, 0.02]).astype(np.uint8),
    is_organic=random.integers(2, size=lengths.sum()).astype(np.int8),
    played_ratio_pct=random.integers(101, size=lengths.sum()),
)
for folder in ("processed_5b", "shared_metadata"):
    (root / folder).mkdir(parents=True, exist_ok=True)
sessions = events.group_by("uid", "session_id", maintain_order=True).agg(pl.all())
sessions.write_parquet(root / "processed_5b/train_sessions.parquet")
for name in ("artist", "album"):
    ids = {"item_id": np.arange(items), f"{name}_id": random.integers(500, size=items)}
    pl.DataFrame(ids).write_parquet(root / f"shared_metadata/{name}_item_mapping.parquet")
