"""The ``shoal`` command: ``shoal run`` starts ranks here or on other hosts, ``shoal store`` hosts a store.

Data flow of ``shoal run``::

    commands/run.py           options, errors, exit code
     ├─ ranks/program.py          the program of a command line
     ├─ ranks/environment.py      the variables and the cores of each rank
     ├─ ranks/guardian.py         a process that ends the ranks if the launcher is killed
     ├─ job/launch.py             options of the job; restarts the whole job after a failure
     ├─ job/job_store.py          the job's store, hosted by the launcher or given by --store, and notes in it
     ├─ job/rank_launcher.py      starts the initial ranks, spares, and processes that join later
     └─ job/supervisor.py         the loop: exits, signals, deadlines, output
         ├─ ranks/process.py          a rank on this machine, which is a ``JobProcess`` (``ranks/rank.py``)
         ├─ ranks/fork_server.py      forks ranks from a process that has imported modules (``--preload``)
         ├─ ranks/reports.py          reports of a rank; processes by their ranks in later meetings
         ├─ ranks/slots.py            slots to fill or empty: delays of restarts, another number of processes
         ├─ job/evictions.py          ends evicted processes
         ├─ job/control.py            requests of ``shoal scale``
         ├─ job/signals.py            signals of the launcher; a second Ctrl-C
         ├─ output/output.py          bytes of a pipe -> whole lines and progress updates
         ├─ output/sink.py            whole lines -> this terminal, file or pipe
         ├─ output/causes.py          finds the rank that failed first
         └─ output/summary.py         the launcher's own messages

With ``--hosts`` the same loop runs ranks that agents start::

    commands/on_hosts.py      environment of the hosts, order of the start
     ├─ remote/hosts.py           --hosts and --hostfile
     ├─ remote/agent_pool.py      the agents of all hosts, and the addresses between them
     │   ├─ remote/ssh.py             the ssh process of a host
     │   └─ remote/agent_client.py    one agent: heartbeats, clock, loss; a rank that it runs
     │       └─ remote/connection.py            frames over two descriptors, or over a connection of shoal.net
     │           └─ agent_protocol.py   the frames
     ├─ remote/rank_launcher.py   starts ranks through agents
     │   └─ output/stdin.py           the launcher's stdin for rank 0
     └─ commands/agent.py         the agent, which starts processes on its host

With ``--srun`` the agents of the nodes connect to the launcher::

    slurm/allocation.py       the nodes of this Slurm allocation, and their numbers of ranks
    slurm/agent_pool.py       accepts the connections of agents
     ├─ slurm/srun.py             the srun process, which starts agents on the nodes
     └─ remote/callback.py        the agent's side: connects, and sends the name of its node

Nothing here imports torch, so the command starts in a tenth of a second and uses little memory.
"""
