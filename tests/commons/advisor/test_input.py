import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.demo.training import DEFAULT
from commons.advisor import InputError, columns
from commons.advisor.__main__ import main
from commons.advisor.columns import read_column_lengths, read_groups, read_ids
from commons.advisor.prediction import num_unique
from commons.advisor.samples import TokenRule, read_lengths
from commons.perf_model import Cost
from tests.commons.advisor.command import MODEL, REPOSITORY, advise_on_gin_file, by_name
from tests.commons.datasets.text_variants import NO_TEXT, SAME_TEXT
from tests.process_pool import ProcessPool

WITHOUT_DATASET = """
TrainerArgs.train_batch_size = 8
NetworkArgs.num_layers = 2
NetworkArgs.hidden_size = 32
NetworkArgs.num_attention_heads = 2
NetworkArgs.kv_channels = 16
"""


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_an_array_of_integers(dtype, tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([3, 0, 7], dtype=dtype))
    lengths = read_lengths(tmp_path / "lengths.npy", None)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [3, 0, 7]


def test_columns_of_integers_and_of_lists(tmp_path):
    (tmp_path / "lengths.csv").write_text("n\n5\n6\n")
    assert read_lengths(tmp_path / "lengths.csv", None).tolist() == [5, 6]  # the only column needs no name
    path = tmp_path / "histories.parquet"
    pl.DataFrame({"user": [1, 2, 3], "items": [[4, 5], [], [6]]}).write_parquet(path)
    assert read_lengths(path, "items").tolist() == [2, 0, 1]
    assert read_lengths(path, "user").tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [pl.List(pl.Int32), pl.List(pl.UInt64), pl.Array(pl.Int64, 2)])
def test_ids_and_groups(dtype, tmp_path):
    ids = [[7, 5], [5, 5]] if isinstance(dtype, pl.Array) else [[7, 5], [], [5, 5], []]
    user = pl.Series([2**64 - 1, 2**64 - 2, 0, 0][: len(ids)], dtype=pl.UInt64)
    none = pl.Series([-1, 3, -1, 3][: len(ids)])
    path = tmp_path / "histories.parquet"
    pl.DataFrame({"ids": pl.Series(ids, dtype=dtype), "user": user, "none": none}).write_parquet(path)
    column = read_ids(path, "ids")
    assert column.lengths.tolist() == list(map(len, ids))
    some = column.of(np.array([len(ids) - 2, 0, 0]))
    assert {sample: of.tolist() for sample, of in some.items()} == {i: ids[i] for i in (0, len(ids) - 2)}
    read = column.of(np.arange(len(ids)))
    assert [read[sample].tolist() for sample in range(len(ids))] == ids
    assert num_unique(read, np.arange(len(ids))) == 2 and num_unique(read, np.zeros(0, dtype=int)) == 0
    users = read_groups(path, "user")
    assert users.dtype == np.int64 and len(set(users)) == len(set(user))
    assert (read_groups(path, "none") < 0).tolist() == [True, False, True, False][: len(ids)]


CSV = b"n,m\n5,1\n6,2\n"


@pytest.mark.parametrize("change", SAME_TEXT.values(), ids=SAME_TEXT)
@pytest.mark.parametrize("separator", [b",", b";", b"\t"])
def test_csv_files_that_are_read(change, separator, tmp_path):
    for name in ("lengths.csv", "lengths.csv.gz"):
        path = tmp_path / name
        path.write_bytes(change(CSV.replace(b",", separator)))
        assert read_column_lengths(path, "--column", "n").tolist() == [5, 6]
        assert read_groups(path, "m").tolist() == [1, 2]
        path.write_bytes(change(b'"n"\n"5"\n"6"\n'))
        assert read_column_lengths(path, "--column", None).tolist() == [5, 6]


REFUSED = NO_TEXT | {
    "leading space": (lambda text: text.replace(b"6", b" 6"), ", row 1: n is ' 6'; expected an integer"),
    "trailing space": (lambda text: text.replace(b"6", b"6 "), ", row 1: n is '6 '; expected an integer"),
    "float": (lambda text: text.replace(b"6", b"6.0"), ", row 1: n is '6.0'; expected an integer"),
    "blank middle line": (lambda text: text.replace(b"6", b"\n6"), "line 3: '': expected 2 fields"),
    "short line": (
        lambda text: text.replace(b"6,2", b"6"),
        "line 3: '6': expected 2 fields separated by ','",
    ),
    "column twice": (lambda text: text.replace(b"m", b"n"), "line 1: 'n,n': 2 columns 'n', expected"),
    "negative": (lambda text: text.replace(b"6", b"-6"), ", row 1: length -6; expected at least 0"),
}


