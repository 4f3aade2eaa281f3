"""Every kernel test runs on both implementations."""

from __future__ import annotations

import pytest
from kernel_problems import needs_cpp

from vtoken.kernels import load


@pytest.fixture(params=["torch", pytest.param("cpp", marks=needs_cpp)])
def kernels(request):
    return load(request.param)
