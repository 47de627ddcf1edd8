"""Batch norm in training and inference, and its gradients."""
