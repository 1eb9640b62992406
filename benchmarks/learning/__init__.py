"""Costs and speeds that are learned, measured."""
