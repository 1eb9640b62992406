"""Optional parts. Each folder imports the core, which imports none of them; without it, the rest works.

Two files serve several of them: `row_objects` joins and divides batches that one process holds whole, and
`row_hashes` compares rows between ranks.
"""
