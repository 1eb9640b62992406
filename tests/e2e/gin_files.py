"""Small configurations, as files that users write."""

from tests.e2e.torchrun import REPOSITORY

# Eight rows per rank, six steps, all logged; no balancing, dropout or checkpoints.
RANDOM_DATA = (
    (REPOSITORY / "benchmarks/soak.gin").read_text()
    + """
TrainerArgs.eval_interval = 3
TrainerArgs.max_train_iters = 6
TrainerArgs.enable_balanced_shuffler = False
TrainerArgs.ckpt_save_interval = -1
TrainerArgs.ckpt_keep = None
lengths/RandomDistribution.mean = 16
lengths/RandomDistribution.std = 20
history/FeatureArgs.max_sequence_length = 64
BenchmarkDatasetArgs.num_generated_batches = 4
NetworkArgs.hidden_size = 16
NetworkArgs.kv_channels = 8
NetworkArgs.hidden_dropout = 0.0
OptimizerArgs.learning_rate = 1e-2
"""
)

# Settings of a semantic-ID training in recsys-examples, beyond those of a file that ships for the model.
RECSYS_EXAMPLES_SID_GR = f"""
include '{REPOSITORY}/sid_gr/training/configs/sid_amazon.gin'
TrainerArgs.max_eval_iters = 10
TrainerArgs.seed = 1234
TrainerArgs.profile = False
TrainerArgs.ckpt_save_interval = -1
TrainerArgs.pipeline_type = "prefetch"
TrainerArgs.eval_metrics = ("NDCG@5", "NDCG@10", "Recall@10", "HitRate@5")
TrainerArgs.enable_balanced_shuffler = True
DatasetArgs.dataset_name = "shop"
DatasetArgs.sequence_features_training_data_path = "training.parquet"
DatasetArgs.sequence_features_validation_data_path = None
DatasetArgs.sequence_features_testing_data_path = "testing.parquet"
DatasetArgs.item_to_sid_mapping_path = "item_to_sid.pt"
DatasetArgs.max_candidate_length = 1
DatasetArgs.deduplicate_label_across_hierarchy = True
NetworkArgs.hidden_dropout = 0.1
NetworkArgs.norm_epsilon = 1e-5
NetworkArgs.is_causal = True
NetworkArgs.dtype_str = "bfloat16"
NetworkArgs.kernel_backend = "triton"
NetworkArgs.scaling_seqlen = 128
NetworkArgs.item_embedding_dim = 64
OptimizerArgs.optimizer_str = "adam"
OptimizerArgs.learning_rate = 1e-3
OptimizerArgs.adam_beta1 = 0.9
OptimizerArgs.adam_beta2 = 0.999
OptimizerArgs.weight_decay = 0.01
TensorModelParallelArgs.tensor_model_parallel_size = 1
"""

# Other choices of the generator, and what recsys-examples' ranking benchmarks have beyond them.
RECSYS_EXAMPLES = """
TrainerArgs.pipeline_type = "prefetch"
TrainerArgs.enable_balanced_shuffler = True
batch_size = 16
TrainerArgs.eval_batch_size = %batch_size
uniform/RandomDistribution.dist_type = "uniform"
uniform/RandomDistribution.low = 0
uniform/RandomDistribution.high = 1000
user/FeatureArgs.value_dists = {"user_id": @uniform/RandomDistribution()}
users/DynamicEmbeddingArgs.evict_strategy = "lfu"
users/DynamicEmbeddingArgs.dist_type = "hash_roundrobin"
BenchmarkDatasetArgs.max_num_candidates = 10
NetworkArgs.dtype_str = "bfloat16"
NetworkArgs.is_causal = True
NetworkArgs.target_group_size = 1
NetworkArgs.num_position_buckets = 8192
NetworkArgs.kernel_backend = "cutlass"
NetworkArgs.recompute_input_layernorm = True
NetworkArgs.recompute_input_silu = True
NetworkArgs.embedding_backend = "DYNAMIC"
RankingArgs.prediction_head_act_type = "gelu"
RankingArgs.eval_metrics = ("AUC",)
"""


