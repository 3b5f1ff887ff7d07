import inspect
from importlib import import_module

import pytest

MODULES = ("norm", "rope", "swiglu", "attention", "cross_entropy", "embedding", "adamw")


def public(module):
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_kernel_takes_what_its_twin_takes_in_the_same_order(name):
    kernels, twins = (public(import_module(f"ntp_kernels{path}.{name}")) for path in ("", ".reference"))
    for function, twin in twins.items():
        mine = list(inspect.signature(kernels[function]).parameters.values())
        theirs = list(inspect.signature(twin).parameters.values())
        assert [p.name for p in mine[: len(theirs)]] == [p.name for p in theirs], function
        assert all(p.default is not p.empty for p in mine[len(theirs) :]), function
