"""Where a fused kernel is worth it: the policy, and the measurements it goes by."""
