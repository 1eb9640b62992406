"""Optional parts. Each folder imports the core. The core imports no folder, and works without any of them.

`row_objects` serves several extensions: it joins and divides batches that one process holds whole.
"""
