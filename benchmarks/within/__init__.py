"""What runs in the processes of a service that is measured, of any commit: each file ``begin``s there.

They import nothing of the benchmarks, which are those of the commit that runs.
"""
