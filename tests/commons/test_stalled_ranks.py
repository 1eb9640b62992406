"""Stacks of stalled ranks are grouped by text, whatever their files hold."""

import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.stalled_ranks import main, ranks_text, read_stalls, report
from tests.commons.training.internals import HangWatch

REPOSITORY = Path(__file__).parents[2]
ASLEEP = 5
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


class SlowLoader:
    """Sleeps on one rank until rank 0 has said where all are."""

    def __init__(self, said: Path) -> None:
        self._said = said

    def __next__(self) -> torch.Tensor:
        while dist.get_rank() == ASLEEP and not self._said.exists():
            time.sleep(0.05)
        return torch.ones(1)


def _stall(log_dir: Path) -> None:
    said = log_dir / "said"
    with HangWatch(str(log_dir), 2.0) as watch:
        tell = watch._say

        def say(text: str) -> None:
            tell(text)
            if text.startswith("has read the stacks: "):
                (log_dir / "unfinished").write_text(text)
                (log_dir / "unfinished").rename(said)

        watch._say = say
        dist.barrier()  # a rank that comes later has its stacks later
        watch.begins("step 3")
        dist.all_reduce(next(SlowLoader(said)))  # and leaves in step 3: a rank that goes on writes so


def test_the_rank_asleep_in_its_loader_stands_out(pools, tmp_path, capsys):
    pools(8).run(_stall, tmp_path)
    (tmp_path / "train.jsonl").write_text('{"kind": "start", "step": 0, "ranks": 9}\n{"kind": "tra')
    main([str(tmp_path)])
    first, asleep, waiting = capsys.readouterr().out.strip().split("\n\n")
    waits = "7 ranks (0-4, 6-7) in all_reduce (torch/distributed/distributed_c10d.py:"
    sleeps = "rank 5 in SlowLoader.__next__ (tests/commons/test_stalled_ranks.py:"
    assert first.startswith(waits) and f" of step 3; {sleeps}" in first
    assert first.endswith(" of step 3; no stacks of rank 8")
    assert asleep.startswith("rank 5 in step 3, ") and " in __next__\n" in asleep
    assert waiting.startswith("7 ranks (0-4, 6-7) in step 3, ") and " in all_reduce\n" in waiting
    said = (tmp_path / "said").read_text()
    assert waits in said and sleeps in said and f"-m commons.stalled_ranks {tmp_path} shows them" in said


def test_thousands_of_files_are_one_line_and_a_stack_for_each_text(tmp_path):
    texts = {rank: stalled("all_reduce", planning="gather") for rank in range(4000)}
    texts[5] = stalled("__next__", planning="gather")
    texts[8] = stalled("all_reduce", planning="get_workloads")
    texts |= {9: "", 10: stalled("load", step=3, minute=2), 11: stalled("save", step=3) + texts[11]}
    texts[5] = texts[5].replace(WAIT, "Loader.__next__ (/work/train.py:40)")  # the class, as the rank said
    stalls, problems = read_stalls(written(tmp_path, texts))
    assert not problems
    line, odd, most, before = report(stalls, 4001).split("\n\n")
    assert line == (
        "3,997 ranks (0-4, 6-8, 11-3999) in all_reduce (/work/train.py:40) of step 812; rank 5 in "
        "Loader.__next__ (/work/train.py:40) of step 812; no stacks of 2 ranks (9, 4000); only older stacks "
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


@given(
    st.dictionaries(
        st.integers(0, 4),
        st.binary(max_size=200)
        | st.text(max_size=200).map(
            lambda text: ("Timeout (\n" + THREADS + SAID + text).encode(errors="replace")
        ),
        min_size=1,
    )
)
def test_no_content_ends_in_a_traceback(tmp_path_factory, texts):
    log_dir = written(tmp_path_factory.mktemp("log"), texts)
    (log_dir / "train.jsonl").write_bytes(b'{"kind": "start"' + next(iter(texts.values())))
    main([str(log_dir)])


def test_the_command_runs_without_torch_and_names_a_folder_without_stacks(tmp_path):
    program = "import sys; sys.modules['torch'] = None\nfrom commons.stalled_ranks import main; main()"

    def run(log_dir: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, str(log_dir)]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)

    assert run(tmp_path).stdout == f"no rank has written stacks to {tmp_path / 'stacks'}\n"
    gone = run(tmp_path / "gone")
    assert gone.returncode == 2 and "gone is not a folder; expected TrainerArgs.log_dir" in gone.stderr


def test_ranks_are_ranges():
    assert ranks_text([5]) == "rank 5"
    assert ranks_text([*range(5), *range(6, 1024)]) == "1,023 ranks (0-4, 6-1023)"
    assert ranks_text(list(range(0, 1024, 2))) == "512 ranks (0, 2, 4, 6, 8, 10, 12, 14, …)"
