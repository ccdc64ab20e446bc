"""Rendezvous: how the processes of a job find each other.

    membership = rendezvous("tcp://10.0.0.1:29400")     # -> rank, size, store, secret, ...

``launcher_variables`` reads the launcher's variables, ``schemes`` and ``mpi`` open the venue that a URL
names, ``point`` is the open rendezvous point, ``protocol`` is the protocol by which the ranks meet there, and
``membership`` returns the resulting :class:`Membership`. ``docs/rendezvous.md`` is the documentation for
users.
"""

from ..store.urls import EXTERNAL_SCHEMES, set_rendezvous_opener
from .addresses import LOOPBACK, loopback_error
from .launcher_variables import Launch
from .membership import Membership, rendezvous, rendezvous_again_at, rendezvous_at
from .mpi import mpi_world
from .point import RendezvousPoint, open_point
from .records import job_keys, job_record, report_exit, set_wanted_size
from .schemes import env, external, file, tcp
from .user_files import default_secret, private_directory, user_secret
from .venue import Handler, Request, Venue, open_venue, parse_url, register_rendezvous, unregister_rendezvous

register_rendezvous("env", env)
register_rendezvous("tcp", tcp)
register_rendezvous("file", file)
register_rendezvous("mpi", mpi_world)
for _scheme in EXTERNAL_SCHEMES:
    register_rendezvous(_scheme, external)
for _scheme in ("env", "mpi"):
    set_rendezvous_opener(_scheme, None)  # has no store of its own

__all__ = [
    "LOOPBACK",
    "Handler",
    "Launch",
    "Membership",
    "RendezvousPoint",
    "Request",
    "Venue",
    "default_secret",
    "job_keys",
    "job_record",
    "loopback_error",
    "open_point",
    "open_venue",
    "parse_url",
    "private_directory",
    "register_rendezvous",
    "rendezvous",
    "rendezvous_again_at",
    "rendezvous_at",
    "report_exit",
    "set_wanted_size",
    "unregister_rendezvous",
    "user_secret",
]
