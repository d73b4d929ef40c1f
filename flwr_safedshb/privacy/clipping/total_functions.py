"""Operations of torch that raise for some values, in a form that never raises.

If the value of one example, or a weight that a server chose, could make an operation
raise, a whole batch would fail because of one example. So whether a model may be given
whole batches is decided once, by its operations: all of them must be *total*. No value
makes a total operation raise, or draw another number of random numbers.

`TotalFunctions` replaces the few common operations that are not total. An example whose
value the original would refuse gets NaN there, and an example with a loss of NaN
contributes zero. `find_partial_operation` looks for others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that no value makes raise. Pointwise operations and views are not listed:
# torch marks them.
_TOTAL = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d
    adaptive_max_pool3d addbmm addmm addmv addr alias all amax amin aminmax any
    arange argmax argmin argsort as_strided avg_pool1d avg_pool2d avg_pool3d baddbmm
    bernoulli_ binary_cross_entropy_with_logits bmm bucketize cat _cdist_forward
    clone col2im constant_pad_nd convolution copy_ count_nonzero cross cummax cummin
    cumprod cumsum detach diag_embed diagonal_scatter dot empty empty_like
    empty_strided exponential_ eye _fft_c2c _fft_c2r _fft_r2c fill flip full
    full_like _fused_dropout glu  huber_loss im2col
    isin lift_fresh linalg_cross linalg_vector_norm linspace log_sigmoid_forward
    _log_softmax logcumsumexp logsumexp masked_fill max max_pool2d_with_indices
    max_pool3d_with_indices mean median min mm mse_loss mv nanmedian nansum
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    native_dropout native_group_norm native_layer_norm new_empty new_empty_strided
    new_full new_ones new_zeros norm normal_ ones ones_like _prelu_kernel prod rand
    rand_like randint randint_like randn randn_like randperm reflection_pad1d
    reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d
    replication_pad3d _reshape_alias roll _safe_softmax
    scalar_tensor scaled_dot_product_attention
    _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention_for_cpu select_scatter slice_scatter
    smooth_l1_loss soft_margin_loss _softmax sort split stack std sum _to_copy topk
    trace tril tril_indices triu triu_indices uniform_ _unsafe_view
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean
    vector_norm _weight_norm_interface zero_ zeros zeros_like
    """.split()  # noqa: SIM905
)
# The position of the indices among the arguments of operations that are total if an
# adversary does not choose the indices.
_INDICES = {
    **dict.fromkeys(("embedding", "index", "_unsafe_index", "take"), 1),
    **dict.fromkeys(("index_put", "index_put_", "_unsafe_index_put"), 1),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), 1),
    **dict.fromkeys(("gather", "index_select", "take_along_dim"), 2),
    **dict.fromkeys(("index_add", "index_copy", "index_fill"), 2),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_add_"), 2),
}
# They read outside of their memory for some values, which ends the process.
_UNCHECKED = ("ctc_loss", "grid_sampler", "segment_reduce", "sparse", "_mode")
# They raise for whole numbers and a divisor of zero.
_DIVISIONS = frozenset({"floor_divide", "remainder", "fmod"})

_in_total_form: ContextVar[bool] = ContextVar("in_total_form", default=False)


class TotalFunctions(TorchFunctionMode):
    """Replace functions that raise for some values by functions that give NaN there.

    Attributes
    ----------
    used : bool
        Whether a function was replaced.
    """

    used = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, or its total form if it has one."""
        form, given = _FORMS.get(func), kwargs or {}
        result = NotImplemented if form is None else form(func, args, given)
        if result is NotImplemented:
            return func(*args, **given)
        self.used = True
        return result


def find_partial_operation(
    compute_loss: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    examples: Iterable[torch.Tensor],
) -> str:
    """Return the first operation on given values that is not total, or "".

    Parameters
    ----------
    compute_loss : callable () -> Tensor
        The forward pass and the loss of made-up examples, under `TotalFunctions`.
    parameters : sequence of Tensor
        The loss is differentiated by them; a server chooses their values.
    examples : iterable of Tensor
        The made-up examples.
    """
    tracer = _Tracer([*parameters, *examples])
    with tracer:
        loss = compute_loss()
        tracer.backward = True
        torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
    return tracer.found


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow the tensors that depend on given ones, and record a partial operation."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # They are kept, so that no other tensor gets the id of one.
        self.given = {id(tensor): tensor for tensor in given}
        self.backward = False
        self.found = ""


def _trace_operation(
    tracer: _Tracer,
    func: Any,
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call an operation, and record it if some value could make it raise."""
    tensors = _list_tensors((args, kwargs))
    result = func(*args, **(kwargs or {}))
    chosen = [tensor for tensor in tensors if id(tensor) in tracer.given]
    if chosen or torch.Tag.nondeterministic_seeded in func.tags:
        trusted = _in_total_form.get() or _is_total(
            func, args, tensors, chosen, tracer.backward
        )
        if not trusted and (not tracer.found or is_unchecked(str(func))):
            tracer.found = str(func)
    if chosen:
        tracer.given.update((id(made), made) for made in _list_tensors(result))
    return result


# Set here, because in the class torch would wrap it and import its compiler.
_Tracer.__torch_dispatch__ = _trace_operation  # type: ignore[assignment, method-assign]


