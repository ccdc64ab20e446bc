"""The ``shoal`` command: ``shoal run`` starts ranks here or on other hosts, ``shoal store`` hosts a store.

How data flows in ``shoal run``::

    run.py          options, errors, exit code
     ├─ command.py      which program a command line means
     ├─ environment.py  what each rank is told
     ├─ job_store.py    the store in which the ranks meet: the launcher's, or one that is named
     ├─ guardian.py     a process of its own that ends the ranks should the launcher be killed
     ├─ crew.py         the processes of a job: the ranks that meet first, and those that join later
     └─ supervisor.py   the loop: exits, signals, deadlines, output
         ├─ rank.py         what is known of one rank, wherever it runs
         ├─ process.py      one rank of this machine: start, signal, exit status
         ├─ restarts.py     starts the whole job again after a failure
         ├─ control.py      what ``shoal scale`` asks for
         ├─ slots.py        which places to fill, or to empty, for another number of processes
         ├─ respawn.py      when a rank that failed is started again
         ├─ reports.py      what a rank reported of its failure
         ├─ interrupts.py   a second Ctrl-C, told from the first
         ├─ suspension.py   Ctrl-Z: stops and continues the whole job
         ├─ unannounced.py  ranks that ended without leaving a group, while others run
         ├─ meetings.py     which process has which rank of a later meeting
         ├─ evictions.py    ends the processes without which the other ranks go on
         ├─ notes.py        which ranks have ended, for those that wait for them
         ├─ causes.py       which rank failed first
         ├─ lines.py        bytes of a pipe -> whole lines and progress updates
         ├─ sink.py         whole lines -> this terminal, file or pipe
         └─ summary.py      what the user reads when a rank failed

With ``--hosts`` the same loop has another crew, whose ranks live at agents::

    on_hosts.py         what is passed on, and the order of the start
     ├─ hosts.py           --hosts and --hostfile
     ├─ fleet.py           the agents of all hosts, and the addresses between them
     │   ├─ ssh.py            the process that leads to a host
     │   └─ agency.py         one agent as the launcher sees it: beats, clock, loss
     │       └─ link.py          frames over two descriptors, or over a connection of shoal.net
     │           └─ frames.py       what is said
     ├─ remote_crew.py     starts ranks by asking agents
     │   ├─ remote.py         one rank at an agent, and its output
     │   └─ stdin.py          the launcher's stdin for rank 0
     └─ agent.py           the other side: a server of processes on each host

With ``--srun`` the agents of the nodes call back::

    allocation.py       the nodes of this allocation of Slurm, and how many ranks each takes
    srun_fleet.py       takes in the agents that call, and names those that do not
     ├─ srun.py            the process that starts agents on the nodes
     └─ dial.py            the other side: how an agent calls, and says where it is

Nothing here imports torch: the command starts in a tenth of a second and stays small.
"""
