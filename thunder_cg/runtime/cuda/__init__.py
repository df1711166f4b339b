"""The ``cuda`` backend: regions as CUDA graphs.

What comes in: a region's function and its inputs. What goes out: a `CudaGraph`, and tensors that show where in the
arena its kernels write. An arena owns a `CudaPool`, which owns a private pool of PyTorch's caching allocator and
uses a capture stream. A `CudaGraph` owns PyTorch's graph and keeps the private pool alive.

A capture, step by step:

1.  `CudaPool` takes the `CaptureStream` of its thread and stream, and captures an empty graph, the keep-alive graph.
    It keeps the private pool in use (:mod:`pool`, :mod:`streams`).
2.  ``CudaPool.warm_up`` runs the region's function for real, on the capture stream and in the private pool. See
    Note [Warm-up inside the pool].
3.  ``CudaPool.capture`` takes the capture lock, switches the garbage collector off, waits for kernels that draw, and
    begins a capture on the same stream (:mod:`streams`).
4.  The first nodes of the graph copy the inputs to its buffers (:mod:`copy_nodes`).
5.  The region's function runs. Its results are copied out as soon as enough of them wait
    (:mod:`thunder_cg.runtime.early_outputs`), and the rest at the end, again by nodes of the graph.
6.  The capture ends. `refuse_host_memory` rejects graphs that would touch the host's memory, and `KernelScalars` finds
    the kernels that take the call's scalars (:mod:`nodes`).
7.  The graph is instantiated. Its first replay goes through PyTorch and shows whether it draws random numbers. If not,
    later replays set the addresses of the copy nodes and call the driver's launch (:mod:`graph`).
8.  If anything fails, the error passes through, and ``CudaPool._recover`` leaves the process able to capture again.
"""

from thunder_cg.runtime.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
