"""From a composition to a picture: everything that is decided here is noise to the captions."""
