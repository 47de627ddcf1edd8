"""Dense layers and batched products, and their gradients."""
