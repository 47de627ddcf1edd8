"""LSTM and GRU in loops, and their gradients."""
