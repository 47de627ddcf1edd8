"""Attention, whole or its products alone, and its gradients."""
