from sid_gr.training.model_args import NetworkArgs


def test_settings_of_hstu_layers_have_no_effect():
    args = NetworkArgs(1, 8, 1, 8, kernel_backend="cutlass", recompute_input_silu=True)
    assert args.settings_without_effect() == [
        'NetworkArgs.kernel_backend = "cutlass" is not available here: attention runs in PyTorch, because '
        "this model has no kernels of its own",
        "NetworkArgs.recompute_input_silu has no effect here: only HSTU layers recompute",
    ]
