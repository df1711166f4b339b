"""Handwritten calls of operators that PyTorch's table does not reach.

They are indexing and stores, recurrent cells, losses, sparse tensors, properties of a tensor, Thunder's prims, fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from thunder_cg.compat.thunder import prims
from thunder_cg.tools.operators.samples import OperatorCase, Sample, symbol_of

Make = Callable[[str, bool], Any]


def _floats(*shape: int, low: float = -2.0, high: float = 2.0, dtype: torch.dtype = torch.float32) -> Make:
    def make(device: str, grad: bool) -> torch.Tensor:
        values = torch.rand(shape, device=device) * (high - low) + low
        return values.to(dtype).requires_grad_(grad)

    return make


def _whole(*shape: int, high: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Make:
    return lambda device, grad: torch.randint(low, high, shape, device=device).to(dtype)


def _part(device: str, grad: bool) -> torch.Tensor:
    """A view into larger memory."""
    return torch.rand(6, 5, device=device)[2:].detach().requires_grad_(grad)


def _mask(*shape: int) -> Make:
    return lambda device, grad: torch.rand(shape, device=device) < 0.5


def _positive(size: int, *batch: int) -> Make:
    """Matrices with a Cholesky decomposition."""

    def make(device: str, grad: bool) -> torch.Tensor:
        values = torch.rand(*batch, size, size, device=device)
        return (values @ values.mT + torch.eye(size, device=device)).requires_grad_(grad)

    return make


def _triangle(device: str, grad: bool) -> torch.Tensor:
    return torch.rand(4, 4, device=device).triu() + torch.eye(4, device=device)


def _complex(*shape: int) -> Make:
    return lambda device, grad: torch.randn(shape, dtype=torch.complex64, device=device).requires_grad_(grad)


def _sparse(kind: str) -> Make:
    def make(device: str, grad: bool) -> torch.Tensor:
        dense = torch.rand(4, 4, device=device).tril()
        return dense.to_sparse() if kind == "coo" else getattr(dense, f"to_sparse_{kind}")()

    return make


def _draw(fn: Callable[..., Any], makers: tuple[Any, ...], device: str, grad: bool) -> Iterator[Sample]:
    yield Sample(fn, tuple(m(device, grad) if callable(m) else m for m in makers))


def _case(name: str, fn: Callable[..., Any], *makers: Any, **options: Any) -> OperatorCase:
    return OperatorCase(f"by hand: {name}", partial(_draw, fn, makers), symbol=symbol_of(name.split(",")[0]), **options)


_X, _Y, _V = _floats(4, 5), _floats(4, 5), _floats(5)
_SQUARE = _floats(4, 4)
_I = _whole(3, high=4)
_P = _floats(4, 5, low=0.1, high=0.9)

# ----------------------------------------------------------------------------------------------------------------------
# Functions of one line
# ----------------------------------------------------------------------------------------------------------------------


def _store(key: Callable[..., Any] | Any) -> Callable[..., Any]:
    def store(x: Any, value: Any, *indices: Any) -> Any:
        x[key(*indices) if callable(key) else key] = value
        return x * 2

    return store


def _written(x: Any, y: Any) -> Any:
    x.add_(y)
    x.mul_(2)
    return x + 1


def _attention(dropout: float, causal: bool) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)

    return call


_CALLS: tuple[tuple[Any, ...], ...] = (
    # reads
    ("read an integer", lambda x: x[1], _X),
    ("read slices", lambda x: x[1:3, ::2], _X),
    ("read an ellipsis and a new axis", lambda x: x[..., None, 0], _X),
    ("read by a tensor", lambda x, i: x[i], _X, _I),
    ("read by two tensors", lambda x, i, j: x[i, j], _X, _I, _I),
    ("read by a list", lambda x: x[[0, 2]], _X),
    ("read by a mask", lambda x, m: x[m], _X, _mask(4, 5)),
    ("read by a number on the device", lambda x, k: x[:, k], _X, _whole(high=4)),
    # writes
    ("write in place", _written, _X, _Y),
    ("store at an integer", _store(1), _X, _V),
    ("store at slices", _store((slice(0, 2), slice(1, 3))), _X, _floats(2, 2)),
    ("store a number", lambda x: _store(0)(x, 1.5), _X),
    ("store at a tensor", _store(lambda i: i), _X, _floats(3, 5),
     lambda device, grad: torch.randperm(3, device=device)),
    ("store a number at a tensor", lambda x, i: _store(lambda j: j)(x, 1.5, i), _X, _I),
    ("store at a list", lambda x, v: _store(([0, 2],))(x, v), _X, _floats(2, 5)),
    ("store at a mask", lambda x, m: _store(lambda k: k)(x, 0.0, m), _X, _mask(4, 5)),
    ("store at a number on the device", _store(lambda k: k), _X, _V, _whole(high=4)),
    ("index_put with a mask", lambda x, m, v: torch.index_put(x, (m,), v), _X, _mask(4), _floats(5)),
    ("index_put", lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True), _X, _I, _floats(3, 5)),
    ("masked_fill by a number", lambda x, m: x.masked_fill(m, 0.5), _X, _mask(4, 5)),
    ("masked_fill by a tensor", lambda x, m, v: torch.masked_fill(x, m, v), _X, _mask(4, 5), _floats()),
    ("index_fill by a tensor", lambda x, i, v: torch.index_fill(x, 0, i, v), _X, _I, _floats()),
    ("copy", lambda x, y: x.copy_(y) * 1, _X, _Y),
    # factories
    ("new_zeros", lambda x: x.new_zeros(3) + torch.zeros_like(x).sum(), _X),
    ("full_like", lambda x: (torch.ones_like(x), torch.full_like(x, 2)), _X),
    ("zeros", lambda x: torch.zeros(3, 2, device=x.device) + x.sum(), _X),
    ("ones", lambda x: torch.ones(3, 2, device=x.device) + x.sum(), _X),
    ("full", lambda x: torch.full((3, 2), 1.5, device=x.device) + x.sum(), _X),
    ("arange", lambda x: torch.arange(0, 7, 2, device=x.device) + x.sum(), _X),
    ("tensor", lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device) + x.sum(), _X),
    ("new_tensor", lambda x: x.new_tensor([1.0, 2.0]) + x.sum(), _X),
    ("scalar_tensor", lambda x: torch.scalar_tensor(2.0, device=x.device) + x.sum(), _X),
    # draws
    ("rand", lambda x: torch.rand(3, 4, device=x.device) + x.sum(), _X),
    ("randn", lambda x: torch.randn(3, 4, device=x.device) + x.sum(), _X),
    ("randint", lambda x: torch.randint(0, 9, (3, 4), device=x.device) + x.sum(), _X),
    ("randint_like", lambda x: torch.randint_like(x, 9), _X),
    ("rand_like", lambda x: torch.rand_like(x), _X),
    ("randn_like", lambda x: torch.randn_like(x), _X),
    ("bernoulli", lambda x: torch.bernoulli(x), _P),
    ("multinomial", lambda x: torch.multinomial(x, 2), _P),
    ("multinomial with replacement", lambda x: torch.multinomial(x, 7, replacement=True), _P),
    ("poisson", lambda x: torch.poisson(x), _P),
    ("binomial", lambda n, p: torch.binomial(n, p), _whole(4, 5, low=1, high=9, dtype=torch.float32), _P),
    ("native_dropout", lambda x: torch.native_dropout(x, 0.3, True), _X),
    *((f"{name}", getattr(functional, name), _floats(2, 3, 4, 4), 0.4, True) for name in
      ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
      if name not in ("dropout1d", "dropout3d")),
    *((f"{name}, in place", lambda x, name=name: getattr(functional, name)(x * 2, 0.4, True, True) * 3,
       _floats(2, 3, 4, 4)) for name in ("dropout2d", "alpha_dropout", "feature_alpha_dropout")),
    ("dropout1d", lambda x: functional.dropout1d(x, 0.4), _floats(2, 3, 4)),
    ("dropout3d", lambda x: functional.dropout3d(x, 0.4), _floats(2, 3, 2, 2, 2)),
    ("feature_dropout", lambda x: torch.feature_dropout(x, 0.4, True), _floats(2, 3, 4)),
    ("gumbel_softmax", lambda x: functional.gumbel_softmax(x), _X),
    ("rrelu", lambda x: functional.rrelu(x, training=True), _X),
    ("fractional_max_pool2d", lambda x: functional.fractional_max_pool2d(x, 2, output_size=3), _floats(1, 2, 8, 8)),
    ("fractional_max_pool2d_with_indices",
     lambda x: functional.fractional_max_pool2d_with_indices(x, (2, 2), output_size=(3, 3)), _floats(1, 2, 8, 8)),
    ("fractional_max_pool3d", lambda x: functional.fractional_max_pool3d(x, 2, output_size=3), _floats(1, 1, 8, 8, 8)),
    ("fractional_max_pool3d_with_indices",
     lambda x: functional.fractional_max_pool3d_with_indices(x, (2,) * 3, output_size=(3, 3, 3)),
     _floats(1, 1, 8, 8, 8)),
    # attention and embeddings
    ("attention, in half precision", _attention(0.0, True),
     *(_floats(2, 2, 8, 16, dtype=torch.bfloat16) for _ in "qkv")),
    *((f"attention, dropout {p}, causal {c}", _attention(p, c), *(_floats(2, 2, 8, 16) for _ in "qkv"))
      for p in (0.0, 0.3) for c in (False, True)),
    ("_native_multi_head_attention",
     lambda x, w, b, v, c: torch._native_multi_head_attention(x, x, x, 8, 2, w, b, v, c, need_weights=False),
     _floats(2, 5, 8), _floats(24, 8), _floats(24), _floats(8, 8), _floats(8)),
    ("embedding", lambda i, w: functional.embedding(i, w), _I, _X),
    ("embedding, renormalized", lambda i, w: functional.embedding(i, w, max_norm=1.0), _I, _X),
    ("embedding_bag", lambda i, w: functional.embedding_bag(i, w), _whole(2, 3, high=4), _X),
    ("embedding, with a sparse gradient", lambda i, w: functional.embedding(i, w, sparse=True), _I, _X),
    ("embedding_bag, with a sparse gradient", lambda i, w: functional.embedding_bag(i, w, sparse=True),
     _whole(2, 3, high=4), _X),
    # recurrent cells and layers
    *((name, getattr(torch, name), _floats(3, 4), _floats(3, 5), _floats(g * 5, 4), _floats(g * 5, 5), _floats(g * 5),
       _floats(g * 5)) for name, g in (("gru_cell", 3), ("rnn_relu_cell", 1), ("rnn_tanh_cell", 1))),
    ("lstm_cell", lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), _floats(3, 4), _floats(3, 5), _floats(3, 5),
     _floats(20, 4), _floats(20, 5), _floats(20), _floats(20)),
    *((name, lambda x, h, a, b, c, d, name=name: getattr(torch, name)(
        x, h, [a, b, c, d], True, 1, 0.0, False, False, False), _floats(6, 3, 4), _floats(1, 3, 5), _floats(g * 5, 4),
       _floats(g * 5, 5), _floats(g * 5), _floats(g * 5))
      for name, g in (("gru", 3), ("rnn_relu", 1), ("rnn_tanh", 1))),
    ("lstm", lambda x, h, k, a, b, c, d: torch.lstm(x, (h, k), [a, b, c, d], True, 1, 0.0, False, False, False),
     _floats(6, 3, 4), _floats(1, 3, 5), _floats(1, 3, 5), _floats(20, 4), _floats(20, 5), _floats(20), _floats(20)),
    *((f"{name}, with dropout", lambda x, h, *w, name=name: getattr(torch, name)(
        x, (h, h * 2) if name == "lstm" else h, [*w], True, 2, 0.5, True, False, False), _floats(6, 3, 4),
       _floats(2, 3, 5), *(_floats(*size) for n in (4, 5) for size in ((g * 5, n), (g * 5, 5), (g * 5,), (g * 5,))))
      for name, g in (("gru", 3), ("lstm", 4), ("rnn_relu", 1), ("rnn_tanh", 1))),
    # normalization
    ("batch_norm_stats", lambda x: torch.batch_norm_stats(x, 1e-5), _floats(4, 3, 5)),
    ("batch_norm_elemt", lambda x, w, b, m, v: torch.batch_norm_elemt(x, w, b, m, v, 1e-5), _floats(4, 3, 5),
     *(_floats(3) for _ in range(3)), _floats(3, low=0.5)),
    ("batch_norm_update_stats", lambda x, m, v: torch.batch_norm_update_stats(x, m, v, 0.1), _floats(4, 3, 5),
     _floats(3), _floats(3, low=0.5)),
    ("native_batch_norm", lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, m, v, True, 0.1, 1e-5),
     _floats(4, 3, 5), *(_floats(3) for _ in range(3)), _floats(3, low=0.5)),
    ("batch_norm in training", lambda x, m, v: functional.batch_norm(x, m, v, training=True), _floats(4, 3, 5),
     _floats(3), _floats(3, low=0.5)),
    ("instance_norm", lambda x: functional.instance_norm(x), _floats(4, 3, 5)),
    ("native_layer_norm", lambda x, w, b: torch.native_layer_norm(x, (5,), w, b, 1e-5), _X, _V, _V),
    ("native_group_norm", lambda x, w, b: torch.native_group_norm(x, w, b, 2, 4, 9, 2, 1e-5), _floats(2, 4, 3, 3),
     _floats(4), _floats(4)),
    ("batch_norm_gather_stats", lambda x, m, i, a, b: torch.batch_norm_gather_stats(x, m, i, a, b, 0.1, 1e-5, 20),
     _floats(4, 3, 5), _floats(2, 3), _floats(2, 3, low=0.5), _floats(3), _floats(3, low=0.5)),
    ("batch_norm_gather_stats_with_counts",
     lambda x, m, i, a, b, n: torch.batch_norm_gather_stats_with_counts(x, m, i, a, b, 0.1, 1e-5, n),
     _floats(4, 3, 5), _floats(2, 3), _floats(2, 3, low=0.5), _floats(3), _floats(3, low=0.5), _floats(2, low=20)),
    ("batch_norm_backward_reduce",
     lambda g, x, m, i, w: torch.batch_norm_backward_reduce(g, x, m, i, w, True, True, True), _floats(4, 3, 5),
     _floats(4, 3, 5), _floats(3), _floats(3, low=0.5), _floats(3)),
    ("batch_norm_backward_elemt",
     lambda g, x, m, i, w, a, b, n: torch.batch_norm_backward_elemt(g, x, m, i, w, a, b, n), _floats(4, 3, 5),
     _floats(4, 3, 5), _floats(3), _floats(3, low=0.5), _floats(3), _floats(3), _floats(3),
     _whole(1, low=20, high=21, dtype=torch.int32)),
    ("native_norm", lambda x: torch.native_norm(x, 2), _X),
    ("norm_except_dim", lambda x: torch.norm_except_dim(x, 2, 0), _X),
    # pools, convolutions, grids
    *((f"max_pool{n}d_with_indices", getattr(functional, f"max_pool{n}d_with_indices"), _floats(2, 3, *[6] * n), 2)
      for n in (1, 2, 3)),
    *((f"max_pool{n}d", getattr(torch, f"max_pool{n}d"), _floats(2, 3, *[6] * n), [2] * n) for n in (1, 2, 3)),
    *((f"adaptive_max_pool{n}d_with_indices",
       getattr(functional, f"adaptive_max_pool{n}d_with_indices"), _floats(2, 3, *[6] * n), 2) for n in (1, 2, 3)),
    *((f"adaptive_max_pool{n}d", getattr(functional, f"adaptive_max_pool{n}d"), _floats(2, 3, *[6] * n), 2)
      for n in (1, 2, 3)),
    ("conv_tbc", lambda x, w, b: torch.conv_tbc(x, w, b, 1), _floats(6, 2, 3), _floats(3, 3, 4), _floats(4)),
    ("grid_sampler", lambda x, g: torch.grid_sampler(x, g, 0, 0, False), _floats(2, 3, 5, 5), _floats(2, 4, 4, 2)),
    ("affine_grid_generator", lambda t: torch.affine_grid_generator(t, [2, 3, 4, 4], False), _floats(2, 2, 3)),
    ("channel_shuffle", lambda x: torch.channel_shuffle(x, 2), _floats(2, 4, 3, 3)),
    ("native_channel_shuffle", lambda x: torch.native_channel_shuffle(x, 2), _floats(2, 4, 3, 3)),
    ("bilinear", lambda x, y, w, b: torch.bilinear(x, y, w, b), _floats(3, 4), _floats(3, 5), _floats(2, 4, 5),
     _floats(2)),
    *((f"lp_pool{n}d", getattr(functional, f"lp_pool{n}d"), _floats(2, 3, *[6] * n), 2, 2) for n in (1, 2, 3)),
    ("fold", lambda x: functional.fold(x, (4, 5), (2, 2)), _floats(2, 12, 12)),
    ("affine_grid", lambda t: functional.affine_grid(t, [2, 3, 4, 4]), _floats(2, 2, 3)),
    ("slice_inverse", lambda x, y: torch.slice_inverse(x, y, 0, 1, 3, 1), _floats(2, 5), _X),
    ("unsafe_split_with_sizes", lambda x: torch.unsafe_split_with_sizes(x, (1, 3)), _X),
    ("detach", lambda x: x.detach() * 2, _X),
    ("aminmax", lambda x: torch.aminmax(x, dim=1), _X),
    ("narrow_copy", lambda x: torch.narrow_copy(x, 0, 1, 2), _X),
    ("igamma", lambda a, x: torch.igamma(a.detach(), x), _P, _P),
    ("igammac", lambda a, x: torch.igammac(a.detach(), x), _P, _P),
    ("detach_copy", lambda x: torch.detach_copy(x), _X),
    # operators that return their argument, which need a product for a backward
    *((f"{name}, of a product", lambda x, name=name: getattr(torch, name)(x * 2) * 3, _X) for name in
      ("conj", "conj_physical", "positive", "resolve_conj", "resolve_neg")),
    ("to_dense, of a product", lambda x: (x * 2).to_dense() * 3, _X),
    # special functions
    *((name, getattr(torch.special, name), _P, _P) for name in ("gammainc", "gammaincc")),
    *((name, getattr(torch.special, name), _floats(4, 5, low=2, high=4)) for name in ("gammaln", "psi")),
    ("multigammaln", lambda x: torch.special.multigammaln(x, 2), _floats(4, 5, low=2, high=4)),
    ("frobenius_norm", lambda x: torch.frobenius_norm(x, (0, 1)), _X),
    ("linalg.multi_dot", lambda x, y, z: torch.linalg.multi_dot((x, y, z)), _X, _floats(5, 3), _floats(3, 2)),
    # losses
    ("triplet_margin_loss", functional.triplet_margin_loss, _X, _Y, _floats(4, 5)),
    ("triplet_margin_with_distance_loss", functional.triplet_margin_with_distance_loss, _X, _Y, _floats(4, 5)),
    ("binary_cross_entropy_with_logits", functional.binary_cross_entropy_with_logits, _X, _P),
    ("hinge_embedding_loss", lambda x, y: functional.hinge_embedding_loss(x, y.sign()), _X, _Y),
    ("cosine_embedding_loss", lambda x, y, t: functional.cosine_embedding_loss(x, y, t.sign()), _X, _Y, _floats(4)),
    ("margin_ranking_loss", lambda x, y, t: functional.margin_ranking_loss(x, y, t.sign()), _V, _floats(5), _floats(5)),
    ("ctc_loss", lambda x, t: torch.ctc_loss(x.log_softmax(-1), t, (6, 6), (3, 3)), _floats(6, 2, 5),
     _whole(2, 3, low=1, high=5)),
    ("one_hot", lambda i: functional.one_hot(i), _I),
    ("one_hot of five", lambda i: functional.one_hot(i, 5), _I),
    ("cross_entropy", functional.cross_entropy, _X, _whole(4, high=5)),
    ("nll_loss", lambda x, i: functional.nll_loss(x.log_softmax(-1), i), _X, _whole(4, high=5)),
    # quantization
    ("fake_quantize_per_tensor_affine", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255), _X),
    ("fake_quantize_per_channel_affine", lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 0, 0, 255), _X,
     _floats(4, low=0.1, high=0.2), _whole(4, high=3, dtype=torch.int32)),
    ("fused_moving_avg_obs_fake_quant",
     lambda x, o, f, a, b, s, z: torch.fused_moving_avg_obs_fake_quant(x, o, f, a, b, s, z, 0.01, 0, 255, 0), _X,
     _whole(1, low=1, high=2), _whole(1, low=1, high=2), _floats(1), _floats(1), _floats(1, low=0.1),
     _whole(1, high=3, dtype=torch.int32)),
    ("fused_moving_avg_obs_fake_quant, of empty ranges",
     lambda x, o, f, a, b, s, z: torch.fused_moving_avg_obs_fake_quant(x, o, f, a, b, s, z, 0.01, 0, 255, 0, True), _X,
     _whole(1, low=1, high=2), _whole(1, low=1, high=2), _floats(0), _floats(0), _floats(4, low=0.1),
     _whole(4, high=3, dtype=torch.int32)),
    # several tensors
    ("broadcast_tensors", lambda x, v: torch.broadcast_tensors(x, v), _X, _V),
    ("cartesian_prod", lambda x, y: torch.cartesian_prod(x, y), _V, _floats(3)),
    ("chain_matmul", lambda x, y, z: torch.chain_matmul(x, y, z), _X, _floats(5, 3), _floats(3, 2)),
    ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), _V, _floats(3)),
    ("block_diag", lambda x, y: torch.block_diag(x, y), _X, _Y),
    ("combinations", lambda x: torch.combinations(x), _V),
    ("row_stack", lambda x, y: torch.row_stack((x, y)), _X, _Y),
    ("einsum", lambda x, y: torch.einsum("ij,kj->ik", x, y), _X, _Y),
    ("pdist", lambda x: functional.pdist(x), _X),
    ("cosine_similarity", functional.cosine_similarity, _X, _Y),
    # reads by the host
    ("unravel_index", lambda i: torch.unravel_index(i, (2, 2)), _I),
    ("is_nonzero", lambda x: x.is_nonzero(), _floats(1)),
    ("tolist", lambda x: x.tolist(), _X),
    ("numpy", lambda x: x.numpy(), _X),
    ("equal", lambda x, y: torch.equal(x, y), _X, _Y),
    ("cpu", lambda x: x.cpu(), _X),
    ("pin_memory", lambda x: x.pin_memory(), _X),
    ("masked_select", lambda x, m: torch.masked_select(x, m), _X, _mask(4, 5)),
    ("nonzero_static", lambda x: torch.nonzero_static(x, size=30), _X),
    ("unique", lambda i: i.unique(), _whole(9, high=5)),
    ("unique_consecutive", lambda i: torch.unique_consecutive(i), _whole(9, high=5)),
    ("isin", lambda i, j: torch.isin(i, j), _whole(9, high=5), _I),
    ("isin, of many", lambda i, j: torch.isin(i, j), _whole(9, high=5), _whole(40, high=5)),
    ("bincount", lambda i: torch.bincount(i), _whole(9, high=5)),
    ("histc", lambda x: torch.histc(x, 4), _X),
    ("histogram", lambda x: torch.histogram(x, 4), _X),
    ("mode", lambda x: torch.mode(x), _X),
    ("corrcoef", lambda x: torch.corrcoef(x), _X),
    ("cov", lambda x: torch.cov(x), _X),
    ("matrix_exp", lambda x: torch.matrix_exp(x), _SQUARE),
    ("istft", lambda x: torch.istft(x, 8, window=torch.ones(8, device=x.device)), _complex(5, 6)),
    ("gaussian_nll_loss", lambda x, y, v: functional.gaussian_nll_loss(x, y, v), _X, _Y, _P),
    ("lobpcg", lambda x: torch.lobpcg(x, 1), _positive(9)),
    # decompositions
    *((name, getattr(torch, name), _positive(4)) for name in
      ("cholesky", "inverse", "det", "logdet", "slogdet", "pinverse", "qr", "svd", "geqrf", "cholesky_inverse")),
    ("matrix_power", lambda x: torch.matrix_power(x, 3), _SQUARE),
    ("matrix_power of an inverse", lambda x: torch.matrix_power(x, -1), _positive(4)),
    ("nuclear_norm", lambda x: torch.nuclear_norm(x), _SQUARE),
    ("norm", lambda x: torch.norm(x), _SQUARE),
    ("norm, of rows", lambda x: x.norm(dim=-1, keepdim=True), _X),
    ("norm, of two dimensions", lambda x: torch.norm(x, "fro", (0, 2)), _floats(4, 5, 3)),
    ("norm, p by keyword", lambda x: torch.norm(x, p=2), _SQUARE),
    ("norm, the largest element", lambda x: x.norm(float("inf")), _X),
    ("norm, in half precision", lambda x: torch.norm(x), _floats(4, 5, dtype=torch.bfloat16)),
    ("norm, of complex numbers", lambda x: torch.norm(x), _complex(4, 5)),
    ("norm, nuclear", lambda x: torch.norm(x, p="nuc"), _SQUARE),
    ("norm, spectral", lambda x: torch.linalg.norm(x, ord=2), _SQUARE),
    ("triangular_solve", lambda x, y: torch.triangular_solve(x, y), _SQUARE, _triangle),
    ("lu", lambda x: x.lu(), _positive(4)),
    ("orgqr", lambda x, y: torch.orgqr(x, y), _SQUARE, _floats(4)),
    ("ormqr", lambda x, y, z: torch.ormqr(x, y, z), _SQUARE, _floats(4), _SQUARE),
    ("cholesky_solve", lambda x, y: torch.cholesky_solve(x, y), _SQUARE, _triangle),
    *((f"linalg.{name}", getattr(torch.linalg, name), _positive(4)) for name in (
        "cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "inv_ex", "ldl_factor",
        "ldl_factor_ex", "lu", "lu_factor", "lu_factor_ex", "matrix_norm", "matrix_rank", "norm", "pinv", "qr",
        "slogdet", "svd", "svdvals")),
    *((f"linalg.{name}", getattr(torch.linalg, name), _positive(4), _SQUARE) for name in
      ("lstsq", "solve", "solve_ex")),
    ("linalg.solve_triangular", lambda x, y: torch.linalg.solve_triangular(x, y, upper=True), _triangle, _SQUARE),
    ("linalg.tensorinv", lambda x: torch.linalg.tensorinv(x.reshape(2, 2, 4), ind=2), _positive(4)),
    ("linalg.tensorsolve", lambda x, y: torch.linalg.tensorsolve(x.reshape(2, 2, 4), y.reshape(2, 2)), _positive(4),
     _floats(4)),
    ("linalg.householder_product", torch.linalg.householder_product, _SQUARE, _floats(4)),
    *((f"{name} of {what}", fn, matrix)  # size and batch choose the library
      for what, matrix in (("a large one", _positive(600)), ("a batch", _positive(40, 9)), ("many", _positive(6, 70)))
      for name, fn in (
          ("cholesky_ex", torch.linalg.cholesky_ex),
          ("det", torch.linalg.det),
          ("geqrf", torch.geqrf),
          ("householder_product", lambda x: torch.linalg.householder_product(*torch.geqrf(x))),
          ("inv_ex", torch.linalg.inv_ex),
          ("logdet", torch.logdet),
          ("lu_solve", lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), x)),
          ("lu_unpack", lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x))),
          ("orgqr", lambda x: torch.orgqr(*torch.geqrf(x))),
          ("ormqr", lambda x: torch.ormqr(*torch.geqrf(x), x)),
          ("qr", torch.linalg.qr),
          ("slogdet", torch.linalg.slogdet),
          ("solve_ex", lambda x: torch.linalg.solve_ex(x, x)),
          ("solve_triangular", lambda x: torch.linalg.solve_triangular(x, x, upper=True)),
          ("triangular_solve", lambda x: torch.triangular_solve(x, x)),
      )),
    # parts of larger memory
    ("as_strided, of a part", lambda x: x.as_strided((4, 2), (2, 1), 0) * 2, _part),
    ("as_strided_scatter, of a part", lambda x, y: x.as_strided_scatter(y, (5,), (1,), 0) * 2, _part, _V),
    # sparse
    ("to_sparse", lambda x: x.to_sparse(), _SQUARE),
    *((name, lambda x, name=name: getattr(x, name)(), _sparse("coo")) for name in
      ("coalesce", "indices", "values", "is_coalesced", "dense_dim", "sparse_dim", "to_dense")),
    *((name, lambda x, name=name: getattr(x, name)(), _sparse("csr")) for name in ("crow_indices", "col_indices")),
    *((name, lambda x, name=name: getattr(x, name)(), _sparse("csc")) for name in ("ccol_indices", "row_indices")),
    *((f"{name}_copy", getattr(torch, f"{name}_copy"), _sparse(kind)) for name, kind in (
        ("values", "coo"), ("indices", "coo"), ("crow_indices", "csr"), ("col_indices", "csr"), ("ccol_indices", "csc"),
        ("row_indices", "csc")) if hasattr(torch, f"{name}_copy")),
    *((name, getattr(torch, name), _sparse("coo"), _SQUARE) for name in ("smm", "spmm", "dsmm", "hsmm", "hspmm")),
    *((name, getattr(torch, name), _SQUARE, _sparse("coo"), _SQUARE) for name in ("saddmm",)),
    ("sspaddmm", torch.sspaddmm, _sparse("coo"), _sparse("coo"), _SQUARE),
    ("sparse_mask", lambda x, s: x.sparse_mask(s), _SQUARE, _sparse("coo")),
    # properties of a tensor
    *((name, lambda x, name=name: getattr(x, name)(), _X) for name in (
        "data_ptr", "dim_order", "element_size", "get_device", "has_names", "is_conj", "is_contiguous",
        "is_distributed", "is_inference", "is_neg", "is_pinned", "is_shared", "is_signed", "ndimension", "nelement")),
    ("is_same_size", lambda x, y: torch.is_same_size(x, y), _X, _Y),
    ("is_set_to", lambda x, y: x.is_set_to(y), _X, _Y),
    # state
    ("resize", lambda x: x.resize(4, 4), _SQUARE),
    ("resize_as", lambda x, y: x.resize_as(y), _SQUARE, _SQUARE),
    ("rename", lambda x: x.rename("a", "b"), _SQUARE),
    ("refine_names", lambda x: x.refine_names("a", "b"), _SQUARE),
    ("align_to", lambda x: x.align_to("a", "b"), _SQUARE),
    ("align_as", lambda x, y: x.align_as(y), _SQUARE, _SQUARE),
    ("retain_grad", lambda x: (x * 2).retain_grad(), _SQUARE),
    ("module_load", lambda x, y: x.module_load(y), _SQUARE, _SQUARE),
    ("int_repr", lambda x: x.int_repr(), _SQUARE),
    # prims
    ("stride_order", lambda x: prims.stride_order(x, (0, 1)), _X),
    ("bitcast", lambda x: prims.bitcast(x, torch.int32), _X),
    ("erfcinv", lambda x: prims.erfcinv(x), _P),
    ("ndtri", lambda x: prims.ndtri(x), _P),
    ("pad", lambda x: prims.pad(x, 0.0, ((1, 1, 0), (0, 2, 0))), _X),
    ("flip", lambda x: torch.flip(x, (0,)), _X),
    ("shallow_copy", lambda x: prims.shallow_copy(x) + 1, _X),
    ("rng state", lambda x: prims.get_and_update_rng_state(None, None, device=x.device), _X),
    ("pack for fsdp", lambda x, y: prims.pack_for_fsdp([x, y], 1, "gather"), _X, _Y),
)  # fmt: skip


_FUSED = (
    ("pointwise", lambda x, y: torch.tanh(x * y) + x.exp(), _X, _Y),
    ("softmax", lambda x: torch.softmax(x * 2, -1) + 1, _X),
    ("cat", lambda x, y: torch.cat((x * 2, y + 1)) * 3, _X, _Y),
    ("layer_norm", lambda x, w, b: functional.layer_norm(x, (5,), w, b), _X, _V, _V),
    ("cross_entropy", functional.cross_entropy, _X, _whole(4, high=5)),
    ("dropout", lambda x: functional.dropout(x.relu(), 0.4) * 2, _X),
    ("gelu of a linear", lambda x, w, b: functional.gelu(functional.linear(x, w, b)), _X, _floats(3, 5), _floats(3)),
    ("reductions", lambda x: (x.sum(0) * x.mean(1).sum(), x.var(1), x.amax(0)), _X),
    ("written in place", _written, _X, _Y),
    ("masks", lambda x, y: torch.where(x > y, x, y * 2).tril(), _SQUARE, _SQUARE),
)

HANDWRITTEN: tuple[OperatorCase, ...] = (
    *(_case(name, fn, *makers) for name, fn, *makers in _CALLS),
    # The operator crashes if the host cannot read its input.
    _case(
        "choose_qparams_optimized",
        lambda x: torch.choose_qparams_optimized(x, 20, 10, 0.16, 8),
        _floats(20),
        device="cpu",
    ),
    *(
        _case(f"fused by {executor}: {name}", fn, *makers, executors=(executor,))
        for executor in ("torchcompile", "torchcompile_cat", "torchcompile_xentropy")
        for name, fn, *makers in _FUSED
    ),
)
