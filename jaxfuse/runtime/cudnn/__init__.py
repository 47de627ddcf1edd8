"""cuDNN's graph API: operation graphs as data (`graph`), execution plans made of them (`backend`), and kept (`plans`).

Plans are made while a program is lowered, for the GPU at hand or for one described by its properties (`devices`); the handler
`jaxfuse_cudnn_graph` in cuda/cudnn_graph.cc runs them.
"""
