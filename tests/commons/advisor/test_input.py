"""Lengths of any format give the same prediction, and what cannot be predicted is named in one line."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.demo.training import DEFAULT
from commons.advisor import InputError
from commons.advisor.__main__ import main
from commons.advisor.columns import read_column_lengths, read_groups, read_ids
from commons.advisor.prediction import num_unique
from commons.advisor.public_data import PUBLIC_DATA
from commons.advisor.samples import read_lengths
from commons.perf_model import Cost
from tests.commons.advisor.command import (
    MODEL,
    REPOSITORY,
    advise_on,
    advise_on_gin_file,
    by_name,
    heavy_tailed,
)
from tests.commons.datasets.text_variants import NO_TEXT, SAME_TEXT
from tests.process_pool import ProcessPool

WITHOUT_DATASET = """
TrainerArgs.train_batch_size = 8
NetworkArgs.num_layers = 2
NetworkArgs.hidden_size = 32
NetworkArgs.num_attention_heads = 2
NetworkArgs.kv_channels = 16
"""


LENGTHS = heavy_tailed(70)


def write_npy(path: Path) -> None:
    np.save(path, LENGTHS.astype(np.uint16))


def write_text(path: Path, separator: str = ",") -> None:
    lines = [f"{row}{separator}{length}" for row, length in enumerate(LENGTHS)]
    path.write_text("\n".join([f"user{separator}n", *lines]))


def write_column(path: Path) -> None:
    pl.DataFrame({"user": range(len(LENGTHS)), "n": LENGTHS}).write_parquet(path)


def write_lists(path: Path) -> None:
    pl.DataFrame({"n": [[7] * length for length in LENGTHS]}).write_parquet(path)


SAME_LENGTHS = {
    "integers.npy": (write_npy, []),
    "integers.csv": (write_text, ["--column", "n"]),
    "semicolons.csv": (lambda path: write_text(path, ";"), ["--column", "n"]),
    "integers.parquet": (write_column, ["--column", "n"]),
    "lists.parquet": (write_lists, []),  # the only column needs no name
    "tokens.npy": (
        lambda path: np.save(path, 2 * LENGTHS + 1),
        ["--tokens-per-item", "1", "--extra-tokens", "0"],
    ),
}


@pytest.mark.parametrize(("name", "input_of"), SAME_LENGTHS.items(), ids=SAME_LENGTHS)
def test_lengths_of_any_format_give_the_same_prediction(name, input_of, tmp_path):
    def prediction(path, *options):
        [case] = advise_on(path, *options, "--ranks", "2", "--rows-per-rank", "4")["cases"]
        figures = {of: case[of] for of in ("lower_bound", "steps_drawn", "mean_tokens_per_rank")}
        for strategy, found in by_name(case).items():
            figures[strategy] = found["imbalance"], found["relative_time"]
        return figures

    write, options = input_of
    np.save(tmp_path / "lengths.npy", LENGTHS)
    write(tmp_path / name)
    assert prediction(tmp_path / name, *options) == prediction(tmp_path / "lengths.npy")


CSV = b"n,m\n5,1\n6,2\n"


@pytest.mark.parametrize("change", SAME_TEXT.values(), ids=SAME_TEXT)
def test_csv_files_that_are_read(change, tmp_path):
    for name, separator in (("lengths.csv", b","), ("lengths.csv.gz", b";"), ("lengths.csv", b"\t")):
        path = tmp_path / name
        path.write_bytes(change(CSV.replace(b",", separator)))
        assert read_column_lengths(path, "--column", "n").tolist() == [5, 6]
        assert read_groups(path, "m").tolist() == [1, 2]
        path.write_bytes(change(b'"n"\n"5"\n"6"\n'))
        assert read_column_lengths(path, "--column", None).tolist() == [5, 6]


REFUSED = NO_TEXT | {
    "leading space": (lambda text: text.replace(b"6", b" 6"), "row 1", "' 6'", "integer"),
    "float": (lambda text: text.replace(b"6", b"6.0"), "row 1", "'6.0'", "integer"),
    "word": (lambda text: text.replace(b"6", b"many"), "row 1", "'many'", "integer"),
    "empty": (lambda text: text.replace(b"6", b""), "row 1", "''", "integer"),
    "blank middle line": (lambda text: text.replace(b"6", b"\n6"), "''", "2 fields"),
    "column twice": (lambda text: text.replace(b"m", b"n"), "2 columns 'n'"),
    "no header": (lambda _: b"3\n4\n", "'3'", "header"),
    "nothing": (lambda _: b"", "is empty"),
    "header only": (lambda _: b"n,m\n", "no lines"),
}


@pytest.mark.parametrize("variant", REFUSED.values(), ids=REFUSED)
def test_csv_files_that_are_refused(variant, tmp_path):
    change, *expected = variant
    path = tmp_path / "lengths.csv"
    path.write_bytes(change(CSV))
    with pytest.raises(InputError) as refused:
        read_column_lengths(path, "--column", "n")
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)
    assert all(text in str(refused.value) for text in expected), refused.value


@pytest.mark.parametrize("rows", [0, 4, 2600])  # in several batches of rows
@pytest.mark.parametrize("dtype", [pl.List(pl.Int32), pl.List(pl.UInt64), pl.Array(pl.Int64, 2)])
def test_ids_and_groups(dtype, rows, tmp_path):
    num_ids = [2 if isinstance(dtype, pl.Array) else row * 7 % 4 for row in range(rows)]
    ids = [[row % 5] * count for row, count in enumerate(num_ids)]
    user = pl.Series([2**64 - 1 - row % 3 for row in range(rows)], dtype=pl.UInt64)
    none = pl.Series([row % 2 * 4 - 1 for row in range(rows)], dtype=pl.Int64)
    path = tmp_path / "histories.parquet"
    pl.DataFrame({"ids": pl.Series(ids, dtype=dtype), "user": user, "none": none}).write_parquet(path)
    assert read_column_lengths(path, "--column", "ids").tolist() == num_ids
    column = read_ids(path, "ids")
    assert column.lengths.tolist() == num_ids
    users = read_groups(path, "user")
    assert users.dtype == np.int64 and len(set(users)) == len(set(user))
    assert (read_groups(path, "none") < 0).tolist() == [row % 2 == 0 for row in range(rows)]
    if rows:
        samples = np.array([[rows - 2, 0], [0, 1]])
        some = column.of(samples)
        assert {sample: of.tolist() for sample, of in some.items()} == {i: ids[i] for i in {rows - 2, 0, 1}}
        read = column.of(np.arange(rows))
        assert [read[sample].tolist() for sample in range(rows)] == ids
        assert num_unique(read, np.arange(rows)) == len({one for row in ids for one in row})
        assert num_unique(read, np.zeros(0, dtype=int)) == 0


def test_a_null_is_named_by_its_row_in_the_file(tmp_path):
    ids = [[7]] * 2500 + [None] + [[7]] * 20
    pl.DataFrame({"ids": ids}).write_parquet(tmp_path / "ids.parquet")
    with pytest.raises(InputError, match="row 2500: ids is null"):
        read_lengths(tmp_path / "ids.parquet", "ids")


@pytest.fixture(params=["hstu", "sid_gr"])
def application(request: pytest.FixtureRequest) -> Iterator[tuple[str, ProcessPool]]:
    """A process for each application, because their gin configurables have the same names."""
    process = ProcessPool(1)
    yield request.param, process
    process.close()


def test_the_demo_is_predicted_within_a_tenth(application, tmp_path):
    model, process = application
    if model == "hstu":
        incomplete = tmp_path / "incomplete.gin"
        incomplete.write_text(WITHOUT_DATASET)
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
        _run_that_learns(config, tmp_path / "logs")
        [(_, out, _)] = process.run(advise_on_gin_file, config)
        (learned,) = json.loads(out)["cases"]
        # The file has the other settings.
        assert by_name(learned)["rebalance"]["gin"] == []
        assert "extensions=[LearnedCosts()]" in by_name(learned)["rebalance"]["python"]
        assert by_name(learned)["rebalance"]["speedup"] < default["speedup"]


def _run_that_learns(config: Path, log_dir: Path) -> None:
    """Makes a gin file one of a run that has learned that samples cost the same."""
    config.write_text(
        f'{config.read_text()}\nTrainerArgs.balance_cost = "learned"\nTrainerArgs.log_dir = "{log_dir}"\n'
        "TrainerArgs.enable_balanced_shuffler = True\n"
    )
    Cost((1e6, 1.0, 0.0, 0.0)).save(log_dir / "learned_cost.json")


COST = {"kind": "cost of samples, tokens and workloads", "coefficients": [1, 0, 0, 0], "per_step": None}
TEXTS = {
    "broken.npy": "no array",
    "lengths.txt": "1\n2\n",
    "words.csv": "n,m\n1,2\nmany,3\n",
    "wide.csv": f"n\n{2**70}\n",
    "broken.parquet": "no table",
    "other.json": '{"kind": "something else"}',
    "typing.json": json.dumps(COST | {"per_step": True}),
    "unknown.gin": "NoSuchArgs.size = 3\n",
    "first.gin": "include 'second.gin'\n",
    "second.gin": "include 'first.gin'\n",
}
ARRAYS = {
    "good": np.arange(1, 400),
    "empty": np.zeros(0, dtype=np.int64),
    "negative": np.array([3, -7, 2]),
    "floats": np.array([3.0, 2.5]),
    "square": np.ones((2, 2), dtype=np.int64),
    "huge": np.array([1, 2**40]),
    "long": np.array([1, 2**30]),
}
TABLES = {
    "nan": {"n": [1.0, float("nan")]},
    "null": {"n": [[1], None]},
    "lists": {"ids": [[1], [2, 3]], "words": [["a"], ["b"]], "holes": [[1, None], [2]], "user": [1, 2]},
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
        Path("folder").mkdir()
        yield path


# Command lines, where MODEL stands for the dimensions of a model, and what the error says.
CASES = {
    "none.npy MODEL": "none.npy does not exist",
    "lengths.txt MODEL": ".csv, .npy, .parquet",
    "broken.npy MODEL": "broken.npy cannot be read",
    "broken.parquet MODEL": ("broken.parquet", "b'no table'", "cannot be read as Parquet"),
    "words.csv --column size MODEL": ("--column size", "n, m"),
    "words.csv MODEL": "n, m; name the one with --column",
    "good.npy --column n MODEL": "--column n has no effect",
    "empty.npy MODEL": "empty.npy is empty",
    "negative.npy MODEL": "row 1: length -7",
    "floats.npy MODEL": "float64 (row 1 is 2.5)",
    "square.npy MODEL": "(2, 2)",
    "huge.npy MODEL": "row 1: length 1099511627776",
    "long.npy MODEL --ranks 1": "costs more than 2^62",
    "nan.parquet MODEL": "Float64 (row 1 is nan)",
    "null.parquet MODEL": "row 1: n is null",
    "good.npy MODEL --ids n": "--ids n has no effect",
    "lists.parquet MODEL --ids user": "holds Int64; expected lists",
    "lists.parquet MODEL --ids words": "column words holds List(String)",
    "lists.parquet MODEL --ids holes": "row 0: holes has a null in its list",
    "good.npy MODEL --groups n": "--groups n has no effect",
    "lists.parquet MODEL --ids ids --groups ids": "column ids holds List(Int64); expected integers",
    "lists.parquet MODEL --ids ids --groups session": "--groups session: lists.parquet has no such",
    "good.npy MODEL --ranks 0": ("--ranks", "'0'", "at least 1"),
    "good.npy MODEL --bandwidth 0": ("--bandwidth", "above 0"),
    "good.npy MODEL --ranks 8,64": ("399 samples", "64 ranks × 32 rows needs 2048"),
    "good.npy": ("no model", "--model"),
    "good.npy MODEL --cost one_column.json": "one_column.json is for 1 columns of get_workloads; exp",
    "good.npy --model bert": ("--model bert", "hstu"),
    "good.npy --model hstu --hidden-size 8": "--num-layers, --num-heads",
    "good.npy MODEL --num-heads 3": ("--num-heads 3", "--head-dim"),
    "good.npy MODEL --mlp-size 8": "--mlp-size 8 has no effect",
    "good.npy --num-layers 2": "--num-layers 2 has no effect",
    "good.npy MODEL --cost other.json": ("other.json", "another kind"),
    "good.npy --cost other.json --tflops 3": "--tflops 3 has no effect",
    "none.gin": "none.gin does not exist",
    "unknown.gin": ("unknown.gin", "NoSuchArgs"),
    "unknown.gin --extra-tokens 1": "--extra-tokens 1 has no effect",
    "unknown.gin --model other.gin": "--model other.gin",
    "good.npy MODEL --gin-bindings A.b=1": "--gin-bindings A.b=1",
    "": "no data; expected a file of lengths, or --lengths-of",
    "MODEL --lengths-of yamba": ("--lengths-of yamba", *PUBLIC_DATA),
    "good.npy MODEL --lengths-of taobao": "both have lengths",
    "good.npy MODEL --max-length 5": "--max-length 5 has no effect",
    "MODEL --lengths-of taobao --ids items": "--ids items has no effect",
    "wide.csv MODEL": "wide.csv",
    "good.npy MODEL --cost typing.json": "has True; expected",
    "first.gin": "first.gin",
    "good.npy MODEL --hidden-size 99999999999999999999": ("--hidden-size", "at most"),
    "good.npy MODEL --ranks 1000000 --rows-per-rank 1000000": "in a step",
    "good.npy MODEL --html folder": "--html folder is a folder",
    "good.npy MODEL --ranks 2 --html /dev/full": ("--html /dev/full", "No space left"),
    "good.npy MODEL --html folder/../good.npy": "would overwrite good.npy, which is read",
    "good.npy --model unknown.gin --html unknown.gin": "would overwrite unknown.gin",
    "good.npy MODEL --ranks 1 --html none/page.html": "none/page.html",
}


@pytest.mark.parametrize(("arguments", "expected"), CASES.items(), ids=CASES)
def test_wrong_input_is_named_in_one_line(arguments, expected, folder, capsys):
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(arguments.replace("MODEL", " ".join(MODEL)).split()) == 2
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1, written.err
    for text in [expected] if isinstance(expected, str) else expected:
        assert text in written.err


def test_a_missing_application_is_named(folder, capsys, monkeypatch):
    def absent(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("commons.advisor.gin_file.importlib.import_module", absent)
    assert main(["unknown.gin"]) == 2
    assert "hstu, which the file configures, cannot be imported: run in a checkout" in capsys.readouterr().err
