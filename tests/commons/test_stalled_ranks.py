"""Stacks of stalled ranks are grouped by text, whatever their files hold."""

import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.stalled_ranks import main, ranks_text, read_stalls, report
from tests.commons.training.internals import HangWatch, StepVote
from tests.commons.training.small_task import lines_in, small_run

REPOSITORY = Path(__file__).parents[2]
THREADS = """\
Thread 0x00007f2e617146c0 (most recent call first):
  File "/env/lib/python3.11/site-packages/commons/distributed/plan_ahead.py", line 290 in {planning}
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f2e80ff2b80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/work/train.py", line 40 in {name}
  File "/work/train.py", line 7 in <module>
"""
SAID = "2026-11-26 05:{minute:02}:44 rank 1 has been in step {step} for more than 300 s, now in {place}\n"
WAIT = "Event.wait (lib/python3.11/threading.py:320)"


def stalled(name: str, step: int = 812, minute: int = 22, planning: str = "_run") -> str:
    stacks = THREADS.format(name=name, planning=planning)
    return "Timeout (0:05:00)!\n" + stacks + SAID.format(minute=minute, step=step, place=WAIT) + "\n"


def written(log_dir: Path, texts: dict[int, str | bytes]) -> Path:
    (log_dir / "stacks").mkdir(exist_ok=True)
    for rank, text in texts.items():
        data = text.encode() if isinstance(text, str) else text
        (log_dir / f"stacks/rank{rank}.txt").write_bytes(data)
    return log_dir


def _train(log_dir: Path) -> None:
    """Trains. Rank 1 waits in step 2 until rank 0 has said where all are, then each for its own next line."""
    said, rank = log_dir / "said", dist.get_rank()

    def say(watch: HangWatch, text: str) -> None:
        with said.open("a") as file:
            file.write(f"rank {rank} {text}\n")

    def linger(vote: StepVote, step: int, loss: torch.Tensor) -> bool:
        awaited = {2: " shows them\n" if rank == 1 else "", 3: f"rank {rank} goes on"}.get(step, "")
        while awaited not in (said.read_text() if said.exists() else ""):
            time.sleep(0.05)
        return False

    # Rank 0 reads the others' stacks 0.3 × 3 s after its own, which is enough on a busy machine, too.
    with mock.patch.object(HangWatch, "_say", say), mock.patch.object(StepVote, "after_step", linger):
        small_run(str(log_dir), max_train_iters=3, enable_balanced_shuffler=True, hang_timeout_s=3.0)


def test_the_rank_asleep_stands_out_and_goes_on(pools, tmp_path):
    pools(2).run(_train, tmp_path)
    said = (tmp_path / "said").read_text()
    lingers = "linger (tests/commons/test_stalled_ranks.py:"
    assert f"rank 1 has been in step 2 for more than 3 s, now in _train.<locals>.{lingers}" in said
    [found] = [line for line in said.splitlines() if "has read the stacks: " in line]
    assert "rank 0 in " in found and f"rank 1 in _train.<locals>.{lingers}" in found
    assert f"-m commons.stalled_ranks {tmp_path} shows them" in found
    assert "rank 1 goes on: step 2 took" in said
    stacks = [(tmp_path / f"stacks/rank{rank}.txt").read_text() for rank in range(2)]
    assert ["in linger" in text for text in stacks] == [False, True]
    _, problems = read_stalls(tmp_path)
    assert problems == [f"rank{rank}.txt: the rank has gone on since" for rank in range(2)]
    assert [step["step"] for step in lines_in(tmp_path, "train")] == [1, 2, 3]


def test_many_files_are_one_line_and_a_stack_for_each_text(tmp_path):
    texts = {rank: stalled("all_reduce", planning="gather") for rank in range(40)}
    texts[5] = stalled("__next__", planning="gather")
    texts[8] = stalled("all_reduce", planning="get_workloads")
    texts |= {9: "", 10: stalled("load", step=3, minute=2), 11: stalled("save", step=3) + texts[11]}
    texts[5] = texts[5].replace(WAIT, "Loader.__next__ (/work/train.py:40)")  # the class, as the rank said
    stalls, problems = read_stalls(written(tmp_path, texts))
    assert not problems
    line, odd, most, before = report(stalls, 41).split("\n\n")
    assert line == (
        "37 ranks (0-4, 6-8, 11-39) in all_reduce (/work/train.py:40) of step 812; rank 5 in "
        "Loader.__next__ (/work/train.py:40) of step 812; no stacks of 2 ranks (9, 40); only older stacks "
        "of rank 10"
    )
    assert odd.startswith("rank 5 in step 812, 2026-11-26 05:22:44\n")
    assert most.count("planning thread of ") == 2 and "planning thread of rank 8\n" in most
    assert before.startswith("rank 10 in step 3, 2026-11-26 05:02:44\n")


def test_a_file_cut_anywhere_is_read_as_far_as_it_goes(tmp_path):
    before, last = stalled("load", step=3), stalled("all_reduce")
    whole = (before + last).encode()
    begins = len(before) + last.index("Thread 0x00007f2e8")

    @given(st.integers(0, len(whole)))
    def check(size: int) -> None:
        stalls, problems = read_stalls(written(tmp_path, {0: stalled("all_reduce"), 1: whole[:size]}))
        report(stalls, 2)
        of_rank = [stall for stall in stalls if stall.rank == 1]
        assert len(of_rank) + len(problems) == (size > 0)
        if size == len(whole):
            assert of_rank[0].step == "step 812" and of_rank[0].stack == stalls[0].stack
        elif size > begins:
            assert of_rank[0].step in ("an unknown step", "step 812")
            assert of_rank[0].stack == stalls[0].stack[: len(of_rank[0].stack)]

    check()


def test_other_formats_are_named_and_the_rest_is_shown(tmp_path, capsys):
    others = b"\xff\xfe\0\0\n\n", b"Process 12: python train.py\nThread 12 (idle)\n    wait (a.py:3)\n"
    written(tmp_path, {0: stalled("all_reduce"), 1: others[0], 2: stalled("all_reduce"), 4: others[1]})
    (tmp_path / "stacks/rank3.txt").mkdir()
    (tmp_path / "stacks/core.1234").write_bytes(others[1])
    main([str(tmp_path)])
    shown = capsys.readouterr()
    assert shown.out.startswith("2 ranks (0, 2) in all_reduce (/work/train.py:40) of step 812\n")
    named = [line.split(": ")[1] for line in shown.err.splitlines()]
    assert named == ["core.1234", "rank1.txt", "rank3.txt", "rank4.txt"]


def test_the_command_runs_without_torch(tmp_path):
    program = "import sys; sys.modules['torch'] = None\nfrom commons.stalled_ranks import main; main()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.stdout == f"no rank has written stacks to {tmp_path / 'stacks'}\n", run.stderr


def test_ranks_are_ranges():
    assert ranks_text([5]) == "rank 5"
    assert ranks_text([*range(5), *range(6, 1024)]) == "1,023 ranks (0-4, 6-1023)"
    assert ranks_text(list(range(0, 1024, 2))) == "512 ranks (0, 2, 4, 6, 8, 10, 12, 14, …)"
