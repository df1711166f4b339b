"""Thunder's prims, which stand inside of fusions. They have no executor.

Nothing measures a prim by itself: an executor runs a prim as an operator, which has a record of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunder_cg.analysis.rules import conditions as when
from thunder_cg.analysis.rules.record import KEEP_ON_DEVICE, AliasedInputs, Cause, Evidence, Reason, Rule, rows
from thunder_cg.compat.settings import Settings

FIRST, LAST, PAIRWISE, ALL = AliasedInputs

_PRIMS = "thunder/core/prims.py"
_OPERATORS = f"{_PRIMS}; the torch executor runs it as an operator of torch.py"


def _captured(names: str, settings: Settings = Settings.NONE, **columns: Any) -> Iterable[Rule]:
    cause = Cause(Reason.ALLOWED, "it only launches kernels on the current stream", source=_OPERATORS)
    return rows(None, names, cause, Evidence.KNOWN, settings=settings, **columns)


def _eager(names: str, reason: Reason, detail: str, fix: str, source: str = _PRIMS, **columns: Any) -> Iterable[Rule]:
    return rows(None, names, Cause(reason, detail, fix, source), Evidence.NOT_MEASURED, **columns)


# fmt: off
RULES: tuple[Rule, ...] = (
    *_captured("""
        ABS ACOS ACOSH ADD AMAX AMIN ARGMAX ARGMIN ASIN ASINH ATAN ATAN2 ATANH BITWISE_AND BITWISE_LEFT_SHIFT
        BITWISE_NOT BITWISE_OR BITWISE_RIGHT_SHIFT BITWISE_XOR CAT CEIL CLONE CONVERT_ELEMENT_TYPE COS COSH
        DIGAMMA DIV EQ ERF ERFC ERFCINV ERFINV EXOGENOUS_LIKE EXP EXP2 EXPM1 FLIP FLOOR FMOD FREXP FULL GATHER GE GT
        INDEX_ADD INDEX_COPY IOTA ISFINITE LE LERP LGAMMA LOG LOG10 LOG1P LOG2 LT MAXIMUM MINIMUM MUL
        NDTRI NE NEG NEXTAFTER POW PROD RECIPROCAL REMAINDER ROUND RSQRT SCATTER SCATTER_ADD SIGN SIGNBIT SIN SINH SORT
        SQRT STD SUB SUM TAKE TAKE_ALONG_AXIS TAN TANH TOPK TRUNC VAR VAR_MEAN WHERE ZETA log_softmax_backward
        nll_loss_backward adaptive_avg_pool2d_backward
    """),
    *_captured("LINEAR MATMUL", settings=Settings.MATMUL),
    *_captured("CONVOLUTION", settings=Settings.ALL),
    *_captured("EMPTY", launches_kernels=False),
    *_captured("COPY_", aliases=LAST, writes=LAST),
    *_captured("COPY_WITH_SETITEM",
               conditions=(when.SCALAR_INDEX, when.BOOLEAN_INDEX, when.LIST_INDEX, when.NUMBER_AT_TENSOR_INDEX)),
    *_captured("INDEX_PUT", conditions=(when.BOOLEAN_INDEX,)),
    *_captured("EMBEDDING", conditions=(when.RENORMALIZED_WEIGHT,)),
    *_captured("EMBEDDING_BACKWARD", conditions=(when.SPARSE_GRADIENT,)),
    *_captured("UNIFORM RANDINT RANDN", draws=True),
    *_captured("MULTINOMIAL", draws=True, conditions=(when.OWN_GENERATOR,)),

    # Views, and prims that may return a view
    *_captured("BITCAST BROADCAST_IN_DIM SHALLOW_COPY SLICE SQUEEZE TRANSPOSE UNFOLD VIEW REAL IMAG RESHAPE",
               aliases=FIRST, launches_kernels=False),
    *_captured("UPDATE_ALIASES", aliases=PAIRWISE, launches_kernels=False),
    *_captured("PAD STRIDE_ORDER", aliases=FIRST),
    *_captured("PACK_FOR_FSDP UNPACK_FOR_FSDP", aliases=ALL),

    # Prims that stay eager
    *_eager("ITEM", Reason.DATA_DEPENDENT,
            "it reads a tensor's contents into Python, so the host must wait for the device",
            KEEP_ON_DEVICE),
    *_eager("DEVICE_PUT", Reason.MIXED_DEVICES,
            "it moves a tensor between devices", "move the tensor before or after the compiled function", aliases=ALL),
    *_eager("NUMPY_ARRAY_TO_TORCH_TENSOR TENSOR_FROM_SEQUENCE", Reason.HOST_SYNC,
            "it copies numbers from Python to the device",
            "make the tensor once, outside of the compiled function", _OPERATORS),
    *_eager("GET_AND_UPDATE_RNG_STATE", Reason.RANDOM_STATE,
            "it takes the generator's seed and offset as numbers on the host",
            "draw with the default generator, as dropout and rand do", draws=True),
    *_eager("UNIFORM_PHILOX", Reason.RUNTIME_NUMBER, "it draws by a seed and an offset that are numbers on the host",
            "draw with the default generator, as dropout and rand do"),
    *_eager("PRINT SINK", Reason.SIDE_EFFECT, "it acts on Python", "do it outside of the compiled function"),
    *_eager("GET_GRAD PACK PUT_GRAD", Reason.SIDE_EFFECT,
            "it acts on Python", "do it outside of the compiled function", aliases=ALL),
    *_eager("STASH_GRAD_FOR_FSDP UNPACK UPDATE_BUCKET_VIEW", Reason.SIDE_EFFECT,
            "it acts on Python", "do it outside of the compiled function", aliases=ALL, writes=ALL),
    *_eager("PY_ABS PY_FLOORDIV SHAPE", Reason.RUNTIME_NUMBER,
            "it computes a Python number", "compile with the default cache mode, in which sizes are constants"),
    *_eager("""
        ALL_GATHER BROADCAST REDUCE_SCATTER SYNCHRONIZE SYNCHRONIZE_TENSOR_PARALLEL_INPUT
        SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT WAIT
    """, Reason.COLLECTIVE,
            "other processes must take part at the same time", "none needed: regions form on both sides of it",
            "thunder/distributed/prims.py", aliases=ALL),
    *_eager("ALL_REDUCE", Reason.COLLECTIVE,
            "other processes must take part at the same time", "none needed: regions form on both sides of it",
            "thunder/distributed/prims.py", aliases=ALL, writes=ALL),
    *_eager("_GROUPED_MM", Reason.UNVERIFIED,
            "its path depends on the GPU, and one of them loops over offsets read on the host",
            "", "aten/src/ATen/native"),
)
# fmt: on
