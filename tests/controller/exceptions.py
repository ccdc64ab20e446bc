"""The entries of torch's ``op_db`` that do not do on a node exactly what they do here, and why."""

_SPARSE = "nodes hold dense tensors"
_GPU = "torch has it for GPUs only"

EXCEPTIONS = {
    "as_strided.partial_views": "the samples reach beyond what they show, and only that moves to a node",
    "jiterator_2inputs_2outputs": _GPU,
    "jiterator_4inputs_with_extra_args": _GPU,
    "jiterator_binary": _GPU,
    "jiterator_binary_return_by_ref": _GPU,
    "jiterator_unary": _GPU,
    "ormqr": "torch says of the result other strides than its kernel has: the elements are the same",
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "to_sparse": _SPARSE,
}

#: those that are equal to rounding
ROUNDED = {
    "linalg.cond": "without gradients torch computes singular vectors too for classes of tensors",
    "native_group_norm": "torch has another formula of the tangent for classes of tensors",
    "nn.functional.linear_cross_entropy.chunked": "in bfloat16 a gradient is summed in another order",
    "nn.functional.linear_cross_entropy.chunked_none": "in bfloat16 a gradient is summed in another order",
    "prod": "torch has another formula of the gradient for classes of tensors",
}

#: those whose elements are whatever the memory held: the rest is compared
WITHOUT_ELEMENTS = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

#: the entries of ``module_db``, likewise
MODULES = {
    "nn.LazyConv2d": "in training two tensors differed once in a sweep, and not alone: not explained",
    "nn.LinearCrossEntropyLoss": "torch cuts what it computes into other parts on other devices than the CPU",
    "nn.Transformer": "with a mask of padding it takes nested tensors, and nodes hold dense ones",
}

#: entries that some supported releases of torch lack
NOT_IN_EVERY_RELEASE = {
    "native_group_norm",
    "nn.functional.linear_cross_entropy.chunked",
    "nn.functional.linear_cross_entropy.chunked_none",
}
