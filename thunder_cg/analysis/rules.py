"""What may be captured, what may not, and what shares or writes memory: tables of data, keyed ``(executor, id)``.

A symbol that no row knows is not safe; it is unknown. Each group of rows has one reason and one source. Prims and
Thunder's own torch symbols have the executor None; the latter (``"torch.nn.functional.linear"``) do what the torch
executor's symbol of the same last name does and are looked up there, by `find`.

Note [How the rules were checked]
    ``python -m thunder_cg rules`` measures them, and its results are in ``tools/results/rules-*.json``: one file
    for each machine, with versions and date. It drives PyTorch's own table of operators with all its samples
    (torch.testing._internal.common_methods_invocations.op_db; float32 where an operator takes that), other names for
    the same operators, their in-place forms, and calls written by hand, through Thunder: captured and replayed on
    three fresh sets of values, forward and backward, and compared bit for bit with uncaptured Thunder. What a row
    denies is captured by force, through ``allow=``: it fails, is wrong, or is barred, as for a number that a replay
    would not compute again. What Thunder does not compile is captured without it. A row whose source begins with
    `MEASURED` has such a measurement; one that begins with `NOT_REACHED` has none, and says why not. ``tape`` runs
    kernels of the CPU, which hardly ever wait for anything: whether a row of `UP_TO_A_GPU` is denied rightly is for a
    GPU to show. A test compares all of it with the rows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

__all__ = [
    "ALLOW",
    "COLLECTIVES",
    "DENY",
    "DENY_IF",
    "FUSION_EXECUTORS",
    "KERNEL_FREE",
    "MEASURED",
    "NOT_REACHED",
    "ONLY_ON_A_GPU",
    "PURE_EXECUTORS",
    "RANDOM",
    "RANDOM_IF",
    "UNREACHED",
    "UP_TO_A_GPU",
    "VIEWS",
    "VIEWS_IF",
    "WRITES",
    "WRITES_IF",
    "Key",
    "Reason",
    "Rule",
    "Sharing",
    "find",
]

Key = tuple[str | None, str | None]


class Reason(enum.Enum):
    """Why an op is captured or eager; the value is how a report says it."""

    ALLOWED = "allowed"
    USER_ALLOW = "allowed by the user"
    FUSION = "a fusion of allowed operators"

    BOOKKEEPING = "bookkeeping of the trace"
    USER_DENY = "denied by the user"
    NOT_ON_DEVICE = "not on the device that is captured"
    MIXED_DEVICES = "moves between devices"
    RUNTIME_NUMBER = "a number known only at run time"
    SYMBOLIC_SHAPE = "a size known only at run time"
    DATA_DEPENDENT = "depends on what tensors hold"
    HOST_SYNC = "waits for the device"
    RANDOM_STATE = "touches generator state on the host"
    COLLECTIVE = "communicates between processes"
    SIDE_EFFECT = "changes something outside of tensors"
    UNVERIFIED = "not shown to be safe in a capture"
    UNKNOWN = "no rule knows it"
    TOO_SMALL = "too small a region to gain"


@dataclass(frozen=True, slots=True)
class Rule:
    """A row: what is decided, why exactly, and who says so."""

    reason: Reason
    detail: str
    source: str
    fix: str = ""
    """What the user can change in their code; empty if only ``allow=`` would."""


class Sharing(enum.Enum):
    """Which inputs an operator's row means."""

    FIRST = "the first tensor"
    LAST = "the last tensor"
    PAIRWISE = "each output its input at the same place"
    ALL = "any tensor"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _rows(executor: str | None, rule: Rule, names: Iterable[str]) -> dict[Key, Rule]:
    return {(executor, name): rule for name in names}


MEASURED = "thunder_cg/tools/results/rules-*.json, see Note [How the rules were checked]"
NOT_REACHED = "not measured"

# ----------------------------------------------------------------------------------------------------------------------
# The torch executor, what may be captured
# ----------------------------------------------------------------------------------------------------------------------

