"""Measures of saved checkpoints: ranking and input ablation."""
