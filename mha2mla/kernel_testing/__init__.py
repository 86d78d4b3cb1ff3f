"""How kernels are tested: random problems and what is right about them, checks and tuning in processes of their own.

Tests, benchmarks, ``mha2mla check kernels`` and ``mha2mla tune`` draw from here, ``mha2mla.eval`` the rule alone.
"""
