"""Convolutions with what stands around them, and their gradients."""
