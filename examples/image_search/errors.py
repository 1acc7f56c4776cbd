"""What can go wrong here, in one tree; the command line prints the message alone.

SearchError
├── FolderError     there is no such folder, or nothing in it to search
├── IndexFileError  the index cannot be opened, or is none, or holds nothing for the served model
├── QueryError      the query cannot be asked
└── ServiceFailed   the service cannot be reached, or refuses
"""

from __future__ import annotations


class SearchError(Exception):
    """Root of the tree."""


class FolderError(SearchError):
    pass


class IndexFileError(SearchError):
    pass


class QueryError(SearchError):
    pass


class ServiceFailed(SearchError):
    pass
