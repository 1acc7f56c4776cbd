"""The clients' APIs: one module for each, with its fields, answers, errors and routes."""
