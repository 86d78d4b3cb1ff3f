"""Problems, numeric checks and timing, shared by tests, benchmarks, ``eval`` and ``mha2mla check kernels``."""
