"""Workload-balanced data-parallel training for TorchRec: everything that no single model owns."""