_POINTWISE = _names("""
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin
    asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq exp exp2 expm1 fix float_power
    floor floor_divide fmax fmin fmod frac frexp gcd ge greater greater_equal gt heaviside hypot isclose
    isfinite isinf isnan isneginf isposinf isreal lcm ldexp le lerp less less_equal log log10 log1p log2
    logaddexp logaddexp2 logical_and logical_or logical_xor logit lt maximum minimum mul multiply ne neg
    negative nextafter not_equal pow rad2deg reciprocal remainder round rsqrt rsub sgn signbit sin sinc sinh
    sqrt sub subtract tan tanh torch_div_prim_impl true_divide trunc
""")
_CREATION = _names("""
    arange clone empty full full_like new_empty new_full new_ones new_zeros ones ones_like scalar_tensor zeros
    zeros_like
""")
_INDEXING = _names("""
    as_strided_scatter bucketize copy_ copy_with_setitem_impl diagonal_scatter embedding embedding_bag gather
    index_add index_copy index_fill index_put index_reduce index_select masked_fill masked_scatter
    nonzero_static put scatter scatter_add scatter_reduce searchsorted select_scatter slice_scatter take
    take_along_dim torch.ops.aten.embedding_backward where
""")
_LAYOUT = _names("""
    block_diag cat complex detach_copy diag_embed diagflat diagonal_copy dstack expand_copy flip fliplr flipud
    hstack narrow_copy permute_copy polar repeat roll row_stack select_copy slice_copy split_copy
    split_with_sizes_copy squeeze_copy stack t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy
    view_as_complex_copy view_as_real_copy view_copy vstack
""")
_LINEAR_ALGEBRA = _names("""
    addbmm addmm addmv addr baddbmm bmm cholesky_ex cross det dot frobenius_norm geqrf ger householder_product inner
    inv_ex kron logdet lu_solve lu_unpack matmul mm mv norm_except_dim orgqr ormqr outer qr slogdet solve_ex
    solve_triangular tensordot trace triangular_solve tril triu vander vdot vecdot vector_norm
""")
_BY_LU = _names("det inv_ex logdet lu_solve slogdet solve_ex")
_REDUCTIONS = _names("""
    all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum
    cumulative_trapezoid diff dist histogram kthvalue logcumsumexp logsumexp mean median min msort nanmean nanmedian
    nanquantile nansum quantile renorm sort std std_mean sum topk trapezoid trapz var var_mean
""")
_NEURAL = _names("""
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool1d_with_indices
    adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices
    affine_grid affine_grid_generator batch_norm batch_norm_backward_elemt batch_norm_backward_reduce
    batch_norm_elemt batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats bilinear
    binary_cross_entropy binary_cross_entropy_with_logits cdist celu constant_pad_nd conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d convolution cosine_embedding_loss cosine_similarity elu
    fake_quantize_per_tensor_affine fold fused_moving_avg_obs_fake_quant gelu grid_sample grid_sampler
    grid_sampler_2d grid_sampler_3d group_norm gru_cell hardshrink hardsigmoid hardswish hardtanh
    hinge_embedding_loss huber_loss instance_norm kl_div l1_loss layer_norm leaky_relu linear local_response_norm
    log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d lstm_cell margin_ranking_loss max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d
    max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool1d max_unpool2d max_unpool3d mish mse_loss
    multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss native_batch_norm native_group_norm
    native_layer_norm nll_loss pad pairwise_distance pdist poisson_nll_loss prelu relu relu6 rnn_relu_cell
    rnn_tanh_cell scaled_dot_product_attention selu silu smooth_l1_loss soft_margin_loss softmax softplus softshrink
    softsign tanhshrink threshold torch.ops.aten._adaptive_avg_pool2d_backward
    torch.ops.aten._log_softmax_backward_data torch.ops.aten.log_sigmoid_backward torch_nll_loss_backward_impl
    triplet_margin_loss triplet_margin_with_distance_loss
""")
_SPECIAL = _names("""
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
    chebyshev_polynomial_v chebyshev_polynomial_w digamma entr erf erfc erfcx erfinv gammainc gammaincc gammaln
    hermite_polynomial_h hermite_polynomial_he i0 i0e i1 i1e igamma igammac laguerre_polynomial_l
    legendre_polynomial_p lgamma log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
    modified_bessel_k1 multigammaln mvlgamma ndtr ndtri polygamma psi scaled_modified_bessel_k0
    scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 torch_erfcinv_impl xlog1py
    xlogy zeta
""")
_FOURIER = _names("""
    fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 irfftn rfft rfft2 rfftn
    stft
""")
_FREE_VIEWS = _names("""
    adjoint as_strided atleast_1d atleast_2d atleast_3d bitcast broadcast_tensors chunk conj detach diagonal
    dsplit expand hsplit imag meshgrid moveaxis movedim narrow permute positive real select shallow_copy split
    split_with_sizes squeeze swapaxes swapdims tensor_split torch_slice_prim_impl
    torch_unpack_for_fsdp_prim_impl transpose unbind unfold unsafe_chunk unsafe_split unsafe_split_with_sizes
    unsqueeze update_aliases view view_as view_as_complex view_as_real vsplit
""")
_MAY_VIEW = _names("""
    __getitem__ alpha_dropout bfloat16 bool byte cartesian_prod cdouble cfloat chain_matmul chalf channel_shuffle char
    column_stack conj_physical contiguous diag double dropout dropout1d dropout2d dropout3d einsum feature_alpha_dropout
    feature_dropout fftshift flatten half ifftshift int interpolate module_load native_channel_shuffle pixel_shuffle
    pixel_unshuffle prod ravel reshape reshape_as resize resize_as resolve_conj resolve_neg rot90 short slice_inverse
    sum_to_size tile to to_dense torch.linalg.multi_dot torch_pack_for_fsdp_prim_impl torch_pad_prim_impl
    torch_prims_reshape_impl torch_stride_order_prim_impl
""")
_RANDOM = _names("""
    alpha_dropout binomial dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout
    fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices gumbel_softmax multi_head_attention_forward multinomial_helper
    native_dropout poisson rand randint randint_like randn rrelu uniform
""")

# What nn.MultiheadAttention calls in evaluation. Only nested tensors, which no trace holds, have sizes to ask for.
_INFERENCE = _names("_native_multi_head_attention")

# A fused attention draws only when its dropout does.
_DROPOUT_ATTENTION = _names("scaled_dot_product_attention")

