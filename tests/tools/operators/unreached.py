"""What the operator sweep cannot reach, and why."""

from __future__ import annotations

from collections.abc import Mapping

from thunder_cg.analysis.rules import RULES, VJP, Evidence, Key

# Operators of the torch executor, or derivatives. A reason for an operator holds for its derivative, too.
WHY: Mapping[str, str] = {
    "Thunder compiles no call that comes to it, and PyTorch itself refuses it": """
        _grouped_mm native_norm ops.rngprims.philox_rand slice_inverse
    """,
    "Thunder raises, and so does PyTorch for tensors as regions have them: on a device, unnamed, without a history": """
        align_as align_to pin_memory retain_grad
    """,
    "Thunder writes it out in other operators, or computes it while it traces": """
        bitcast dropout_vjp erf_vjp erfc_vjp erfinv_vjp exp2_vjp expm1_vjp log1p_vjp mm rand shape
        torch.linalg.multi_dot
    """,
    "it takes sparse tensors, which Thunder has no type for, and PyTorch does not run the call without Thunder": """
        ccol_indices_vjp coalesce_vjp col_indices_vjp crow_indices_copy_vjp crow_indices_vjp dense_dim_vjp dsmm
        hsmm_vjp hspmm_vjp indices_copy indices_vjp is_coalesced_vjp row_indices_copy_vjp row_indices_vjp saddmm
        smm_vjp sparse_dim_vjp sparse_mask_vjp sspaddmm_vjp values_copy values_vjp
    """,
    "it is for several processes, and takes a process group or buckets of one": """
        dtensor_add_prim dtensor_broadcast_in_dim_prim dtensor_convert_element_type_prim dtensor_exp_prim
        dtensor_from_local dtensor_grouped_mm_prim dtensor_linear_prim dtensor_mul_prim dtensor_neg_prim
        dtensor_reciprocal_prim dtensor_redistribute dtensor_reshape_prim dtensor_to_local dtensor_transpose_prim
        torch_all_gather_prim_impl torch_all_reduce_prim_impl torch_broadcast_prim_impl torch_pack_for_fsdp_prim_impl
        torch_pack_prim_impl torch_reduce_scatter_prim_impl torch_stash_grad_for_fsdp_prim_impl
        torch_unpack_for_fsdp_prim_impl torch_unpack_prim_impl torch_update_bucket_view_prim_impl torch_wait_prim_impl
    """,
    "it takes weights that FBGEMM packed, or quantized tensors, which Thunder has no type for": """
        fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
        fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
        fbgemm_pack_quantized_matrix int_repr
    """,
}
_BY_NAME = {name: why for why, names in WHY.items() for name in names.split()}
_NO_DERIVATIVE = "Thunder makes no derivative of it, and PyTorch has none, or none of its results has one"
_BY_EXECUTOR: Mapping[str | None, str] = {
    None: "executors make operators of it, which have records of their own",
    "python": "without tensors it stays eager whatever a record says",
}


def _why(key: Key) -> str | None:
    executor, name = key
    if executor != "torch":
        return _BY_EXECUTOR.get(executor, "it was not installed")
    operator = str(name).removesuffix(VJP)
    return _BY_NAME.get(str(name)) or _BY_NAME.get(operator) or (_NO_DERIVATIVE if operator != name else None)


UNREACHED: Mapping[Key, str | None] = {
    key: _why(key) for key, rule in RULES.items() if rule.evidence is Evidence.NOT_MEASURED
}
"""Operators that no call of the operator sweep comes to, and why none does."""
