"""Rendezvous: how the processes of a job find each other.

    membership = rendezvous("tcp://10.0.0.1:29400")     # -> rank, size, store, secret, ...

``environment`` reads the launcher's variables, ``schemes`` opens the venue that a URL names, ``place`` is the
open rendezvous point, ``meeting`` is the protocol by which the ranks meet there, and ``meet`` returns the
resulting :class:`Membership`. ``docs/rendezvous.md`` is the documentation for users.
"""

from ..store.urls import EXTERNAL_SCHEMES, set_rendezvous_opener
from .environment import Launch
from .host import LOOPBACK, loopback_trouble
from .meet import meet_at, meet_beside, rendezvous
from .membership import Membership
from .place import RendezvousPoint, open_place
from .private import default_secret, private_directory, user_secret
from .record import job_record, note_exit, note_wanted, root_of
from .schemes import env, external, file, tcp
from .venue import (
    Handler,
    Request,
    Venue,
    open_venue,
    parse_url,
    register_rendezvous,
    unregister_rendezvous,
)

register_rendezvous("env", env)
register_rendezvous("tcp", tcp)
register_rendezvous("file", file)
for _scheme in EXTERNAL_SCHEMES:
    register_rendezvous(_scheme, external)
set_rendezvous_opener("env", None)  # env:// has no store of its own

__all__ = [
    "LOOPBACK",
    "Handler",
    "Launch",
    "Membership",
    "RendezvousPoint",
    "Request",
    "Venue",
    "default_secret",
    "job_record",
    "loopback_trouble",
    "meet_at",
    "meet_beside",
    "note_exit",
    "note_wanted",
    "open_place",
    "open_venue",
    "parse_url",
    "private_directory",
    "register_rendezvous",
    "rendezvous",
    "root_of",
    "unregister_rendezvous",
    "user_secret",
]
