"""Floor 2: what the processes of one cluster know of each other, kept in Redis as soft state.

Losing Redis costs speed, never a request: nothing here is on the path of a running stream.
"""
