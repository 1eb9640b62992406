"""Lengths of any format give the same prediction, and what cannot be predicted is named in one line."""

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.demo.training import DEFAULT
from commons.perf_model import Cost
from tests.commons.advisor.command import (
    MODEL,
    REPOSITORY,
    advise_on,
    advise_on_gin_file,
    by_name,
    heavy_tailed,
)
from tests.commons.advisor.internals import PUBLIC_DATA, main, read_lengths
from tests.commons.datasets.text_variants import SAME_TEXT
from tests.process_pool import ProcessPool

LENGTHS = heavy_tailed(70)
TABLE = pl.DataFrame({"user": range(len(LENGTHS)), "n": LENGTHS})
LISTS = pl.DataFrame({"n": [[7] * length for length in LENGTHS]})
SAME_LENGTHS = {
    "integers.npy": (lambda path: np.save(path, LENGTHS.astype(np.uint16)), []),
    "integers.csv": (TABLE.write_csv, ["--column", "n"]),
    "integers.parquet": (TABLE.write_parquet, ["--column", "n"]),
    "lists.parquet": (LISTS.write_parquet, []),  # the only column needs no name
    "tokens.npy": (
        lambda path: np.save(path, 2 * LENGTHS + 1),
        ["--tokens-per-item", "1", "--extra-tokens", "0"],
    ),
}


@pytest.mark.parametrize(("name", "input_of"), SAME_LENGTHS.items(), ids=SAME_LENGTHS)
def test_lengths_of_any_format_give_the_same_prediction(name, input_of, tmp_path):
    write, options = input_of
    np.save(tmp_path / "lengths.npy", LENGTHS)
    write(tmp_path / name)
    run = ["--ranks", "2", "--rows-per-rank", "4"]
    [case], [expected] = (
        advise_on(tmp_path / file, *given, *run)["cases"]
        for file, given in ((name, options), ("lengths.npy", []))
    )
    assert case["lower_bound"] == expected["lower_bound"]
    assert case["mean_tokens_per_rank"] == expected["mean_tokens_per_rank"]


CSV = b"n,m\n5,1\n6,2\n"


