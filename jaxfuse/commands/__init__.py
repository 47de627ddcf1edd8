"""What `python -m jaxfuse` runs: the demo, the doctor, and the measurement of the rules."""
