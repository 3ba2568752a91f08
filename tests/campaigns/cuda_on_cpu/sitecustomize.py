# mypy: ignore-errors
"""Let scripts that name CUDA run on CPUs: a folder for PYTHONPATH, the same under each launcher.

"cuda" is the CPU, "nccl" is gloo, and DDP gets no device. A seed is set where a script joins the
others, as some set none. Nothing else of torch changes.
"""

import sys


class _Finder:
    """Changes torch right after its import, no matter what imports it."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        others = [it for it in sys.meta_path if it is not self]
        spec = next(filter(None, (it.find_spec(name, path, target) for it in others)))
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), _change(module))
        return spec


def _change(torch):
    import torch.distributed as dist

    def without_cuda(function):
        def changed(*args, **kwargs):
            devices = str | torch.device
            args = [
                "cpu" if isinstance(it, devices) and str(it).startswith("cuda") else it
                for it in args
            ]
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return changed

    torch.Tensor.to = without_cuda(torch.Tensor.to)
    torch.nn.Module.to = without_cuda(torch.nn.Module.to)
    torch.tensor = without_cuda(torch.tensor)
    # A function each: torch.compile distinguishes them by identity.
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_: self
    torch.cuda.set_device = lambda _: None
    torch.cuda.synchronize = lambda *_: None
    join, wrap = dist.init_process_group, torch.nn.parallel.DistributedDataParallel.__init__

    def join_gloo(backend=None, *args, **kwargs):
        torch.manual_seed(0)
        return join("gloo" if backend == "nccl" else backend, *args, **kwargs)

    def without_device(self, module, device_ids=None, output_device=None, **kwargs):  # noqa: ARG001
        wrap(self, module, **kwargs)

    dist.init_process_group = join_gloo
    torch.nn.parallel.DistributedDataParallel.__init__ = without_device


sys.meta_path.insert(0, _Finder())
