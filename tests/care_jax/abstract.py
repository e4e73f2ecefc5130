"""Shapes that stand for arrays, compared with the arrays they stand for."""


def assert_same(abstract, array):
    assert (abstract.shape, abstract.dtype) == (array.shape, array.dtype)
    assert abstract.sharding.is_equivalent_to(array.sharding, array.ndim)
    assert abstract.sharding.memory_kind == array.sharding.memory_kind