_CAPTURABLE = (
    *_POINTWISE, *_CREATION, *_INDEXING, *_LAYOUT, *_LINEAR_ALGEBRA, *_REDUCTIONS, *_NEURAL, *_SPECIAL,
    *_FOURIER, *_FREE_VIEWS, *_MAY_VIEW, *_RANDOM, *_INFERENCE,
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# The torch executor, what must stay eager
# ----------------------------------------------------------------------------------------------------------------------

_TAGS = "torch.Tag.data_dependent_output and dynamic_output_shape"

_TORCH_DENY: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (
        Rule(
            Reason.DATA_DEPENDENT,
            "it reads a tensor's contents into Python, so the host must wait for the device",
            _TAGS,
            "keep the value on the device as a 0-dim tensor, or read it outside of the compiled function",
        ),
        _names("item tolist equal is_nonzero numpy"),
    ),
    (
        Rule(
            Reason.DATA_DEPENDENT,
            "the size of its result depends on what its input holds, so the host must ask the device",
            _TAGS,
            "use a form with a fixed size: torch.where or a mask instead of indices, nonzero_static instead of nonzero",
        ),
        _names("argwhere bincount combinations isin masked_select nonzero unique unique_consecutive to_sparse"),
    ),
    (
        Rule(
            Reason.DATA_DEPENDENT,
            "it checks its input's contents on the host",
            MEASURED,
            "call a form without the check",
        ),
        _names(
            """
            choose_qparams_optimized corrcoef cov ctc_loss gaussian_nll_loss istft lobpcg matrix_exp mode one_hot
            """
        ),
    ),
    (
        Rule(
            Reason.HOST_SYNC,
            "its solver library is chosen by size and batch, and several of them wait for the device or report errors "
            "through the host",
            "MAGMA, cuSOLVER",
            "move the decomposition out of the compiled function, or off the hot path",
        ),
        _names(
            """
            cholesky cholesky_inverse cholesky_solve cond eig eigh eigvals eigvalsh inv inverse ldl_factor ldl_factor_ex
            ldl_solve lstsq lu lu_factor lu_factor_ex matrix_norm matrix_power matrix_rank norm nuclear_norm pinv
            pinverse solve svd svdvals tensorinv tensorsolve
            """
        ),
    ),
    (
        Rule(
            Reason.HOST_SYNC,
            "it copies numbers from Python to the device, and a graph would replay the copy from memory that is gone",
            MEASURED,
            "make the tensor once, outside of the compiled function, or with torch.full or torch.arange; "
            "batch_norm_gather_stats_with_counts takes one",
        ),
        _names("tensor new_tensor unravel_index batch_norm_gather_stats"),
    ),
    (
        Rule(
            Reason.HOST_SYNC,
            "it reads its input's range or parameters on the host",
            MEASURED,
            "give the range in other ops",
        ),
        _names("histc fake_quantize_per_channel_affine"),
    ),
    (
        Rule(
            Reason.RANDOM_STATE,
            "it takes the generator's seed and offset as numbers on the host",
            "thunder/executors/torchex.py, _get_and_update_rng_state_impl",
            "draw with the default generator, as dropout and rand do",
        ),
        _names("get_and_update_rng_state_impl ops.rngprims.philox_rand"),
    ),
    (
        Rule(
            Reason.RANDOM_STATE,
            "cuDNN keeps the dropout state of recurrent layers outside of the generator that a graph advances",
            "cudnnSetDropoutDescriptor",
            "call the cell in a loop: gru_cell, lstm_cell and rnn_*_cell are captured",
        ),
        _names("gru lstm rnn_relu rnn_tanh"),
    ),
    (
        Rule(
            Reason.DATA_DEPENDENT,
            "sparse layouts have sizes that depend on their contents",
            "torch.sparse",
            "use dense tensors",
        ),
        _names(
            """
            ccol_indices coalesce col_indices crow_indices crow_indices_copy dsmm hsmm hspmm indices indices_copy
            row_indices row_indices_copy saddmm smm sparse_mask spmm sspaddmm values values_copy
            """
        ),
    ),
    (
        Rule(
            Reason.RUNTIME_NUMBER,
            "it answers a question about a tensor with a Python value",
            "returns no tensor",
            "ask it outside of the compiled function",
        ),
        _names(
            """
            data_ptr dense_dim dim_order element_size get_device has_names is_coalesced is_conj is_contiguous
            is_distributed is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed ndimension nelement
            shape sparse_dim
            """
        ),
    ),
    (
        Rule(
            Reason.SIDE_EFFECT,
            "it changes state that a replay would not change: Python attributes, named dimensions or "
            "buffers kept in a dict",
            "thunder/executors/torchex.py and torch.Tensor",
            "do it outside of the compiled function",
        ),
        _names(
            """
            align_as align_to refine_names rename retain_grad torch_pack_prim_impl
            torch_stash_grad_for_fsdp_prim_impl torch_unpack_prim_impl torch_update_bucket_view_prim_impl
            """
        ),
    ),
    (
        Rule(
            Reason.MIXED_DEVICES,
            "it goes through the CPU's memory",
            "a pinned copy is captured with the host's address and would read whatever is there at replay",
            "move the tensor before or after the compiled function",
        ),
        _names("cpu pin_memory"),
    ),
    (
        Rule(
            Reason.COLLECTIVE,
            "other processes must take part at the same time, and between an asynchronous call and its wait the result "
            "is a Python object",
            "thunder/distributed/prims.py, thunder/executors/torchex.py",
            "none needed: regions form on both sides of it",
        ),
        _names(
            """
            dtensor_add_prim dtensor_broadcast_in_dim_prim dtensor_convert_element_type_prim dtensor_exp_prim
            dtensor_from_local dtensor_grouped_mm_prim dtensor_linear_prim dtensor_mul_prim dtensor_neg_prim
            dtensor_reciprocal_prim dtensor_redistribute dtensor_reshape_prim dtensor_to_local dtensor_transpose_prim
            torch_all_gather_prim_impl torch_all_reduce_prim_impl torch_broadcast_prim_impl
            torch_reduce_scatter_prim_impl torch_wait_prim_impl
            """
        ),
    ),
    (
        Rule(
            Reason.UNVERIFIED,
            "quantization kernels run on the CPU or update their ranges on the host",
            "torch/_inductor: cudagraph-unsafe operators; fbgemm",
        ),
        _names(
            """
            fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
            fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
            fbgemm_pack_quantized_matrix int_repr
            """
        ),
    ),
    (
        Rule(
            Reason.UNVERIFIED,
            "its path depends on the GPU and the inputs, and some of the paths loop over offsets read on the host",
            "aten/src/ATen/native",
        ),
        _names("_grouped_mm native_norm"),
    ),
)

# Backward formulas that ask the host although the forward does not.
_VJP_DENY = _names("cumprod_vjp masked_scatter_vjp prod_vjp trace_vjp vander_vjp")

_VJP_SYNC = Rule(
    Reason.HOST_SYNC,
    "its derivative looks for zeros or builds indices on the host",
    MEASURED,
    "write the derivative's operators out, or detach the input",
)


def _with_vjp(names: Iterable[str]) -> tuple[str, ...]:
    """The names and those of their derivatives, which Thunder runs through torch.autograd and calls ``<name>_vjp``."""
    return tuple(name for forward in names for name in (forward, f"{forward}_vjp"))


def _torch_deny() -> dict[Key, Rule]:
    rows: dict[Key, Rule] = {}
    for rule, names in _TORCH_DENY:
        rows.update(_rows("torch", rule, _with_vjp(names)))
    return _with_sources({**rows, **_rows("torch", _VJP_SYNC, _VJP_DENY)})


def _with_sources(rows: Mapping[Key, Rule]) -> dict[Key, Rule]:
    """The rows, saying whether they were measured before they say what else is known."""
    return {key: replace(rule, source=_source(key, rule.source)) for key, rule in rows.items()}


def _source(key: Key, known: str) -> str:
    basis = f"{NOT_REACHED}: {UNREACHED[key]}" if key in UNREACHED else MEASURED
    basis += "; up to a GPU, as on the tape it does no harm" if key in UP_TO_A_GPU else ""
    return basis if known == MEASURED else f"{basis}; {known}"


