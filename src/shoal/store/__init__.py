"""Key-value stores through which the processes of a job exchange small data.

=====================  ==================================================================
:class:`MemoryStore`   for threads of one process
:class:`FileStore`     a log file that the processes of a host, or of a shared disk, write
:class:`TCPStore`      a server on the network, hosted by :class:`TCPStoreServer`, or with its data on disk by
                       :class:`DurableStoreServer`
:class:`PrefixStore`   a view of another store in which every key has a prefix
=====================  ==================================================================

:func:`open_store` opens the store that a URL names, :func:`adopt` wraps a ``torch.distributed.Store``.
A user-defined store is a :class:`Store` over a :class:`Backing`.
"""

from ..net import parse_address
from .backing import Backing
from .base import Store
from .file import FileStore
from .memory import MemoryStore
from .prefix import PrefixStore
from .requests import MAX_VALUE
from .tcp.client import TCPStore
from .tcp.durable_server import DurableStoreServer, serve
from .tcp.server import TCPStoreServer
from .torch_adapter import adopt
from .urls import open_store, register_store

__all__ = [
    "MAX_VALUE",
    "Backing",
    "DurableStoreServer",
    "FileStore",
    "MemoryStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TCPStoreServer",
    "adopt",
    "open_store",
    "parse_address",
    "register_store",
    "serve",
]
