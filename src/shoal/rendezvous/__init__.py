"""How the processes of a job find each other.

    membership = rendezvous("tcp://10.0.0.1:29400")     # -> rank, size, store, secret, ...

Data flows one way: ``environment`` reads what the launcher said, ``schemes`` opens the place that a
URL names, ``place`` is that place once it is open, ``meeting`` is the protocol by which the ranks meet there,
and ``meet`` makes a :class:`Membership` of it all.  ``docs/rendezvous.md`` tells it to users.
"""

from .environment import Launch
from .meet import attend, meet_at, rendezvous
from .membership import Membership
from .place import Place, open_place
from .private import default_secret, user_secret
from .record import job_record, note_exit
from .schemes import env, file, tcp
from .venue import Handler, Request, Venue, register_rendezvous, unregister_rendezvous

register_rendezvous("env", env)
register_rendezvous("tcp", tcp)
register_rendezvous("file", file)

__all__ = [
    "Handler",
    "Launch",
    "Membership",
    "Place",
    "Request",
    "Venue",
    "attend",
    "default_secret",
    "job_record",
    "meet_at",
    "note_exit",
    "open_place",
    "register_rendezvous",
    "rendezvous",
    "unregister_rendezvous",
    "user_secret",
]
