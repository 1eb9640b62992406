"""Optional parts of a shuffler. Each folder imports the core. The core neither imports nor needs any of them.

`row_objects` serves several extensions: it joins and divides batches that one process holds whole.
"""
