"""Calls to other workers of a job: functions, and objects that stay where they are.

Here are the parts that need no connection: ``directory`` knows who has joined under which name, ``codec``
pickles, ``functions`` numbers what is called often, and the threads of handlers are the ``executor``'s.
"""
