"""Checks jaxfuse's numbers against float64, then times it side by side with XLA and PyTorch: `python -m benchmarks --help`.

cases     what is measured, as data               peers      who is measured, and with which settings
inputs    the numbers every peer starts from      peer       one worker process, serving jax_peer or torch_peer
turns     one worker at a time, the rest stopped  checks     errors against the float64 reference
machine   where it ran                            report     JSON and markdown             screen     the terminal
readme    its table                              pictures   PNGs, at the end of a run and for the README
roofline  ops under the machine's peaks          browser    headless Chromium, for pages and their tests

coverage  how many layers of other packages' networks (networks/) are in fused sites: `python -m benchmarks.coverage`
"""
