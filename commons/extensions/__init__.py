"""Optional parts. Each folder imports the core, which imports none of them; without it, the rest works.

`row_objects` serves several of them: it joins and divides batches that one process holds whole.
"""
