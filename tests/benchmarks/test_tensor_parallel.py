"""The benchmark of several GPUs on a CPU: what a step reads on one of them."""

from benchmarks.step_timeline import weight_bytes
from benchmarks.tensor_parallel import local_bytes
from tests.modeling.models import mla_model


def test_a_model_that_is_not_split_reads_all_its_weights():
    model = mla_model()
    assert local_bytes(model) == weight_bytes(model) > 0