# ----------------------------------------------------------------------------------------------------------------------
# What nothing reaches, and why
# ----------------------------------------------------------------------------------------------------------------------

_UNREACHED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Thunder compiles no call that comes to it, and PyTorch itself refuses it",
        _names(
            """
            _grouped_mm native_norm ops.rngprims.philox_rand slice_inverse
            """
        ),
    ),
    (
        "Thunder makes no derivative of it, and PyTorch has none, or none of its results has one",
        _names(
            """
            _native_multi_head_attention_vjp airy_ai_vjp aminmax_vjp argwhere_vjp batch_norm_backward_elemt_vjp
            batch_norm_backward_reduce_vjp batch_norm_elemt_vjp batch_norm_gather_stats_vjp
            batch_norm_gather_stats_with_counts_vjp batch_norm_stats_vjp batch_norm_update_stats_vjp bessel_j0_vjp
            bessel_j1_vjp bessel_y0_vjp bessel_y1_vjp bincount_vjp binomial_vjp bool_vjp bucketize_vjp byte_vjp char_vjp
            chebyshev_polynomial_t_vjp chebyshev_polynomial_u_vjp chebyshev_polynomial_v_vjp chebyshev_polynomial_w_vjp
            choose_qparams_optimized_vjp count_nonzero_vjp data_ptr_vjp detach_copy_vjp dim_order_vjp element_size_vjp
            equal_vjp fake_quantize_per_channel_affine_vjp fused_moving_avg_obs_fake_quant_vjp gammainc_vjp
            gammaincc_vjp gcd_vjp geqrf_vjp get_device_vjp has_names_vjp greater_equal_vjp greater_vjp heaviside_vjp
            hermite_polynomial_h_vjp hermite_polynomial_he_vjp histogram_vjp int_vjp is_conj_vjp is_contiguous_vjp
            is_distributed_vjp is_inference_vjp is_neg_vjp is_nonzero_vjp is_pinned_vjp is_same_size_vjp is_set_to_vjp
            is_shared_vjp is_signed_vjp isclose_vjp isin_vjp isneginf_vjp isposinf_vjp isreal_vjp
            laguerre_polynomial_l_vjp lcm_vjp ldl_factor_ex_vjp ldl_factor_vjp ldl_solve_vjp legendre_polynomial_p_vjp
            less_equal_vjp less_vjp matrix_rank_vjp modified_bessel_i0_vjp modified_bessel_i1_vjp modified_bessel_k0_vjp
            modified_bessel_k1_vjp module_load_vjp narrow_copy_vjp native_norm_vjp ndimension_vjp nelement_vjp
            new_empty_vjp new_full_vjp new_ones_vjp nonzero_static_vjp nonzero_vjp not_equal_vjp numpy_vjp
            scaled_modified_bessel_k0_vjp scaled_modified_bessel_k1_vjp searchsorted_vjp
            shifted_chebyshev_polynomial_t_vjp shifted_chebyshev_polynomial_u_vjp shifted_chebyshev_polynomial_v_vjp
            shifted_chebyshev_polynomial_w_vjp short_vjp slice_inverse_vjp spherical_bessel_j0_vjp tolist_vjp
            unique_consecutive_vjp unique_vjp unravel_index_vjp view_as_complex_copy_vjp
            """
        ),
    ),
    (
        "Thunder raises, and so does PyTorch for tensors as regions have them: on a device, unnamed, without a history",
        _names(
            """
            align_as align_as_vjp align_to align_to_vjp pin_memory pin_memory_vjp retain_grad retain_grad_vjp
            """
        ),
    ),
    (
        "Thunder writes it out in other operators, or computes it while it traces",
        _names(
            """
            bitcast dropout_vjp erf_vjp erfc_vjp erfinv_vjp exp2_vjp expm1_vjp log1p_vjp mm
            mm_vjp rand shape torch.linalg.multi_dot
            """
        ),
    ),
    (
        "it takes sparse tensors, which Thunder has no type for, and PyTorch does not run the call without Thunder",
        _names(
            """
            ccol_indices_vjp coalesce_vjp col_indices_vjp crow_indices_copy_vjp crow_indices_vjp dense_dim_vjp dsmm
            dsmm_vjp hsmm_vjp hspmm_vjp indices_copy indices_copy_vjp indices_vjp is_coalesced_vjp
            row_indices_copy_vjp row_indices_vjp saddmm saddmm_vjp smm_vjp sparse_dim_vjp sparse_mask_vjp
            sspaddmm_vjp values_copy values_copy_vjp values_vjp
            """
        ),
    ),
    (
        "it is for several processes, and takes a process group or buckets of one",
        _names(
            """
            dtensor_add_prim dtensor_broadcast_in_dim_prim dtensor_convert_element_type_prim dtensor_exp_prim
            dtensor_from_local dtensor_grouped_mm_prim dtensor_linear_prim dtensor_mul_prim dtensor_neg_prim
            dtensor_reciprocal_prim dtensor_redistribute dtensor_reshape_prim dtensor_to_local
            dtensor_transpose_prim torch_all_gather_prim_impl torch_all_reduce_prim_impl torch_broadcast_prim_impl
            torch_pack_for_fsdp_prim_impl torch_pack_prim_impl torch_reduce_scatter_prim_impl
            torch_stash_grad_for_fsdp_prim_impl torch_unpack_for_fsdp_prim_impl torch_unpack_prim_impl
            torch_update_bucket_view_prim_impl torch_wait_prim_impl
            """
        ),
    ),
    (
        "it takes weights that FBGEMM packed, or quantized tensors, which Thunder has no type for",
        _names(
            """
            fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation
            fbgemm_linear_fp16_weight_fp32_activation_vjp fbgemm_linear_fp16_weight_vjp fbgemm_linear_int8_weight
            fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_int8_weight_fp32_activation_vjp
            fbgemm_linear_int8_weight_vjp fbgemm_linear_quantize_weight fbgemm_linear_quantize_weight_vjp
            fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_gemm_matrix_fp16_vjp fbgemm_pack_quantized_matrix
            fbgemm_pack_quantized_matrix_vjp int_repr int_repr_vjp
            """
        ),
    ),
)

UNREACHED: Mapping[Key, str] = MappingProxyType({("torch", name): why for why, names in _UNREACHED for name in names})
"""Of the torch executor's symbols, those that no call of the sweep comes to, and why none does."""

