"""Files of recsys-examples' benchmark generator train, and train again in the same folder."""

from pathlib import Path

from tests.e2e.gin_files import RECSYS_EXAMPLES, for_inference, generated_benchmark
from tests.e2e.kept_ranks import KeptRanks
from tests.e2e.torchrun import RANKING, bind, train_log

SMALL = bind(
    "TrainerArgs.train_batch_size = 4",
    "TrainerArgs.eval_batch_size = 16",
    "TrainerArgs.log_interval = 1",
    "TrainerArgs.max_train_iters = 3",
    "TrainerArgs.max_eval_iters = 1",
    "history/FeatureArgs.max_sequence_length = 32",
    "BenchmarkDatasetArgs.num_generated_batches = 4",
    "items/DynamicEmbeddingArgs.item_vocab_size_or_capacity = 1000",
    "users/DynamicEmbeddingArgs.item_vocab_size_or_capacity = 1000",
    "NetworkArgs.item_embedding_dim = 16",
    "NetworkArgs.contextual_embedding_dim = 16",
    "NetworkArgs.num_layers = 1",
    "NetworkArgs.hidden_size = 16",
    "NetworkArgs.kv_channels = 8",
)


def _train(kept_ranks: KeptRanks, directory: Path, *bindings: str) -> tuple[str, list[dict]]:
    """Returns what a run printed, and the lines it appended to its log."""
    logs = directory / "out/logs"
    before = len(train_log(logs)) if logs.exists() else 0
    output = kept_ranks.train(directory, *RANKING, "--gin-config-file", "generated.gin", *SMALL, *bindings)
    return output, train_log(logs)[before:]


def test_a_generated_file_trains_twice_in_a_row(kept_ranks, tmp_path):
    text = generated_benchmark(caching=True, zipf_values=1.2) + RECSYS_EXAMPLES
    (tmp_path / "generated.gin").write_text(text)
    (output, first), (_, second) = _train(kept_ranks, tmp_path), _train(kept_ranks, tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert [line["kind"] for line in first] == ["start", "train", "train", "train", "eval"]
    assert [(line["step"], line["loss"]) for line in second[1:4]] == [
        (line["step"], line["loss"]) for line in first[1:4]
    ]
    for warning in (
        "TrainerArgs.ckpt_save_interval = 999999999 is beyond the run's 3 steps",
        "TrainerArgs.profile writes no trace",
        "no fused Adam on CPU",
        "all labels of task 7 in an evaluation",  # no action below 100 has bit 7
        'TrainerArgs.pipeline_type = "prefetch"',
        'NetworkArgs.kernel_backend = "cutlass"',
        "NetworkArgs.embedding_backend",
        "caching = True, dist_type = 'hash_roundrobin' of table 'user_id'",
    ):
        assert output.count(warning) == 1, f"expected one warning about {warning}:\n{output}"
    assert "NetworkArgs.recompute" not in output  # it has an effect
    assert first[-1]["AUC"] > 0 and first[-1]["AUC_task7"] is None


def test_a_file_without_an_optimizer_evaluates_a_checkpoint(kept_ranks, tmp_path):
    file = tmp_path / "generated.gin"
    file.write_text(generated_benchmark() + "TrainerArgs.enable_balanced_shuffler = True\n")
    _, trained = _train(kept_ranks, tmp_path, "TrainerArgs.ckpt_save_interval = 2")
    file.write_text(for_inference(file.read_text()))
    saved = "checkpoints/generated_exp"
    output, (evaluated,) = _train(kept_ranks, tmp_path, f"TrainerArgs.ckpt_load_dir = '{saved}'")
    assert f"no training: evaluates {saved}/step_3" in output
    assert [evaluated] == [line for line in trained if line["kind"] == "eval"]
    assert [path.name for path in sorted((tmp_path / saved).glob("[!.]*"))] == ["step_2", "step_3"]
