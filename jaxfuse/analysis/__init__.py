"""What a value of the program is, however it was written: a number per channel, a moved value, a statistic, a gradient."""