@pytest.mark.parametrize("variant", REFUSED.values(), ids=REFUSED)
def test_csv_files_that_are_refused(variant, tmp_path):
    change, *expected = variant
    path = tmp_path / "lengths.csv"
    path.write_bytes(change(CSV))
    with pytest.raises(InputError) as refused:
        read_lengths(path, "n")
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)
    assert all(text in str(refused.value) for text in expected), refused.value


@pytest.mark.parametrize("rows", [0, 1, 5, 100])
def test_lists_are_read_in_few_rows_at_a_time(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "_ROWS_AT_A_TIME", 5)
    ids = [[7] * (row * 7 % 11) for row in range(rows)]
    pl.DataFrame({"ids": ids}, schema={"ids": pl.List(pl.Int64)}).write_parquet(tmp_path / "ids.parquet")
    found = read_column_lengths(tmp_path / "ids.parquet", "--column", "ids")
    assert found.tolist() == list(map(len, ids)) and found.dtype == np.int64
    samples = np.arange(0, rows, 2)
    if len(samples):
        read = read_ids(tmp_path / "ids.parquet", "ids").of(samples)
        assert [read[sample].tolist() for sample in samples.tolist()] == ids[::2]


def test_a_null_is_named_by_its_row_in_the_file(tmp_path):
    ids = [[7]] * 2500 + [None] + [[7]] * 20
    pl.DataFrame({"ids": ids}).write_parquet(tmp_path / "ids.parquet")
    with pytest.raises(InputError, match="row 2500: ids is null"):
        read_lengths(tmp_path / "ids.parquet", "ids")