def is_unchecked(operation: str) -> bool:
    """Return whether an operation may read outside of its memory."""
    return any(name in operation for name in _UNCHECKED)


def _list_tensors(nest: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def _is_total(
    func: Any,
    args: tuple[Any, ...],
    tensors: Sequence[torch.Tensor],
    chosen: Sequence[torch.Tensor],
    backward: bool,
) -> bool:
    """Return whether no value of the chosen tensors makes an operation raise."""
    library, _, name = str(func.overloadpacket).partition(".")
    if library != "aten":
        return False
    if backward and ("_backward" in name or name in _INDICES):
        return True  # it has the shapes and the indices of the forward pass
    if name in _INDICES:
        indices = {id(tensor) for tensor in _list_tensors(args[_INDICES[name] :][:1])}
        return not any(id(tensor) in indices for tensor in chosen)
    if name in _DIVISIONS or "_mode" in func._overloadname:
        return any(tensor.is_floating_point() for tensor in tensors)
    if name == "binary_cross_entropy":  # it wants outputs between 0 and 1
        return False
    if name == "bernoulli_":  # with probabilities in a tensor it checks them
        return len(tensors) == 1
    if name in _TOTAL or name.removesuffix("_") in _TOTAL or func.is_view:
        return True
    tags = func.tags
    random = torch.Tag.nondeterministic_seeded in tags
    return torch.Tag.pointwise in tags and not random


Arguments = dict[str, Any]
# Forms return NotImplemented for arguments that the original takes whatever they are.
Form = Callable[[Callable[..., Any], tuple[Any, ...], Arguments], Any]


@contextmanager
def _trust_operations() -> Iterator[None]:
    """Take the operations of a total form for total, whatever their names."""
    before = _in_total_form.set(True)
    try:
        yield
    finally:
        _in_total_form.reset(before)


@cache
def _get_signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _fill_nan(result: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Replace a result by NaN where it is not valid."""
    if result.dim() < valid.dim():  # reduced over the values
        valid = valid.all()
    return torch.where(valid, result, torch.nan)


def _call_class_loss(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments
) -> Any:
    """Give NaN for classes that do not exist: `cross_entropy` and `nll_loss`."""
    given = _get_signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    scores, target = given.arguments["input"], given.arguments["target"]
    if target.is_floating_point():
        return NotImplemented
    with _trust_operations():
        classes = scores.shape[min(1, scores.dim() - 1)]
        ignored = target == given.arguments["ignore_index"]
        valid = ((target >= 0) & (target < classes)) | ignored
        given.arguments["target"] = torch.where(valid, target, 0)
        return _fill_nan(func(*given.args, **given.kwargs), valid)


def _call_probability_loss(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments
) -> Any:
    """Give NaN for what is no probability: `binary_cross_entropy`."""
    given = _get_signature(func).bind(*args, **kwargs)
    with _trust_operations():
        outputs, target = given.arguments["input"], given.arguments["target"]
        valid = (outputs >= 0) & (outputs <= 1) & (target >= 0) & (target <= 1)
        given.arguments["input"] = torch.where(valid, outputs, 0.5)
        given.arguments["target"] = torch.where(valid, target, 0)
        return _fill_nan(func(*given.args, **given.kwargs), valid)


def _call_embedding(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments
) -> Any:
    """Give rows of NaN for entries that a table does not have."""
    given = _get_signature(func).bind(*args, **kwargs)
    if given.arguments.get("max_norm") is not None:  # which changes the table
        return NotImplemented
    with _trust_operations():
        entries = given.arguments["input"]
        valid = (entries >= 0) & (entries < given.arguments["weight"].shape[0])
        given.arguments["input"] = torch.where(valid, entries, 0)
        return _fill_nan(func(*given.args, **given.kwargs), valid.unsqueeze(-1))


def _call_gather(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments
) -> Any:
    """Give NaN for places that do not exist: `gather`."""
    if len(args) != 3 or kwargs or not args[0].is_floating_point():
        return NotImplemented
    source, dim, index = args
    with _trust_operations():
        valid = (index >= 0) & (index < source.shape[dim])
        return _fill_nan(func(source, dim, torch.where(valid, index, 0)), valid)


def _call_getitem(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments
) -> Any:
    """Give NaN for places that do not exist, where all indices are whole numbers."""
    source, index = args
    parts = index if isinstance(index, tuple) else (index,)
    whole = all(
        isinstance(part, torch.Tensor)
        and part.dim() > 0
        and part.dtype in (torch.int32, torch.int64)
        for part in parts
    )
    if not whole or not source.is_floating_point():
        return NotImplemented
    with _trust_operations():
        valid = functools.reduce(
            torch.logical_and,
            [(p >= -size) & (p < size) for p, size in zip(parts, source.shape)],  # noqa: B905
        )
        safe = tuple(torch.where(valid, part, 0) for part in parts)
        shape = valid.shape + (1,) * (source.dim() - len(parts))
        return _fill_nan(func(source, safe), valid.reshape(shape))


_FORMS: dict[Callable[..., Any], Form] = {
    functional.cross_entropy: _call_class_loss,
    functional.nll_loss: _call_class_loss,
    functional.binary_cross_entropy: _call_probability_loss,
    functional.embedding: _call_embedding,
    torch.gather: _call_gather,
    torch.Tensor.gather: _call_gather,
    torch.Tensor.__getitem__: _call_getitem,
}
