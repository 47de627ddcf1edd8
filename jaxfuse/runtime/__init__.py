"""The machine, JAX and the libraries beneath: the native modules, platforms, threads, memory, versions."""
