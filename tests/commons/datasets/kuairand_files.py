"""Synthetic files in KuaiRand's official formats.

    python -m tests.commons.datasets.kuairand_files DIR NUM_EVENTS NUM_USERS NUM_VIDEOS

writes those of kuairand-1k.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

LOG_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,"
    "long_view,play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
FLAGS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view")
USERS_HEADER = ",".join(
    (
        "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author",
        "follow_user_num,follow_user_num_range,fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range",
        "register_days,register_days_range",
        *(f"onehot_feat{feature}" for feature in range(18)),
    )
)
LOGS_1K = ("log_standard_4_08_to_4_21_1k.csv", "log_standard_4_22_to_5_08_1k.csv")
FIRST_TIME = 1_649_347_200_000
CHUNK = 500_000


def log_line(user: int, video: int, time: int, bits: int = 0) -> str:
    """A line of a log: bit t of `bits` is the flag of task t."""
    flags = [bits >> bit & 1 for bit in range(8)]
    values = [user, video, 20220408, 1234, time, *flags[:7], 5000, 15000, 0, 0, flags[7], 0, 1]
    return ",".join(map(str, values))


def user_line(user: int, active: str = "full_active", ranges: Sequence[str] = ("0", "0", "0", "730+")) -> str:
    """A line of the users' file; ranges are those of followed, fans, friends and days."""
    follow, fans, friends, days = ranges
    fields = [user, active, 0, 0, 0, 1, follow, 2, fans, 3, friends, 900, days]
    fields = [*fields, *[0] * 17, ""]  # features that nothing is known of are empty
    return ",".join(f'"{field}"' if "," in str(field) else str(field) for field in fields)


def write_csv(path: Path, header: str, lines: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in (header, *lines)), encoding="latin-1")
    return path


def write_kuairand_1k(
    directory: Path, num_events: int, num_users: int, num_videos: int, seed: int = 0
) -> None:
    """Writes kuairand-1k's logs and users' file, with heavy-tailed numbers of events per user."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    days = ("15-30", "31-60", "61-90", "91-180", "181-365", "366-730", "730+")
    ranges = ("0", "(0,10]", "(10,50]", "(50,100]")
    users = [
        user_line(
            user,
            str(rng.choice(["full_active", "high_active", "middle_active", "UNKNOWN"])),
            [*rng.choice(ranges, 3), rng.choice(days)],
        )
        for user in range(num_users)
    ]
    write_csv(directory / "user_features_1k.csv", USERS_HEADER, users)
    activity = rng.lognormal(0, 1.5, num_users).cumsum()
    for number, name in enumerate(LOGS_1K):
        num_here = num_events // 2 + number * (num_events % 2)
        with (directory / name).open("wb") as file:
            file.write(f"{LOG_HEADER}\n".encode())
            for start in range(0, num_here, CHUNK):
                size = min(CHUNK, num_here - start)
                _events(rng, size, activity, num_videos, number).write_csv(file, include_header=False)


def _events(
    rng: np.random.Generator, size: int, activity: np.ndarray, num_videos: int, period: int
) -> pl.DataFrame:
    half = 14 * 86_400_000
    columns = dict.fromkeys(LOG_HEADER.split(","), np.zeros(size, dtype=np.int64))
    columns |= {
        "user_id": np.searchsorted(activity, rng.random(size) * activity[-1]),
        "video_id": (rng.lognormal(0, 2, size) * num_videos / 100).clip(max=num_videos - 1).astype(int),
        "date": np.full(size, 20220408 if period == 0 else 20220422),
        "hourmin": rng.integers(0, 24, size) * 100,
        "time_ms": FIRST_TIME + period * half + rng.integers(0, half, size),
        "play_time_ms": rng.integers(0, 60_000, size),
        "duration_ms": rng.integers(5_000, 60_000, size),
        "tab": rng.integers(0, 15, size),
    }
    rates = (0.35, 0.02, 0.002, 0.003, 0.001, 0.0005, 0.25, 0.01)
    for flag, rate in zip((*FLAGS, "is_profile_enter"), rates, strict=True):
        columns[flag] = (rng.random(size) < rate).astype(np.int64)
    return pl.DataFrame(columns)


def main(arguments: Sequence[str]) -> None:
    directory, *sizes = arguments
    write_kuairand_1k(Path(directory), *map(int, sizes))


if __name__ == "__main__":
    main(sys.argv[1:])
