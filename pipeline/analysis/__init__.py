"""The worker ``analysis``: tasks that examine what became searchable, or what somebody may no longer read.

A task is a module with a class (`task.Task`), its line in ``tasks.TOPICS``, and its place in
``cli.workers.analysis_tasks``. It reads the ledger and the vectors and changes neither.
"""
