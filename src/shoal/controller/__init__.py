"""The master-worker mode: one script drives tensors on many nodes, asynchronously, as a device of torch.

    master = shoal.init_master_worker(workers=4)
    x = torch.full((20, 20), 4.0, device="node:0")
    print((x + 1).sum().item())

``docs/controller.md`` has more.
"""

from .explaining import Explanation
from .master import Master, init_master_worker
from .place import Place
from .streams import Event, Stream
from .tensor import RemoteTensor
from .trace import Trace

__all__ = ["Event", "Explanation", "Master", "Place", "RemoteTensor", "Stream", "Trace", "init_master_worker"]