READING_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from commons.advisor.command_line import read_lengths
print(len(read_lengths(Path(sys.argv[1]), "ids")))
print({"numba", "polars"} & set(sys.modules))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_a_file_is_read_in_little_memory(tmp_path):
    """Neither polars nor numba are in the process that plans, nor is a row group in the one that reads."""
    ids = np.random.default_rng(0).integers(0, 1 << 40, (200_000, 100))
    path = tmp_path / "ids.parquet"
    table = pl.DataFrame({"ids": ids}).cast(pl.List(pl.Int64))
    table.write_parquet(path, compression="uncompressed", row_group_size=len(ids))
    command = [sys.executable, "-c", READING_IN_LITTLE_MEMORY, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    num_samples, imported, kilobytes = result.stdout.splitlines()
    assert (num_samples, imported) == (str(len(ids)), "set()"), result.stderr
    assert int(kilobytes) < 200 << 10, kilobytes  # the row group alone has 160 MB


def test_tokens_of_lengths():
    rule = TokenRule(2, 1)
    assert rule.of(np.array([0, 5])).tolist() == [1, 11]
    assert str(rule) == "2 × length + 1"
    assert str(TokenRule(1, 0)) == "length"


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
    "fraction.csv": "n\n1\n2.5\n",
    "header.csv": "n\n",
    "nothing.csv": "",
    "null.csv": "n,m\n1,1\n,2\n",
    "no_header.csv": "3\n4\n",
    "wide.csv": f"n\n{2**70}\n",
    "broken.parquet": "no table",
    "broken.json": "{",
    "other.json": '{"kind": "something else"}',
    "typing.json": json.dumps(COST | {"per_step": True}),
    "digits.json": json.dumps(COST).replace("null", "9" * 400),
    "unknown.gin": "NoSuchArgs.size = 3\n",
    "typo.gin": "NetworkArgs.num_layers = (\n",
    "missing.gin": "include 'none.gin'\n",
    "first.gin": "include 'second.gin'\n",
    "second.gin": "include 'first.gin'\n",
}
ARRAYS = {
    "good": np.arange(1, 400),
    "empty": np.zeros(0, dtype=np.int64),
    "negative": np.array([3, -7, 2]),
    "floats": np.array([3.0, 2.5]),
    "nan": np.array([3.0, np.nan]),
    "square": np.ones((2, 2), dtype=np.int64),
    "huge": np.array([1, 2**40]),
    "long": np.array([1, 2**30]),
    "spans": np.array([1, 2], dtype="timedelta64[s]"),
}
TABLES = {
    "nan": {"n": [1.0, float("nan")]},
    "null": {"n": [[1], None]},
    "lists": {"ids": [[1], [2, 3]], "words": [["a"], ["b"]], "holes": [[1, None], [2]], "user": [1, 2]},
    "wide": {"n": pl.Series([1, 2**70], dtype=pl.Int128)},
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
        Path("link.npy").symlink_to("good.npy")
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
    "header.csv MODEL": ("header.csv", "expected"),
    "nothing.csv MODEL": "nothing.csv is empty",
    "negative.npy MODEL": "row 1: length -7",
    "floats.npy MODEL": "float64 (row 1 is 2.5)",
    "nan.npy MODEL": "row 1 is nan",
    "square.npy MODEL": "(2, 2)",
    "huge.npy MODEL": "row 1: length 1099511627776",
    "long.npy MODEL --ranks 1": "costs more than 2^62",
    "words.csv --column n MODEL": "row 1: n is 'many'; expected an integer",
    "fraction.csv MODEL": "row 1: n is '2.5'; expected an integer",
    "null.csv --column n MODEL": "row 1: n is ''; expected an integer",
    "nan.parquet MODEL": "Float64 (row 1 is nan)",
    "null.parquet MODEL": "row 1: n is null",
    "good.npy MODEL --ids n": "--ids n has no effect",
    "words.csv MODEL --column m --ids n": "--ids n has no effect",
    "lists.parquet MODEL --ids user": "holds Int64; expected lists",
    "lists.parquet MODEL --ids words": "column words holds List(String)",
    "lists.parquet MODEL --ids holes": "row 0: holes has a null in its list",
    "good.npy MODEL --groups n": "--groups n has no effect",
    "lists.parquet MODEL --ids ids --groups ids": "column ids holds List(Int64); expected integers",
    "lists.parquet MODEL --ids ids --groups session": "--groups session: lists.parquet has no such",
    "unknown.gin --groups user": "--groups user has no effect",
    "good.npy MODEL --ranks 0": ("--ranks", "'0'", "at least 1"),
    "good.npy MODEL --ranks 8,many": "'many'",
    "good.npy MODEL --rows-per-rank 0": ("--rows-per-rank", "'0'"),
    "good.npy MODEL --bandwidth 0": ("--bandwidth", "above 0"),
    "good.npy MODEL --ranks 8,64": ("399 samples", "64 ranks × 32 rows needs 2048"),
    "good.npy": ("no model", "--model"),
    "good.npy --cost one_column.json": ("no model", "--model"),
    "good.npy MODEL --cost one_column.json": "one_column.json is for 1 columns of get_workloads; exp",
    "good.npy --model bert": ("--model bert", "hstu"),
    "good.npy --model hstu --hidden-size 8": "--num-layers, --num-heads",
    "good.npy MODEL --num-heads 3": ("--num-heads 3", "--head-dim"),
    "good.npy MODEL --mlp-size 8": "--mlp-size 8 has no effect",
    "good.npy --num-layers 2": "--num-layers 2 has no effect",
    "good.npy MODEL --cost none.json": "none.json does not exist",
    "good.npy MODEL --cost broken.json": "broken.json",
    "good.npy MODEL --cost other.json": ("other.json", "another kind"),
    "good.npy --cost other.json --tflops 3": "--tflops 3 has no effect",
    "none.gin": "none.gin does not exist",
    "unknown.gin": ("unknown.gin", "NoSuchArgs"),
    "unknown.gin --extra-tokens 1": "--extra-tokens 1 has no effect",
    "unknown.gin --model other.gin": "--model other.gin",
    "good.npy MODEL --gin-bindings A.b=1": "--gin-bindings A.b=1",
    "": "data",
    "good.npy --color red": "--color",
    "folder.npy/../folder MODEL": "folder",
    "spans.npy MODEL": "timedelta64",
    "no_header.csv MODEL": ("begins with '3'", "header"),
    "wide.csv MODEL": "wide.csv",
    "wide.parquet MODEL": "row 1",
    "good.npy MODEL --cost typing.json": "has True; expected",
    "good.npy MODEL --cost digits.json": "digits.json",
    "typo.gin": "typo.gin",
    "missing.gin": ("missing.gin", "none.gin"),
    "first.gin": "first.gin",
    "good.npy MODEL --hidden-size 99999999999999999999": ("--hidden-size", "at most"),
    "good.npy MODEL --num-layers 1000000 --hidden-size 1000000": "more than 2^62",
    "good.npy MODEL --extra-tokens 99999999999999999999": ("--extra-tokens", "at most"),
    "good.npy MODEL --ranks 1000000 --rows-per-rank 1000000": "in a step",
    "good.npy MODEL --bandwidth 1e-320": ("--bandwidth", "1e-9"),
    "good.npy MODEL --html folder": "--html folder is a folder",
    "good.npy MODEL --ranks 2 --html /dev/full": ("--html /dev/full", "No space left"),
    "good.npy MODEL --html folder/../good.npy": "would overwrite good.npy, which is read",
    "good.npy MODEL --html link.npy": "overwrite good.npy",
    "good.npy --cost other.json --html other.json": "would overwrite other.json",
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