_GPU_ONLY = _names("""
    batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_stats get_and_update_rng_state_impl nanquantile
    nanquantile_vjp quantile quantile_vjp
""")
_SDPA = _names("""
    sdpaex_grad_forward_scaled_dot_product_efficient_attention sdpaex_scaled_dot_product_efficient_attention_backward
    sdpafx_grad_forward_scaled_dot_product_efficient_attention sdpafx_scaled_dot_product_efficient_attention_backward
""")

ONLY_ON_A_GPU: frozenset[Key] = frozenset(
    {*(("torch", name) for name in _GPU_ONLY), *(("sdpa", name) for name in _SDPA)}
)
"""Symbols that no call comes to on a CPU, whose operators refuse, or look at what their arguments hold."""

_GPU_TELLS = _names("""
    fake_quantize_per_channel_affine isin ldl_factor ldl_factor_ex ldl_solve lstm masked_scatter_vjp trace_vjp
""")
_GPU_TELLS_BOTH_WAYS = _names("""
    cholesky_inverse cholesky_solve cpu eig eigvals gru inv inverse lu lu_factor lu_factor_ex matrix_exp matrix_power
    mode pinv pinverse rnn_relu rnn_tanh solve tensorinv tensorsolve
""")

UP_TO_A_GPU: frozenset[Key] = frozenset(("torch", name) for name in (*_GPU_TELLS, *_with_vjp(_GPU_TELLS_BOTH_WAYS)))
"""Denied symbols that the tape captures by force without harm: only a GPU can tell that they must not be captured."""

# ----------------------------------------------------------------------------------------------------------------------
# Prims, inside of fusions
# ----------------------------------------------------------------------------------------------------------------------

_PRIM_FREE_VIEWS = _names(
    "BITCAST BROADCAST_IN_DIM SHALLOW_COPY SLICE SQUEEZE TRANSPOSE UNFOLD UPDATE_ALIASES VIEW REAL IMAG"
)
_PRIM_MAY_VIEW = _names("RESHAPE PAD STRIDE_ORDER PACK_FOR_FSDP UNPACK_FOR_FSDP")
_PRIM_RANDOM = _names("UNIFORM RANDINT RANDN MULTINOMIAL")
_PRIM_COMPUTE = _names("""
    ABS ACOS ACOSH ADD AMAX AMIN ARGMAX ARGMIN ASIN ASINH ATAN ATAN2 ATANH BITWISE_AND BITWISE_LEFT_SHIFT BITWISE_NOT
    BITWISE_OR BITWISE_RIGHT_SHIFT BITWISE_XOR CAT CEIL CLONE CONVERT_ELEMENT_TYPE CONVOLUTION COPY_ COPY_WITH_SETITEM
    COS COSH DIGAMMA DIV EMBEDDING EMBEDDING_BACKWARD EMPTY EQ ERF ERFC ERFCINV ERFINV EXOGENOUS_LIKE EXP EXP2 EXPM1
    FLIP FLOOR FMOD FREXP FULL GATHER GE GT INDEX_ADD INDEX_COPY INDEX_PUT IOTA ISFINITE LE LERP LGAMMA LINEAR LOG
    LOG10 LOG1P LOG2 LT MATMUL MAXIMUM MINIMUM MUL NDTRI NE NEG NEXTAFTER POW PROD RECIPROCAL REMAINDER ROUND RSQRT
    SCATTER SCATTER_ADD SIGN SIGNBIT SIN SINH SORT SQRT STD SUB SUM TAKE TAKE_ALONG_AXIS TAN TANH TOPK TRUNC VAR
    VAR_MEAN WHERE ZETA
    log_softmax_backward nll_loss_backward adaptive_avg_pool2d_backward
""")

_DECOMPOSED = "thunder/core/prims.py; the torch executor runs each as an operator of the table above"

_PRIM_DENY: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (
        Rule(
            Reason.DATA_DEPENDENT,
            "it reads a tensor's contents into Python, so the host must wait for the device",
            "thunder/core/prims.py",
            "keep the value on the device as a 0-dim tensor, or read it outside of the compiled function",
        ),
        _names("ITEM"),
    ),
    (
        Rule(
            Reason.MIXED_DEVICES,
            "it moves a tensor between devices",
            "thunder/core/prims.py",
            "move the tensor before or after the compiled function",
        ),
        _names("DEVICE_PUT"),
    ),
    (
        Rule(
            Reason.HOST_SYNC,
            "it copies numbers from Python to the device",
            _DECOMPOSED,
            "make the tensor once, outside of the compiled function",
        ),
        _names("NUMPY_ARRAY_TO_TORCH_TENSOR TENSOR_FROM_SEQUENCE"),
    ),
    (
        Rule(
            Reason.RANDOM_STATE,
            "it takes the generator's seed and offset as numbers on the host",
            "thunder/core/prims.py",
            "draw with the default generator, as dropout and rand do",
        ),
        _names("GET_AND_UPDATE_RNG_STATE"),
    ),
    (
        Rule(
            Reason.RUNTIME_NUMBER,
            "it draws by a seed and an offset that are numbers on the host",
            "thunder/core/prims.py",
            "draw with the default generator, as dropout and rand do",
        ),
        _names("UNIFORM_PHILOX"),
    ),
    (
        Rule(
            Reason.SIDE_EFFECT,
            "it acts on Python",
            "thunder/core/prims.py",
            "do it outside of the compiled function",
        ),
        _names("GET_GRAD PACK PRINT PUT_GRAD SINK STASH_GRAD_FOR_FSDP UNPACK UPDATE_BUCKET_VIEW"),
    ),
    (
        Rule(
            Reason.RUNTIME_NUMBER,
            "it computes a Python number",
            "thunder/core/prims.py",
            "compile with the default cache mode, in which sizes are constants",
        ),
        _names("PY_ABS PY_FLOORDIV SHAPE"),
    ),
    (
        Rule(
            Reason.COLLECTIVE,
            "other processes must take part at the same time",
            "thunder/distributed/prims.py",
            "none needed: regions form on both sides of it",
        ),
        _names(
            """
            ALL_GATHER ALL_REDUCE BROADCAST REDUCE_SCATTER SYNCHRONIZE SYNCHRONIZE_TENSOR_PARALLEL_INPUT
            SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT WAIT
            """
        ),
    ),
    (
        Rule(
            Reason.UNVERIFIED,
            "its path depends on the GPU, and one of them loops over offsets read on the host",
            "aten/src/ATen/native",
        ),
        _names("_GROUPED_MM"),
    ),
)

