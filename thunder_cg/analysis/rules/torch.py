"""The operators of Thunder's torch executor: PyTorch's own.

A row makes a record for each of its operators, and one for the derivative of each. A row without columns stands for
the usual operator: it may be captured, was measured, returns new memory, writes no input, draws nothing, launches
kernels, and no setting chooses which. A row names only what is different.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from thunder_cg.analysis.rules import conditions as when
from thunder_cg.analysis.rules.record import (
    CAPTURED,
    CAPTURED_COLLECTIVE,
    FIXED_SIZE,
    KEEP_ON_DEVICE,
    VJP,
    AliasedInputs,
    Cause,
    Evidence,
    Reason,
    Rule,
    rows,
)
from thunder_cg.compat.settings import Settings

FIRST, LAST, PAIRWISE, ALL = AliasedInputs
MEASURED, MEASURED_ON_GPU, NOT_MEASURED, _ = Evidence
MATMUL, ANY = Settings.MATMUL, Settings.ALL


def _but(**columns: Any) -> Mapping[str, Any]:
    """What is different for a derivative."""
    return columns


_UNMEASURED = _but(evidence=NOT_MEASURED)
_ON_GPU = _but(evidence=MEASURED_ON_GPU)


def _rows(
    names: str,
    cause: Cause = CAPTURED,
    *,
    evidence: Evidence = MEASURED,
    settings: Settings = Settings.NONE,
    derivative: Mapping[str, Any] | None = None,
    **columns: Any,
) -> Iterator[Rule]:
    """The records of operators and of their derivatives.

    A derivative has the columns of its operator, except those in ``derivative``. A gradient may be the incoming
    gradient itself, which is another input for each operator, so a derivative may return any input. If the operator
    sweep reaches no call of an operator, it does not measure the derivative either.
    """
    measured = MEASURED if evidence is not NOT_MEASURED else evidence
    like = {"evidence": measured, "aliases": ALL, "launches_kernels": True, **(derivative or {})}
    for rule in rows("torch", names, cause, evidence, settings=settings, **columns):
        yield rule
        yield replace(rule, key=("torch", f"{rule.key[1]}{VJP}"), **like)


# fmt: off
# Why operators stay eager
_TAGS = "torch.Tag.data_dependent_output and dynamic_output_shape"
_READS_CONTENTS = Cause(Reason.DATA_DEPENDENT,
    "it reads a tensor's contents into Python, so the host must wait for the device",
    KEEP_ON_DEVICE, _TAGS)
_DYNAMIC_SIZE = Cause(Reason.DATA_DEPENDENT,
    "the size of its result depends on what its input holds, so the host must ask the device",
    FIXED_SIZE, _TAGS)
_CHECKS_CONTENTS = Cause(Reason.DATA_DEPENDENT, "it checks its input's contents on the host",
    "write it with other operators, or move it out of the compiled function")
_SOLVER = Cause(Reason.HOST_SYNC,
    "its solver library is chosen by size and batch, and several of them wait for the device or report errors "
    "through the host",
    "move the decomposition out of the compiled function, or off the hot path", "MAGMA, cuSOLVER")
_COPIES_NUMBERS = Cause(Reason.HOST_SYNC,
    "it copies numbers from Python to the device, and a graph would replay the copy from memory that is gone",
    "make the tensor once, outside of the compiled function, or with torch.full or torch.arange")
_READS_RANGE = Cause(Reason.HOST_SYNC, "it reads its input's range or parameters on the host",
    "give the range in other ops")
_SEED_ON_HOST = Cause(Reason.RANDOM_STATE, "it takes the generator's seed and offset as numbers on the host",
    "draw with the default generator, as dropout and rand do",
    "thunder/executors/torchex.py, _get_and_update_rng_state_impl")
_CUDNN_DROPOUT_STATE = Cause(Reason.RANDOM_STATE,
    "cuDNN keeps the dropout state of recurrent layers outside of the generator that a graph advances",
    "call the cell in a loop: gru_cell, lstm_cell and rnn_*_cell are captured", "cudnnSetDropoutDescriptor")
_SPARSE_LAYOUT = Cause(Reason.DATA_DEPENDENT, "sparse layouts have sizes that depend on their contents",
    "use dense tensors", "torch.sparse")
_PYTHON_ANSWER = Cause(Reason.RUNTIME_NUMBER, "it answers a question about a tensor with a Python value",
    "ask it outside of the compiled function", "returns no tensor")
_PYTHON_STATE = Cause(Reason.SIDE_EFFECT,
    "it changes state that a replay would not change: Python attributes, named dimensions or buffers kept in a dict",
    "do it outside of the compiled function", "thunder/executors/torchex.py and torch.Tensor")
_THROUGH_CPU = Cause(Reason.MIXED_DEVICES, "it goes through the CPU's memory",
    "move the tensor before or after the compiled function",
    "a pinned copy is captured with the host's address and would read whatever is there at replay")
_COLLECTIVE = Cause(Reason.COLLECTIVE,
    "other processes must take part at the same time, and between an asynchronous call and its wait the result "
    "is a Python object",
    "none needed: regions form on both sides of it", "thunder/distributed/prims.py, thunder/executors/torchex.py")
_TO_LOCAL = "compute with plain tensors between to_local() and from_local()"
_DTENSOR = Cause(Reason.DTENSOR,
    "a DTensor is a Python object around a tensor of each process, and the address that a graph needs is that "
    "tensor's", _TO_LOCAL, "torch.distributed.tensor.DTensor has no data_ptr of its own")
_REDISTRIBUTING = Cause(Reason.DTENSOR,
    "it takes DTensors, and communicates where their layouts do not fit", _TO_LOCAL,
    "CommDebugMode, two processes: add and mul of tensors that are sharded differently, exp of a partial sum")
_QUANTIZATION = Cause(Reason.UNVERIFIED, "quantization kernels run on the CPU or update their ranges on the host",
    source="torch/_inductor: cudagraph-unsafe operators; fbgemm")
_PATH_DEPENDS_ON_GPU = Cause(Reason.UNVERIFIED,
    "its path depends on the GPU and the inputs, and some of the paths loop over offsets read on the host",
    source="aten/src/ATen/native")
_ASKS_THE_HOST = Cause(Reason.HOST_SYNC, "its derivative looks for zeros or builds indices on the host",
    "write the derivative's operators out, or detach the input")

RULES: tuple[Rule, ...] = (
    # Pointwise
    *_rows("""
        abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin
        asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq exp fix float_power floor
        floor_divide fmax fmin fmod frac frexp ge gt hypot isfinite isinf isnan ldexp le lerp log log10 log2 logaddexp
        logaddexp2 logical_and logical_or logical_xor logit lt maximum minimum mul multiply ne neg negative nextafter
        pow rad2deg reciprocal remainder round rsqrt rsub sgn signbit sin sinc sinh sqrt sub subtract tan tanh
        torch_div_prim_impl true_divide trunc
    """),
    *_rows("""
        exp2 expm1 gcd greater greater_equal heaviside isclose isneginf isposinf isreal lcm less less_equal log1p
        not_equal
    """, derivative=_UNMEASURED),

    # Creation
    *_rows("arange clone full full_like new_zeros ones ones_like scalar_tensor zeros zeros_like"),
    *_rows("new_full new_ones", derivative=_UNMEASURED),
    *_rows("empty", launches_kernels=False),
    *_rows("new_empty", launches_kernels=False, derivative=_UNMEASURED),

    # Indexing
    *_rows("""
        diagonal_scatter gather index_add index_copy index_reduce index_select put scatter scatter_add scatter_reduce
        select_scatter slice_scatter take take_along_dim where
    """),
    *_rows("as_strided_scatter", conditions=(when.READS_PAST_VIEW,)),
    *_rows("index_fill masked_fill", conditions=(when.TENSOR_FILL_VALUE,)),
    *_rows("bucketize nonzero_static", derivative=_UNMEASURED),
    *_rows("masked_scatter", derivative=_but(evidence=MEASURED_ON_GPU, cause=_ASKS_THE_HOST)),
    *_rows("index_put", conditions=(when.BOOLEAN_INDEX,), derivative=_but(conditions=())),
    *_rows("one_hot", conditions=(when.CLASSES_CHECKED,), derivative=_UNMEASURED),
    *_rows("embedding embedding_bag", conditions=(when.RENORMALIZED_WEIGHT,),
           derivative=_but(conditions=(when.RENORMALIZED_WEIGHT, when.SPARSE_GRADIENT))),
    *_rows("copy_with_setitem_impl", derivative=_but(conditions=()),
           conditions=(when.SCALAR_INDEX, when.BOOLEAN_INDEX, when.LIST_INDEX, when.NUMBER_AT_TENSOR_INDEX)),
    *_rows("searchsorted", conditions=(when.SORTER,), derivative=_but(evidence=NOT_MEASURED, conditions=())),
    *_rows("torch.ops.aten.embedding_backward", conditions=(when.SPARSE_GRADIENT,), derivative=_but(conditions=())),
    *_rows("copy_", aliases=LAST, writes=LAST, derivative=_but(writes=None)),

    # Layout
    *_rows("""
        block_diag cat complex diag_embed diagflat diagonal_copy dstack expand_copy flip fliplr flipud hstack
        permute_copy polar repeat roll row_stack select_copy slice_copy split_copy split_with_sizes_copy squeeze_copy
        stack t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_as_real_copy view_copy vstack
    """),
    *_rows("detach_copy narrow_copy view_as_complex_copy", derivative=_UNMEASURED),

    # Linear algebra
    *_rows("addbmm addmm addmv addr baddbmm bmm dot ger inner matmul mv outer tensordot vdot vecdot", settings=MATMUL),
    *_rows("mm", settings=MATMUL, evidence=NOT_MEASURED),
    *_rows("cross frobenius_norm kron norm_except_dim tril triu vector_norm"),
    *_rows("norm", settings=ANY, conditions=(when.SINGULAR_VALUES,)),
    *_rows("cholesky_ex householder_product lu_unpack orgqr qr solve_triangular triangular_solve", settings=ANY),
    *_rows("det inv_ex logdet lu_solve slogdet solve_ex", settings=ANY, conditions=(when.BATCH_BY_MAGMA,)),
    *_rows("geqrf", settings=ANY, derivative=_UNMEASURED),
    *_rows("vander", derivative=_but(cause=_ASKS_THE_HOST)),
    *_rows("ormqr", settings=ANY, derivative=_but(conditions=(when.OTHER_FORMULA_ON_CPU,))),
    *_rows("trace", derivative=_but(evidence=MEASURED_ON_GPU, cause=_ASKS_THE_HOST)),

    # Reductions
    *_rows("""
        all amax amin any argmax argmin argsort cummax cummin cumsum cumulative_trapezoid diff dist kthvalue
        logcumsumexp logsumexp mean msort nanmean nanquantile nansum quantile renorm sort std std_mean sum topk
        trapezoid trapz var var_mean
    """),
    *_rows("aminmax count_nonzero histogram", derivative=_UNMEASURED),
    *_rows("histc", conditions=(when.READS_RANGE,)),
    *_rows("cumprod", derivative=_but(cause=_ASKS_THE_HOST)),
    *_rows("median min nanmedian", derivative=_but(conditions=(when.NAN_CHECK_ON_CPU,))),

    # Neural networks
    *_rows("linear", settings=MATMUL),
    *_rows("""
        affine_grid affine_grid_generator batch_norm bilinear cdist conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d convolution grid_sample grid_sampler grid_sampler_2d grid_sampler_3d gru_cell
        lstm_cell pdist rnn_relu_cell rnn_tanh_cell
    """, settings=ANY),
    *_rows("""
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool1d_with_indices
        adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices
        binary_cross_entropy binary_cross_entropy_with_logits constant_pad_nd cosine_embedding_loss cosine_similarity
        fake_quantize_per_tensor_affine fold gelu group_norm hardshrink hinge_embedding_loss huber_loss kl_div l1_loss
        layer_norm local_response_norm log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss
        max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool2d_with_indices_backward
        max_pool3d max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool1d max_unpool2d max_unpool3d
        mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss native_group_norm
        native_layer_norm nll_loss pad pairwise_distance poisson_nll_loss prelu smooth_l1_loss soft_margin_loss softmax
        softplus softshrink softsign tanhshrink torch.ops.aten._adaptive_avg_pool2d_backward
        torch.ops.aten._log_softmax_backward_data torch.ops.aten.log_sigmoid_backward torch_nll_loss_backward_impl
        triplet_margin_loss triplet_margin_with_distance_loss
    """),
    *_rows("scaled_dot_product_attention", settings=ANY, conditions=(when.DROPOUT,)),
    *_rows("celu elu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu threshold",
           conditions=(when.IN_PLACE,)),
    *_rows("batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_stats",
           settings=ANY, derivative=_UNMEASURED),
    *_rows("instance_norm native_batch_norm", settings=ANY, writes=ALL),
    *_rows("batch_norm_gather_stats_with_counts batch_norm_update_stats",
           settings=ANY, writes=ALL, derivative=_UNMEASURED),
    *_rows("fused_moving_avg_obs_fake_quant",
           writes=ALL, conditions=(when.EMPTY_RANGE,), derivative=_but(evidence=NOT_MEASURED, conditions=())),

    # Special functions
    *_rows("""
        digamma entr erfcx gammaln i0 i0e i1 i1e igamma igammac lgamma log_ndtr multigammaln mvlgamma ndtr ndtri
        polygamma psi torch_erfcinv_impl xlog1py xlogy zeta
    """),
    *_rows("""
        airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
        chebyshev_polynomial_v chebyshev_polynomial_w erf erfc erfinv gammainc gammaincc hermite_polynomial_h
        hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p modified_bessel_i0 modified_bessel_i1
        modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w spherical_bessel_j0
    """, derivative=_UNMEASURED),

    # Fourier transforms
    *_rows("""
        fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 irfftn rfft rfft2 rfftn stft
    """, conditions=(when.CUFFT_PLAN,)),

    # Views
    *_rows("atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid", aliases=ALL, launches_kernels=False),
    *_rows("""
        adjoint chunk conj detach diagonal dsplit expand hsplit imag moveaxis movedim narrow permute positive real
        select shallow_copy split split_with_sizes squeeze swapaxes swapdims tensor_split torch_slice_prim_impl
        transpose unbind unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view view_as view_as_complex
        view_as_real vsplit
    """, aliases=FIRST, launches_kernels=False),
    *_rows("update_aliases", aliases=PAIRWISE, launches_kernels=False),
    *_rows("as_strided", aliases=FIRST, launches_kernels=False, conditions=(when.READS_PAST_VIEW,)),
    *_rows("torch_unpack_for_fsdp_prim_impl", evidence=NOT_MEASURED, aliases=ALL, launches_kernels=False),
    *_rows("bitcast", evidence=NOT_MEASURED, aliases=FIRST, launches_kernels=False),

    # Operators that may return a view
    *_rows("cartesian_prod column_stack", aliases=ALL),
    *_rows("chain_matmul einsum", settings=MATMUL, aliases=ALL),
    *_rows("""
        bfloat16 cdouble cfloat chalf channel_shuffle conj_physical contiguous diag double fftshift half ifftshift
        interpolate native_channel_shuffle pixel_shuffle pixel_unshuffle rot90 sum_to_size tile to to_dense
        torch_pad_prim_impl torch_stride_order_prim_impl
    """, aliases=FIRST),
    *_rows("resize resize_as", aliases=ALL, writes=ALL),
    *_rows("bool byte char int short", aliases=FIRST, derivative=_UNMEASURED),
    *_rows("prod", aliases=FIRST, derivative=_but(cause=_ASKS_THE_HOST)),
    *_rows("flatten ravel reshape reshape_as resolve_conj resolve_neg torch_prims_reshape_impl",
           aliases=FIRST, launches_kernels=False),
    *_rows("torch_pack_for_fsdp_prim_impl", evidence=NOT_MEASURED, aliases=ALL),
    *_rows("torch.linalg.multi_dot", settings=MATMUL, evidence=NOT_MEASURED, aliases=ALL),
    *_rows("slice_inverse", evidence=NOT_MEASURED, aliases=FIRST),
    *_rows("module_load", aliases=ALL, writes=ALL, derivative=_UNMEASURED),
    *_rows("__getitem__", aliases=FIRST, derivative=_but(conditions=()),
           conditions=(when.SCALAR_INDEX, when.BOOLEAN_INDEX, when.LIST_INDEX)),

    # Random draws
    *_rows("rrelu", draws=True, conditions=(when.OWN_GENERATOR, when.IN_PLACE)),
    *_rows("""
        fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
        fractional_max_pool3d_with_indices gumbel_softmax multinomial_helper native_dropout poisson randint
        randint_like randn uniform
    """, draws=True, conditions=(when.OWN_GENERATOR,)),
    *_rows("alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout",
           aliases=FIRST, draws=True, conditions=(when.OWN_GENERATOR, when.IN_PLACE)),
    *_rows("feature_dropout", aliases=FIRST, draws=True, conditions=(when.OWN_GENERATOR,)),
    *_rows("binomial", draws=True, conditions=(when.OWN_GENERATOR,), derivative=_UNMEASURED),
    *_rows("rand", evidence=NOT_MEASURED, draws=True, conditions=(when.OWN_GENERATOR,)),
    *_rows("dropout",
           aliases=FIRST, draws=True, conditions=(when.OWN_GENERATOR, when.IN_PLACE), derivative=_UNMEASURED),

    *_rows("multi_head_attention_forward", settings=ANY, draws=True, conditions=(when.OWN_GENERATOR,)),
    # nn.MultiheadAttention calls it in evaluation.
    *_rows("_native_multi_head_attention", settings=ANY, draws=True, derivative=_UNMEASURED),

    # Operators that stay eager
    *_rows("item", _READS_CONTENTS),
    *_rows("equal is_nonzero tolist", _READS_CONTENTS, derivative=_UNMEASURED),
    *_rows("numpy", _READS_CONTENTS, aliases=ALL, derivative=_UNMEASURED),
    *_rows("combinations masked_select to_sparse", _DYNAMIC_SIZE),
    *_rows("argwhere bincount nonzero unique unique_consecutive", _DYNAMIC_SIZE, derivative=_UNMEASURED),
    *_rows("isin", _DYNAMIC_SIZE, evidence=MEASURED_ON_GPU, derivative=_UNMEASURED),
    *_rows("corrcoef cov ctc_loss gaussian_nll_loss istft", _CHECKS_CONTENTS),
    *_rows("choose_qparams_optimized", _CHECKS_CONTENTS, derivative=_UNMEASURED),
    *_rows("lobpcg", _CHECKS_CONTENTS, draws=True),
    *_rows("matrix_exp mode", _CHECKS_CONTENTS, evidence=MEASURED_ON_GPU, derivative=_ON_GPU),
    *_rows("cholesky cond eigh eigvalsh lstsq matrix_norm nuclear_norm svd svdvals", _SOLVER),
    *_rows("matrix_rank", _SOLVER, derivative=_UNMEASURED),
    *_rows("""
        cholesky_inverse cholesky_solve eig eigvals inv inverse lu lu_factor lu_factor_ex matrix_power pinv pinverse
        solve tensorinv tensorsolve
    """, _SOLVER, evidence=MEASURED_ON_GPU, derivative=_ON_GPU),
    *_rows("ldl_factor ldl_factor_ex ldl_solve", _SOLVER, evidence=MEASURED_ON_GPU, derivative=_UNMEASURED),
    *_rows("new_tensor tensor", _COPIES_NUMBERS),
    *_rows("unravel_index", _COPIES_NUMBERS, derivative=_UNMEASURED),
    *_rows("batch_norm_gather_stats",
           replace(_COPIES_NUMBERS, fix="call batch_norm_gather_stats_with_counts, which takes a tensor"),
           writes=ALL, derivative=_UNMEASURED),
    *_rows("fake_quantize_per_channel_affine", _READS_RANGE, evidence=MEASURED_ON_GPU, derivative=_UNMEASURED),
    *_rows("ops.rngprims.philox_rand", _SEED_ON_HOST, evidence=NOT_MEASURED),
    *_rows("get_and_update_rng_state_impl", _SEED_ON_HOST, draws=True, derivative=_but(draws=False)),
    *_rows("lstm", _CUDNN_DROPOUT_STATE, evidence=MEASURED_ON_GPU, draws=True),
    *_rows("gru rnn_relu rnn_tanh", _CUDNN_DROPOUT_STATE, evidence=MEASURED_ON_GPU, draws=True, derivative=_ON_GPU),
    *_rows("spmm", _SPARSE_LAYOUT),
    *_rows("crow_indices_copy hsmm hspmm row_indices_copy smm sspaddmm", _SPARSE_LAYOUT, derivative=_UNMEASURED),
    *_rows("dsmm indices_copy saddmm values_copy", _SPARSE_LAYOUT, evidence=NOT_MEASURED),
    *_rows("ccol_indices coalesce col_indices crow_indices indices row_indices sparse_mask values",
           _SPARSE_LAYOUT, aliases=ALL, derivative=_UNMEASURED),
    *_rows("""
        data_ptr dense_dim dim_order element_size get_device has_names is_coalesced is_conj is_contiguous is_distributed
        is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed ndimension nelement sparse_dim
    """, _PYTHON_ANSWER, derivative=_UNMEASURED),
    *_rows("shape", _PYTHON_ANSWER, evidence=NOT_MEASURED),
    *_rows("refine_names rename", _PYTHON_STATE, aliases=ALL),
    *_rows("retain_grad", _PYTHON_STATE, evidence=NOT_MEASURED),
    *_rows("align_as align_to torch_pack_prim_impl", _PYTHON_STATE, evidence=NOT_MEASURED, aliases=ALL),
    *_rows("torch_stash_grad_for_fsdp_prim_impl torch_unpack_prim_impl torch_update_bucket_view_prim_impl",
           _PYTHON_STATE, evidence=NOT_MEASURED, aliases=ALL, writes=ALL),
    *_rows("pin_memory", _THROUGH_CPU, evidence=NOT_MEASURED, aliases=ALL),
    *_rows("cpu", _THROUGH_CPU, evidence=MEASURED_ON_GPU, aliases=ALL, derivative=_ON_GPU),
    *_rows("""
        dtensor_add_prim dtensor_exp_prim dtensor_grouped_mm_prim dtensor_linear_prim dtensor_mul_prim
        dtensor_reciprocal_prim
    """, _REDISTRIBUTING, evidence=NOT_MEASURED),
    *_rows("dtensor_neg_prim", _DTENSOR, evidence=NOT_MEASURED),
    *_rows("""
        dtensor_broadcast_in_dim_prim dtensor_convert_element_type_prim dtensor_from_local dtensor_reshape_prim
        dtensor_to_local dtensor_transpose_prim
    """, _DTENSOR, evidence=NOT_MEASURED, aliases=ALL),
    *_rows("dtensor_redistribute", _COLLECTIVE, evidence=NOT_MEASURED, aliases=ALL),
    *_rows("""
        torch_all_gather_prim_impl torch_broadcast_prim_impl torch_reduce_scatter_prim_impl torch_wait_prim_impl
    """, CAPTURED_COLLECTIVE, evidence=NOT_MEASURED, communicates=True, aliases=ALL),
    *_rows("torch_all_reduce_prim_impl", CAPTURED_COLLECTIVE, evidence=NOT_MEASURED, communicates=True, aliases=ALL,
           writes=ALL, conditions=(when.REDUCES_IN_PLACE,), derivative=_but(conditions=())),
    *_rows("""
        fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
        fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
        fbgemm_pack_quantized_matrix int_repr
    """, _QUANTIZATION, evidence=NOT_MEASURED),
    *_rows("_grouped_mm native_norm", _PATH_DEPENDS_ON_GPU, evidence=NOT_MEASURED),
)
# fmt: on
