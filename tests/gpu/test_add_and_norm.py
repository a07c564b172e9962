"""The kernel that adds and normalises on a real GPU, over the case table of the interpreted tests."""

import pytest

from jaxinfer.attention.backend import select_backend
from tests.kernels.add_and_norm_cases import EPS, Case
from tests.kernels.add_and_norm_checks import AddAndNormChecks, check_case

pytestmark = pytest.mark.gpu


def run(case: Case):
    tokens = case.arguments[0].shape[0]
    return select_backend("pallas").residual(tokens).add_and_norm(*case.arguments, EPS)


class TestOnTheGpu(AddAndNormChecks):
    def run(self, case):
        return run(case)


@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("size", [1024, 2880, 4096, 16384])
def test_thousands_of_tokens_at_once(size, parts):
    case = Case(tokens=2000, size=size, parts=parts, wide_scale=size == 2880)
    check_case(case, run(case))
