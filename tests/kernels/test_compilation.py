"""Arguments of every kernel."""

import pytest
import tilelang.language as T

from mha2mla.kernels.machine import check_arguments


def test_two_arguments_of_one_name_are_refused():
    """On an H200 every append was refused by its own wrapper, which no compilation and no CPU target had noticed."""

    @T.prim_func
    def copies(first: T.Tensor([8], T.float32), second: T.Tensor([8], T.float32), out: T.Tensor([8], T.float32)):
        with T.Kernel(1, threads=8):
            for tensor in (first, second):
                for i in T.Parallel(8):
                    out[i] = tensor[i]

    with pytest.raises(ValueError, match="arguments of copies are named tensor, tensor, out; expected distinct names"):
        check_arguments(copies)