@pytest.mark.parametrize("change", SAME_TEXT.values(), ids=SAME_TEXT)
def test_csv_files_that_are_read(change, tmp_path):
    for name, compress in (("lengths.csv", bytes), ("lengths.csv.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(compress(change(CSV)))
        assert read_lengths(path, "n").tolist() == [5, 6]
        path.write_bytes(compress(change(b'"n"\n"5"\n"6"\n')))
        assert read_lengths(path).tolist() == [5, 6]


def test_lists_are_counted(tmp_path):
    lists = [[row % 5] * (row * 7 % 4) for row in range(2600)]
    pl.DataFrame({"ids": pl.Series(lists, dtype=pl.List(pl.UInt64))}).write_parquet(
        tmp_path / "histories.parquet", row_group_size=1000
    )
    lengths = read_lengths(tmp_path / "histories.parquet")
    assert lengths.dtype == np.int64 and lengths.tolist() == list(map(len, lists))


def test_only_the_newest_events_of_longer_histories_count(tmp_path):
    for name, lengths in (("all", LENGTHS), ("newest", LENGTHS.clip(max=50))):
        np.save(tmp_path / name, lengths)
    run = ["--ranks", "2", "--rows-per-rank", "4"]
    [case], [expected] = (
        advise_on(tmp_path / f"{name}.npy", *given, *run)["cases"]
        for name, given in (("all", ["--max-length", "50"]), ("newest", []))
    )
    assert case["mean_tokens_per_rank"] == expected["mean_tokens_per_rank"]
    assert case["lower_bound"] == expected["lower_bound"]


@pytest.fixture(params=["hstu", "sid_gr"])
def application(request: pytest.FixtureRequest) -> Iterator[tuple[str, ProcessPool]]:
    """A process for each application, because their gin configurables have the same names."""
    process = ProcessPool(1)
    yield request.param, process
    process.close()


def test_the_demo_is_predicted_within_a_tenth(application, tmp_path):
    model, process = application
    if model == "hstu":
        incomplete, sizes = tmp_path / "incomplete.gin", ("hidden_size", "num_attention_heads", "kv_channels")
        settings = ["TrainerArgs.train_batch_size", *(f"NetworkArgs.{of}" for of in ("num_layers", *sizes))]
        incomplete.write_text("\n".join(f"{setting} = 2" for setting in settings))
        [(code, _, err)] = process.run(advise_on_gin_file, incomplete)
        assert code == 2 and err.count("\n") == 1
        assert err.startswith(f"balance-advisor: error: {incomplete} has no dataset; expected")
    demo, config = REPOSITORY / "benchmarks/demo", tmp_path / "config.gin"
    config.write_text(f'include "{demo / model}.gin"\n' + (demo / f"{model}_long.gin").read_text())
    [(code, out, err)] = process.run(advise_on_gin_file, config)
    assert code == 0, err
    (case,) = json.loads(out)["cases"]
    assert case["rows_per_rank"] == {"hstu": 8, "sid_gr": 6}[model]
    summary = json.loads((REPOSITORY / "benchmarks/results/demo" / model / "summary.json").read_text())
    measured, default = summary["balanced"][DEFAULT]["untrimmed"], by_name(case)["rebalance"]
    assert default["speedup"] == pytest.approx(measured["speedup"], rel=0.1)
    # Seven samples of lognormal length leave a rank per step: the mean of 64 steps is off by 5% by chance.
    assert default["bytes_sent_per_rank"] == pytest.approx(measured["bytes_sent_per_step"], rel=0.15)
    if model == "hstu":
        # As after a run that has learned that samples cost the same.
        config.write_text(
            f'{config.read_text()}\nTrainerArgs.log_dir = "{tmp_path}"\n'
            'TrainerArgs.balance_cost = "learned"\nTrainerArgs.enable_balanced_shuffler = True\n'
        )
        Cost((1e6, 1.0, 0.0, 0.0)).save(tmp_path / "learned_cost.json")
        [(_, out, _)] = process.run(advise_on_gin_file, config)
        (learned,) = json.loads(out)["cases"]
        # The file has the other settings.
        assert by_name(learned)["rebalance"]["gin"] == []
        assert "extensions=[LearnedCosts()]" in by_name(learned)["rebalance"]["python"]
        assert by_name(learned)["rebalance"]["speedup"] < default["speedup"]


TEXTS = {
    "broken.npy": "no array",
    "words.csv": "n,m\n1,2\nmany,3\n",
    "spaces.csv": "n\n5\n 6\n",
    "empty.csv": "",
    "wide.csv": f"n\n{2**70}\n",
    "broken.parquet": "no table",
    "other.json": '{"kind": "something else"}',
    "unknown.gin": "NoSuchArgs.size = 3\n",
    "first.gin": "include 'second.gin'\n",
    "second.gin": "include 'first.gin'\n",
}
ARRAYS = {
    "good": np.arange(1, 400),
    "none": np.zeros(0, dtype=np.int64),
    "negative": np.array([3, -7, 2]),
    "floats": np.array([3.0, 2.5]),
    "long": np.array([1, 2**30]),
}
TABLES = {
    "null": {"n": [[1]] * 2500 + [None]},
    "floats": {"n": [1.0, 2.5]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A working directory with files of all kinds, which no test changes."""
    with contextlib.chdir(path := tmp_path_factory.mktemp("folder")):
        for name, text in TEXTS.items():
            Path(name).write_text(text)
        for name, array in ARRAYS.items():
            np.save(name, array)
        for name, columns in TABLES.items():
            pl.DataFrame(columns).write_parquet(f"{name}.parquet")
        Cost((1.0, 0.0, 0.0)).save("one_column.json")
        yield path


# Command lines, where MODEL stands for the dimensions of a model, and what the error says.
CASES = {
    "absent.npy MODEL": "No such file or directory: 'absent.npy'",
    "absent.txt MODEL": "absent.txt has an unknown format; expected .npy, .csv, .csv.gz, .parquet",
    "broken.npy MODEL": "broken.npy",
    "broken.parquet MODEL": "broken.parquet",
    "words.csv --column size MODEL": ("words.csv", "--column size", "n, m"),
    "spaces.csv MODEL": ("row 3", "' 6'", "integer"),
    "empty.csv MODEL": "empty.csv",
    "words.csv MODEL": "--column None; expected one of n, m",
    "words.csv --column n MODEL": ("words.csv, row 3", "'many'"),
    "none.npy MODEL": "none; expected one per sample",
    "negative.npy MODEL": "-7 to 3; expected",
    "floats.npy MODEL": "float64 of shape (2,); expected integers",
    "floats.parquet MODEL": "column n holds Float64; expected integers",
    "long.npy MODEL --ranks 1": "costs more than 2^62",
    "null.parquet MODEL": "row 2500: n is null",
    "good.npy MODEL --ranks 0": ("--ranks", "0", "at least 1"),
    "good.npy MODEL --bandwidth 0": ("--bandwidth", "0", "above 0"),
    "good.npy MODEL --ranks 8,64": ("399 samples", "64 ranks × 32 rows needs 2048"),
    "good.npy": ("--model None", "hstu"),
    "good.npy MODEL --cost one_column.json": "one_column.json is for 1 columns of get_workloads; exp",
    "good.npy --model hstu --hidden-size 8": "--num-layers, --num-heads",
    "good.npy MODEL --num-heads 3": ("--num-heads 3", "--head-dim"),
    "good.npy --model bert": ("--model bert", "hstu"),
    "good.npy --cost other.json --tflops 3": "--tflops: not allowed with argument --cost",
    "unknown.gin --extra-tokens 1": "--extra-tokens 1 has no effect",
    "unknown.gin --max-length 5": "--max-length 5 has no effect",
    "unknown.gin --model first.gin": "--model first.gin has no effect",
    "good.npy --model unknown.gin --num-layers 2": "--num-layers 2 has no effect",
    "good.npy MODEL --cost other.json": ("other.json", "another kind"),
    "unknown.gin": ("unknown.gin", "NoSuchArgs"),
    "absent.gin": "absent.gin",
    "": "one of the arguments data --lengths-of is required",
    "MODEL --lengths-of yamba": ("--lengths-of", "yamba", *PUBLIC_DATA),
    "good.npy MODEL --lengths-of taobao": "--lengths-of: not allowed with argument data",
    "wide.csv MODEL": "wide.csv",
    "first.gin": "first.gin",
    "good.npy MODEL --html absent/page.html": "absent/page.html",
    "good.npy MODEL --ranks 2 --html /dev/full": "No space left",
}


@pytest.mark.parametrize(("arguments", "expected"), CASES.items(), ids=CASES)
def test_wrong_input_is_named(arguments, expected, folder, capsys):
    try:
        code = main(arguments.replace("MODEL", " ".join(MODEL)).split())
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == 2
    written = capsys.readouterr()
    assert written.out == ""
    *usage, error = written.err.splitlines()
    assert all(line.startswith(("usage:", " ")) for line in usage)
    for text in [expected] if isinstance(expected, str) else expected:
        assert text in error
