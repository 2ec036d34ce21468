"""Fixtures shared by all tests."""

import pytest

DEVICES = ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request):
    """The device that a test runs on."""
    return request.param
