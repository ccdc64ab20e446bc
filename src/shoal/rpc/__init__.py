"""Calls to other workers of a job: functions, and objects that stay where they are.

    with shoal.rpc.join("trainer0") as agent:
        ps = agent.peer("ps")                          # as soon as "ps" has joined
        future = ps.call(torch.add, torch.ones(2), 1)  # a shoal.Future

Bytes move in the native endpoint (``post``), everything else is here: ``directory`` knows who has joined
under which name, ``links`` makes connections, ``codec`` pickles, ``call`` is the caller's half and
``serving`` the callee's, whose threads are the ``executor``'s.  Whoever can call a worker can run any code
there; ``docs/security.md`` says how strangers are kept out.
"""

from .agent import Agent
from .current import Current, current
from .join import join
from .peer import Peer
from .reference import Actor, RRef
from .serving import async_execution

__all__ = ["Actor", "Agent", "Current", "Peer", "RRef", "async_execution", "current", "join"]
