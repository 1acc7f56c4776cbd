"""Starts, supervises and stops the processes of a service on one machine.

Until the environment is made nothing but the standard library is there: modules that need more are imported
where they are used.
"""