# ----------------------------------------------------------------------------------------------------------------------
# Other executors that come with Thunder
# ----------------------------------------------------------------------------------------------------------------------

_SDPA_FORWARD = tuple(name for name in _SDPA if "forward" in name)

_NVFUSER_OPERATORS = _names("nv_cross_entropy_bwd nv_cross_entropy_fwd nv_sdpfa_bwd nv_sdpfa_fwd")

_PYTHON_NUMBERS = _names("""
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_or bitwise_xor convert_element_type_prim div eq
    floordiv fmod ge gt imag le lt mod mul ne neg pow real shape signbit sub tensor_abs
""")

_OTHERS_DENY: tuple[tuple[str, Rule, tuple[str, ...]], ...] = (
    (
        "python",
        Rule(
            Reason.RUNTIME_NUMBER,
            "it computes with Python numbers on the host",
            "thunder/executors/pythonex.py",
            "compute with 0-dim tensors instead",
        ),
        _PYTHON_NUMBERS,
    ),
    (
        "python",
        Rule(Reason.SIDE_EFFECT, "it acts on Python", "thunder/executors/pythonex.py", "remove it"),
        _names("sink"),
    ),
    (
        "cudnn",
        Rule(Reason.UNVERIFIED, "it builds plans and dropout seeds on the host", "thunder/executors/cudnn_sdpa.py"),
        _names("cudnn_sdpa_bwd cudnn_sdpa_fwd"),
    ),
    (
        "cudnn_layernorm",
        Rule(Reason.UNVERIFIED, "it builds plans on the host", "thunder/executors/cudnn_layernormex.py"),
        _names("cudnn_layernorm cudnn_layernorm_aug_fwd cudnn_layernorm_bwd"),
    ),
    (
        "fa3",
        Rule(Reason.UNVERIFIED, "FlashAttention 3 was not tried", "thunder/executors/fa3ex.py"),
        _names("fa3_bwd fa3_fwd"),
    ),
    (
        "apex",
        Rule(Reason.UNVERIFIED, "apex was not tried", "thunder/executors/apexex.py"),
        _names(
            """
            apex_cross_entropy apex_cross_entropy_backward apex_fused_rms_norm_backward_affine
            apex_fused_rms_norm_forward_affine apex_fused_rms_norm_forward_affine_mixed_dtypes
            """
        ),
    ),
    (
        "triton",
        Rule(
            Reason.UNVERIFIED,
            "Triton compiles and loads a kernel at the first call of each new specialization",
            "thunder/executors/triton_crossentropy_impl.py",
        ),
        _names("triton_crossentropy"),
    ),
    (
        "nvfuser",
        Rule(Reason.UNVERIFIED, "nvFuser's own operators were not tried", "thunder/executors/nvfuserex_impl.py"),
        _NVFUSER_OPERATORS,
    ),
    (
        "transformer_engine_v1",
        Rule(
            Reason.SIDE_EFFECT,
            "FP8 scaling factors live in Python objects",
            "thunder/executors/transformer_engine_v1ex.py",
            "run the layer without FP8",
        ),
        _names("te_functional_linear_backward te_sync_fp8_meta_bwd"),
    ),
    (
        "transformer_engine",
        Rule(
            Reason.SIDE_EFFECT,
            "FP8 scaling factors live in Python objects",
            "thunder/executors/transformer_engineex_impl.py",
            "run the layer without FP8",
        ),
        _names("te_fp8_amax_and_scale_update te_functional_linear_bwd te_functional_linear_fwd"),
    ),
)

# ----------------------------------------------------------------------------------------------------------------------
# The tables
# ----------------------------------------------------------------------------------------------------------------------


def _deny() -> dict[Key, Rule]:
    rows = _torch_deny()
    for rule, names in _PRIM_DENY:
        rows.update(
            _rows(None, _unmeasured(rule, "executors make operators of it, which have rows of their own"), names)
        )
    for executor, rule, names in _OTHERS_DENY:
        alone = "without tensors it stays eager whatever a row says"
        rows.update(
            _rows(executor, _unmeasured(rule, alone if executor == "python" else "it was not installed"), names)
        )
    return rows


def _unmeasured(rule: Rule, why: str) -> Rule:
    return replace(rule, source=f"{NOT_REACHED}: {why}; {rule.source}")


DENY: Mapping[Key, Rule] = MappingProxyType(_deny())


def _allow() -> dict[Key, Rule]:
    kernels = Rule(Reason.ALLOWED, "it only launches kernels on the current stream", MEASURED)
    names = (n for n in _with_vjp(_CAPTURABLE) if n not in _VJP_DENY)
    prims = (*_PRIM_FREE_VIEWS, *_PRIM_MAY_VIEW, *_PRIM_RANDOM, *_PRIM_COMPUTE)
    return {
        **_with_sources(_rows("torch", kernels, names)),
        **_rows(None, Rule(Reason.ALLOWED, kernels.detail, _DECOMPOSED), prims),
        **_with_sources(_rows("sdpa", kernels, _SDPA)),
    }


ALLOW: Mapping[Key, Rule] = MappingProxyType(_allow())


