"""Other executors that come with Thunder: their operators, and the properties of each executor as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thunder_cg.analysis.rules import conditions as when
from thunder_cg.analysis.rules.record import (
    ALL,
    CAPTURED,
    CAPTURED_COLLECTIVE,
    FIRST,
    Cause,
    Evidence,
    ExecutorRule,
    Reason,
    Rule,
    rows,
)
from thunder_cg.compat.settings import Settings

EXECUTORS: Mapping[str, ExecutorRule] = {
    "nvfuser": ExecutorRule(fuses=True, kernel_scalars={"UNIFORM_PHILOX": frozenset({"seed", "offset"})}),
    "inductor": ExecutorRule(fuses=True, keeps_reduced_apart=True),
    "torchcompile": ExecutorRule(fuses=True),
    "torchcompile_cat": ExecutorRule(fuses=True),
    "torchcompile_xentropy": ExecutorRule(fuses=True),
    # torch.library.custom_op checks this, and Thunder takes only operators that declare no mutation.
    "collectives": ExecutorRule(is_pure=True),
    "custom_op": ExecutorRule(is_pure=True),
    "cudnn_attention": ExecutorRule(is_pure=True),
    "derivatives": ExecutorRule(is_pure=True),
    "fused_derivatives": ExecutorRule(is_pure=True),
    # thunder_cg.dynamo takes only operators that neither write nor return an argument, as far as their schema says.
    "torch_ops": ExecutorRule(is_pure=True),
}


def executor_rule(name: str | None) -> ExecutorRule:
    """What is known of an executor; nothing of one that is not in the table."""
    return EXECUTORS.get(name or "", ExecutorRule())


def _eager(
    executor: str, names: str, reason: Reason, detail: str, source: str, fix: str = "", **columns: Any
) -> Iterable[Rule]:
    source = f"thunder/executors/{source}"
    return rows(executor, names, Cause(reason, detail, fix, source), Evidence.NOT_MEASURED, **columns)


_READS_ENDS_OF_GROUPS = Cause(
    Reason.DATA_DEPENDENT,
    "it reads on the host where the rows of each expert end",
    "use bfloat16, for which Transformers calls PyTorch's kernel, or model.set_experts_implementation('batched_mm')",
    "transformers/integrations/moe.py",
)

# fmt: off
RULES: tuple[Rule, ...] = (
    *rows("sdpa", """
        sdpaex_grad_forward_scaled_dot_product_efficient_attention
        sdpafx_grad_forward_scaled_dot_product_efficient_attention
    """, CAPTURED, Evidence.MEASURED, settings=Settings.ATTENTION, conditions=(when.DROPOUT,)),
    *rows("sdpa", """
        sdpaex_scaled_dot_product_efficient_attention_backward sdpafx_scaled_dot_product_efficient_attention_backward
    """, CAPTURED, Evidence.MEASURED, settings=Settings.ATTENTION),

    # Of thunder_cg.dynamo.operators: PyTorch's operators as they are
    *rows("torch_ops", """
        avg_pool1d avg_pool1d_vjp avg_pool2d avg_pool2d_vjp avg_pool3d avg_pool3d_vjp column_stack_each
        column_stack_each_vjp int_mm dstack_each dstack_each_vjp flip imag_copy imag_copy_vjp real_copy real_copy_vjp
        flip_vjp hstack_each hstack_each_vjp interpolate interpolate_vjp lerp lerp_vjp max_pool1d max_pool1d_vjp
        max_pool2d max_pool2d_vjp max_pool3d max_pool3d_vjp minimum minimum_vjp normalize pad pad_vjp remainder
        remainder_vjp repeat repeat_vjp repeat_interleave repeat_interleave_vjp rms_norm rms_norm_vjp round round_vjp
        trunc trunc_vjp unfold_copy unfold_copy_vjp vstack_each vstack_each_vjp weight_norm weight_norm_vjp
        transformer_encoder_layer bartlett_window blackman_window eye hamming_window hann_window kaiser_window linspace
        logspace tril_indices triu_indices
    """, CAPTURED, Evidence.KNOWN, settings=Settings.NONE),
    *rows("torch_ops", "segment_reduce segment_reduce_vjp", CAPTURED, Evidence.KNOWN,
          conditions=(when.CHECKS_LENGTHS,)),
    *rows("torch_ops", "scaled_dot_product_attention scaled_dot_product_attention_vjp", CAPTURED, Evidence.KNOWN,
          conditions=(when.DROPOUT,)),
    *rows("torch_ops", "cross_entropy cross_entropy_vjp mul mul_vjp nll_loss nll_loss_vjp", CAPTURED, Evidence.KNOWN,
          settings=Settings.NONE),
    *rows("torch_ops", "laid_out", CAPTURED, Evidence.KNOWN, settings=Settings.NONE, aliases=FIRST),
    *rows("torch_ops", "overwrite", CAPTURED, Evidence.KNOWN, settings=Settings.NONE, aliases=FIRST, writes=FIRST),
    *rows("torch_ops", "write_to_copy", CAPTURED, Evidence.KNOWN, conditions=(when.SCALAR_INDEX, when.BOOLEAN_INDEX)),
    *rows("torch_ops", "read_written", CAPTURED, Evidence.KNOWN, aliases=FIRST,
          conditions=(when.SCALAR_INDEX, when.BOOLEAN_INDEX)),
    *rows("torch_ops", "laid_out_vjp", CAPTURED, Evidence.KNOWN, settings=Settings.NONE, aliases=ALL),
    *rows("torch_ops", """
        index_add index_add_vjp lstm_cell_each lstm_cell_each_vjp scatter_masked scatter_masked_vjp
    """, CAPTURED, Evidence.KNOWN),
    # What Inductor has compiled of a graph of Dynamo's: thunder_cg.dynamo.pieces asks the rules for what is inside.
    *rows("torch_ops", "piece piece_backward", CAPTURED, Evidence.KNOWN),
    *rows("torch_ops", "piece_backward_draws piece_draws", CAPTURED, Evidence.KNOWN, draws=True),
    *rows("torch_ops", "bernoulli exponential normal uniform", CAPTURED, Evidence.KNOWN, settings=Settings.NONE,
          draws=True),
    # On an H200 with torch 2.11, both ways, with ends of groups that change from call to call. A GPU that has no kernel
    # for it reads them on the host, which fails the capture.
    *rows("torch_ops", "grouped_mm grouped_mm_vjp", CAPTURED, Evidence.KNOWN),
    # Transformers calls it for experts that are not bfloat16.
    *rows("torch_ops", "transformers.grouped_mm_fallback transformers.grouped_mm_fallback_vjp",
          _READS_ENDS_OF_GROUPS, Evidence.KNOWN),

    # Of thunder_cg.communication. A future is new memory, and the result of its wait is that memory.
    *rows("collectives", """
        collectives_all_gather collectives_all_reduce collectives_all_to_all collectives_broadcast
        collectives_reduce_scatter
    """, CAPTURED_COLLECTIVE, Evidence.KNOWN, communicates=True, settings=Settings.NONE),
    *rows("collectives", "collectives_wait", CAPTURED_COLLECTIVE, Evidence.KNOWN, communicates=True, aliases=ALL,
          settings=Settings.NONE),

    # Of thunder_cg.kernels
    *rows("fused_derivatives", """
        cross_entropy cross_entropy_gradient embedding embedding_gradient gelu gelu_gradient max_pool max_pool_gradient
        normalization_after_update normalization_apply normalization_gradients normalization_statistics relu
        relu_gradient
    """, CAPTURED, Evidence.KNOWN, settings=Settings.NONE),
    *rows("fused_derivatives", "linear_of_one_row", CAPTURED, Evidence.KNOWN, settings=Settings.MATMUL),
    *rows("cudnn_attention", "cudnn_attention cudnn_attention_backward cudnn_attention_forward", CAPTURED,
          Evidence.KNOWN, settings=Settings.ATTENTION),
    *rows("derivatives", "convolution_backward_input convolution_backward_weight", CAPTURED, Evidence.KNOWN,
          settings=Settings.CUDNN | Settings.MATMUL),
    *rows("derivatives", "convolution_laid_out", CAPTURED, Evidence.KNOWN, settings=Settings.NONE, aliases=FIRST),

    *_eager("python", """
        abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_or bitwise_xor convert_element_type_prim div
        eq floordiv fmod ge gt imag le lt mod mul ne neg pow real shape signbit sub tensor_abs
    """, Reason.RUNTIME_NUMBER, "it computes with Python numbers on the host", "pythonex.py",
            "compute with 0-dim tensors instead"),
    *_eager("python", "sink", Reason.SIDE_EFFECT, "it acts on Python", "pythonex.py", "remove it"),

    *_eager("cudnn", "cudnn_sdpa_fwd", Reason.UNVERIFIED,
            "it builds plans and dropout seeds on the host", "cudnn_sdpa.py", conditions=(when.DROPOUT,)),
    *_eager("cudnn", "cudnn_sdpa_bwd", Reason.UNVERIFIED,
            "it builds plans and dropout seeds on the host", "cudnn_sdpa.py"),
    *_eager("cudnn_layernorm", "cudnn_layernorm cudnn_layernorm_aug_fwd cudnn_layernorm_bwd", Reason.UNVERIFIED,
            "it builds plans on the host", "cudnn_layernormex.py"),
    *_eager("fa3", "fa3_bwd fa3_fwd", Reason.UNVERIFIED, "FlashAttention 3 was not tried", "fa3ex.py"),
    *_eager("apex", """
        apex_cross_entropy apex_cross_entropy_backward apex_fused_rms_norm_backward_affine
        apex_fused_rms_norm_forward_affine apex_fused_rms_norm_forward_affine_mixed_dtypes
    """, Reason.UNVERIFIED, "apex was not tried", "apexex.py"),
    *_eager("triton", "triton_crossentropy", Reason.UNVERIFIED,
            "Triton compiles and loads a kernel at the first call of each new specialization",
            "triton_crossentropy_impl.py"),
    *_eager("nvfuser", "nv_sdpfa_fwd", Reason.UNVERIFIED,
            "nvFuser's own operators were not tried", "nvfuserex_impl.py", conditions=(when.DROPOUT,)),
    *_eager("nvfuser", "nv_cross_entropy_bwd nv_cross_entropy_fwd nv_sdpfa_bwd", Reason.UNVERIFIED,
            "nvFuser's own operators were not tried", "nvfuserex_impl.py"),
    *_eager("transformer_engine_v1", "te_functional_linear_backward te_sync_fp8_meta_bwd", Reason.SIDE_EFFECT,
            "FP8 scaling factors live in Python objects", "transformer_engine_v1ex.py", "run the layer without FP8"),
    *_eager("transformer_engine", "te_fp8_amax_and_scale_update te_functional_linear_bwd te_functional_linear_fwd",
            Reason.SIDE_EFFECT,
            "FP8 scaling factors live in Python objects", "transformer_engineex_impl.py", "run the layer without FP8"),
)
# fmt: on
