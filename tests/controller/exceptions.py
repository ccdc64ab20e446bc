"""The entries of torch's ``op_db`` that do not do on a node exactly what they do here, and why."""

_ELEMENTS = "the elements of new memory are whatever was there"
_SPARSE = "nodes hold dense tensors"
_GPU = "torch has it for GPUs only"
_CUSTOM = "torch registers it in a module that the node has not imported"

EXCEPTIONS = {
    "as_strided.partial_views": "the samples reach beyond what they show, and only that moves to a node",
    "empty": _ELEMENTS,
    "empty_like": _ELEMENTS,
    "empty_permuted": _ELEMENTS,
    "empty_strided": _ELEMENTS,
    "jiterator_2inputs_2outputs": _GPU,
    "jiterator_4inputs_with_extra_args": _GPU,
    "jiterator_binary": _GPU,
    "jiterator_binary_return_by_ref": _GPU,
    "jiterator_unary": _GPU,
    "new_empty": _ELEMENTS,
    "new_empty_strided": _ELEMENTS,
    "nn.functional.linear_cross_entropy.chunked": _CUSTOM,
    "nn.functional.linear_cross_entropy.chunked_none": _CUSTOM,
    "ormqr": "torch says of the result other strides than its kernel has: the elements are the same",
    "prod": "torch has another formula of the gradient for classes of tensors: equal to rounding",
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "t": "torch says another stride of a dimension of one element, which is of no account",
    "tensor_split": "the sample's indices must be on the CPU, on every device",
    "to": "the sample moves the tensor to the CPU",
    "to_sparse": _SPARSE,
}

#: the entries of ``module_db``, likewise
MODULES = {
    "nn.LazyConv2d": "in training two tensors differed once in a sweep, and not alone: not explained",
    "nn.LinearCrossEntropyLoss": _CUSTOM,
    "nn.Transformer": "with a mask of padding it takes nested tensors, and nodes hold dense ones",
}