def _conditional() -> dict[Key, Mapping[str, Rule]]:
    mask = Rule(
        Reason.DATA_DEPENDENT,
        "an index is a boolean mask, and how many elements it selects is known only on the device",
        MEASURED,
        "use torch.where(mask, a, b) instead",
    )
    numbers = Rule(
        Reason.HOST_SYNC,
        "an index is a Python list, which is copied to the device at every call",
        MEASURED,
        "make the index a tensor once, outside of the compiled function",
    )
    fill = Rule(
        Reason.HOST_SYNC,
        "a number is stored at indices given by a tensor, and the number is copied to the device at every call",
        MEASURED,
        "store a tensor, or use torch.where",
    )
    value = Rule(
        Reason.DATA_DEPENDENT,
        "the value to fill in is a tensor, which is read on the host",
        MEASURED,
        "use torch.where(mask, value, a) instead",
    )
    seed = Rule(
        Reason.RANDOM_STATE,
        "it draws from a generator of its own, which a graph does not advance",
        "CUDAGeneratorImpl cannot be made during a capture",
        "draw with the default generator",
    )
    renorm = Rule(
        Reason.SIDE_EFFECT,
        "max_norm rewrites rows of the weight in place, in a way that the trace does not show",
        "torch.nn.functional.embedding",
        "renormalize the weight outside of the compiled function",
    )
    nan = Rule(
        Reason.HOST_SYNC,
        "on a CPU its derivative asks whether the result is a NaN",
        f"{MEASURED}; torch/csrc/autograd/FunctionsManual.cpp, evenly_distribute_backward",
        "take amin or amax, or sort",
    )
    other = Rule(
        Reason.UNVERIFIED,
        "on a CPU, PyTorch takes another formula for its derivative in a capture, and a gradient has other strides",
        MEASURED,
        "multiply by what torch.linalg.householder_product makes",
    )
    batched = Rule(
        Reason.HOST_SYNC,
        "of matrices in a batch, MAGMA takes those with more than 16 rows, and waits for the device",
        "captured on an H200: batches of 2 to 64 matrices of 20 to 600 rows fail, single ones do not",
        "take the matrices one by one",
    )
    plan = Rule(
        Reason.UNVERIFIED,
        "a graph reads the tables of a cuFFT plan, which PyTorch's cache of plans may drop",
        "torch.backends.cuda.cufft_plan_cache.clear() before a replay: a segmentation fault on an H200",
        "name it in allow= if nothing clears that cache, and no more plans are made than its max_size",
    )
    sorter = Rule(
        Reason.HOST_SYNC,
        "whether the sorter is in range is asked on the host",
        MEASURED,
        "sort the values with it first: sorted_sequence.gather(-1, sorter)",
    )
    scalar = Rule(
        Reason.HOST_SYNC,
        "an index is a 0-dim tensor, and the number in it is read on the host",
        MEASURED,
        "give the index a dimension: x.index_select(0, k.reshape(1)), or x.index_copy(0, k.reshape(1), value[None])",
    )
    sparse = Rule(
        Reason.DATA_DEPENDENT,
        "the gradient is sparse, and its size depends on the indices",
        MEASURED,
        "let the gradient be dense: sparse=False",
    )
    beyond = Rule(
        Reason.UNVERIFIED,
        "it may show memory of the storage that is not the tensor's own, which a graph does not have: it reads a copy "
        "of the tensor alone",
        MEASURED,
        "pass the tensor that has all of the memory, and take slices of it",
    )
    range_ = Rule(
        Reason.SIDE_EFFECT,
        "its running range has no elements yet, and it makes room for them in the caller's tensors",
        MEASURED,
        "give running_min and running_max an element for each channel before the first call",
    )
    read = {"scalar_index": scalar, "bool_index": mask, "host_index": numbers}
    store = {**read, "number_at_tensor_index": fill}
    rows: dict[Key, Mapping[str, Rule]] = {("torch", "__getitem__"): read}
    rows |= dict.fromkeys((("torch", "copy_with_setitem_impl"), (None, "COPY_WITH_SETITEM")), store)
    rows |= {key: {"bool_index": mask} for key in (("torch", "index_put"), (None, "INDEX_PUT"))}
    rows |= {("torch", name): {"tensor_value": value} for name in _with_vjp(("index_fill", "masked_fill"))}
    rows |= {key: {"seeded": seed} for key in ((None, "MULTINOMIAL"), *(("torch", n) for n in _with_vjp(_RANDOM)))}
    embeddings: tuple[Key, ...] = (
        (None, "EMBEDDING"),
        *(("torch", n) for n in _with_vjp(("embedding", "embedding_bag"))),
    )
    rows |= {key: {"renorm": renorm} for key in embeddings}
    backwards = _names("embedding_bag_vjp embedding_vjp torch.ops.aten.embedding_backward")
    for key in ((None, "EMBEDDING_BACKWARD"), *(("torch", n) for n in backwards)):
        rows[key] = {**rows.get(key, {}), "sparse": sparse}
    rows |= {("torch", name): {"beyond": beyond} for name in _with_vjp(("as_strided", "as_strided_scatter"))}
    rows |= {("torch", "fused_moving_avg_obs_fake_quant"): {"empty_range": range_}}
    rows |= {("torch", name): {"batched": batched} for name in _with_vjp(_BY_LU)}
    rows |= {("torch", name): {"plan": plan} for name in _with_vjp(_FOURIER)}
    # Under a dispatch mode, and so on the tape, PyTorch takes the formula of a GPU: it asks nobody, and the zeros that
    # it makes may have another sign.
    rows |= {("torch", name): {"on_cpu": nan} for name in _names("median_vjp min_vjp nanmedian_vjp")}
    rows |= {("torch", "ormqr_vjp"): {"on_cpu": other}, ("torch", "searchsorted"): {"sorter": sorter}}
    return rows


DENY_IF: Mapping[Key, Mapping[str, Rule]] = MappingProxyType(_conditional())
"""Rows that hold only for ops with a trait; see Note [Traits] in ops.py."""

FUSION_EXECUTORS = frozenset({"nvfuser", "torchcompile", "torchcompile_cat", "torchcompile_xentropy"})
"""Fusions of these are as safe as the worst operator inside of them."""

KERNEL_SCALARS: Mapping[Key, frozenset[str]] = MappingProxyType(
    {("nvfuser", "UNIFORM_PHILOX"): frozenset({"seed", "offset"})}
)
"""Of prims inside of a fusion of an executor, the keywords whose numbers are arguments of the fusion's kernels, so that
a graph can be given new ones before each launch. Every recording that makes use of it is verified before it counts."""

PURE_EXECUTORS = frozenset({"custom_op"})
"""Operators of these neither write an input nor return a view of one: ``torch.library.custom_op`` checks that, and
Thunder takes only those that declare no mutation."""


