"""Errors of a failed trace: place in the model, cause, and the way out."""

from __future__ import annotations

import linecache

import torch
from torch import nn

from autoshard import frames
from autoshard.errors import CaptureError, SharedStateError
from autoshard.passes.capture.exported.snapshots import REMOVED_STATE_MESSAGE, plain_tensors
from autoshard.passes.capture.refusals.aliasing import names_sharing_memory

_DATA_DEPENDENT_ERRORS = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "PendingUnbackedSymbolNotFound",
)


DATA_DEPENDENT_MESSAGE = (
    "the program depends on the values of a tensor ({what}), but one graph must serve all inputs. Use "
    "torch.where, clamp() or a mask instead of `if`, Python's max() and min(), and loops over a tensor."
)

IN_TRANSFORM_MESSAGE = (
    "the forward differentiates tensors of the model with torch.func (grad, vjp, jvp, jacrev, ...), which a trace "
    "cannot follow. Compute the gradient outside, with torch.autograd.grad on the compiled module's outputs."
)
_SPARSE_ERRORS = ("Cannot access storage of Sparse", "tensors do not have strides", "layout_impl is only implemented")
_NO_DATA_ERRORS = (
    ".numpy() is not supported for tensor subclasses",
    "Cannot access data pointer of Tensor",
    "Can't pickle",
)
_TRANSFORM_ERRORS = ("_unwrap_for_grad()", "_wrap_for_grad()")


def explained_capture_error(model: nn.Module, error: BaseException) -> CaptureError:
    """The user's error for ``error``, raised in a trace: place, cause, and the way out."""
    path, line, code = _user_code_location(model, error)
    where = f"{path or 'the model'} ({line})" if line else path
    prefix = f"{where}: " if where else ""
    if isinstance(error, CaptureError):
        text = str(error)
    elif is_data_dependent(error):
        text = DATA_DEPENDENT_MESSAGE.format(what=f"`{code}`" if code else type(error).__name__)
    elif "HigherOrder" in type(error).__name__:
        text = (
            "control flow as an operation, such as torch.cond, while_loop, scan and map, is not "
            f"supported (`{code}`; {type(error).__name__}). To choose by values use torch.where. "
            "To choose by shapes, or to loop over a known length, use Python's `if` and loops."
        )
    elif isinstance(error, AssertionError) and str(error).startswith("expected FakeTensor, got <class 'NoneType'>"):
        text = REMOVED_STATE_MESSAGE.format(name="a buffer of the model")  # export's own check where it is set
    elif str(error).startswith("expected compiled_fn to be GraphModule") and (names := names_sharing_memory(model)):
        text = f"the forward writes to tensors of the model that share memory, {names}. Replace one by a clone()."
    elif "__obj_flatten__" in str(error) and (kept := _module_with_cpp_object(model)):
        text = (
            f"{kept}, which no trace can read, as with packed weights of quantised layers. "
            "Compile the model before it is quantised, or use layers whose weights are tensors."
        )
    elif any(part in str(error) for part in _SPARSE_ERRORS):
        named = ", ".join(map(repr, _sparse_tensor_names(model)))
        text = (
            f"the forward reads a sparse tensor{named and f' ({named})'}, but autoshard shards "
            "plain dense tensors. Convert it first (to_dense())."
        )
    elif any(part in str(error) for part in _NO_DATA_ERRORS):
        text = (
            f"the forward passes the values of a tensor to NumPy, SciPy, another library or a file (`{code}`), but "
            "one graph must serve all inputs. Write it with torch ops, or return the tensor and do this outside the "
            "compiled module. For a loss with a matching (DETR), compile the model and call the loss on its outputs."
        )
    elif any(part in str(error) for part in _TRANSFORM_ERRORS):
        text = IN_TRANSFORM_MESSAGE
    elif isinstance(error, NotImplementedError) and str(error).startswith("argument of type: "):  # torch < 2.13
        text = (
            "the forward uses an object that is not a tensor "
            f"({str(error).partition(': ')[2]}). Pass tensors and numbers."
        )
    elif "SymFloat.__format__" in str(error):
        text = f"the forward formats the value of a tensor as text (`{code}`). Return it, and format it outside."
    else:
        first = str(error).strip().split("\n\n")[0]
        text = f"the model could not be traced. {type(error).__name__}: {first}"
    keeps = isinstance(error, SharedStateError) or "share memory" in text
    return (SharedStateError if keeps else CaptureError)(prefix + text)


def _module_with_cpp_object(model: nn.Module) -> str:
    """Text that names the first module with an object of a torch C++ class; "" if there is none."""
    held = ((path, type(m).__name__, x) for path, m in model.named_modules() for x in vars(m).values())
    own = next((known for known in held if isinstance(known[2], torch.ScriptObject)), None)
    return "" if own is None else f"{own[1]} {own[0]!r} holds a C++ object, {own[2]._type().name()}"


def _sparse_tensor_names(model: nn.Module) -> list[str]:
    """Names of sparse buffers and plain attributes."""
    tensors = [*model.named_buffers(), *((name, x) for name, (x, _) in plain_tensors(model).items())]
    return [name for name, x in tensors if x.layout != torch.strided]


def is_data_dependent(error: BaseException) -> bool:
    """Whether ``error`` arose because Python asked for a tensor's value."""
    return type(error).__name__ in _DATA_DEPENDENT_ERRORS or "data-dependent" in str(error)


def _user_code_location(model: nn.Module, error: BaseException) -> tuple[str, str, str]:
    """(module path, ``file:line``, source text) of the innermost user frame; "" if unknown."""
    names = {id(module): name for name, module in model.named_modules()}
    path = line = code = ""
    for frame, number in frames.traceback_frames(error.__traceback__):
        file = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if id(owner) in names and names[id(owner)]:
            path = names[id(owner)]
        if frames.is_users_file(file):
            line, code = frames.location_text(file, number), linecache.getline(file, number).strip()
    if not line and (recorded := frames.users_lines(str(error))):  # no model in a second trace
        file, number = recorded[-1]
        line, code = frames.location_text(file, number), linecache.getline(file, number).strip()
    return path, line, code
