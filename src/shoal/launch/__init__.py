"""The ``shoal`` command: ``shoal run`` starts ranks here or on other hosts, ``shoal store`` hosts a store.

How data flows in ``shoal run``::

    commands/run.py         options, errors, exit code
     ├─ ranks/program.py       the program that a command line names
     ├─ ranks/environment.py   the variables of each rank
     ├─ ranks/guardian.py      a process that ends the ranks if the launcher is killed
     ├─ job/job_store.py       the store in which the ranks meet: the launcher's, or one that is named
     ├─ job/crew.py            the processes of a job: the ranks that meet first, and those that join later
     └─ job/supervisor.py      the loop: exits, signals, deadlines, output
         ├─ ranks/process.py      one rank of this machine, which is a ``JobProcess`` (``ranks/rank.py``)
         ├─ ranks/reports.py      the reports of a rank about its failure
         ├─ ranks/slots.py        which places to fill, or to empty, for another number of processes
         ├─ ranks/respawn.py      when a rank that failed is started again
         ├─ ranks/meetings.py     which process has which rank of a later meeting
         ├─ ranks/notes.py        which ranks have ended, for those that wait for them
         ├─ job/restarts.py       starts the whole job again after a failure
         ├─ job/evictions.py      ends the processes without which the other ranks go on
         ├─ job/control.py        requests of ``shoal scale``
         ├─ job/interrupts.py     a second Ctrl-C
         ├─ job/suspension.py     Ctrl-Z: stops and continues the whole job
         ├─ output/output.py      bytes of a pipe -> whole lines and progress updates
         ├─ output/sink.py        whole lines -> this terminal, file or pipe
         ├─ output/causes.py      which rank failed first
         ├─ output/unannounced.py ranks that ended without leaving a group, while others run
         └─ output/summary.py     the launcher's own lines about a job that failed

With ``--hosts`` the same loop has another crew, whose ranks are started by agents::

    commands/on_hosts.py    what is passed on, and the order of the start
     ├─ remote/hosts.py        --hosts and --hostfile
     ├─ remote/fleet.py        the agents of all hosts, and the addresses between them
     │   ├─ remote/ssh.py         the process that leads to a host
     │   └─ remote/agency.py      one agent as the launcher sees it: heartbeats, clock, loss
     │       └─ remote/link.py       frames over two descriptors, or over a connection of shoal.net
     │           └─ agent_protocol.py   the frames
     ├─ remote/crew.py         starts ranks by asking agents
     │   ├─ remote/rank.py        one rank at an agent, and its output
     │   └─ output/stdin.py       the launcher's stdin for rank 0
     └─ commands/agent.py      the other side: a server of processes on each host

With ``--srun`` the agents of the nodes connect to the launcher::

    slurm/allocation.py     the nodes of this allocation of Slurm, and how many ranks each takes
    slurm/fleet.py          accepts the agents that connect, and names those that do not
     ├─ slurm/srun.py          the process that starts agents on the nodes
     └─ remote/dial.py         the other side: an agent connects and names its node

Nothing here imports torch: the command starts in a tenth of a second and stays small.
"""
