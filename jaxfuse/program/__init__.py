"""The traced program: its graph, its source lines, the part that autodiff made, and who reads a value."""