def generated_benchmark(*, caching: bool = False, zipf_values: float | None = None) -> str:
    """Returns a ranking benchmark as recsys-examples' generator writes it; its choices are the arguments.

    Source: their examples/hstu/training/benchmark/scripts/generate_gin_config.py.
    """
    dynamic = "".join(
        f"""
{name}/DynamicEmbeddingArgs.feature_names = ['{feature}']
{name}/DynamicEmbeddingArgs.table_name = '{feature}'
{name}/DynamicEmbeddingArgs.item_vocab_size_or_capacity = 50000000
{name}/DynamicEmbeddingArgs.item_vocab_gpu_capacity_ratio = {0.1 if caching else 0.0}
{name}/DynamicEmbeddingArgs.evict_strategy = 'lru'
{name}/DynamicEmbeddingArgs.caching = {caching}
{name}/DynamicEmbeddingArgs.dist_type = 'roundrobin'
"""
        for name, feature in (("items", "item"), ("users", "user_id"))
    )
    replicated = "".join(
        f"""
{name}/EmbeddingArgs.feature_names = ['{feature}']
{name}/EmbeddingArgs.table_name = '{feature}'
{name}/EmbeddingArgs.item_vocab_size_or_capacity = {rows}
{name}/EmbeddingArgs.sharding_type = 'data_parallel'
"""
        for name, feature, rows in (
            ("actions", "action", 100),
            ("ages", "user_age", 100),
            ("categories", "item_category_l1", 50),
        )
    )
    values = "".join(
        f"""
of_{feature}/RandomDistribution.dist_type = 'zipf'
of_{feature}/RandomDistribution.alpha = {zipf_values}
{group}/FeatureArgs.value_dists = {{'{feature}': @of_{feature}/RandomDistribution()}}
"""
        for group, feature in (("history", "item"), ("user", "user_id"))
        if zipf_values is not None
    )
    return f"""
TrainerArgs.train_batch_size = 32
TrainerArgs.eval_batch_size = 32
TrainerArgs.log_interval = 100
TrainerArgs.eval_interval = 1001
TrainerArgs.max_train_iters = 1000
TrainerArgs.max_eval_iters = 50
TrainerArgs.seed = 1234
TrainerArgs.pipeline_type = 'none'
TrainerArgs.profile = True
TrainerArgs.profile_step_start = 150
TrainerArgs.profile_step_end = 170
TrainerArgs.ckpt_save_dir = './checkpoints/generated_exp'
TrainerArgs.ckpt_save_interval = 999999999

history/FeatureArgs.feature_names = ['item', 'action']
history/FeatureArgs.max_sequence_length = 4096
history/FeatureArgs.is_jagged = True
lengths/RandomDistribution.dist_type = 'zipf'
lengths/RandomDistribution.alpha = 1.2
lengths/RandomDistribution.low = 1
history/FeatureArgs.seqlen_dist = @lengths/RandomDistribution()
user/FeatureArgs.feature_names = ['user_id', 'user_age']
user/FeatureArgs.max_sequence_length = 1
user/FeatureArgs.is_jagged = False
category/FeatureArgs.feature_names = ['item_category_l1']
category/FeatureArgs.max_sequence_length = 1
category/FeatureArgs.is_jagged = False
{values}
BenchmarkDatasetArgs.feature_args = [@history/FeatureArgs(), @user/FeatureArgs(), @category/FeatureArgs()]
BenchmarkDatasetArgs.item_feature_name = 'item'
BenchmarkDatasetArgs.contextual_feature_names = ['user_id', 'user_age', 'item_category_l1']
BenchmarkDatasetArgs.action_feature_name = 'action'
BenchmarkDatasetArgs.max_num_candidates = 0
BenchmarkDatasetArgs.num_generated_batches = 100
{dynamic}{replicated}
BenchmarkDatasetArgs.embedding_args = [
    @items/DynamicEmbeddingArgs(),
    @actions/EmbeddingArgs(),
    @users/DynamicEmbeddingArgs(),
    @ages/EmbeddingArgs(),
    @categories/EmbeddingArgs(),
]

NetworkArgs.item_embedding_dim = 128
NetworkArgs.contextual_embedding_dim = 128
NetworkArgs.num_layers = 8
NetworkArgs.num_attention_heads = 4
NetworkArgs.hidden_size = 1024
NetworkArgs.kv_channels = 256
NetworkArgs.kernel_backend = 'triton'
NetworkArgs.recompute_input_layernorm = False
NetworkArgs.recompute_input_silu = False

RankingArgs.prediction_head_arch = [512, 8]
RankingArgs.prediction_head_bias = True
RankingArgs.num_tasks = 8
RankingArgs.eval_metrics = ['auc']

OptimizerArgs.optimizer_str = 'adam'
OptimizerArgs.learning_rate = 1e-3
OptimizerArgs.adam_beta1 = 0.9
OptimizerArgs.adam_beta2 = 0.999
OptimizerArgs.adam_eps = 1e-8
TensorModelParallelArgs.tensor_model_parallel_size = 1
"""


def for_inference(gin_text: str) -> str:
    """Returns a file without an optimizer, like those for recsys-examples' inference."""
    return "".join(line for line in gin_text.splitlines(keepends=True) if not line.startswith("Optimizer"))