def _views() -> dict[Key, Sharing]:
    rows: dict[Key, Sharing] = {}
    rows |= {("torch", name): Sharing.FIRST for name in (*_FREE_VIEWS, *_MAY_VIEW)}
    rows |= {("torch", name): Sharing.ALL for name in _SHARE_ANY}
    rows |= {(None, name): Sharing.FIRST for name in (*_PRIM_FREE_VIEWS, *_PRIM_MAY_VIEW)}
    rows |= {(None, name): Sharing.ALL for name in _PRIM_SHARE_ANY}
    rows |= dict.fromkeys((("torch", "update_aliases"), (None, "UPDATE_ALIASES")), Sharing.PAIRWISE)
    rows |= dict.fromkeys((("torch", "copy_"), (None, "COPY_")), Sharing.LAST)
    # A gradient may be the cotangent itself, and which input that is differs by operator.
    rows |= {(executor, name): Sharing.ALL for executor, name in (*ALLOW, *DENY) if name and name.endswith("_vjp")}
    return rows


# Several inputs, any of which may come back: lists of tensors, futures, buckets.
_SHARE_ANY = _names("""
    atleast_1d atleast_2d atleast_3d broadcast_tensors cartesian_prod chain_matmul column_stack einsum meshgrid
    torch.linalg.multi_dot torch_all_gather_prim_impl torch_all_reduce_prim_impl torch_broadcast_prim_impl
    torch_pack_for_fsdp_prim_impl torch_pack_prim_impl torch_reduce_scatter_prim_impl
    torch_stash_grad_for_fsdp_prim_impl torch_unpack_for_fsdp_prim_impl torch_unpack_prim_impl
    torch_update_bucket_view_prim_impl torch_wait_prim_impl align_as align_to refine_names rename resize resize_as
    values indices coalesce cpu pin_memory module_load dtensor_from_local dtensor_to_local dtensor_redistribute
    dtensor_reshape_prim dtensor_transpose_prim dtensor_broadcast_in_dim_prim dtensor_convert_element_type_prim
    crow_indices ccol_indices col_indices row_indices sparse_mask numpy
""")
_PRIM_SHARE_ANY = _names("""
    ALL_GATHER ALL_REDUCE BROADCAST REDUCE_SCATTER SYNCHRONIZE SYNCHRONIZE_TENSOR_PARALLEL_INPUT
    SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT WAIT PACK UNPACK PACK_FOR_FSDP UNPACK_FOR_FSDP UPDATE_BUCKET_VIEW
    STASH_GRAD_FOR_FSDP DEVICE_PUT PUT_GRAD GET_GRAD
""")

VIEWS: Mapping[Key, Sharing] = MappingProxyType(_views())
"""Outputs may share memory with these inputs: read off the schemas, the op_db runs and the code. When in doubt, yes."""

_SPARSE = {"sparse": Sharing.ALL}

VIEWS_IF: Mapping[Key, Mapping[str, Sharing]] = MappingProxyType(
    {(None, "EMBEDDING_BACKWARD"): _SPARSE, ("torch", "torch.ops.aten.embedding_backward"): _SPARSE}
)
"""The same, only for ops with a trait: a sparse gradient is made of the incoming gradient and the indices."""

_WRITE_ANY = _names("""
    batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats fused_moving_avg_obs_fake_quant
    instance_norm module_load native_batch_norm resize resize_as torch_all_reduce_prim_impl torch_unpack_prim_impl
    torch_update_bucket_view_prim_impl torch_stash_grad_for_fsdp_prim_impl
""")

WRITES: Mapping[Key, Sharing] = MappingProxyType(
    {
        ("torch", "copy_"): Sharing.LAST,
        (None, "COPY_"): Sharing.LAST,
        **{("torch", name): Sharing.ALL for name in _with_vjp(_WRITE_ANY)},
        (None, "ALL_REDUCE"): Sharing.ALL,
        (None, "UNPACK"): Sharing.ALL,
        (None, "UPDATE_BUCKET_VIEW"): Sharing.ALL,
        (None, "STASH_GRAD_FOR_FSDP"): Sharing.ALL,
    }
)
"""Inputs that may be written. ``copy_(source, destination)`` writes its last tensor."""

WRITES_IF: Mapping[Key, Mapping[str, Sharing]] = MappingProxyType(
    {key: {"renorm": Sharing.ALL} for key, traits in DENY_IF.items() if "renorm" in traits}
)
"""The same, only for ops with a trait."""

RANDOM: frozenset[Key] = frozenset(
    {
        *(("torch", name) for name in _with_vjp(_RANDOM)),
        *(
            ("torch", name)
            for name in _with_vjp(_names("gru lstm rnn_relu rnn_tanh lobpcg _native_multi_head_attention"))
        ),
        ("torch", "get_and_update_rng_state_impl"),
        *((None, name) for name in (*_PRIM_RANDOM, "GET_AND_UPDATE_RNG_STATE")),
    }
)
"""What draws from a generator or moves it; draws keep their order."""

RANDOM_IF: Mapping[Key, str] = MappingProxyType(
    {
        **{("torch", name): "dropout" for name in _with_vjp(_DROPOUT_ATTENTION)},
        **{("sdpa", name): "dropout" for name in _SDPA_FORWARD},
        ("cudnn", "cudnn_sdpa_fwd"): "dropout",
        ("nvfuser", "nv_sdpfa_fwd"): "dropout",
    }
)
"""What draws only when it has a trait."""

COLLECTIVES: frozenset[Key] = frozenset(key for key, rule in DENY.items() if rule.reason is Reason.COLLECTIVE)

KERNEL_FREE: frozenset[Key] = frozenset(
    {
        *(("torch", name) for name in (*_FREE_VIEWS, "empty", "new_empty", "torch_prims_reshape_impl", "reshape")),
        *((None, name) for name in (*_PRIM_FREE_VIEWS, "EMPTY", "RESHAPE")),
        *(("torch", name) for name in _names("flatten ravel reshape_as resolve_conj resolve_neg")),
    }
)
"""What launches nothing, or almost never: a region of only these gains nothing."""


def find(executor: str | None, id: str | None) -> Key:
    """The key under which the tables know a symbol: Thunder's own torch symbols go by their last name."""
    if executor is None and id is not None and id.startswith(("torch.", "Tensor.")):
        named: Key = ("torch", id)
        return named if named in ALLOW or named in DENY else ("torch", id.rsplit(".", 1)[-1])
    return executor, id
