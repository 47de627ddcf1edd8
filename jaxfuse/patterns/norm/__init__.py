"""Layer, RMS, group and instance norm, and their gradients."""
